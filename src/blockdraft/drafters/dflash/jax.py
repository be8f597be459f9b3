"""DFlash in JAX: its draft pass, and a cycle of a chain as one program that drafts, scores, verifies, commits and
observes. Of such a cycle the host gets the tokens, and no logits, features, keys or values leave the devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import numpy as np
from torch import Tensor

from blockdraft.drafters.dflash.network import DFlashNetwork, cached_bytes
from blockdraft.jax.cache import JaxCache, JaxTensor
from blockdraft.jax.model import (
    Array,
    Layout,
    Memory,
    Params,
    Rows,
    abstract_params,
    angles,
    as_numpy,
    attend,
    best_tokens,
    bucket,
    embed,
    forward,
    head,
    jax,
    jnp,
    linear,
    load_params,
    rms_norm,
    rotate,
    sample,
    write,
)
from blockdraft.nn.decoder_config import DecoderConfig, Rope
from blockdraft.nn.draft_config import DraftConfig
from blockdraft.nn.layers import ReducedHead
from blockdraft.nn.rotary import rotary_frequencies
from blockdraft.timing import PASS, mark
from blockdraft.types import CycleTokens

EVERYTHING = 2**30  # a draft window that hides nothing


def context(config: DraftConfig, rope: Rope, params: Params, features: Array, positions: Array) -> Memory:
    """Keys and values `[layers, B, N, kv_heads, D]` of committed tokens, whose features `[B, N, m * H]` pass through
    `fc` and `hidden_norm` only."""
    eps, shape = config.rms_norm_eps, (*positions.shape, config.num_key_value_heads, config.head_dim)
    fused = linear(params, "fc", features.astype(params["fc.weight"].dtype))
    fused = rms_norm(fused, params["hidden_norm.weight"], eps)
    turns, found = angles(rope, positions, fused.dtype), []
    for number in range(config.num_hidden_layers):
        own = f"layers.{number}.self_attn."
        keys = linear(params, f"{own}k_proj", fused).reshape(shape)
        keys = rotate(rms_norm(keys, params[f"{own}k_norm.weight"], eps), *turns)
        found.append((keys, linear(params, f"{own}v_proj", fused).reshape(shape)))
    keys, values = zip(*found, strict=True)
    return jnp.stack(keys), jnp.stack(values)


def draft(
    config: DraftConfig,
    rope: Rope,
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
    positions = rows.lengths[:, None] + at
    latest = rows.known(memory[0])[:, None] & (rows.distances(memory[0], rows.lengths[:, None]) <= window)
    masks = {}
    for kind in dict.fromkeys(config.layers):
        seen, inside = latest, at[None] <= at[:, None] if kind.causal else jnp.ones((count, count), bool)
        if kind.window is not None:
            seen = seen & (rows.distances(memory[0], positions) < kind.window)
            inside = inside & (jnp.abs(at[:, None] - at[None]) < kind.window)
        inside = (inside & (at < size)) | (at[None] == at[:, None])
        masks[kind] = tuple(jnp.broadcast_to(each, (batch, count, each.shape[-1])) for each in (seen, inside))
    eps, turns = config.rms_norm_eps, angles(rope, positions, block.dtype)
    x = block if config.input_embedding_scale == 1 else block * config.input_embedding_scale
    for number, kind in enumerate(config.layers):
        own = f"layers.{number}."
        normed = rms_norm(x, params[f"{own}input_layernorm.weight"], eps)
        q, k, v = (
            linear(params, f"{own}self_attn.{name}", normed).reshape(batch, count, -1, config.head_dim)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        q, k = (
            rotate(rms_norm(each, params[f"{own}self_attn.{name}.weight"], eps), *turns)
            for each, name in ((q, "q_norm"), (k, "k_norm"))
        )
        read = rows.read(memory[0], number), rows.read(memory[1], number)
        attended = attend(q, (k, v), read, masks[kind], config.head_dim**-0.5)
        x = layout.place(x + linear(params, f"{own}self_attn.o_proj", attended), None, None, "embed")
        normed = rms_norm(x, params[f"{own}post_attention_layernorm.weight"], eps)
        gate, up = (linear(params, f"{own}mlp.{name}", normed) for name in ("gate_proj", "up_proj"))
        added = linear(params, f"{own}mlp.down_proj", layout.place(jax.nn.silu(gate) * up, None, None, "mlp"))
        x = layout.place(x + added, None, None, "embed")
    return rms_norm(x, params["norm.weight"], eps)


def draft_logits(
    config: DraftConfig, decoder: DecoderConfig, layout: Layout, params: Params, own: Params, hidden: Array
) -> Array:
    """Logits `[B, N, V]` of hidden states, by the drafter's reduced head, if it has one, or the target's head."""
    if "reduced" in own:
        few = jnp.einsum("...h,vh->...v", hidden, own["reduced"])
        whole = jnp.full((*few.shape[:-1], decoder.vocab_size), -jnp.inf, few.dtype)
        return whole.at[..., own["kept"]].set(few)
    return head(decoder, layout, params, hidden)


def cycle(
    config: DraftConfig,
    rope: Rope,
    decoder: DecoderConfig,
    layout: Layout,
    count: int,
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
    chance: tuple[Array, Array] | None,
) -> tuple[Memory, Memory, Array]:
    """A cycle of chains: draft, score, verify, commit, observe.

    Args:
        count: Tokens of a chain as compiled, a bucket.
        slots: As in `Rows`.
        memory, state: Keys and values of target and drafter; both are donated.
        where: First slots and committed tokens of the rows.
        drafted: `[B]` int32, tokens of each row that the drafter has observed.
        anchors: `[B]` int32.
        size, window: As in `draft`.
        chance: Temperature `[B]`, 0 for greedy rows, and a number `[B, count]` float64 for the token after each node;
            None where all rows are greedy.

    Returns:
        Memory and state with the accepted tokens written to them, and `[B, 2 * count + 1]` int32: the chain, the
        target's token after each node (-1 where there is none), and the number of nodes accepted, anchor included.
    """
    at = jnp.arange(count, dtype=jnp.int32)
    own_rows, rows = Rows(where[0], drafted, slots), Rows(*where, slots)
    block = jnp.where(at == 0, anchors[:, None], config.mask_token_id)
    block = embed(params, block).astype(state[0].dtype)
    hidden = draft(config, rope, layout, own, state, own_rows, block, size, window)
    logits = draft_logits(config, decoder, layout, params, own, hidden[:, 1:]) * config.output_multiplier
    # A soft-cap changes no order, so guesses need none.
    guesses = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    tokens = jnp.concatenate([anchors[:, None], guesses], axis=1)
    depths = jnp.broadcast_to(at, tokens.shape)
    within = jnp.broadcast_to(at[None] <= at[:, None], (*tokens.shape, count))
    scores, features, nodes = forward(decoder, layout, config.taps, params, memory, rows, tokens, depths, within)
    following = best_tokens(scores)
    if chance is not None:
        temperature, uniforms = chance
        sampled = (temperature[:, None] > 0) & (following >= 0)
        following = jnp.where(sampled, sample(scores, temperature, uniforms), following)
    right = (tokens[:, 1:] == following[:, :-1]) & (at[1:] < size)
    accepted = 1 + jnp.cumprod(right.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)

    def keep(memory: Memory, nodes: Memory, lengths: Array) -> Memory:
        places = (where[0] + lengths)[:, None] + at
        beyond = memory[0].shape[2]
        return write(layout, memory, nodes, depths, jnp.where(at < accepted[:, None], places, beyond))

    learned = context(config, rope, own, features, drafted[:, None] + at)
    told = jnp.concatenate([tokens, following, accepted[:, None]], axis=1)
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
        frequencies, scale = rotary_frequencies(
            config.head_dim, config.max_position_embeddings, config.rope_theta, config.rope_scaling
        )
        rope, tensors = Rope(tuple(frequencies.tolist()), scale), dict(network.state_dict())
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._dtype = target.params["model.norm.weight"].dtype
        heads = {"heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads}
        self.params = load_params(abstract_params(shapes, self._dtype, self._layout, **heads), tensors.__getitem__)
        if own_head is not None:
            reduced = cast(ReducedHead, own_head)
            self.params["reduced"] = self._layout.put(as_numpy(reduced.weight))
            self.params["kept"] = self._layout.put(as_numpy(reduced.kept).astype(np.int32))
        decoder = target.decoder

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
                block = embed(params, block).astype(memory[0].dtype)
            hidden = draft(config, rope, self._layout, own, memory, Rows(*where, slots), block, size, window)
            hidden = hidden[:, first:]
            return hidden, draft_logits(config, decoder, self._layout, params, own, hidden)

        def learned(own: Params, features: Array, lengths: Array) -> Memory:
            at = jnp.arange(features.shape[1], dtype=jnp.int32)
            return context(config, rope, own, features, lengths[:, None] + at)

        self._pass, self._context = jax.jit(passed, static_argnums=(0, 1)), jax.jit(learned)
        one = partial(cycle, config, rope, decoder, self._layout)
        self.jax_cycle = jax.jit(one, static_argnums=(0, 1), donate_argnums=(4, 5))

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
        temperatures: Sequence[float],
        window: int | None = None,
    ) -> CycleTokens:
        """As `Drafter.cycle`. What it needs is put on the devices before, and what it found is fetched after it;
        between there is no transfer."""
        batch, wide, count = len(anchors), bucket(len(anchors)), bucket(block_size)
        cache.check_room(block_size)
        sampled = any(temperatures)
        # Sums over a vocabulary need float64, as ours on the CPU have it.
        with jax.enable_x64(True) if sampled else nullcontext():
            firsts, lengths, slots = cache.where()
            _, drafted, _ = state.where()
            chance = None
            if sampled:
                chance = _padded(temperatures, (wide,)).astype(np.float32), _padded(uniforms, (wide, count))
            limits = np.int32(block_size), np.int32(EVERYTHING if window is None else window)
            given = (_padded(anchors, (wide,)).astype(np.int32), *limits, chance)
            cache.arrays, state.arrays, told = self.jax_cycle(
                count,
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
        following, accepted = found[:, count:-1], found[:, -1]
        kept = [int(n) if following[row, n - 1] >= 0 else 0 for row, n in enumerate(accepted)]
        for each in (cache, state):
            each.advance(kept)
        return CycleTokens(found[:, :block_size].tolist(), following[:, :block_size].tolist(), kept)


def _padded(values: Any, shape: Sequence[int]) -> Any:
    """Numbers in an array of numpy, with zeros behind them in each dimension."""
    if isinstance(values, JaxTensor):
        values = values.real
    values = as_numpy(values) if isinstance(values, Tensor) else np.array(values)
    return np.pad(values, [(0, size - own) for size, own in zip(shape, values.shape, strict=True)])


RUNNERS = {DFlashNetwork: JaxDraftPass}
