"""The decoder's forward as one call of the library that `build` compiles from `decoder.c`."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from ctypes import POINTER, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from blockdraft.nn.cache import KVCache
from blockdraft.nn.decoder import Decoder, Norm
from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.nn.packed import PackedWeight

PROJECTIONS = ("qkv", "output", "gate_up", "down")
NORMS = ("before_attention", "before_mlp", "after_attention", "after_mlp")
FIRST_POSITIONS = 1024  # of the tables of angles, which grow as texts do
EVERYWHERE = 1 << 40  # more tokens than there are


class LayerFields(ctypes.Structure):
    """`Layer` of decoder.c."""

    _fields_ = [
        *((name, PackedWeight) for name in PROJECTIONS),
        *((name, c_void_p) for name in (*NORMS, "query_norm", "key_norm", "cos", "sin")),
        ("window", c_int64),
        ("whole_block", c_int64),
    ]


class ModelFields(ctypes.Structure):
    """`Model` of decoder.c."""

    _fields_ = [
        ("layers", POINTER(LayerFields)),
        ("embedding", PackedWeight),
        ("head", PackedWeight),
        ("norm", c_void_p),
        *((name, c_int64) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "inner", "gelu")),
        ("max_positions", c_int64),
        *((name, c_float) for name in ("eps", "embedding_scale", "attention_scale", "attention_cap", "logit_cap")),
    ]


class CallFields(ctypes.Structure):
    """`Call` of decoder.c."""

    _fields_ = [
        *((name, c_void_p) for name in ("tokens", "parents", "lengths", "taps", "logits_at", "embedded")),
        *((name, c_int64) for name in ("batch", "nodes", "num_taps", "num_logits", "reach", "threads")),
        ("store", c_void_p),
        *((name, c_int64) for name in ("layer_stride", "head_stride")),
        *((name, c_void_p) for name in ("starts", "features", "logits", "workspace", "best")),
    ]


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


class CompiledLayers(ABC):
    """Layers as `decoder.c` takes them, with all that its calls need besides.

    Args:
        library: Built for the dtypes and head size of the layers.
        max_positions: Positions from here on are clamped.
    """

    def __init__(self, library: ctypes.CDLL, count: int, max_positions: int) -> None:
        self.library, self._max_positions = library, max_positions
        self._layers = (LayerFields * count)()
        self._model = ModelFields()
        self._alive: list[Tensor] = []
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

    def _room(self, needed: int) -> int:
        """Where so many numbers of float32 may be put during a call."""
        if self._workspace.numel() < needed:
            self._workspace = torch.empty(needed)
        return self._workspace.data_ptr()

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        """What a call takes for its work."""
        shape = map(c_int64, (batch, nodes, slots, torch.get_num_threads()))
        return 4 * int(self.library.decoder_workspace(ctypes.byref(self._model), *shape))

    def _run(self, call: CallFields, end: int) -> None:
        """Run the layers, with at most `end` slots a row."""
        shape = map(c_int64, (call.batch, call.nodes, end, call.threads))
        self._reach(end)
        call.workspace = self._room(self.library.decoder_workspace(ctypes.byref(self._model), *shape))
        self.library.decoder_forward(ctypes.byref(self._model), ctypes.byref(call))

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

    def __init__(self, decoder: Decoder, library: ctypes.CDLL, max_context: int) -> None:
        config = decoder.config
        super().__init__(library, len(config.layers), max_context)
        self._decoder = decoder
        layer: Any  # nn.Module knows no types of its parts
        for own, layer in zip(self._layers, decoder.layers, strict=True):
            for name in PROJECTIONS:
                setattr(own, name, getattr(layer, name).pack(library))
            for name in NORMS:
                norm: Norm | None = getattr(layer, name, None)
                setattr(own, name, None if norm is None else self._pointer(norm.weight))
            if config.qk_norm:  # one row a head, equal among queries and among keys
                own.query_norm = self._pointer(layer.qk_norm.weight[0])
                own.key_norm = self._pointer(layer.qk_norm.weight[-1])
            own.window = config.layers[layer.number].window or 0
        self.embedding, self.head = decoder.embedding.pack(library), decoder.head.pack(library)
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
        wanted = None if logits_at is None else logits_at + torch.arange(batch) * count
        columns = batch * count if wanted is None else batch
        logits = torch.empty(batch, columns // batch, config.vocab_size)
        features = torch.empty(batch, count, len(taps) * config.hidden_size) if taps else None
        best = torch.empty(batch, columns // batch, dtype=torch.int64)
        tokens, parents = tokens.contiguous(), parents.contiguous()
        committed, starts, tapped = numbers(lengths), numbers(cache.rows), numbers(taps)
        call = CallFields(
            tokens.data_ptr(),
            parents.data_ptr(),
            address(committed),
            address(tapped),
            None if wanted is None else wanted.data_ptr(),
            None,
            *(batch, count, len(taps), columns, EVERYWHERE, threads),
            memory.data_ptr(),
            *memory.stride()[:2],
            address(starts),
            *(None if features is None else features.data_ptr(), logits.data_ptr()),
            best=best.data_ptr(),
        )
        self._run(call, end)
        return logits, features, best

    def _angles(self, count: int) -> list[tuple[Tensor, Tensor]]:
        config, tables = self._decoder.config, {}
        for rope in config.ropes:
            angles = torch.arange(count)[:, None] * torch.tensor(rope.inverse_frequencies)
            tables[rope] = (angles.cos() * rope.scale, angles.sin() * rope.scale)
        return [tables[kind.rope] for kind in config.layers]
