"""DFlash's draft pass in JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from torch import Tensor

from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.jax import model
from blockdraft.jax.cache import JaxCache, JaxTensor
from blockdraft.jax.drafting import Context, JaxRunner, as_decoder, chain_of, latest, padded, tree_of
from blockdraft.jax.model import Array, Memory, Params, as_numpy, bucket, jax, jnp
from blockdraft.nn.draft_config import DraftConfig
from blockdraft.nn.layers import ReducedHead
from blockdraft.timing import PASS, mark


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
    return tree_of(anchors, scores, parents, tokens, depths, budget)


class JaxDraftPass(JaxRunner):
    """A `DraftRunner` in JAX, for networks of DFlash.

    Args:
        network: Network in the target's dtype, of which the parameters are copied to the devices.
        target: Target in JAX, with its decoder, params and layout.
        own_head: A head of the drafter's own; None is the target's.
    """

    config: DraftConfig

    def __init__(self, network: DFlashNetwork, target: Any, own_head: Callable[[Tensor], Tensor] | None) -> None:
        config = network.config
        own = ("fc.", "hidden_norm.", "layers.", "norm.")  # of networks that extend DFlash's, the heads stay in torch
        tensors = {f"model.{name}": each for name, each in network.state_dict().items() if name.startswith(own)}
        drafter = as_decoder(config, target.vocab_size, [layer.window for layer in config.layers])
        super().__init__(config, target, drafter, tensors)
        if own_head is not None:
            reduced = cast(ReducedHead, own_head)
            self.params["reduced"] = self._layout.put(as_numpy(reduced.weight))
            self.params["kept"] = self._layout.put(as_numpy(reduced.kept).astype(np.int32))
        self.jax_draft_tokens, self.jax_context = jax.jit(self._draft_tokens, static_argnums=0), jax.jit(self._context)

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
        block = jnp.where(jnp.arange(count) == 0, anchors[:, None], self.config.mask_token_id)
        _, logits = self._draft_tokens(1, known, block, size, window)
        if not budget:
            return chain_of(anchors, jnp.argmax(logits, axis=-1), size)
        logits, cap = logits.astype(jnp.float32) * self.config.output_multiplier, self.config.final_logit_softcapping
        logits = logits if cap is None else jnp.tanh(logits / cap) * cap  # neither changes an order
        return best_tree(logits, anchors, size, budget, temperature)

    def learn(self, known: Context, tokens: Array, parents: Array, depths: Array, hidden_states: Array) -> Memory:
        """As in `JaxRunner`."""
        return self._context(known.own, hidden_states, known.rows.lengths[:, None] + depths)

    def _context(self, own: Params, hidden_states: Array, positions: Array) -> Memory:
        """Keys and values of tokens, whose features pass through `fc` and `hidden_norm` only."""
        fused = model.linear(own, "model.fc", hidden_states.astype(self._dtype))
        fused = model.rms_norm(fused, own["model.hidden_norm.weight"], self.drafter.norm_eps)
        turns, found = model.angles(self.drafter.ropes[0], positions, fused.dtype), []
        for number in range(len(self.drafter.layers)):
            _, *keys_values = model.queries_keys_values(self.drafter, self._layout, own, number, fused, turns)
            found.append(keys_values)
        keys, values = zip(*found, strict=True)
        return jnp.stack(keys), jnp.stack(values)

    def _draft_tokens(
        self, first: int, known: Context, block: Array, size: Array, window: Array
    ) -> tuple[Array, Array]:
        """One pass over blocks.

        Args:
            first: First position whose results are returned.
            block: `[B, N]` tokens, or embeddings `[B, N, H]`.
            size: Positions of a block, int32; those behind them are padding.
            window: Number of each row's last committed tokens that are read, int32.

        Returns:
            Hidden states `[B, N - first, H]` after the final norm, and logits `[B, N - first, V]`.
        """
        config, rows, (batch, count) = self.config, known.rows, block.shape[:2]
        if block.ndim == 2:
            block = model.embed(known.params, block).astype(self._dtype)
        at = jnp.arange(count, dtype=jnp.int32)
        positions, alone = rows.lengths[:, None] + at, at[None] == at[:, None]
        inside = {True: (at[None] <= at[:, None]) & (at < size) | alone, False: (at < size) | alone}
        inside = {causal: jnp.broadcast_to(mask, (batch, count, count)) for causal, mask in inside.items()}
        masks = {
            kind: rows.masks(known.state[0], positions, inside[kind.causal], kind.window, window)
            for kind in dict.fromkeys(config.layers)
        }
        scale, each = config.input_embedding_scale, [masks[kind] for kind in config.layers]
        x = block if scale == 1 else block * scale
        outputs, _ = model.layers(self.drafter, self._layout, known.own, known.state, rows, x, positions, each)
        hidden = model.rms_norm(outputs[-1], known.own["model.norm.weight"], self.drafter.norm_eps)[:, first:]
        if "reduced" not in known.own:
            return hidden, model.head(self._decoder, self._layout, known.params, hidden)
        few = jnp.einsum("...h,vh->...v", hidden, known.own["reduced"])
        whole = jnp.full((*few.shape[:-1], self._decoder.vocab_size), -jnp.inf, few.dtype)
        return hidden, whole.at[..., known.own["kept"]].set(few)

    def observe(self, state: JaxCache, hidden_states: Tensor) -> None:
        """As `DraftRunner.observe`; `state.commit` writes."""
        rows = state.where()
        array = self._on_devices(hidden_states, len(rows.lengths))
        positions = rows.lengths[:, None] + np.arange(array.shape[1], dtype=np.int32)
        state.leave(self.jax_context(self.params, array, positions))

    def draft_tokens(
        self, state: JaxCache, tokens: Tensor, first: int, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `DraftRunner.draft_tokens`."""
        hidden, logits = self._through(state, tokens, first, window)
        mark(PASS)
        shape = (len(tokens), tokens.size(1) - first)
        return JaxTensor(hidden, (*shape, hidden.shape[-1])), JaxTensor(logits, (*shape, logits.shape[-1]))

    def __call__(self, state: JaxCache, block: Tensor, window: int | None = None) -> Tensor:
        """As `DraftRunner.__call__`."""
        return JaxTensor(self._through(state, block, 0, window)[0], block.shape)

    def _through(self, state: JaxCache, block: Tensor, first: int, window: int | None) -> tuple[Array, Array]:
        known = Context(self._target.params, self.params, state.arrays, state.where())
        wide = padded(block, (bucket(block.size(0)), bucket(block.size(1)), *block.shape[2:]))
        wide = wide if block.is_floating_point() else wide.astype(np.int32)
        given = (wide, np.int32(block.size(1)), latest(window))
        found: tuple[Array, Array] = self.jax_draft_tokens(first, known, *self._layout.put(given))
        return found


RUNNERS = {DFlashNetwork: JaxDraftPass}
