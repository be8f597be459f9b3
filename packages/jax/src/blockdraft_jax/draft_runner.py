"""Draft networks in JAX, as pure functions over their parameters; `DraftDescription` says what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockdraft.decode.drafting import paying_part
from blockdraft.errors import UsageError
from blockdraft.nn.decoder_config import DecoderConfig, LayerKind, Rope
from blockdraft.nn.draft_network import DraftHost, LayeredNetwork
from blockdraft.nn.draft_runner import DraftRunner
from blockdraft.nn.foreign_tensor import in_torch
from blockdraft.nn.layers import ReducedHead
from blockdraft.nn.rotary import rotary_frequencies
from blockdraft.timing import PASS, mark
from blockdraft_jax.cache import JaxCache
from blockdraft_jax.model import (
    Array,
    CacheView,
    JaxDecoder,
    Memory,
    Params,
    angles,
    as_numpy,
    attend,
    bucket,
    embed,
    jax,
    jnp,
    linear,
    load_params,
)
from blockdraft_jax.tensor import JaxTensor

NO_LIMIT = np.int32(2**30)  # a draft window that hides nothing
KNOWN = frozenset(
    ("pairs", "whole blocks", "sliding windows", "several layers of pairs", "contexts without a norm")
)  # of `DraftDescription.kinds`


@dataclass(frozen=True, kw_only=True)
class JaxHost(DraftHost):
    """What a draft network in JAX borrows from its target.

    Attributes:
        decoder: The target's decoder.
        params: The target's weights by their checkpoint names.
    """

    decoder: JaxDecoder
    params: Params


class Context(NamedTuple):
    """Arguments that all jitted functions of a draft network share."""

    target_params: Params
    params: Params
    memory: Memory
    view: CacheView


class Nodes(NamedTuple):
    """Nodes of a draft.

    Attributes:
        keys, values: `[layers, B, M, kv_heads, D]` of all nodes.
        hidden: `[B, N, H]`, the hidden states that the children of the last level read.
        within: `[B, N, M]` bool, the nodes that those of the last level attend to, themselves included.
        depths: `[M]` int32, distances of all nodes from the anchors.
    """

    keys: Array
    values: Array
    hidden: Array
    within: Array
    depths: Array


class JaxDraftRunner(DraftRunner):
    """A `DraftRunner` in JAX, whose layers are those of a decoder.

    Args:
        network: Network in the target's dtype; its parameters are copied to the devices.

    Raises:
        UsageError: A network of pairs without a head of its own is to use a draft vocabulary.
    """

    def __init__(self, network: LayeredNetwork, host: JaxHost) -> None:
        config, self.described = network.config, network.description
        if self.described.has_pairs and self.described.head is None and host.own_head is not None:
            raise UsageError("JAX runs such a head over the target's whole vocabulary only; omit draft_vocab.")
        names = [kind.name for kind in self.described.layers]
        tensors = {
            f"model.{self._named(name)}": tensor
            for name, tensor in network.named_parameters()
            if name.startswith(tuple(f"{part}." for part in (*names, *self._parts())))
        }
        frequencies, scale = rotary_frequencies(
            config.head_dim, config.max_position_embeddings, config.rope_theta, config.rope_scaling
        )
        rope = Rope(tuple(frequencies.tolist()), scale)
        layers = DecoderConfig(
            vocab_size=host.decoder.config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            layers=tuple(LayerKind(rope, kind.window) for kind in self.described.layers),
            norm_eps=config.rms_norm_eps,
            activation="silu",
            query_scale=config.head_dim**-0.5,
            tied_head=True,
            qk_norm="model.layers.0.self_attn.q_norm.weight" in tensors,
        )
        self.config, self._host = config, host
        self._hidden_size = config.hidden_size if self.described.has_pairs else 0
        self._layout, self._dtype = host.decoder.layout, host.params["model.norm.weight"].dtype
        self.decoder, self.target_decoder = JaxDecoder(layers, self._layout), host.decoder
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        heads = layers.num_heads, layers.num_kv_heads
        self.params = load_params(shapes, tensors.__getitem__, self._dtype, self._layout, *heads)
        kept = network.kept if self.described.has_pairs else None
        if kept is None and isinstance(host.own_head, ReducedHead):
            kept = host.own_head.kept
            self.params["reduced"] = self._layout.put(as_numpy(host.own_head.weight))
        if kept is not None:
            self.params["kept"] = self._layout.put(as_numpy(kept).astype(np.int32))
        observe = self._observe_pairs if self.described.has_pairs else self._observe_context
        self.jax_observe, self.jax_level = jax.jit(observe), jax.jit(self._level)
        self.jax_forward = jax.jit(self._forward, static_argnums=0)
        self.jax_first = jax.jit(self._first, static_argnums=0)
        self.jax_chain = jax.jit(self._chain, static_argnums=0)

    def _parts(self) -> list[str]:
        """Return the names of the network's modules besides its layers."""
        described = self.described
        names = ("fc", "norm", *described.fusing_norms, described.fused_norm, described.head)
        pairs = (described.token_norm, described.hidden_state_norm)
        return [name for name in (*names, *pairs) if name]

    def _named(self, name: str) -> str:
        """Return the name of a module or parameter with that of a decoder's layers."""
        for index, kind in enumerate(self.described.layers):
            if name.startswith(f"{kind.name}."):
                return f"layers.{index}{name.removeprefix(kind.name)}"
        return name

    def new_state(self, batch: int, capacity: int) -> JaxCache:
        return JaxCache(batch, capacity, self.decoder.config, self._dtype, self._layout, self._hidden_size)

    def state_bytes(self, batch: int, capacity: int) -> int:
        layers = self.decoder.config
        slot = 2 * len(layers.layers) * layers.num_kv_heads * layers.head_dim + self._hidden_size
        return int(batch * capacity * slot * self._dtype.itemsize)

    def weight_bytes(self) -> int:
        return sum(int(weight.nbytes) for weight in self.params.values())  # JAX's copy

    def observe(self, state: JaxCache, tokens: Tensor, hidden_states: Tensor) -> None:
        hidden = self.hidden_states(hidden_states)
        arrays = self._layout.put(padded(tokens, hidden.shape[:2])) if self.described.has_pairs else None
        state.pending = self.jax_observe(self.context(state), arrays, hidden)

    def draft_tokens(
        self, state: JaxCache, tokens: Tensor, first: int, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        batch, count = tokens.shape
        block = padded(tokens, (bucket(batch), bucket(count)))
        arguments = self._layout.put((block, np.int32(count), draft_window(window)))
        hidden, logits = self.jax_forward(first, self.context(state), *arguments)
        mark(PASS)
        shape = batch, count - first
        return JaxTensor(hidden, (*shape, hidden.shape[-1])), JaxTensor(logits, (*shape, logits.shape[-1]))

    def chain(
        self,
        state: JaxCache,
        anchor: Tensor,
        draft_tokens: int,
        window: int | None = None,
        seconds: Sequence[float] | None = None,
        calibration: float = 1.0,
    ) -> tuple[Tensor, Tensor | None]:
        """As `DraftRunner.chain`. All draft tokens are computed, and those that do not pay are cut off."""
        batch = len(anchor)
        arguments = padded(anchor, (bucket(batch),)), np.int32(draft_tokens), draft_window(window)
        arrays = self.jax_chain(bucket(draft_tokens), self.context(state), *self._layout.put(arguments))
        tokens, probs = (JaxTensor(array, (batch, draft_tokens)).real for array in arrays)
        mark(PASS)
        tokens = torch.cat([anchor[:, None], tokens], dim=1)
        return paying_part(tokens, probs, seconds, calibration) if seconds else (tokens, None)

    def nodes(self, state: JaxCache, block_size: int, width: int, window: int | None = None) -> JaxNodes:
        return JaxNodes(self, state, block_size, width, window)

    def context(self, state: JaxCache) -> Context:
        return Context(self._host.params, self.params, state.arrays, state.view_of_batch())

    def rotation(self, positions: Array) -> tuple[Array, Array]:
        return angles(self.decoder.config.ropes[0], positions, self._dtype)

    def hidden_states(self, hidden_states: Tensor) -> Array:
        """Return hidden states `[B, N, m * H]` of the target layers, padded to powers of two."""
        batch = bucket(hidden_states.size(0))
        if isinstance(hidden_states, JaxTensor) and hidden_states.array.shape[0] == batch:
            return hidden_states.array
        return self._layout.put(padded(hidden_states, (batch, bucket(hidden_states.size(1)), hidden_states.size(2))))

    # Pure functions, in the terms of `LayeredNetwork`.

    def _norm(self, params: Params, name: str, x: Array) -> Array:
        return self.decoder.norm(params, f"model.{self._named(name)}.weight", x)

    def _fuse(self, params: Params, hidden: Array) -> Array:
        described, norms = self.described, self.described.fusing_norms
        if norms:
            parts = zip(norms, jnp.split(hidden, len(norms), axis=-1), strict=True)
            hidden = jnp.concatenate([self._norm(params, name, part) for name, part in parts], axis=-1)
        if described.entry == "joined pair":
            return hidden
        fused = linear(params, "model.fc", hidden)
        return fused if described.fused_norm is None else self._norm(params, described.fused_norm, fused)

    def _entries(self, context: Context, tokens: Array, hidden: Array | None) -> tuple[Array, Array | None]:
        described, params = self.described, context.params
        embedded = embed(context.target_params, tokens).astype(self._dtype)
        if hidden is None:
            scale = described.embedding_scale
            return (embedded if scale == 1 else embedded * scale), None
        normed = self._norm(params, described.hidden_state_norm, hidden)
        pairs = jnp.concatenate([self._norm(params, described.token_norm, embedded), normed], axis=-1)
        if described.entry == "joined pair":
            return linear(params, "model.fc", pairs), None
        return (normed if described.normed_stream else hidden), pairs

    def _heads(
        self, params: Params, layer: int, x: Array, pairs: Array | None, rotation: tuple[Array, Array]
    ) -> list[Array]:
        """Return queries, keys and values of a layer, whose attention reads pairs if it is the first of them."""
        name = self.decoder.config.norms(layer)["before_attention"]
        read = self.decoder.norm(params, name, x) if layer or pairs is None else pairs
        return self.decoder.queries_keys_values(params, layer, read, rotation)

    def _fed_on(self, params: Params, hidden: Array) -> Array:
        return self._norm(params, "norm", hidden) if self.described.normed_feedback else hidden

    def _logits(self, context: Context, normed: Array) -> Array:
        """Return the logits of outputs behind the last norm."""
        head, params = self.described.head, context.params
        if head is not None:
            return linear(params, f"model.{head}", normed)
        if "reduced" not in params:
            return self.target_decoder.head(context.target_params, normed)
        logits = jnp.einsum("...h,vh->...v", normed, params["reduced"])
        everywhere = jnp.full((*logits.shape[:-1], self.decoder.config.vocab_size), -jnp.inf, logits.dtype)
        return everywhere.at[..., params["kept"]].set(logits)

    # Blocks.

    def _observe_context(self, context: Context, tokens: None, hidden: Array) -> Memory:
        """Return keys and values of committed tokens for all layers, made of their hidden states."""
        fused = self._fuse(context.params, hidden.astype(self._dtype))
        positions = context.view.lengths[:, None] + jnp.arange(hidden.shape[1], dtype=jnp.int32)
        layers, rotation = range(len(self.described.layers)), self.rotation(positions)
        heads = [self.decoder.queries_keys_values(context.params, layer, fused, rotation) for layer in layers]
        _, keys, values = zip(*heads, strict=True)
        return jnp.stack(keys), jnp.stack(values)

    def _forward(self, first: int, context: Context, block: Array, size: Array, window: Array) -> tuple[Array, Array]:
        """Run one pass over blocks of tokens `[B, N]`, of which the first `size` count and the others are padding.

        Returns:
            Hidden states after the final norm, and logits, of the positions from `first` on.
        """
        params, view, (batch, count) = context.params, context.view, block.shape
        x, _ = self._entries(context, block, None)
        at = jnp.arange(count, dtype=jnp.int32)
        positions, masks = view.lengths[:, None] + at, []
        for kind in self.described.layers:
            within = (at < size) & ((at <= at[:, None]) | (not kind.causal)) | (at == at[:, None])
            within = jnp.broadcast_to(within, (batch, count, count))
            masks.append(view.masks(context.memory[0], positions, within, kind.window, window))
        outputs, _ = self.decoder.layers(params, context.memory, view, x, positions, masks)
        hidden = self._norm(params, "norm", outputs[-1])[:, first:]
        return hidden, self._logits(context, hidden)

    # Nodes, whose entries are pairs.

    def _observe_pairs(self, context: Context, tokens: Array, hidden: Array) -> Memory:
        """Return what the state stores of committed tokens: keys, values and fused hidden states."""
        params, memory, view = context.params, context.memory, context.view
        fused = self._fuse(params, hidden.astype(self._dtype))
        before = jnp.concatenate([_last_hidden(context), fused[:, :-1]], axis=1)
        at = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        slots = view.lengths[:, None] + at
        rotation, last = self.rotation(jnp.maximum(slots - 1, 0)), len(self.described.layers) - 1
        within = (at <= at[:, None]) & (slots > 0)[:, None] | (at == at[:, None])
        (x, pairs), new = self._entries(context, tokens, before), list[list[Array]]()
        for layer, kind in enumerate(self.described.layers):
            queries, *own = self._heads(params, layer, x, pairs, rotation)
            new.append(own)
            if layer < last:
                masks = view.masks(memory[0], slots, within, kind.window, (view.lengths - 1)[:, None, None])
                committed = view.read(memory[0], layer), view.read(memory[1], layer)
                attended = attend(queries, (own[0], own[1]), committed, masks, self.decoder.config.query_scale)
                x = self.decoder.after_attention(params, layer, x, attended)
        keys, values = zip(*new, strict=True)
        return jnp.stack(keys), jnp.stack(values), fused[None, :, :, None]

    def _first(self, room: int, context: Context) -> Nodes:
        """Return a draft without nodes, with room for this many."""
        batch, layers = len(context.view.lengths), self.decoder.config
        shape = len(layers.layers), batch, room, layers.num_kv_heads, layers.head_dim
        empty, none = jnp.zeros(shape, self._dtype), jnp.zeros((batch, 1, room), bool)
        return Nodes(empty, empty, _last_hidden(context), none, jnp.zeros(room, jnp.int32))

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
        params, memory, view, update = context.params, context.memory, context.view, jax.lax.dynamic_update_slice
        hidden, within = (jnp.take_along_axis(x, parents[..., None], axis=1) for x in (nodes.hidden, nodes.within))
        lengths, count = view.lengths[:, None], tokens.shape[1]
        slots = jnp.broadcast_to(lengths + depth, tokens.shape)
        at, places = jnp.arange(count, dtype=jnp.int32), jnp.arange(within.shape[2], dtype=jnp.int32)
        within = within | (begin + at[:, None] == places)
        depths = update(nodes.depths, jnp.full(count, depth, jnp.int32), (begin,))
        latest = jnp.minimum(window, view.lengths - 1)[:, None, None]  # the first token of a sequence has no entry
        (x, pairs), (keys, values) = self._entries(context, tokens, hidden), nodes[:2]
        rotation = self.rotation(jnp.maximum(slots - 1, 0))
        for layer, kind in enumerate(self.described.layers):
            queries, *new = self._heads(params, layer, x, pairs, rotation)
            place = (layer, 0, begin, 0, 0)
            keys, values = (update(store, own[None], place) for store, own in zip((keys, values), new, strict=True))
            masks = view.masks(memory[0], slots, within, kind.window, latest, lengths + depths)
            committed = view.read(memory[0], layer), view.read(memory[1], layer)
            scale = self.decoder.config.query_scale
            attended = attend(queries, (keys[layer], values[layer]), committed, masks, scale)
            x = self.decoder.after_attention(params, layer, x, attended)
        logits = self._logits(context, self._norm(params, "norm", x))
        return logits, Nodes(keys, values, self._fed_on(params, x), within, depths)

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
        self, runner: JaxDraftRunner, state: JaxCache, block_size: int, width: int, window: int | None
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


def padded(tensor: Tensor, shape: Sequence[int]) -> Any:
    """Convert a tensor to numpy, integers to int32, and pad it with zeros at the end of each dimension."""
    values = as_numpy(in_torch(tensor))
    values = values.astype(np.int32) if values.dtype == np.int64 else values
    return np.pad(values, [(0, size - own) for size, own in zip(shape, values.shape, strict=True)])


def draft_window(window: int | None) -> Any:
    """Return the draft window as a number."""
    return NO_LIMIT if window is None else np.int32(window)
