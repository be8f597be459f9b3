"""Draft networks that predict one token at a time, in JAX; `blockdraft.nn.autoregressive` says what they compute."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockdraft.decode.tree import next_pays
from blockdraft.nn.autoregressive import AutoregressiveNetwork
from blockdraft.timing import PASS, mark
from blockdraft_jax.cache import JaxCache, JaxTensor
from blockdraft_jax.draft_runner import Context, JaxDraftRunner, JaxHost, draft_window, padded
from blockdraft_jax.model import Array, Memory, Params, as_numpy, attend, bucket, embed, jax, jnp


class Nodes(NamedTuple):
    """Nodes of a draft.

    Attributes:
        keys, values: `[B, M, kv_heads, D]` of all nodes.
        hidden: `[B, N, H]`, the hidden states that the children of the last level read.
        within: `[B, N, M]` bool, the nodes that those of the last level attend to, themselves included.
    """

    keys: Array
    values: Array
    hidden: Array
    within: Array


class JaxAutoregressive(JaxDraftRunner, ABC):
    """An `AutoregressiveRunner` in JAX. Its state stores the fused hidden state of each token as a third array.

    Args:
        network: Network in the target's dtype; its parameters are copied to the devices.
        tensors: The network's parameters by name, those of the layer with the prefix `layers.0.`.
        qk_norm: Whether queries and keys are normed.
    """

    grown_vocabulary: Tensor | None = None

    def __init__(
        self, network: AutoregressiveNetwork, host: JaxHost, tensors: Mapping[str, Tensor], qk_norm: bool = True
    ) -> None:
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
        super().__init__(network.config, host, tensors, qk_norm=qk_norm, hidden_size=network.config.hidden_size)
        self.params["kept"] = self._layout.put(as_numpy(network.kept).astype(np.int32))
        self.jax_observe, self.jax_level = jax.jit(self._observe), jax.jit(self._level)
        self.jax_first = jax.jit(self._first, static_argnums=0)
        self.jax_chain = jax.jit(self._chain, static_argnums=0)

    @abstractmethod
    def fuse(self, params: Params, hidden: Array) -> Array:
        """As `AutoregressiveNetwork.fuse`."""

    @abstractmethod
    def entries(self, params: Params, embedded: Array, hidden: Array) -> tuple[Array, Array]:
        """Return the layer's residual stream and its normed input, from embeddings and hidden states `[B, N, H]`."""

    @abstractmethod
    def fed_on(self, params: Params, hidden: Array) -> Array:
        """As `AutoregressiveNetwork.fed_on`."""

    @abstractmethod
    def logits(self, context: Context, hidden: Array) -> Array:
        """As `AutoregressiveNetwork.logits`."""

    def norm(self, params: Params, name: str, x: Array) -> Array:
        return self.decoder.norm(params, f"model.{name}.weight", x)

    def slots_beside(self, block_size: int, width: int) -> int:
        return 0

    def observe(self, state: JaxCache, tokens: Tensor, hidden_states: Tensor) -> None:
        hidden = self.hidden_states(hidden_states)
        state.pending = self.jax_observe(
            self.context(state), self._layout.put(padded(tokens, hidden.shape[:2])), hidden
        )

    def chain(
        self,
        state: JaxCache,
        anchor: Tensor,
        draft_tokens: int,
        window: int | None = None,
        seconds: Sequence[float] | None = None,
        calibration: float = 1.0,
    ) -> tuple[Tensor, Tensor | None]:
        """As `AutoregressiveRunner.chain`. All draft tokens are computed, and those that do not pay are cut off."""
        batch = len(anchor)
        arguments = padded(anchor, (bucket(batch),)), np.int32(draft_tokens), draft_window(window)
        arrays = self.jax_chain(bucket(draft_tokens), self.context(state), *self._layout.put(arguments))
        tokens, probs = (JaxTensor(array, (batch, draft_tokens)).real for array in arrays)
        mark(PASS)
        expected, survival, following, count = torch.zeros(batch), torch.ones(batch), torch.ones(batch), 0
        while seconds and count < draft_tokens and next_pays(expected, following, count, seconds, calibration):
            survival = survival * probs[:, count]
            following = survival * probs[:, count]
            expected, count = expected + survival, count + 1
        tokens = torch.cat([anchor[:, None], tokens[:, : count if seconds else draft_tokens]], dim=1)
        return tokens, expected if seconds else None

    def nodes(self, state: JaxCache, block_size: int, width: int, window: int | None = None) -> JaxNodes:
        return JaxNodes(self, state, block_size, width, window)

    def _observe(self, context: Context, tokens: Array, hidden: Array) -> Memory:
        """Return what the state stores of committed tokens: keys, values and fused hidden states."""
        fused = self.fuse(context.params, hidden.astype(self._dtype))
        before = jnp.concatenate([_last_hidden(context), fused[:, :-1]], axis=1)
        positions = context.view.lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32) - 1
        _, (_, keys, values) = self._layer_input(context, tokens, before, positions)
        return keys[None], values[None], fused[None, :, :, None]

    def _layer_input(
        self, context: Context, tokens: Array, hidden: Array, positions: Array
    ) -> tuple[Array, list[Array]]:
        """Return the layer's residual stream, and its queries, keys and values, of entries at positions `[B, N]`."""
        embedded = embed(context.target_params, tokens).astype(self._dtype)
        x, normed = self.entries(context.params, embedded, hidden)
        rotation = self.rotation(jnp.maximum(positions, 0))
        return x, self.decoder.queries_keys_values(context.params, 0, normed, rotation)

    def _first(self, room: int, context: Context) -> Nodes:
        """Return a draft without nodes, with room for this many."""
        batch, layers = len(context.view.lengths), self.decoder.config
        empty = jnp.zeros((batch, room, layers.num_kv_heads, layers.head_dim), self._dtype)
        return Nodes(empty, empty, _last_hidden(context), jnp.zeros((batch, 1, room), bool))

    def _level(
        self, context: Context, nodes: Nodes, window: Array, parents: Array, tokens: Array, depth: Array, begin: Array
    ) -> tuple[Array, Nodes]:
        """Add a level of N nodes behind the first `begin` ones.

        Args:
            parents: `[B, N]` int32, indices of the parents in the last level.
            tokens: `[B, N]` int32.

        Returns:
            Logits `[B, N, Vd]` of the tokens that follow, and all nodes.
        """
        params, memory, view = context.params, context.memory, context.view
        hidden, within = (jnp.take_along_axis(x, parents[..., None], axis=1) for x in (nodes.hidden, nodes.within))
        positions = jnp.broadcast_to(view.lengths[:, None] - 1 + depth, tokens.shape)
        x, (queries, *new) = self._layer_input(context, tokens, hidden, positions)
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(store, added, begin, axis=1)
            for store, added in zip(nodes[:2], new, strict=True)
        )
        at, places = jnp.arange(tokens.shape[1], dtype=jnp.int32), jnp.arange(keys.shape[1], dtype=jnp.int32)
        within = within | (begin + at[:, None] == places)
        latest = jnp.minimum(window, view.lengths - 1)[:, None, None]  # the first token of a sequence has no entry
        masks = view.masks(memory[0], positions, within, None, latest)
        committed = view.read(memory[0], 0), view.read(memory[1], 0)
        attended = attend(queries, (keys, values), committed, masks, self.decoder.config.query_scale)
        out = self.decoder.after_attention(params, 0, x, attended)
        return self.logits(context, out), Nodes(keys, values, self.fed_on(params, out), within)

    def _chain(
        self, room: int, context: Context, anchors: Array, draft_tokens: Array, window: Array
    ) -> tuple[Array, Array]:
        """Return chains of the `draft_tokens` most probable draft tokens, and each one's probability, `[B, room]`."""
        parent = jnp.zeros((len(anchors), 1), jnp.int32)

        def level(depth: Array, carry: Any) -> Any:
            nodes, token, tokens, probs = carry
            logits, nodes = self._level(context, nodes, window, parent, token, depth, depth)
            scores = jax.nn.softmax(logits[:, 0].astype(jnp.float32), axis=-1)
            token = context.params["kept"][jnp.argmax(logits[:, 0], axis=-1)][:, None]
            return nodes, token, tokens.at[:, depth].set(token[:, 0]), probs.at[:, depth].set(scores.max(axis=-1))

        tokens = jnp.zeros((len(anchors), room), jnp.int32)
        carry = self._first(room, context), anchors[:, None], tokens, tokens.astype(jnp.float32)
        _, _, tokens, probs = jax.lax.fori_loop(np.int32(0), draft_tokens, level, carry)
        return tokens, probs


