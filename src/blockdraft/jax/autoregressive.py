"""Draft networks that guess a token at a time, in JAX; `blockdraft.nn.autoregressive` says what they compute.

A draft of a whole chain or tree is one loop on the devices, a level in each turn, and part of a cycle's program. Where
the engine builds the draft itself (sampled guesses, trees of a size that is chosen in each cycle), each level is a
call.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockdraft.decode.tree import next_pays
from blockdraft.jax import model
from blockdraft.jax.cache import JaxCache, JaxTensor
from blockdraft.jax.drafting import Context, JaxRunner, as_decoder, chain_of, latest, padded, tree_of
from blockdraft.jax.model import Array, Memory, Params, as_numpy, bucket, jax, jnp
from blockdraft.nn.autoregressive import WIDTH, AutoregressiveNetwork
from blockdraft.timing import PASS, mark


class Nodes(NamedTuple):
    """Nodes of a draft, and what the next level reads of the last one.

    Attributes:
        keys, values: `[B, M, kv_heads, D]`, of which the nodes so far are the first.
        hidden_states: `[B, N, H]` of the last level.
        within: `[B, N, M]` bool, nodes that those of the last level see, themselves included.
    """

    keys: Array
    values: Array
    hidden_states: Array
    within: Array

    def children(self, parents: Array) -> Nodes:
        """For nodes with these parents `[B, N]` in the last level."""
        found = (jnp.take_along_axis(each, parents[..., None], axis=1) for each in (self.hidden_states, self.within))
        return Nodes(self.keys, self.values, *found)


class JaxAutoregressive(JaxRunner):
    """An `AutoregressiveRunner` in JAX. The state holds the feature of a token as a third array.

    Args:
        network: Network in the target's dtype, of which the parameters are copied to the devices.
        target: Target in JAX.
        tensors: Its parameters by their names, those of the layer with `layers.0.` before them.
        qk_norm: Whether queries and keys are normed.
    """

    def __init__(
        self, network: AutoregressiveNetwork, target: Any, tensors: Mapping[str, Tensor], qk_norm: bool = True
    ) -> None:
        drafter = as_decoder(network.config, len(network.kept), qk_norm=qk_norm)
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
        super().__init__(network.config, target, drafter, tensors, network.config.hidden_size)
        self.params["kept"] = self._layout.put(as_numpy(network.kept).astype(np.int32))
        self.jax_learn, self.jax_draft_tokens = jax.jit(self.learn), jax.jit(self._draft_tokens, static_argnums=(0, 1))
        self.jax_begin, self.jax_level = jax.jit(self._begin, static_argnums=0), jax.jit(self._level)

    def norm(self, own: Params, name: str, x: Array) -> Array:
        return model.rms_norm(x, own[f"model.{name}.weight"], self.drafter.norm_eps)

    @abstractmethod
    def fuse(self, own: Params, hidden_states: Array) -> Array:
        """As in `AutoregressiveNetwork`."""

    @abstractmethod
    def entries(self, own: Params, embedded: Array, hidden_states: Array) -> tuple[Array, Array]:
        """The layer's residual stream and its normed input, of the embeddings and features `[B, N, H]` of entries."""

    @abstractmethod
    def fed_on(self, own: Params, hidden: Array) -> Array:
        """As in `AutoregressiveNetwork`."""

    @abstractmethod
    def logits(self, known: Context, hidden: Array) -> Array:
        """As in `AutoregressiveNetwork`."""

    def _into_layer(
        self, known: Context, tokens: Array, hidden_states: Array, positions: Array
    ) -> tuple[Array, list[Array]]:
        """The layer's residual stream, and its queries, keys and values, of entries at these positions `[B, N]`."""
        embedded = model.embed(known.params, tokens).astype(self._dtype)
        x, normed = self.entries(known.own, embedded, hidden_states)
        turns = model.angles(self.drafter.ropes[0], jnp.maximum(positions, 0), self._dtype)
        return x, model.queries_keys_values(self.drafter, self._layout, known.own, 0, normed, turns)

    def _begin(self, room: int, known: Context) -> Nodes:
        """No nodes, with room for as many. The first ones follow the last token of their row."""
        batch = len(known.rows.lengths)
        empty = jnp.zeros((batch, room, self.drafter.num_kv_heads, self.drafter.head_dim), self._dtype)
        return Nodes(empty, empty, last_hidden_states(known), jnp.zeros((batch, 1, room), bool))

    def _level(
        self,
        known: Context,
        nodes: Nodes,
        window: Array,
        parents: Array,
        tokens: Array,
        depth: Array,
        begin: Array,
    ) -> tuple[Array, Nodes]:
        """Add nodes behind the `begin` ones so far.

        Args:
            parents, tokens: `[B, N]` int32; indices of the parents in the last level.

        Returns:
            Logits `[B, N, Vd]` of the tokens that follow, and all nodes.
        """
        rows, nodes = known.rows, nodes.children(parents)
        positions = jnp.broadcast_to(rows.lengths[:, None] - 1 + depth, tokens.shape)
        x, (queries, *new) = self._into_layer(known, tokens, nodes.hidden_states, positions)
        stores = zip(nodes[:2], new, strict=True)
        keys, values = (jax.lax.dynamic_update_slice_in_dim(store, each, begin, axis=1) for store, each in stores)
        at, places = jnp.arange(tokens.shape[1], dtype=jnp.int32), jnp.arange(keys.shape[1], dtype=jnp.int32)
        within = nodes.within | (begin + at[:, None] == places)
        latest = jnp.minimum(window, rows.lengths - 1)[:, None, None]  # the first token of a text has no entry
        masks = rows.masks(known.state[0], positions, within, None, latest)
        text = rows.read(known.state[0], 0), rows.read(known.state[1], 0)
        attended = model.attend(queries, (keys, values), text, masks, self.drafter.query_scale)
        hidden = model.after_attention(self.drafter, self._layout, known.own, 0, x, attended)
        return self.logits(known, hidden), Nodes(keys, values, self.fed_on(known.own, hidden), within)

    def _draft_tokens(
        self, count: int, width: int, known: Context, anchors: Array, size: Array, window: Array, temperature: Array
    ) -> list[Array]:
        """Guesses of `size - 1` levels: of each level `width` children of the `width` likeliest guesses before.

        Returns:
            Log probabilities of their paths, parents (0, or 1 + the index of a guess) and tokens,
            `[B, (count - 1) * width**2]`.
        """
        batch, each = len(anchors), width * width
        kinds = ((jnp.float32, -jnp.inf), (jnp.int32, 0), (jnp.int32, 0))
        found = [jnp.full((batch, count - 1, each), value, kind) for kind, value in kinds]
        # Every level has `width` nodes; of those of the anchor, all but one have no chance.
        parents = jnp.zeros((batch, width), jnp.int32)
        scores = jnp.where(jnp.arange(width) > 0, -jnp.inf, jnp.zeros_like(parents, jnp.float32))
        tokens = jnp.broadcast_to(anchors[:, None], parents.shape)
        nodes = self._begin((count - 1) * width, known).children(parents)
        heat = jnp.where(temperature > 0, temperature, 1)[:, None, None]

        def level(depth: Array, before: Any) -> Any:
            nodes, found, scores, parents, above, tokens = before
            logits, nodes = self._level(known, nodes, window, above, tokens, depth, depth * width)
            logits = logits.astype(jnp.float32)
            logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / heat
            # Else XLA sorts the whole vocabulary on a CPU; it aborts on one barrier for both.
            best, ids = (jax.lax.optimization_barrier(part) for part in jax.lax.top_k(logits, width))
            likely = best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
            new = scores[..., None] + likely, jnp.repeat(parents, width, axis=1), known.own["kept"][ids]
            children = [values.reshape(batch, each) for values in new]
            found = [store.at[:, depth].set(values) for store, values in zip(found, children, strict=True)]
            scores, chosen = jax.lax.top_k(children[0], width)
            tokens = jnp.take_along_axis(children[2], chosen, axis=1)
            return nodes, found, scores, 1 + depth * each + chosen, chosen // width, tokens

        begun = nodes, found, scores, parents, parents, tokens
        found = jax.lax.fori_loop(np.int32(0), size - 1, level, begun)[1]
        return [store.reshape(batch, -1) for store in found]

    def propose(
        self,
        known: Context,
        anchors: Array,
        size: Array,
        window: Array,
        temperature: Array,
        count: int,
        budget: int,
    ) -> tuple[Array, Array, Array]:
        """As in `JaxRunner`."""
        width = min(WIDTH, budget, len(known.own["kept"])) or 1
        scores, parents, tokens = self._draft_tokens(count, width, known, anchors, size, window, temperature)
        if not budget:
            return chain_of(anchors, tokens, size)
        depths = jnp.repeat(jnp.arange(1, count, dtype=jnp.int32), width * width)
        return tree_of(anchors, scores, parents, tokens, jnp.broadcast_to(depths, tokens.shape), budget)

    def learn(self, known: Context, tokens: Array, parents: Array, depths: Array, hidden_states: Array) -> Memory:
        """As in `JaxRunner`."""
        fused = self.fuse(known.own, hidden_states.astype(self._dtype))
        above = jnp.take_along_axis(fused, jnp.maximum(parents, 0)[..., None], axis=1)
        before = jnp.where(parents[..., None] < 0, last_hidden_states(known), above)
        _, (_, keys, values) = self._into_layer(known, tokens, before, known.rows.lengths[:, None] + depths - 1)
        return keys[None], values[None], fused[None, :, :, None]

    def _known(self, state: JaxCache) -> Context:
        return Context(self._target.params, self.params, state.arrays, state.where())

    def observe(self, state: JaxCache, tokens: Tensor, hidden_states: Tensor) -> None:
        """As `AutoregressiveRunner.observe`; `state.commit` writes."""
        known = self._known(state)
        array = self._on_devices(hidden_states, len(known.rows.lengths))
        wide = padded(tokens, array.shape[:2]).astype(np.int32)
        depths = np.broadcast_to(np.arange(wide.shape[1], dtype=np.int32), wide.shape)
        state.leave(self.jax_learn(known, *self._layout.put((wide, depths - 1, depths)), array))

    def slots_beside(self, block_size: int, width: int) -> int:
        return 0

    def chain(
        self,
        state: JaxCache,
        anchor: Tensor,
        draft_tokens: int,
        window: int | None = None,
        seconds: Sequence[float] | None = None,
        calibration: float = 1.0,
    ) -> tuple[Tensor, Tensor | None]:
        """As `AutoregressiveRunner.chain`. All guesses are made, and those that do not pay are cut off."""
        batch, rows = len(anchor), bucket(len(anchor))
        heat = np.ones(rows, np.float32)
        given = padded(anchor, (rows,)).astype(np.int32), np.int32(1 + draft_tokens), latest(window), heat
        found = self.jax_draft_tokens(bucket(1 + draft_tokens), 1, self._known(state), *self._layout.put(given))
        scores, _, tokens = (JaxTensor(each, (batch, draft_tokens)).real for each in found)
        mark(PASS)
        expected, survival, following, count = torch.zeros(batch), torch.ones(batch), torch.ones(batch), 0
        while seconds and count < draft_tokens and next_pays(expected, following, count, seconds, calibration):
            before, survival = survival, scores[:, count].exp()
            following = survival * survival / before
            expected, count = expected + survival, count + 1
        tokens = torch.cat([anchor[:, None], tokens[:, : count if seconds else draft_tokens]], dim=1)
        return tokens, expected if seconds else None

    def nodes(self, state: JaxCache, block_size: int, width: int, window: int | None = None) -> JaxNodes:
        return JaxNodes(self, state, block_size, width, window)


