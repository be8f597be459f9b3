"""Networks that guess a token at a time (`nn/autoregressive.py`), one call of the compiled library for each call of
their runner."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from blockdraft.cpu.compiled import EVERYWHERE, CompiledDecoder, address, chain_parents, numbers
from blockdraft.cpu.compiled_network import Beside, CompiledNetwork, library_for, why_not_compiled
from blockdraft.cpu.library import Library, LinearFields, ModelFields
from blockdraft.machine import return_freed
from blockdraft.nn.autoregressive import AutoregressiveNetwork, feature_store, last_features, picked
from blockdraft.nn.cache import KVCache
from blockdraft.nn.layers import RMSNorm
from blockdraft.nn.rotary import Rotary
from blockdraft.timing import HEAD, PASS, mark

STREAM, NORMED = 0, 1  # taps: what leaves the only layer, and the same behind the last norm


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Where a network's weights are, and how it joins them.

    Attributes:
        token_norm, feature_norm: Of an entry's embedding and feature; `norm`: behind the layer.
        normed_taps: What `fc` reads of the tapped outputs `[..., m * H]`, where `fc` makes features of them and the
            head is the network's own; None where `fc` joins embedding and feature, and the head is the target's.
        normed_stream: The layer's output is added to the normed feature.
        normed_feedback: What is fed on is behind the last norm.
    """

    layer: nn.Module
    token_norm: RMSNorm
    feature_norm: RMSNorm
    norm: RMSNorm
    rotary: Rotary
    normed_taps: Callable[[Tensor], Tensor] | None
    normed_stream: bool
    normed_feedback: bool


def compiled_runner(
    network: AutoregressiveNetwork, parts: Parts, beside: Beside, owned: bool
) -> CompiledAutoregressive | str:
    """The compiled runner of a network, or why there is none.

    Args:
        owned: As in `Target.runner`.
    """
    dtype, head_dim = beside.dtype, network.config.head_dim
    reason = why_not_compiled(network.fc.weight, dtype, head_dim)
    if reason is not None:
        return reason
    library, reason = library_for(network.state_dict().values(), dtype, beside.store, head_dim)
    if library is None:
        return reason or ""
    target = beside.decoder if beside.decoder.library is library else None
    return CompiledAutoregressive(network, parts, library, beside, target, owned)


class CompiledAutoregressive(CompiledNetwork):
    """An `AutoregressiveRunner` whose calls are one of the library each. The nodes of a draft lie behind their texts.

    Args:
        network: Its weights are copied into the library's layout and must not be changed afterwards.
        library: Built for its dtype and head size.
        target: Lends its embedding, and its head to a network that has none, where it uses the same library.
        owned: As in `Target.runner`.
    """

    @torch.no_grad()
    def __init__(
        self,
        network: AutoregressiveNetwork,
        parts: Parts,
        library: Library,
        beside: Beside,
        target: CompiledDecoder | None,
        owned: bool,
    ) -> None:
        config = network.config
        super().__init__(library, config, 1, beside.dtype, None, owned)
        self.embed, self.head, self.network = beside.embed, beside.head, network
        self._lay_out(self._layers[0], parts.layer)
        fuses, self._normed_taps = parts.normed_taps is not None, parts.normed_taps
        self._fc = self._pack(network, "fc")
        own_head = self._pack(network, "lm_head") if fuses else None
        nothing = LinearFields()
        self._model = ModelFields(
            layers=self._layers,
            embedding=nothing if target is None else target.embedding,
            head=own_head or (nothing if target is None else target.head),
            norm=self._pointer(parts.norm.weight),
            num_layers=1,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            inner=config.intermediate_size,
            eps=config.rms_norm_eps,
            embedding_scale=1.0,
            attention_scale=config.head_dim**-0.5,
            joined=nothing if fuses else self._fc,
            token_norm=self._pointer(parts.token_norm.weight),
            feature_norm=self._pointer(parts.feature_norm.weight),
            pairs=True,
            normed_stream=parts.normed_stream,
        )
        self._target, self._rotary = target, parts.rotary
        self._scores = own_head is not None or target is not None
        # What is fed on comes first, and what the target's head reads last, where that is not the library's.
        taps = [NORMED if parts.normed_feedback else STREAM]
        self._taps = numbers(taps if self._scores or parts.normed_feedback else [*taps, NORMED])
        return_freed()

    def state_bytes(self, batch: int, capacity: int) -> int:
        return super().state_bytes(batch, capacity) + 4 * batch * capacity * int(self.config.hidden_size)

    def slots_beside(self, block_size: int, width: int) -> int:
        return 1 + width * max(block_size - 2, 0)

    def observe(self, state: KVCache, tokens: Tensor, features: Tensor) -> None:
        known = self.features(state)
        fused = self._fuse(features)
        before = torch.cat([last_features(state, known), fused[:, :-1]], dim=1)
        self._run_nodes(state, tokens, before, chain_parents(*tokens.shape), 0, EVERYWHERE)
        for place, (row, length) in enumerate(zip(state.rows, state.lengths, strict=True)):
            known[row + length : row + length + tokens.size(1)] = fused[place]

    def nodes(self, state: KVCache, block_size: int, width: int, window: int | None = None) -> CompiledNodes:
        return CompiledNodes(self, state, window)

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
        self._run_nodes(state, tokens, beside, parents, done, window, features, logits)
        fed, normed = features[..., :size], features[..., -size:]
        mark(PASS)
        return fed, self.head(normed.to(self._dtype)) if logits is None else logits

    def _run_nodes(
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
        if self._normed_taps is None:
            return features.float()
        rows = self._normed_taps(features.to(self._dtype)).float().contiguous()
        fused = torch.empty(*features.shape[:2], self.config.hidden_size)
        self.library.multiply(self._fc, rows.flatten(0, 1), fused)
        return fused

    def _angles(self, count: int) -> list[tuple[Tensor, Tensor]]:
        # The entry of slot s stands at position s - 1, but only differences between positions matter.
        cos, sin = self._rotary(torch.arange(count)[None], torch.float32)
        half = self.config.head_dim // 2
        return [(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())]


class CompiledNodes:
    """`DraftNodes` in the slots behind the texts themselves."""

    def __init__(self, run: CompiledAutoregressive, state: KVCache, window: int | None) -> None:
        self._run, self._state, self._window = run, state, EVERYWHERE if window is None else window
        self._feature = last_features(state, run.features(state))
        self._parents: list[list[int]] = [[] for _ in state.rows]
        self._last = 0  # nodes of a row in the last call

    @property
    def room(self) -> int:
        """Nodes that the slots behind the shortest text still hold."""
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
