"""Compiled runner of networks that guess a token at a time (`nn/autoregressive.py`): a call of the library for each
of its own."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from blockdraft.kernels.cpu.compiled_decoder import (
    EVERYWHERE,
    CompiledDecoder,
    address,
    chain_parents,
    numbers,
    why_not_compiled,
)
from blockdraft.kernels.cpu.compiled_network import Beside, CompiledNetwork, library_for, rounded_beside
from blockdraft.kernels.cpu.library import ChainFields, Library, LinearFields, ModelFields
from blockdraft.machine import return_freed
from blockdraft.nn.autoregressive import AutoregressiveNetwork, hidden_state_store, last_hidden_states, picked
from blockdraft.nn.cache import KVCache
from blockdraft.nn.layers import ReducedHead, RMSNorm
from blockdraft.nn.packed import check_tokens
from blockdraft.nn.rotary import Rotary
from blockdraft.timing import HEAD, PASS, mark

STREAM, NORMED = 0, 1  # taps: the output of the only layer, and the same behind the last norm


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Weights of a network by their role, and how it joins embedding and feature.

    Attributes:
        layer: The only layer.
        token_norm, hidden_state_norm: Norms of an entry's embedding and feature.
        norm: Norm behind the layer.
        rotary: Rotary embedding of the layer's attention.
        normed_target_layers: Function from tapped outputs `[..., m * H]` to the input of `fc`, for networks whose `fc`
            makes features of them and that have a head of their own; None where `fc` joins embedding and feature, and
            the head is the target's.
        normed_stream: Whether the layer's output is added to the normed feature.
        normed_feedback: Whether the feature fed to the next node is taken behind the last norm.
    """

    layer: nn.Module
    token_norm: RMSNorm
    hidden_state_norm: RMSNorm
    norm: RMSNorm
    rotary: Rotary
    normed_target_layers: Callable[[Tensor], Tensor] | None
    normed_stream: bool
    normed_feedback: bool


def compiled_runner(
    network: AutoregressiveNetwork,
    parts: Parts,
    beside: Beside,
    owned: bool,
    head: ReducedHead | None = None,
) -> CompiledAutoregressive | str:
    """The compiled runner of a network, or the reason why there is none.

    Args:
        owned: As in `Target.runner`.
        head: Head of a network that has none; None is the target's.
    """
    dtype, head_dim = beside.dtype, network.config.head_dim
    reason = why_not_compiled(dtype, network.fc.weight.device, head_dim)
    if reason is not None:
        return reason
    if rounded_beside(network, head_dim, beside):
        target = beside.decoder
        return CompiledAutoregressive(network, parts, target.library, beside, target, owned, head, bits=beside.bits)
    weights = [*network.state_dict().values(), *([] if head is None else [head.weight])]
    library, reason = library_for(weights, dtype, beside.store, head_dim)
    if library is None:
        return reason or ""
    lender = beside.decoder if beside.decoder.library is library else None
    return CompiledAutoregressive(network, parts, library, beside, lender, owned, head)


