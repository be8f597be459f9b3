"""DFlash in JAX: its draft pass, and a cycle as one program that drafts, scores, verifies, commits and
observes. Of such a cycle the host gets the tokens, and no logits, features, keys or values leave the devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import numpy as np
from torch import Tensor

from blockdraft.drafters.dflash.network import DFlashNetwork, cached_bytes
from blockdraft.jax import model
from blockdraft.jax.cache import JaxCache, JaxTensor
from blockdraft.jax.model import Array, Layout, Memory, Params, Rows, as_numpy, bucket, jax, jnp
from blockdraft.nn.decoder_config import DecoderConfig, LayerKind, Rope
from blockdraft.nn.draft_config import DraftConfig
from blockdraft.nn.layers import ReducedHead
from blockdraft.nn.rotary import rotary_frequencies
from blockdraft.timing import PASS, mark
from blockdraft.types import CycleTokens

EVERYTHING = 2**30  # a draft window that hides nothing


def as_decoder(config: DraftConfig, vocab_size: int) -> DecoderConfig:
    """The draft layers as those of a decoder, whose names begin with `model.`."""
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
        layers=tuple(LayerKind(rope, layer.window) for layer in config.layers),
        norm_eps=config.rms_norm_eps,
        activation=config.hidden_act,
        query_scale=config.head_dim**-0.5,
        tied_head=True,
        qk_norm=True,
    )


def context(drafter: DecoderConfig, params: Params, features: Array, positions: Array) -> Memory:
    """Keys and values `[layers, B, N, kv_heads, D]` of committed tokens, whose features `[B, N, m * H]` pass through
    `fc` and `hidden_norm` only."""
    eps, shape = drafter.norm_eps, (*positions.shape, drafter.num_kv_heads, drafter.head_dim)
    fused = model.linear(params, "model.fc", features.astype(params["model.fc.weight"].dtype))
    fused = model.rms_norm(fused, params["model.hidden_norm.weight"], eps)
    turns, found = model.angles(drafter.ropes[0], positions, fused.dtype), []
    for number in range(len(drafter.layers)):
        own = f"model.layers.{number}.self_attn."
        keys = model.linear(params, f"{own}k_proj", fused).reshape(shape)
        keys = model.rotate(model.rms_norm(keys, params[f"{own}k_norm.weight"], eps), *turns)
        found.append((keys, model.linear(params, f"{own}v_proj", fused).reshape(shape)))
    keys, values = zip(*found, strict=True)
    return jnp.stack(keys), jnp.stack(values)


def draft(
    config: DraftConfig,
    drafter: DecoderConfig,
    layout: Layout,
    params: Params,
    memory: Memory,
    rows: Rows,
    block: Array,
    size: Array,
    window: Array,
) -> Array:
    """One pass over blocks.

    Args:
        block: `[B, N, H]`, embedded `[anchor, mask, mask, ...]`.
        size: Positions of a block, int32; those behind them are padding.
        window: Number of each row's last committed tokens that are read, int32.

    Returns:
        Hidden states `[B, N, H]` after the final norm.
    """
    batch, count, _ = block.shape
    at = jnp.arange(count, dtype=jnp.int32)
    positions, alone = rows.lengths[:, None] + at, at[None] == at[:, None]
    inside = {True: (at[None] <= at[:, None]) & (at < size) | alone, False: (at < size) | alone}
    masks = {
        kind: rows.masks(
            memory[0], positions, jnp.broadcast_to(inside[kind.causal], (batch, count, count)), kind.window, window
        )
        for kind in dict.fromkeys(config.layers)
    }
    scale, each = config.input_embedding_scale, [masks[kind] for kind in config.layers]
    x = block if scale == 1 else block * scale
    outputs, _ = model.layers(drafter, layout, params, memory, rows, x, positions, each)
    return model.rms_norm(outputs[-1], params["model.norm.weight"], drafter.norm_eps)


def adjusted(config: DraftConfig, logits: Array) -> Array:
    """As `DFlashNetwork.adjust_logits`, in float32. It changes no order."""
    logits, cap = logits.astype(jnp.float32) * config.output_multiplier, config.final_logit_softcapping
    return logits if cap is None else jnp.tanh(logits / cap) * cap


def draft_logits(
    config: DraftConfig, decoder: DecoderConfig, layout: Layout, params: Params, own: Params, hidden: Array
) -> Array:
    """Logits `[B, N, V]` of hidden states, by the drafter's reduced head, if it has one, or the target's head."""
    if "reduced" in own:
        few = jnp.einsum("...h,vh->...v", hidden, own["reduced"])
        whole = jnp.full((*few.shape[:-1], decoder.vocab_size), -jnp.inf, few.dtype)
        return whole.at[..., own["kept"]].set(few)
    return model.head(decoder, layout, params, hidden)


def best_tree(
    logits: Array, anchors: Array, size: Array, budget: int, temperature: Array
) -> tuple[Array, Array, Array]:
    """Trees of the `budget` likeliest paths, where no guess's distribution depends on another guess, as
    `decode.tree.best_first` builds them.

    Args:
        logits: `[B, D, V]` of the positions behind the anchors, of which `size - 1` count.
        temperature: `[B]`; 0 counts as 1.

    Returns:
        Tokens, parents (-1 of the anchor, and of padding) and depths `[B, 1 + budget]` int32, parents before children.
    """
    batch, depth, vocab_size = logits.shape
    ranks, counts = min(budget, vocab_size), jnp.arange(depth) < size - 1
    scores = logits.astype(jnp.float32) / jnp.where(temperature > 0, temperature, 1)[:, None, None]
    best = jax.lax.top_k(jax.nn.log_softmax(scores, axis=-1), ranks)
    # Else slices make XLA sort the whole vocabulary on a CPU. Each has a barrier, since XLA aborts on one for both.
    likely, ids = (jax.lax.optimization_barrier(each) for each in best)
    likely = jnp.where(counts[:, None], likely, -jnp.inf)
    score, offset = jnp.zeros((batch, 1), jnp.float32), 0
    found: list[
        tuple[Array, ...]
    ] = []  # of each depth: scores, parents among all before (0 is the anchor), tokens, depths
    for level in range(depth):  # no tree has more than `budget` nodes of one depth
        paths = (score[:, :, None] + likely[:, level, None]).reshape(batch, -1)
        score, at = jax.lax.top_k(paths, min(budget, paths.shape[1]))
        parents, tokens = offset + at // ranks, jnp.take_along_axis(ids[:, level], at % ranks, axis=1)
        offset = offset + found[-1][0].shape[1] if found else 1
        found.append((score, parents, tokens, jnp.full_like(at, level + 1)))
    scores, parents, tokens, depths = (jnp.concatenate(each, axis=1) for each in zip(*found, strict=True))
    scores, order = jax.lax.top_k(scores, budget)  # of equals the first, so that parents precede children
    rows, numbers = jnp.arange(batch)[:, None], jnp.arange(1, 1 + budget, dtype=jnp.int32)
    places = jnp.zeros((batch, 1 + parents.shape[1]), jnp.int32).at[rows, 1 + order].set(numbers)
    parents, tokens, depths = (jnp.take_along_axis(each, order, axis=1) for each in (parents, tokens, depths))
    parents = jnp.where(jnp.isfinite(scores), jnp.take_along_axis(places, parents, axis=1), -1)
    begin = jnp.zeros((batch, 1), jnp.int32)
    joined = (anchors[:, None], tokens), (begin - 1, parents), (begin, depths)
    return tuple(jnp.concatenate(each, axis=1).astype(jnp.int32) for each in joined)


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


def cycle(
    config: DraftConfig,
    drafter: DecoderConfig,
    decoder: DecoderConfig,
    layout: Layout,
    count: int,
    budget: int,
    slots: int,
    params: Params,
    own: Params,
    memory: Memory,
    state: Memory,
    where: tuple[Array, Array],
    drafted: Array,
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
        slots: As in `Rows`.
        memory, state: Keys and values of target and drafter; both are donated.
        where: First slots and committed tokens of the rows.
        drafted: `[B]` int32, tokens of each row that the drafter has observed.
        anchors: `[B]` int32.
        size, window: As in `draft`.
        temperature: `[B]`; 0 for greedy rows.
        uniforms: A number for the token after each depth, `[B, count]` float64; None where all rows are greedy.

    Returns:
        Memory and state with the accepted tokens written to them; and `[B, 3 * N + count + 1]` int32: of N nodes their
        tokens, their parents, and the target's tokens after them (-1 where there is none), then the path, and its
        number of nodes, anchor included.
    """
    at = jnp.arange(count, dtype=jnp.int32)
    own_rows, rows = Rows(where[0], drafted, slots), Rows(*where, slots)
    block = jnp.where(at == 0, anchors[:, None], config.mask_token_id)
    block = model.embed(params, block).astype(state[0].dtype)
    hidden = draft(config, drafter, layout, own, state, own_rows, block, size, window)
    logits = draft_logits(config, decoder, layout, params, own, hidden[:, 1:])
    if budget:
        tokens, parents, depths = best_tree(adjusted(config, logits), anchors, size, budget, temperature)
    else:
        guesses = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        tokens = jnp.concatenate([anchors[:, None], guesses], axis=1)
        depths = jnp.broadcast_to(at, tokens.shape)
        parents = jnp.where(depths < size, depths - 1, -1)
    nodes_at = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    within = (parents[:, :, None] == nodes_at) | (nodes_at[:, None] == nodes_at)
    for _ in range(count.bit_length()):  # ancestors of twice the distance
        within = jnp.einsum("bij,bjk->bik", within.astype(jnp.int32), within.astype(jnp.int32)) > 0
    scores, features, nodes = model.forward(decoder, layout, config.taps, params, memory, rows, tokens, depths, within)
    following = model.best_tokens(scores)
    if uniforms is not None:
        sampled = (temperature[:, None] > 0) & (following >= 0)
        chosen = model.sample(scores, temperature, jnp.take_along_axis(uniforms, depths, axis=1))
        following = jnp.where(sampled, chosen, following)
    path, kept = walk(tokens, parents, following, count - 1)

    def keep(memory: Memory, nodes: Memory, lengths: Array) -> Memory:
        places = (where[0] + lengths)[:, None] + at
        return model.write(layout, memory, nodes, path, jnp.where(at < kept[:, None], places, memory[0].shape[2]))

    learned = context(drafter, own, features, drafted[:, None] + depths)
    told = jnp.concatenate([tokens, parents, following, path, kept[:, None]], axis=1)
    return keep(memory, nodes, where[1]), keep(state, learned, drafted), told


