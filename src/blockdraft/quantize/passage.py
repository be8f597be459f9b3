"""Texts on their way through a decoder, of which one layer at a time is in memory."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.nn.attention import grouped_mask, visible_slots
from blockdraft.nn.decoder import rope_angles, rope_frequencies
from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.nn.decoder_layer import DecoderLayer, Norm
from blockdraft.nn.packed import PackedLinear

TOKENS = 4096  # that go through a layer at once
LOGITS = 1 << 24  # numbers that a head makes at once


class Passage:
    """Rows of one length `[rows, N]` as they pass through the layers, with float32 arithmetic.

    Args:
        length: N.
    """

    def __init__(self, config: DecoderConfig, length: int) -> None:
        self.config, self.length = config, length
        positions = torch.arange(length)[None]
        self._angles = rope_angles(config, rope_frequencies(config), positions, torch.float32)
        within, group = torch.ones(1, length, length).tril().bool(), config.num_heads // config.num_kv_heads
        self._masks: list[Tensor | None] = []
        for window in config.windows:
            reached = window if window is not None and window < length else None
            free = reached is None and config.attention_softcap is None
            visible = None if free else visible_slots([0], within, positions, reached)
            self._masks.append(None if visible is None else grouped_mask(visible, group, torch.float32))

    def embed(self, table: PackedLinear, tokens: Tensor) -> Tensor:
        """`[rows, N]` int64 to `[rows, N, H]`."""
        return table.rows(tokens) * self.config.embedding_scale

    def through(self, layer: DecoderLayer, states: Tensor) -> Tensor:
        """States `[rows, N, H]` behind a layer."""
        config, out = self.config, torch.empty_like(states)
        batch = max(1, TOKENS // self.length)
        for begin in range(0, len(states), batch):
            some = states[begin : begin + batch]
            store = torch.zeros(len(some), 2 * config.num_kv_heads, self.length, config.head_dim)
            rows = layer(some.flatten(0, 1), self._angles, torch.arange(self.length), self._masks, store)
            out[begin : begin + batch] = rows.view_as(some)
        return out

    def perplexity(self, norm: Norm, head: PackedLinear, states: Tensor, tokens: Tensor) -> float:
        """Of tokens `[rows, N]`, each after those before it, by the states behind the last layer."""
        total, cap = 0.0, self.config.final_softcap
        rows, following = states[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        size = max(1, LOGITS // self.config.vocab_size)
        for some, expected in zip(rows.split(size), following.split(size), strict=True):
            logits: Tensor = head(norm(some))
            logits = logits if cap is None else torch.tanh(logits / cap) * cap
            total += F.cross_entropy(logits, expected, reduction="sum").item()
        return exp(min(total / len(following), 700))


def moments(passage: Passage, layer: DecoderLayer, states: Tensor) -> Mapping[str, Tensor]:
    """The sum of `x x^T` over the inputs x of each projection of a layer, `[in, in]`."""
    found: dict[str, Tensor] = {}
    hooks = []
    for name in passage.config.projections(layer.number):

        def add(module: PackedLinear, given: tuple[Tensor, ...], name: str = name) -> None:
            product = given[0].T @ given[0]
            found[name] = found[name] + product if name in found else product

        hooks.append(getattr(layer, name).register_forward_pre_hook(add))
    try:
        passage.through(layer, states)
    finally:
        for hook in hooks:
            hook.remove()
    return found
