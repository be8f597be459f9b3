"""Compiled runner of networks that draft one token at a time (`nn/autoregressive.py`)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from blockdraft.kernels.cpu.compiled_decoder import EVERYWHERE, address, chain_parents, numbers
from blockdraft.kernels.cpu.compiled_network import CompiledHost, CompiledNetwork, pack_together
from blockdraft.kernels.cpu.growing_head import GrowingHead
from blockdraft.kernels.cpu.library import ChainFields, LinearFields
from blockdraft.machine import return_freed
from blockdraft.nn.autoregressive import (
    AutoregressiveNetwork,
    LayerParts,
    hidden_state_store,
    last_hidden_states,
    picked,
)
from blockdraft.nn.cache import KVCache
from blockdraft.nn.packed import check_tokens
from blockdraft.timing import HEAD, PASS, mark

STREAM, NORMED = 0, 1  # outputs to return: that of the only layer, and the same behind the last norm


class CompiledAutoregressive(CompiledNetwork):
    """An `AutoregressiveRunner` with one library call per method.

    The nodes of a draft lie in the KV slots behind their sequence's committed tokens.

    Args:
        network, host, owned: As in `CompiledNetwork`. The network has `layer_parts`.
    """

    _normed_target_layers: Callable[[Tensor], Tensor] | None = None

    @torch.no_grad()
    def __init__(self, network: AutoregressiveNetwork, host: CompiledHost, owned: bool = False) -> None:
        config, parts = network.config, network.layer_parts
        if parts.normed_target_layers is not None:
            host = replace(host, own_head=None)  # the network has a head itself
        super().__init__(network, host, 1, owned)
        fuses, self._normed_target_layers = parts.normed_target_layers is not None, parts.normed_target_layers
        self._kept = self._kept_tokens(network)
        self._pack_layer(self._layers[0], parts.layer)
        self._fc = self._pack(cast(nn.Linear, network.fc))
        own_head, self._growing = None, None
        if self._grows(parts, host):
            assert host.head_rows is not None
            pack = partial(pack_together, library=self.library, dtype=self._dtype, bits=self.bits)
            head = cast(nn.Linear, network.lm_head)
            self._growing = GrowingHead(
                head, self._kept, host.head_rows, lambda part: pack([part], owned=self._owned), self.library
            )
            self._note_quantized(head)
            own_head, self._kept = self._growing.fields, self._growing.kept
        elif fuses:
            own_head = self._pack(cast(nn.Linear, network.lm_head))
        own_head = own_head if self._reduced is None else self._pack(self._reduced.projection)
        self._model = self._model_fields(
            config,
            own_head,
            norm=self._pointer(parts.norm.weight),
            embedding_scale=1.0,
            joined=LinearFields() if fuses else self._fc,
            token_norm=self._pointer(parts.token_norm.weight),
            hidden_state_norm=self._pointer(parts.hidden_state_norm.weight),
            pairs=True,
            normed_stream=parts.normed_stream,
        )
        self._rotary = parts.rotary
        self._set_outputs(network, host, parts.normed_feedback, own_head is not None)
        return_freed()

    def _set_outputs(
        self, network: AutoregressiveNetwork, host: CompiledHost, normed_feedback: bool, has_head: bool = False
    ) -> None:
        """Set what calls return, and what embeds and scores tokens where the library cannot."""
        self.embed, self.head, self.network = host.embed, host.head, network
        self._scores = has_head or self._target is not None
        # The first output is fed to the next node. The target's head reads the last, unless the library runs it.
        target_layers = [NORMED if normed_feedback else STREAM]
        self._target_layers = numbers(target_layers if self._scores or normed_feedback else [*target_layers, NORMED])

    def _kept_tokens(self, network: AutoregressiveNetwork) -> Tensor:
        """Return the tokens that are drafted, `[Vd]` int64."""
        return (network.kept if self._reduced is None else self._reduced.kept).contiguous()

    def _grows(self, parts: LayerParts, host: CompiledHost) -> bool:
        """Return whether rows of the target's head for tokens of sequences can be added to the network's head."""
        fits = len(self._kept) % self.library.lanes == 0 and len(self._kept) < self.config.vocab_size
        return parts.tied_head and host.head_rows is not None and fits

    @property
    def grown_vocabulary(self) -> Tensor | None:
        return None if self._growing is None else self._kept[: self._growing.outputs]

    def weight_bytes(self) -> int:
        return super().weight_bytes() + (0 if self._growing is None else self._growing.nbytes)

    def state_bytes(self, batch: int, capacity: int) -> int:
        return super().state_bytes(batch, capacity) + 4 * batch * capacity * int(self.config.hidden_size)

    def slots_beside(self, block_size: int, width: int) -> int:
        return 1 + width * max(block_size - 2, 0)

    def observe(self, state: KVCache, tokens: Tensor, hidden_states: Tensor) -> None:
        if self._growing is not None and self._growing.add(tokens):
            self._model.head = self._growing.fields
        known = self.hidden_states(state)
        fused = self._fuse(hidden_states)
        before = torch.cat([last_hidden_states(state, known), fused[:, :-1]], dim=1)
        self._run_nodes(state, tokens, before, chain_parents(*tokens.shape))
        for i, (start, length) in enumerate(zip(state.starts, state.lengths, strict=True)):
            known[start + length : start + length + tokens.size(1)] = fused[i]

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
        """Return the hidden states of all KV slots, `[slots, H]` float32."""
        return hidden_state_store(state, 1, self.config.hidden_size, torch.empty(0))

    def pass_of(
        self, state: KVCache, tokens: Tensor, beside: Tensor, parents: array[int], done: int, window: int
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states that follow nodes, `[B, N, H]` float32, and their logits `[B, N, V]`.

        Args:
            tokens: `[B, N]` int64, behind `done` earlier nodes of each sequence.
            beside: `[B, N, H]` float32, the hidden states before the nodes.
            parents: Parents of all `B * (done + N)` nodes.
            window: Number of last committed tokens that are visible.
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
        """Run nodes as in `pass_of`, and write to `hidden_states` and `logits`.

        Without these, compute only keys and values.
        """
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
        """Fuse the hidden states of the target layers, `[B, N, m * H]`, to `[B, N, H]` float32."""
        if self._normed_target_layers is None:
            return hidden_states.float()
        normed = self._normed_target_layers(hidden_states.to(self._dtype)).float().contiguous()
        fused = torch.empty(*hidden_states.shape[:2], self.config.hidden_size)
        self.library.multiply(self._fc, normed.flatten(0, 1), fused)
        return fused

    def _angles(self, count: int) -> list[tuple[Tensor, Tensor]]:
        # The entry of slot s has position s - 1, but only differences between positions matter.
        cos, sin = self._rotary(torch.arange(count)[None], torch.float32)
        half = self.config.head_dim // 2
        return [(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())]


class CompiledNodes:
    """`DraftNodes` in the KV slots behind each sequence's committed tokens."""

    def __init__(self, run: CompiledAutoregressive, state: KVCache, window: int | None) -> None:
        self._run, self._state, self._window = run, state, EVERYWHERE if window is None else window
        self._hidden_state = last_hidden_states(state, run.hidden_states(state))
        self._parents: list[list[int]] = [[] for _ in state.starts]
        self._last = 0  # nodes per sequence of the last call

    @property
    def room(self) -> int:
        """Nodes that still fit behind every sequence's committed tokens."""
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
