"""The decoder's forward as one call of the library that `build` compiles from `decoder.c`."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from blockdraft.cpu.library import NORMS, PROJECTIONS, CallFields, LayerFields, Library, ModelFields
from blockdraft.nn.cache import KVCache
from blockdraft.nn.decoder import Decoder
from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.nn.decoder_layer import Norm
from blockdraft.nn.packed import check_tokens

FIRST_POSITIONS = 1024  # of the tables of angles, which grow as texts do
EVERYWHERE = 1 << 40  # more tokens than there are


def why_not(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a decoder has no compiled forward; None where it has one."""
    if device.type != "cpu":
        return f"it is for CPUs, and the device is {device}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"it knows float32 and bfloat16, and the dtype is {str(dtype).removeprefix('torch.')}"
    if config.activation not in ("silu", "gelu_pytorch_tanh"):
        return f"it does not know the activation {config.activation}"
    return f"heads of {config.head_dim} are no multiple of 4" if config.head_dim % 4 else None


def numbers(values: Iterable[int]) -> array[int]:
    """As int64 in a row; a tensor of them takes ten times as long to make."""
    return array("q", values)


def address(values: array[int]) -> int:
    return values.buffer_info()[0]


@lru_cache(maxsize=256)
def chain_parents(batch: int, count: int) -> array[int]:
    """Of nodes in a line, in each row."""
    return numbers(list(range(-1, count - 1)) * batch)