class JaxDraftPass:
    """A `DraftRunner` in JAX, for networks of DFlash.

    Args:
        network: Network in the target's dtype, of which the parameters are copied to the devices.
        target: Target in JAX, with its decoder, params and layout.
        own_head: A head of the drafter's own; None is the target's.
    """

    compile_reason: str | None = None

    def __init__(self, network: DFlashNetwork, target: Any, own_head: Callable[[Tensor], Tensor] | None) -> None:
        self.config = config = network.config
        self._target, self._layout = target, target.layout
        own = ("fc.", "hidden_norm.", "layers.", "norm.")  # of networks that extend DFlash's, the heads stay in torch
        tensors = {f"model.{name}": each for name, each in network.state_dict().items() if name.startswith(own)}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._dtype, decoder = target.params["model.norm.weight"].dtype, target.decoder
        heads = {"heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads}
        self.params = model.load_params(
            model.abstract_params(shapes, self._dtype, self._layout, **heads), tensors.__getitem__
        )
        if own_head is not None:
            reduced = cast(ReducedHead, own_head)
            self.params["reduced"] = self._layout.put(as_numpy(reduced.weight))
            self.params["kept"] = self._layout.put(as_numpy(reduced.kept).astype(np.int32))
        drafter = as_decoder(config, decoder.vocab_size)

        def passed(
            first: int,
            slots: int,
            params: Params,
            own: Params,
            memory: Memory,
            where: tuple[Array, Array],
            block: Array,
            size: Array,
            window: Array,
        ) -> tuple[Array, Array]:
            if block.ndim == 2:
                block = model.embed(params, block).astype(memory[0].dtype)
            hidden = draft(config, drafter, self._layout, own, memory, Rows(*where, slots), block, size, window)
            hidden = hidden[:, first:]
            return hidden, draft_logits(config, decoder, self._layout, params, own, hidden)

        def learned(own: Params, features: Array, lengths: Array) -> Memory:
            at = jnp.arange(features.shape[1], dtype=jnp.int32)
            return context(drafter, own, features, lengths[:, None] + at)

        self._pass, self._context = jax.jit(passed, static_argnums=(0, 1)), jax.jit(learned)
        one = partial(cycle, config, drafter, decoder, self._layout)
        self.jax_cycle = jax.jit(one, static_argnums=(0, 1, 2), donate_argnums=(5, 6))

    def new_state(self, batch: int, capacity: int) -> JaxCache:
        return JaxCache(
            batch,
            capacity,
            layers=self.config.num_hidden_layers,
            kv_heads=self.config.num_key_value_heads,
            head_dim=self.config.head_dim,
            dtype=self._dtype,
            layout=self._layout,
        )

    def state_bytes(self, batch: int, capacity: int) -> int:
        return cached_bytes(self.config, batch * capacity, self._target.dtype)

    def weight_bytes(self) -> int:
        return sum(int(weight.nbytes) for weight in self.params.values())  # JAX's copy

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        return 0

    def observe(self, state: JaxCache, features: Tensor) -> None:
        """As `DraftRunner.observe`; `state.commit` writes."""
        _, lengths, _ = state.where()
        if isinstance(features, JaxTensor) and features.array.shape[0] == lengths.shape[0]:
            array = features.array
        else:
            array = self._layout.put(_padded(features, (len(lengths), bucket(features.size(1)), features.size(2))))
        state.leave(self._context(self.params, array, lengths))

    def guesses(self, state: JaxCache, tokens: Tensor, first: int, window: int | None = None) -> tuple[Tensor, Tensor]:
        """As `DraftRunner.guesses`."""
        hidden, logits = self._through(state, tokens, first, window)
        mark(PASS)
        shape = (len(tokens), tokens.size(1) - first)
        return JaxTensor(hidden, (*shape, hidden.shape[-1])), JaxTensor(logits, (*shape, logits.shape[-1]))

    def __call__(self, state: JaxCache, block: Tensor, window: int | None = None) -> Tensor:
        """As `DraftRunner.__call__`."""
        return JaxTensor(self._through(state, block, 0, window)[0], block.shape)

    def _through(self, state: JaxCache, block: Tensor, first: int, window: int | None) -> tuple[Array, Array]:
        firsts, lengths, slots = state.where()
        padded = _padded(block, (bucket(block.size(0)), bucket(block.size(1)), *block.shape[2:]))
        padded = padded if block.is_floating_point() else padded.astype(np.int32)
        given = (padded, np.int32(block.size(1)), np.int32(EVERYTHING if window is None else window))
        found: tuple[Array, Array] = self._pass(
            first, slots, self._target.params, self.params, state.arrays, (firsts, lengths), *self._layout.put(given)
        )
        return found

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
            firsts, lengths, slots = cache.where()
            _, drafted, _ = state.where()
            given = (
                _padded(anchors, wide).astype(np.int32),
                np.int32(block_size),
                np.int32(EVERYTHING if window is None else window),
                _padded(temperatures, wide).astype(np.float32),
                None if uniforms is None else _padded(uniforms, (*wide, count)),
            )
            cache.arrays, state.arrays, told = self.jax_cycle(
                count,
                tree_budget,
                slots,
                self._target.params,
                self.params,
                cache.arrays,
                state.arrays,
                (firsts, lengths),
                drafted,
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


def _padded(values: Any, shape: Sequence[int]) -> Any:
    """Numbers in an array of numpy, with zeros behind them in each dimension."""
    if isinstance(values, JaxTensor):
        values = values.real
    values = as_numpy(values) if isinstance(values, Tensor) else np.array(values)
    return np.pad(values, [(0, size - own) for size, own in zip(shape, values.shape, strict=True)])


RUNNERS = {DFlashNetwork: JaxDraftPass}