class CompiledAutoregressive(CompiledNetwork):
    """An `AutoregressiveRunner` with one call of the library for each of its own. Nodes of a draft lie in the slots
    behind their row's committed tokens.

    Args:
        network: Network whose weights are copied into the library's layout and must not be changed afterwards.
        parts: Its weights by their role.
        library: Library built for its dtype and head size.
        beside: The target.
        target: The target's forward where it uses the same library, which then lends its embedding, and its head to a
            network that has none.
        owned: As in `Target.runner`.
        head: Head of a network that has none; None is the target's. It is packed where `target` is given.
        bits: Bits to which weights are rounded; None keeps them unrounded.
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
        head: ReducedHead | None = None,
        bits: int | None = None,
    ) -> None:
        config = network.config
        super().__init__(library, config, 1, beside.dtype, bits, owned)
        self.embed, self.head, self.network = beside.embed, head or beside.head, network
        self._pack_layer(self._layers[0], parts.layer)
        fuses, self._normed_target_layers = parts.normed_target_layers is not None, parts.normed_target_layers
        self._fc = self._pack(network, "fc")
        self._reduced = head if not fuses and target is not None else None
        self._kept = (network.kept if self._reduced is None else self._reduced.kept).contiguous()
        own_head = self._pack(network, "lm_head") if fuses else None
        own_head = own_head if self._reduced is None else self._pack(self._reduced, "projection")
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
            hidden_state_norm=self._pointer(parts.hidden_state_norm.weight),
            pairs=True,
            normed_stream=parts.normed_stream,
        )
        self._target, self._rotary = target, parts.rotary
        self._scores = own_head is not None or target is not None
        # The first tap is fed to the next node; the last is read by the target's head, unless the library runs it.
        target_layers = [NORMED if parts.normed_feedback else STREAM]
        self._target_layers = numbers(
            target_layers if self._scores or parts.normed_feedback else [*target_layers, NORMED]
        )
        return_freed()

    def state_bytes(self, batch: int, capacity: int) -> int:
        return super().state_bytes(batch, capacity) + 4 * batch * capacity * int(self.config.hidden_size)

    def slots_beside(self, block_size: int, width: int) -> int:
        return 1 + width * max(block_size - 2, 0)

    def observe(self, state: KVCache, tokens: Tensor, hidden_states: Tensor) -> None:
        known = self.hidden_states(state)
        fused = self._fuse(hidden_states)
        before = torch.cat([last_hidden_states(state, known), fused[:, :-1]], dim=1)
        self._run_nodes(state, tokens, before, chain_parents(*tokens.shape))
        for row, (start, length) in enumerate(zip(state.rows, state.lengths, strict=True)):
            known[start + length : start + length + tokens.size(1)] = fused[row]

    def chain(
        self,
        state: KVCache,
        anchor: Tensor,
        draft_tokens: int,
        window: int | None = None,
        seconds: Sequence[float] | None = None,
        calibration: float = 1.0,
    ) -> tuple[Tensor, Tensor | None] | None:
        if self._target is None or not self._scores:
            return None  # the target's own functions embed or score
        batch = len(anchor)
        tokens = torch.empty(batch, draft_tokens + 1, dtype=torch.int64)
        tokens[:, 0] = anchor
        current, best = torch.empty(2, batch, dtype=torch.int64)
        parents = torch.empty(batch * draft_tokens, dtype=torch.int64)
        known, hidden_state = (
            last_hidden_states(state, self.hidden_states(state)).contiguous(),
            torch.empty(batch, self.config.hidden_size),
        )
        logits = torch.empty(batch, self._model.head.outputs)
        expected, survival, following = torch.empty(3, batch)
        costs = None if seconds is None else array("d", seconds[: draft_tokens + 1])
        call, end = self._call(state, batch, draft_tokens)
        call.nodes, call.num_logits, call.hidden_slots = 1, batch, 1
        call.reach = EVERYWHERE if window is None else window
        call.beside, call.hidden_states, call.logits = known.data_ptr(), hidden_state.data_ptr(), logits.data_ptr()
        call.target_layers, call.num_target_layer_ids, call.best = (
            address(self._target_layers),
            len(self._target_layers),
            best.data_ptr(),
        )
        wanted = ChainFields(
            kept=self._kept.data_ptr(),
            tokens=tokens.data_ptr(),
            current=current.data_ptr(),
            parents=parents.data_ptr(),
            draft_tokens=draft_tokens,
            seconds=None if costs is None else costs.buffer_info()[0],
            calibration=calibration,
            expected=expected.data_ptr(),
            survival=survival.data_ptr(),
            following=following.data_ptr(),
        )
        try:
            self._in_workspace(lambda model, call: self.library.draft_chain(model, call, wanted), call, end)
        except AssertionError:
            check_tokens(tokens[:, :1], self._model.embedding.outputs)
            raise
        mark(PASS)
        return tokens[:, : wanted.made + 1], None if costs is None else expected

    def nodes(self, state: KVCache, block_size: int, width: int, window: int | None = None) -> CompiledNodes:
        return CompiledNodes(self, state, window)

    def hidden_states(self, state: KVCache) -> Tensor:
        """Features of all slots, `[slots, H]` float32."""
        return hidden_state_store(state, 1, self.config.hidden_size, torch.empty(0))

    def pass_of(
        self, state: KVCache, tokens: Tensor, beside: Tensor, parents: array[int], done: int, window: int
    ) -> tuple[Tensor, Tensor]:
        """Features that follow nodes, `[B, N, H]` float32, and their logits `[B, N, V]`.

        Args:
            tokens: `[B, N]` int64, behind `done` earlier nodes of each row.
            beside: `[B, N, H]` float32, the features before the nodes.
            parents: Parents of all `B * (done + N)` nodes.
            window: Number of committed tokens that are seen, the last ones.
        """
        size = self.config.hidden_size
        hidden_states = torch.empty(*tokens.shape, len(self._target_layers) * size)
        logits = torch.empty(*tokens.shape, self._model.head.outputs) if self._scores else None
        self._run_nodes(
            state, tokens, beside, parents, done=done, window=window, hidden_states=hidden_states, logits=logits
        )
        fed, normed = hidden_states[..., :size], hidden_states[..., -size:]
        mark(PASS)
        if logits is None:
            return fed, self.head(normed.to(self._dtype))
        return fed, logits if self._reduced is None else self._reduced.everywhere(logits)

    def _run_nodes(
        self,
        state: KVCache,
        tokens: Tensor,
        beside: Tensor,
        parents: array[int],
        *,
        done: int = 0,
        window: int = EVERYWHERE,
        hidden_states: Tensor | None = None,
        logits: Tensor | None = None,
    ) -> None:
        """Run nodes as in `pass_of`, and write to `hidden_states` and `logits`. Without these only keys and values are
        computed."""
        tokens, beside = tokens.contiguous(), beside.contiguous()
        call, end = self._call(state, tokens.size(0), tokens.size(1), done)
        call.parents, call.beside, call.reach, call.hidden_slots = address(parents), beside.data_ptr(), window, 1
        if self._target is None:
            embedded = self.embed(tokens).float().contiguous()
            call.embedded = embedded.data_ptr()
        else:
            call.tokens = tokens.data_ptr()
        if hidden_states is not None:
            call.target_layers, call.num_target_layer_ids, call.hidden_states = (
                address(self._target_layers),
                len(self._target_layers),
                hidden_states.data_ptr(),
            )
        if logits is not None:
            call.logits, call.num_logits = logits.data_ptr(), tokens.numel()
        self._run(call, end, None if self._target is None else tokens)

    def _fuse(self, hidden_states: Tensor) -> Tensor:
        """Features `[B, N, H]` float32 of tapped outputs `[B, N, m * H]`."""
        if self._normed_target_layers is None:
            return hidden_states.float()
        normed = self._normed_target_layers(hidden_states.to(self._dtype)).float().contiguous()
        fused = torch.empty(*hidden_states.shape[:2], self.config.hidden_size)
        self.library.multiply(self._fc, normed.flatten(0, 1), fused)
        return fused

    def _angles(self, count: int) -> list[tuple[Tensor, Tensor]]:
        # The entry of slot s stands at position s - 1, but only differences between positions matter.
        cos, sin = self._rotary(torch.arange(count)[None], torch.float32)
        half = self.config.head_dim // 2
        return [(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())]


class CompiledNodes:
    """`DraftNodes` in the slots behind each row's committed tokens."""

    def __init__(self, run: CompiledAutoregressive, state: KVCache, window: int | None) -> None:
        self._run, self._state, self._window = run, state, EVERYWHERE if window is None else window
        self._hidden_state = last_hidden_states(state, run.hidden_states(state))
        self._parents: list[list[int]] = [[] for _ in state.rows]
        self._last = 0  # nodes a row of the last call

    @property
    def room(self) -> int:
        """Nodes that still fit behind every row's committed tokens."""
        return self._state.spare - len(self._parents[0])

    def __call__(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        count, done = tokens.size(1), len(self._parents[0])
        first, hidden_state = done - self._last, self._hidden_state
        if parents is None:
            for own in self._parents:
                own += [done - 1] * count
        else:
            hidden_state = picked(hidden_state, parents)
            for own, new in zip(self._parents, parents.tolist(), strict=True):
                own += [first + parent for parent in new]
        everyone = numbers(parent for own in self._parents for parent in own)
        self._hidden_state, logits = self._run.pass_of(self._state, tokens, hidden_state, everyone, done, self._window)
        self._last = count
        mark(HEAD)
        return logits