class CompiledLayers(ABC):
    """Layers as `decoder.c` takes them, with all that its calls need besides.

    Several threads may call at once. They wait for each other: one workspace suffices, which can be planned for, and
    the threads of one call have the cores for themselves.

    Args:
        library: Built for the dtypes and head size of the layers.
        max_positions: Positions from here on are clamped.
    """

    def __init__(self, library: Library, count: int, max_positions: int) -> None:
        self.library, self._max_positions = library, max_positions
        self._layers = (LayerFields * count)()
        self._model = ModelFields()
        self._alive: list[Tensor] = []
        self._lock = threading.Lock()  # for what follows, and `_model` and `_layers`, which `_reach` changes
        self._workspace = torch.empty(0)
        self._tables: list[tuple[Tensor, Tensor]] = []

    @abstractmethod
    def _angles(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """cos and sin of the first `count` positions for each layer, `[count, D / 2]` float32."""

    def _reach(self, end: int) -> None:
        """Have tables of angles for so many positions."""
        if end <= self._model.max_positions or self._model.max_positions == self._max_positions:
            return
        count = min(max(FIRST_POSITIONS, 1 << (end - 1).bit_length()), self._max_positions)
        self._tables = self._angles(count)
        for own, (cos, sin) in zip(self._layers, self._tables, strict=True):
            own.cos, own.sin = cos.data_ptr(), sin.data_ptr()
        self._model.max_positions = count

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        """Memory that calls with so many rows, nodes a row, and slots that a row reaches, its nodes' included, take
        beside their results. That of the largest call so far is kept."""
        return 4 * self.library.decoder_workspace(self._model, batch, nodes, slots, torch.get_num_threads())

    def _in_workspace(self, function: Callable[..., int], call: CallFields, end: int, *more: object) -> None:
        """Let a function of the library do what a call says, with at most `end` slots a row."""
        with self._lock:
            self._reach(end)
            call.workspace, call.room = self._workspace.data_ptr(), self._workspace.numel()
            needed = function(self._model, call, *more)
            if needed:
                self._workspace = torch.empty(0)  # before there is a larger one
                self._workspace = torch.empty(needed)
                call.workspace, call.room = self._workspace.data_ptr(), needed
                function(self._model, call, *more)

    def _run(self, call: CallFields, end: int, tokens: Tensor | None) -> None:
        """Run the layers, with at most `end` slots a row."""
        try:
            self._in_workspace(self.library.decoder_forward, call, end)
        except AssertionError:
            if tokens is not None:  # the one argument that is not ours
                check_tokens(tokens, self._model.embedding.outputs)
            raise

    def _pointer(self, weight: Tensor) -> int:
        kept = weight.detach().float().contiguous()
        self._alive.append(kept)
        return kept.data_ptr()


class CompiledDecoder(CompiledLayers):
    """A decoder's forward in one call, from the tree of nodes to logits and features.

    A token gets the same bits alone, in a block, in a tree and in a batch.

    Args:
        decoder: One for which `why_not` has no reason. Its weights are laid out anew, and its own forward uses them.
        library: Built for its dtypes and head size.
        max_context: Positions from here on are clamped; nodes that are never committed may lie there.

    Attributes:
        library: As given.
        embedding, head: The tables, as the library takes them.
    """

    def __init__(self, decoder: Decoder, library: Library, max_context: int) -> None:
        config = decoder.config
        super().__init__(library, len(config.layers), max_context)
        self._decoder = decoder
        layer: Any  # nn.Module knows no types of its parts
        for own, layer in zip(self._layers, decoder.layers, strict=True):
            for name in PROJECTIONS:
                setattr(own, name, library.linear(getattr(layer, name)))
            for name in NORMS:
                norm: Norm | None = getattr(layer, name, None)
                setattr(own, name, None if norm is None else self._pointer(norm.weight))
            if config.qk_norm:  # one row a head, equal among queries and among keys
                own.query_norm = self._pointer(layer.qk_norm.weight[0])
                own.key_norm = self._pointer(layer.qk_norm.weight[-1])
            own.window = config.layers[layer.number].window or 0
        self.embedding, self.head = library.linear(decoder.embedding), library.linear(decoder.head)
        self._model = ModelFields(
            self._layers,
            self.embedding,
            self.head,
            self._pointer(decoder.norm.weight),
            *(len(config.layers), config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim),
            *(config.intermediate_size, config.activation != "silu", 0),
            *(config.norm_eps, decoder.embedding_scale, config.query_scale),
            *(config.attention_softcap or 0.0, config.final_softcap or 0.0),
        )

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        cache: KVCache,
        memory: Tensor,
        taps: Sequence[int] = (),
        logits_at: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Score N nodes a row, and write their keys and values behind each row's committed tokens.

        Args:
            tokens, parents: `[B, N]` int64, as in `Proposal`.
            cache: Its rows.
            memory: Of the cache, `[layers, 2 * num_kv_heads, slots, D]`, keys before values.
            taps, logits_at: As in `Decoder.forward`.

        Returns:
            Logits `[B, N, V]` or `[B, 1, V]`; features `[B, N, m * H]` or None; both float32, whatever the weights. Of
            each row of logits the argmax, int64, as in `TargetOutput`.
        """
        batch, count = tokens.shape
        config, threads, lengths = self._decoder.config, torch.get_num_threads(), cache.lengths
        end = cache.check_room(count)
        assert tokens.dtype == parents.dtype == torch.int64 and parents.shape == tokens.shape and len(lengths) == batch
        layers, heads, slots, size = memory.shape
        expected = len(config.layers), 2 * config.num_kv_heads, self.library.slot_size(config.head_dim)
        assert (layers, heads, size) == expected, memory.shape
        assert memory.is_contiguous() and memory.dtype == self.library.store_dtype, (memory.stride(), memory.dtype)
        wanted = None if logits_at is None else logits_at + torch.arange(batch) * count
        assert logits_at is None or bool(((logits_at >= 0) & (logits_at < count)).all()), (logits_at, count)
        scored = count if wanted is None else 1
        logits = torch.empty(batch, scored, config.vocab_size)
        features = torch.empty(batch, count, len(taps) * config.hidden_size) if taps else None
        best = torch.empty(batch, scored, dtype=torch.int64)
        tokens, parents = tokens.contiguous(), parents.contiguous()
        committed, starts, tapped = numbers(lengths), numbers(cache.rows), numbers(taps)
        call = CallFields(
            tokens.data_ptr(),
            parents.data_ptr(),
            address(committed),
            address(tapped),
            None if wanted is None else wanted.data_ptr(),
            None,
            *(batch, count, len(taps), batch * scored, EVERYWHERE, threads, slots, 0),
            memory.data_ptr(),
            *memory.stride()[:2],
            address(starts),
            *(None if features is None else features.data_ptr(), logits.data_ptr()),
            best=best.data_ptr(),
        )
        self._run(call, end, tokens)
        return logits, features, best

    def _angles(self, count: int) -> list[tuple[Tensor, Tensor]]:
        config, tables = self._decoder.config, {}
        for rope in config.ropes:
            angles = torch.arange(count)[:, None] * torch.tensor(rope.inverse_frequencies)
            tables[rope] = (angles.cos() * rope.scale, angles.sin() * rope.scale)
        return [tables[kind.rope] for kind in config.layers]