class JaxNodes:
    """`DraftNodes` in JAX."""

    def __init__(
        self, runner: JaxAutoregressive, state: JaxCache, block_size: int, width: int, window: int | None
    ) -> None:
        self._runner, self._context, self._window = runner, runner.context(state), draft_window(window)
        self._depth, self._end, self.room = 0, 0, 1 + width * (block_size - 2)
        self._nodes = runner.jax_first(1 + bucket(width) * (block_size - 2), self._context)

    def __call__(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        batch, count = tokens.shape
        shape = bucket(batch), bucket(count)
        parents = torch.zeros_like(tokens) if parents is None else parents
        arguments = padded(parents, shape), padded(tokens, shape), np.int32(self._depth), np.int32(self._end)
        arrays = self._runner._layout.put((self._window, *arguments))
        logits, self._nodes = self._runner.jax_level(self._context, self._nodes, *arrays)
        self._depth, self._end, self.room = self._depth + 1, self._end + shape[1], self.room - count
        mark(PASS)
        return JaxTensor(logits, (batch, count, logits.shape[-1]))


def _last_hidden(context: Context) -> Array:
    """Return the stored hidden state of each sequence's last token, `[B, 1, H]`; 0 for empty sequences."""
    view = context.view
    hidden = context.memory[2][0, 0].at[view.starts + view.lengths - 1].get(mode="fill", fill_value=0)
    return jnp.where(view.lengths[:, None] > 0, hidden, 0)[:, None]