class JaxNodes:
    """`DraftNodes` in JAX."""

    def __init__(
        self, run: JaxAutoregressive, state: JaxCache, block_size: int, width: int, window: int | None
    ) -> None:
        self._run, self._known, self._window = run, run._known(state), latest(window)
        self._depth, self._end, self.room = 0, 0, 1 + width * (block_size - 2)
        self._nodes = run.jax_begin(1 + bucket(width) * (block_size - 2), self._known)

    def __call__(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        run, (batch, count) = self._run, tokens.shape
        wide = bucket(batch), bucket(count)
        above = torch.zeros_like(tokens) if parents is None else parents
        ids, above = (padded(each, wide).astype(np.int32) for each in (tokens, above))
        given = run._layout.put((self._window, above, ids, np.int32(self._depth), np.int32(self._end)))
        logits, self._nodes = run.jax_level(self._known, self._nodes, *given)
        self._depth, self._end, self.room = self._depth + 1, self._end + wide[1], self.room - count
        mark(PASS)
        return JaxTensor(logits, (batch, count, logits.shape[-1]))


def last_hidden_states(known: Context) -> Array:
    """Feature of each row's last token, `[B, 1, H]`; 0 for rows without tokens."""
    firsts, lengths = known.rows.firsts, known.rows.lengths
    found = known.state[2][0, 0].at[firsts + lengths - 1].get(mode="fill", fill_value=0)
    return jnp.where(lengths[:, None] > 0, found, 0)[:, None]
