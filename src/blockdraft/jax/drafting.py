"""What drafters in JAX share: their runner, and a cycle as one program that drafts, scores, verifies, commits and
observes. Of such a cycle the host gets the tokens, and no logits, features, keys or values leave the devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from blockdraft.jax import model
from blockdraft.jax.cache import JaxCache, JaxTensor
from blockdraft.jax.model import Array, Memory, Params, Rows, as_numpy, bucket, jax, jnp
from blockdraft.nn.decoder_config import DecoderConfig, LayerKind, Rope
from blockdraft.nn.rotary import rotary_frequencies
from blockdraft.types import CycleTokens

EVERYTHING = 2**30  # a draft window that hides nothing


def as_decoder(config: Any, vocab_size: int, windows: Sequence[int | None] = (None,), qk_norm: bool = True) -> Any:
    """The layers of a draft network as those of a decoder, whose names begin with `model.`."""
    frequencies, scale = rotary_frequencies(
        config.head_dim, config.max_position_embeddings, config.rope_theta, config.rope_scaling
    )
    rope = Rope(tuple(frequencies.tolist()), scale)
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        layers=tuple(LayerKind(rope, window) for window in windows),
        norm_eps=config.rms_norm_eps,
        activation="silu",
        query_scale=config.head_dim**-0.5,
        tied_head=True,
        qk_norm=qk_norm,
    )


def chain_of(anchors: Array, draft_tokens: Array, size: Array) -> tuple[Array, Array, Array]:
    """Tokens, parents and depths `[B, 1 + D]` of the anchors `[B]` and guesses `[B, D]`, of which `size - 1` count. The
    parent of an anchor, and of padding, is -1."""
    tokens = jnp.concatenate([anchors[:, None], draft_tokens.astype(jnp.int32)], axis=1)
    depths = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return tokens, jnp.where(depths < size, depths - 1, -1), depths


def tree_of(
    anchors: Array, scores: Array, parents: Array, tokens: Array, depths: Array, budget: int
) -> tuple[Array, Array, Array]:
    """Tokens, parents and depths `[B, 1 + budget]` of the likeliest guesses, parents before children.

    Args:
        scores: `[B, G]`, log probabilities of the guesses' paths; -inf is no guess.
        parents: `[B, G]`, 0 for those that follow the anchor, and else 1 + the index of the guess before.
    """
    batch, missing = len(anchors), max(budget - scores.shape[1], 0)
    scores = jnp.pad(scores, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    parents, tokens, depths = (jnp.pad(each, ((0, 0), (0, missing))) for each in (parents, tokens, depths))
    scores, order = jax.lax.top_k(scores, budget)  # of equals the first, so that parents precede children
    rows, numbers = jnp.arange(batch)[:, None], jnp.arange(1, 1 + budget, dtype=jnp.int32)
    places = jnp.zeros((batch, 1 + parents.shape[1]), jnp.int32).at[rows, 1 + order].set(numbers)
    parents, tokens, depths = (jnp.take_along_axis(each, order, axis=1) for each in (parents, tokens, depths))
    parents = jnp.where(jnp.isfinite(scores), jnp.take_along_axis(places, parents, axis=1), -1)
    begin = jnp.zeros((batch, 1), jnp.int32)
    joined = (anchors[:, None], tokens), (begin - 1, parents), (begin, depths)
    tokens, parents, depths = (jnp.concatenate(each, axis=1).astype(jnp.int32) for each in joined)
    return tokens, parents, depths


def walk(tokens: Array, parents: Array, following: Array, steps: int) -> tuple[Array, Array]:
    """The path on which each node holds the target's token after the node before.

    Args:
        tokens, parents, following: `[B, N]`; the token after each node.

    Returns:
        Nodes `[B, 1 + steps]`, beginning with the anchor, and how many of them are on the path, `[B]`.
    """
    node = jnp.zeros((len(tokens), 1), jnp.int32)
    path, goes_on, count = [node], jnp.ones_like(node, bool), jnp.ones_like(node)
    for _ in range(steps):
        right = (parents == node) & (tokens == jnp.take_along_axis(following, node, axis=1))
        goes_on = goes_on & right.any(axis=1, keepdims=True)
        node = jnp.where(goes_on, jnp.argmax(right, axis=1, keepdims=True).astype(jnp.int32), node)
        path.append(node)
        count += goes_on
    return jnp.concatenate(path, axis=1), count[:, 0]


class Context(NamedTuple):
    """What a draft network reads beside its input: the weights of target and network, and its state of some rows."""

    params: Params
    own: Params
    state: Memory
    rows: Rows


class JaxRunner(ABC):
    """Runner of a draft network in JAX.

    Args:
        config: Of the network.
        target: Target in JAX, with its decoder, params and layout.
        drafter: The network's layers, as `as_decoder` returns them.
        tensors: Weights by the names that they have in such a decoder, which are copied to the devices.
        hidden_states: Size of the feature that a slot of the state holds beside keys and values; 0 is none.
    """

    compile_reason: str | None = None
    bits = None

    def __init__(
        self, config: Any, target: Any, drafter: DecoderConfig, tensors: Mapping[str, Tensor], hidden_states: int = 0
    ) -> None:
        self.config, self.drafter, self._hidden_states = config, drafter, hidden_states
        self._target, self._layout, self._decoder = target, target.layout, target.decoder
        self._dtype = target.params["model.norm.weight"].dtype
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        heads = {"heads": drafter.num_heads, "kv_heads": drafter.num_kv_heads}
        abstract = model.abstract_params(shapes, self._dtype, self._layout, **heads)
        self.params = model.load_params(abstract, tensors.__getitem__)
        self.jax_cycle = jax.jit(self._cycle, static_argnums=(0, 1), donate_argnums=(4, 5))

    @abstractmethod
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
        """Tokens, parents and depths of a draft, as `chain_of` and `tree_of` return them. Arguments as in `_cycle`."""

    @abstractmethod
    def learn(self, known: Context, tokens: Array, parents: Array, depths: Array, hidden_states: Array) -> Memory:
        """What the state holds of nodes `[B, N]` behind its rows' tokens, as `JaxCache.leave` takes it.

        Args:
            tokens, parents, depths: As `propose` returns them.
            hidden_states: Outputs of the tapped layers, `[B, N, m * H]`.
        """

    def new_state(self, batch: int, capacity: int) -> JaxCache:
        return JaxCache(
            batch,
            capacity,
            layers=len(self.drafter.layers),
            kv_heads=self.drafter.num_kv_heads,
            head_dim=self.drafter.head_dim,
            dtype=self._dtype,
            layout=self._layout,
            hidden_states=self._hidden_states,
        )

    def state_bytes(self, batch: int, capacity: int) -> int:
        drafter = self.drafter
        slot = 2 * len(drafter.layers) * drafter.num_kv_heads * drafter.head_dim + self._hidden_states
        return int(batch * capacity * slot * self._dtype.itemsize)

    def weight_bytes(self) -> int:
        return sum(int(weight.nbytes) for weight in self.params.values())  # JAX's copy

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        return 0

    def _cycle(
        self,
        count: int,
        budget: int,
        params: Params,
        own: Params,
        memory: Memory,
        state: Memory,
        rows: Rows,
        own_rows: Rows,
        anchors: Array,
        size: Array,
        window: Array,
        temperature: Array,
        uniforms: Array | None,
    ) -> tuple[Memory, Memory, Array]:
        """A cycle: draft, score, verify, commit, observe.

        Args:
            count: Tokens of a block as compiled, a bucket.
            budget: Guesses of a tree; 0 is a chain of the likeliest guesses.
            params, own: Weights of target and network.
            memory, state: Keys and values of target and drafter; both are donated.
            rows, own_rows: Rows of target and drafter; both have the same first slots.
            anchors: `[B]` int32.
            size: Tokens of a block, int32; those behind them are padding.
            window: Number of each row's last committed tokens that the drafter reads, int32.
            temperature: `[B]`; 0 for greedy rows.
            uniforms: A number for the token after each depth, `[B, count]` float64; None where all rows are greedy.

        Returns:
            Memory and state with the accepted tokens written to them; and `[B, 3 * N + count + 1]` int32: of N nodes
            their tokens, their parents, and the target's tokens after them (-1 where there is none), then the path, and
            its number of nodes, anchor included.
        """
        decoder, layout = self._decoder, self._layout
        at, known = jnp.arange(count, dtype=jnp.int32), Context(params, own, state, own_rows)
        tokens, parents, depths = self.propose(known, anchors, size, window, temperature, count, budget)
        nodes_at = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        within = (parents[:, :, None] == nodes_at) | (nodes_at[:, None] == nodes_at)
        for _ in range(count.bit_length()):  # ancestors of twice the distance
            within = jnp.einsum("bij,bjk->bik", within.astype(jnp.int32), within.astype(jnp.int32)) > 0
        target_layers = self.config.target_layers
        scores, hidden_states, nodes = model.forward(
            decoder, layout, target_layers, params, memory, rows, tokens, depths, within
        )
        following = model.best_tokens(scores)
        if uniforms is not None:
            sampled = (temperature[:, None] > 0) & (following >= 0)
            chosen = model.sample(scores, temperature, jnp.take_along_axis(uniforms, depths, axis=1))
            following = jnp.where(sampled, chosen, following)
        path, kept = walk(tokens, parents, following, count - 1)

        def keep(memory: Memory, nodes: Memory, rows: Rows) -> Memory:
            places = (rows.firsts + rows.lengths)[:, None] + at
            return model.write(layout, memory, nodes, path, jnp.where(at < kept[:, None], places, memory[0].shape[2]))

        learned = self.learn(known, tokens, parents, depths, hidden_states)
        told = jnp.concatenate([tokens, parents, following, path, kept[:, None]], axis=1)
        return keep(memory, nodes, rows), keep(state, learned, own_rows), told

    def cycle(
        self,
        cache: JaxCache,
        state: JaxCache,
        anchors: Sequence[int],
        uniforms: Tensor | None,
        *,
        block_size: int,
        tree_budget: int,
        temperatures: Sequence[float],
        window: int | None = None,
    ) -> CycleTokens:
        """As `Drafter.cycle`. What it needs is put on the devices before, and what it found is fetched after it;
        between there is no transfer."""
        batch, wide, count = len(anchors), (bucket(len(anchors)),), bucket(block_size)
        nodes = 1 + tree_budget if tree_budget else count
        cache.check_room(nodes if tree_budget else block_size)
        # Sums over a vocabulary need float64, as ours on the CPU have it.
        with nullcontext() if uniforms is None else jax.enable_x64(True):
            given = (
                padded(anchors, wide).astype(np.int32),
                np.int32(block_size),
                latest(window),
                padded(temperatures, wide).astype(np.float32),
                None if uniforms is None else padded(uniforms, (*wide, count)),
            )
            cache.arrays, state.arrays, told = self.jax_cycle(
                count,
                tree_budget,
                self._target.params,
                self.params,
                cache.arrays,
                state.arrays,
                cache.where(),
                state.where(),
                *self._layout.put(given),
            )
            found = np.asarray(jax.device_get(told))[:batch]
        shown = nodes if tree_budget else block_size
        tokens, parents, following = (found[:, first : first + shown] for first in (0, nodes, 2 * nodes))
        paths = [row[3 * nodes : 3 * nodes + row[-1]].tolist() for row in found]
        paths = [path if after[path[-1]] >= 0 else [] for path, after in zip(paths, following, strict=True)]
        for each in (cache, state):
            each.advance([len(path) for path in paths])
        return CycleTokens(tokens.tolist(), parents.tolist(), following.tolist(), paths)

    def _on_devices(self, hidden_states: Tensor, batch: int) -> Array:
        """Features `[batch, N, m * H]`, padded to these rows and to a bucket of nodes."""
        if isinstance(hidden_states, JaxTensor) and hidden_states.array.shape[0] == batch:
            return hidden_states.array
        return self._layout.put(padded(hidden_states, (batch, bucket(hidden_states.size(1)), hidden_states.size(2))))


def latest(window: int | None) -> Any:
    """A draft window, the number of a row's last tokens that are read, as a number."""
    return np.int32(EVERYTHING if window is None else window)


def padded(values: Any, shape: Sequence[int]) -> Any:
    """Numbers in an array of numpy, with zeros behind them in each dimension."""
    if isinstance(values, JaxTensor):
        values = values.real
    values = as_numpy(values) if isinstance(values, Tensor) else np.array(values)
    return np.pad(values, [(0, size - own) for size, own in zip(shape, values.shape, strict=True)])
