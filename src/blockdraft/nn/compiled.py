"""The decoder's forward as one call of the library that `build` compiles from `decoder.c`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from blockdraft.nn.decoder import Decoder, Norm
from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.nn.packed import PackedWeight

PROJECTIONS = ("qkv", "output", "gate_up", "down")
NORMS = ("before_attention", "before_mlp", "after_attention", "after_mlp")
FIRST_POSITIONS = 1024  # of the tables of angles, which grow as texts do


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, PackedWeight) for name in PROJECTIONS),
        *((name, c_void_p) for name in (*NORMS, "query_norm", "key_norm", "cos", "sin")),
        ("window", c_int64),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        ("layers", POINTER(_Layer)),
        ("embedding", PackedWeight),
        ("head", PackedWeight),
        ("norm", c_void_p),
        *((name, c_int64) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "inner", "gelu")),
        ("max_positions", c_int64),
        *((name, c_float) for name in ("eps", "embedding_scale", "attention_scale", "attention_cap", "logit_cap")),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("tokens", "parents", "lengths", "taps", "logits_at")),
        *((name, c_int64) for name in ("batch", "nodes", "num_taps", "num_logits", "threads")),
        ("store", c_void_p),
        *((name, c_int64) for name in ("layer_stride", "row_stride", "head_stride")),
        *((name, c_void_p) for name in ("features", "logits", "workspace")),
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


class CompiledDecoder:
    """A decoder's forward in one call, from the tree of nodes to logits and features.

    A token gets the same bits alone, in a block, in a tree and in a batch.

    Args:
        decoder: One for which `why_not` has no reason. Its weights are laid out anew, and its own forward uses them.
        library: Built for its dtypes and head size.
        max_context: Positions from here on are clamped; nodes that are never committed may lie there.
    """

    def __init__(self, decoder: Decoder, library: ctypes.CDLL, max_context: int) -> None:
        config = decoder.config
        self._decoder, self._library = decoder, library
        self._max_context = max_context
        self._layers = (_Layer * len(config.layers))()
        self._alive: list[Any] = []
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
        self._model = _Model(
            self._layers,
            decoder.embedding.pack(library),
            decoder.head.pack(library),
            self._pointer(decoder.norm.weight),
            *(len(config.layers), config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim),
            *(config.intermediate_size, config.activation != "silu", 0),
            *(config.norm_eps, decoder.embedding_scale, config.query_scale),
            *(config.attention_softcap or 0.0, config.final_softcap or 0.0),
        )
        self._workspace = torch.empty(0)
        self._tables: list[Tensor] = []

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        lengths: Sequence[int],
        store: Tensor,
        taps: Sequence[int] = (),
        logits_at: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Score N nodes a row, and write their keys and values behind each row's committed tokens.

        Args:
            tokens, parents: `[B, N]` int64, as in `Proposal`.
            lengths: Committed tokens of each row.
            store: `[layers, B, 2 * num_kv_heads, slots, D]`, keys before values.
            taps, logits_at: As in `Decoder.forward`.

        Returns:
            Logits `[B, N, V]` or `[B, 1, V]`; features `[B, N, m * H]` or None.
        """
        batch, count = tokens.shape
        config, end, threads = self._decoder.config, max(lengths) + count, torch.get_num_threads()
        assert end <= store.size(3) and store[0, 0].is_contiguous(), (end, store.shape, store.stride())
        self._reach(end)
        needed = self._library.decoder_workspace(ctypes.byref(self._model), *map(c_int64, (batch, count, end, threads)))
        if self._workspace.numel() < needed:
            self._workspace = torch.empty(needed)
        wanted = None if logits_at is None else logits_at + torch.arange(batch) * count
        columns = batch * count if wanted is None else batch
        logits = torch.empty(columns, config.vocab_size)
        features = torch.empty(batch, count, len(taps) * config.hidden_size)
        tokens, parents = tokens.contiguous(), parents.contiguous()
        facts = torch.tensor([*lengths, *taps])
        call = _Call(
            tokens.data_ptr(),
            parents.data_ptr(),
            facts.data_ptr(),
            facts[batch:].data_ptr(),
            None if wanted is None else wanted.data_ptr(),
            *(batch, count, len(taps), columns, threads),
            store.data_ptr(),
            *store.stride()[:3],
            *(features.data_ptr(), logits.data_ptr(), self._workspace.data_ptr()),
        )
        self._library.decoder_forward(ctypes.byref(self._model), ctypes.byref(call))
        scores = logits.view(batch, -1, config.vocab_size).to(store.dtype)
        return scores, features.to(store.dtype) if taps else None

    def _reach(self, end: int) -> None:
        """Have tables of angles for so many positions."""
        if end <= self._model.max_positions or self._model.max_positions == self._max_context:
            return
        count = min(max(FIRST_POSITIONS, 1 << (end - 1).bit_length()), self._max_context)
        ropes = self._decoder.config.ropes
        self._tables.clear()
        for rope in ropes:
            angles = torch.arange(count)[:, None] * torch.tensor(rope.inverse_frequencies)
            self._tables += [angles.cos() * rope.scale, angles.sin() * rope.scale]
        for own, kind in zip(self._layers, self._decoder.config.layers, strict=True):
            at = 2 * ropes.index(kind.rope)
            own.cos, own.sin = (table.data_ptr() for table in self._tables[at : at + 2])
        self._model.max_positions = count

    def _pointer(self, weight: Tensor) -> int:
        kept = weight.float().contiguous()
        self._alive.append(kept)
        return kept.data_ptr()
