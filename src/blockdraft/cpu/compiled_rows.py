"""Rows of networks that guess a token at a time, EAGLE-3's and MTP heads', each call's in one call of the library that
`build` compiles."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from blockdraft.cpu.compiled import EVERYWHERE, CompiledDecoder, address, chain_parents, numbers
from blockdraft.cpu.compiled_network import CompiledNetwork, library_for, why_not_compiled
from blockdraft.cpu.library import Library, LinearFields, ModelFields
from blockdraft.machine import return_freed
from blockdraft.nn.cache import KVCache
from blockdraft.nn.eagle3 import Eagle3Network
from blockdraft.nn.layers import RMSNorm
from blockdraft.nn.mtp import MTPNetwork
from blockdraft.nn.rotary import Rotary
from blockdraft.nn.row_pass import RowPass, feature_store, last_features, picked
from blockdraft.nn.rows import RowNetwork
from blockdraft.timing import HEAD, PASS, mark

STREAM, NORMED = 0, 1  # taps: what leaves the only layer, and the same behind the last norm


def why_not_rows(network: RowNetwork, dtype: torch.dtype) -> str | None:
    """Why a row network is not compiled; None where it may be."""
    if type(network) not in (Eagle3Network, MTPNetwork):
        return f"it does not know networks of the kind {type(network).__name__}"
    return why_not_compiled(network.fc.weight, dtype, network.config.head_dim)


def row_pass(
    network: RowNetwork,
    target: CompiledDecoder | None,
    embed: Callable[[Tensor], Tensor],
    head: Callable[[Tensor], Tensor],
    owned: bool = False,
    dtype: torch.dtype | None = None,
) -> RowPass | CompiledRows:
    """The fastest way to run a row network; where its target is compiled, a compiled one, if there is one.

    Args:
        target: That of the drafter, compiled.
        embed, head: The target's.
        owned: As in `Target.draft_runner`.
        dtype: Of arithmetic and cache; None is the network's.
    """
    dtype = dtype or network.fc.weight.dtype
    reason = "its target is not compiled" if target is None else why_not_rows(network, dtype)
    if target is None or reason is not None:
        return RowPass(network.to(dtype), embed, head, reason)
    store = torch.int8 if target.library.store_dtype == torch.int8 else dtype
    library, reason = library_for(network.state_dict().values(), dtype, store, network.config.head_dim)
    if library is None:
        return RowPass(network.to(dtype), embed, head, reason)
    return CompiledRows(network, library, embed, head, target if target.library is library else None, owned, dtype)


@dataclass(frozen=True)
class _Parts:
    """Of a row network.

    Attributes:
        fuses: `fc` makes features of the target's, and the head is its own; else `fc` makes rows of embedding and
            feature, and the head is the target's.
        normed_stream: The layer's output is added to the normed feature.
        normed_feedback: What is fed on is behind the last norm.
    """

    layer: nn.Module
    token_norm: RMSNorm
    feature_norm: RMSNorm
    norm: RMSNorm
    rotary: Rotary
    fuses: bool
    normed_stream: bool
    normed_feedback: bool


def _parts_of(network: RowNetwork) -> _Parts:
    if isinstance(network, Eagle3Network):
        layer, config = network.midlayer, network.config
        norms = layer.input_layernorm, layer.hidden_norm, network.norm
        return _Parts(layer, *norms, network.rotary, True, config.norm_before_residual, config.norm_output)
    assert isinstance(network, MTPNetwork)
    norms = cast(RMSNorm, network.pre_fc_norm_embedding), cast(RMSNorm, network.pre_fc_norm_hidden), network.norm
    return _Parts(network.layers[0], *norms, network.rotary, False, False, network.config.normed_feedback)


class CompiledRows(CompiledNetwork):
    """`RowPass` for a network for which `why_not_rows` has no reason. The rows of a cycle lie behind their texts.

    Args:
        network: Its weights are copied into the library's layout and must not be changed afterwards.
        library: Built for its dtype and head size.
        embed, head: The target's.
        target: Lends its embedding, and its head to a network that has none, where it uses the same library.
        owned, dtype: As in `row_pass`.
    """

    @torch.no_grad()
    def __init__(
        self,
        network: RowNetwork,
        library: Library,
        embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        target: CompiledDecoder | None = None,
        owned: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        config, parts = network.config, _parts_of(network)
        super().__init__(library, config, 1, dtype or network.fc.weight.dtype, None, owned)
        self.embed, self.head, self.network = embed, head, network
        self._lay_out(self._layers[0], parts.layer)
        self._fc = self._pack(network, "fc")
        own_head = self._pack(network, "lm_head") if parts.fuses else None
        self._model = ModelFields(
            self._layers,
            LinearFields() if target is None else target.embedding,
            own_head or (LinearFields() if target is None else target.head),
            self._pointer(parts.norm.weight),
            *(1, config.hidden_size, config.num_attention_heads, config.num_key_value_heads),
            *(config.head_dim, config.intermediate_size, 0, 0),
            *(config.rms_norm_eps, 1.0, config.head_dim**-0.5, 0.0, 0.0),
            LinearFields() if parts.fuses else self._fc,
            *(self._pointer(parts.token_norm.weight), self._pointer(parts.feature_norm.weight)),
            *(True, parts.normed_stream),
        )
        self._target, self._fuses, self._rotary = target, parts.fuses, parts.rotary
        self._scores = own_head is not None or target is not None
        # What is fed on comes first, and what the target's head reads last, where that is not the library's.
        taps = [NORMED if parts.normed_feedback else STREAM]
        self._taps = numbers(taps if self._scores or parts.normed_feedback else [*taps, NORMED])
        return_freed()

    def state_bytes(self, batch: int, capacity: int) -> int:
        return super().state_bytes(batch, capacity) + 4 * batch * capacity * int(self.config.hidden_size)

    def rows_beside(self, block_size: int, width: int) -> int:
        return 1 + width * max(block_size - 2, 0)

    def observe(self, state: KVCache, tokens: Tensor, features: Tensor) -> None:
        known = self.features(state)
        fused = self._fuse(features)
        before = torch.cat([last_features(state, known), fused[:, :-1]], dim=1)
        self._run_rows(state, tokens, before, chain_parents(*tokens.shape), 0, EVERYWHERE)
        for place, (row, length) in enumerate(zip(state.rows, state.lengths, strict=True)):
            known[row + length : row + length + tokens.size(1)] = fused[place]

    def rows(self, state: KVCache, block_size: int, width: int, window: int | None = None) -> CompiledRowsOfCycle:
        return CompiledRowsOfCycle(self, state, window)

    def features(self, state: KVCache) -> Tensor:
        """Of all slots, `[slots, H]` float32."""
        return feature_store(state, 1, self.config.hidden_size, torch.empty(0))

    def pass_of(
        self, state: KVCache, tokens: Tensor, beside: Tensor, parents: array[int], done: int, window: int
    ) -> tuple[Tensor, Tensor]:
        """Of nodes behind `done` earlier ones of each row, what is fed on, `[B, N, H]` float32, and logits `[B, N, V]`.

        Args:
            tokens: `[B, N]` int64.
            beside: `[B, N, H]` float32, the features before them.
            parents: Of all `B * (done + N)` nodes.
            window: Committed tokens that are seen, the last ones.
        """
        size = self.config.hidden_size
        features = torch.empty(*tokens.shape, len(self._taps) * size)
        logits = torch.empty(*tokens.shape, self._model.head.outputs) if self._scores else None
        self._run_rows(state, tokens, beside, parents, done, window, features, logits)
        fed, normed = features[..., :size], features[..., -size:]
        mark(PASS)
        return fed, self.head(normed.to(self._dtype)) if logits is None else logits

    def _run_rows(
        self,
        state: KVCache,
        tokens: Tensor,
        beside: Tensor,
        parents: array[int],
        done: int,
        window: int,
        features: Tensor | None = None,
        logits: Tensor | None = None,
    ) -> None:
        """Without features and logits only the keys and values are written."""
        tokens, beside, lengths, starts = tokens.contiguous(), beside.contiguous(), state.lengths, state.rows
        places = numbers(lengths), numbers(starts)
        call, end = self._call(state, tokens.size(0), tokens.size(1), *places, done)
        call.parents, call.beside, call.reach, call.hidden_slots = address(parents), beside.data_ptr(), window, 1
        if self._target is None:
            embedded = self.embed(tokens).float().contiguous()
            call.embedded = embedded.data_ptr()
        else:
            call.tokens = tokens.data_ptr()
        if features is not None:
            call.taps, call.num_taps, call.features = address(self._taps), len(self._taps), features.data_ptr()
        if logits is not None:
            call.logits, call.num_logits = logits.data_ptr(), tokens.numel()
        self._run(call, end, None if self._target is None else tokens)

    def _fuse(self, features: Tensor) -> Tensor:
        """Of the tapped outputs `[B, N, m * H]`, `[B, N, H]` float32."""
        if not self._fuses:
            return features.float()
        assert isinstance(self.network, Eagle3Network)
        rows = self.network.normed_taps(features.to(self._dtype)).float().contiguous()
        fused = torch.empty(*features.shape[:2], self.config.hidden_size)
        self.library.multiply(self._fc, rows.flatten(0, 1), fused)
        return fused

    def _angles(self, count: int) -> list[tuple[Tensor, Tensor]]:
        # The row of slot s stands at position s - 1, but only differences between positions matter.
        cos, sin = self._rotary(torch.arange(count)[None], torch.float32)
        half = self.config.head_dim // 2
        return [(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())]


class CompiledRowsOfCycle:
    """`RowsOfCycle`, behind the texts themselves."""

    def __init__(self, run: CompiledRows, state: KVCache, window: int | None) -> None:
        self._run, self._state, self._window = run, state, EVERYWHERE if window is None else window
        self._feature = last_features(state, run.features(state))
        self._parents: list[list[int]] = [[] for _ in state.rows]
        self._last = 0  # nodes of a row in the last call

    @property
    def room(self) -> int:
        """Rows that the slots behind the shortest text still hold."""
        return self._state.spare - len(self._parents[0])

    def __call__(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        count, done = tokens.size(1), len(self._parents[0])
        first, feature = done - self._last, self._feature
        if parents is None:
            for own in self._parents:
                own += [done - 1] * count
        else:
            feature = picked(feature, parents)
            for own, new in zip(self._parents, parents.tolist(), strict=True):
                own += [first + parent for parent in new]
        everyone = numbers(parent for own in self._parents for parent in own)
        self._feature, logits = self._run.pass_of(self._state, tokens, feature, everyone, done, self._window)
        self._last = count
        mark(HEAD)
        return logits
