"""Llama, Mistral, Qwen and Gemma decoders as pure functions over a pytree of their checkpoint, sharded over a mesh.

Written as jax-llm-examples writes a model: weights and activations have logical axes, `ShardingRules` places these on
the axes of a mesh, and XLA puts in the communication. Parameters keep the names and the layout `[out, in]` of the
checkpoint. All shapes are static: a cache is a line of slots, of which a forward reads a window of a bucket's size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, TypeAlias

import torch

from blockdraft.nn.decoder_config import DecoderConfig, Rope

try:
    jax: Any = import_module("jax")
    jnp: Any = import_module("jax.numpy")
except ImportError:  # the extra `jax` is missing, and nothing below is called
    jax = jnp = None

Array: TypeAlias = Any  # jax.Array
Params: TypeAlias = Mapping[str, Array]
Memory: TypeAlias = "tuple[Array, ...]"  # keys and values, and behind them what else a slot holds

LEAST_SLOTS = 256  # smallest window of a cache that a forward reads


@dataclass(frozen=True)
class ShardingRules:
    """Axis of the mesh for each logical axis of weights and activations; None keeps it whole on every device."""

    embed: str | None = None
    vocab: str | None = "tensor"
    heads: str | None = "tensor"
    kv_heads: str | None = "tensor"
    mlp: str | None = "tensor"


@dataclass(frozen=True)
class Layout:
    """A mesh and the rules by which arrays lie on it. An axis that the mesh does not divide stays whole."""

    mesh: Any  # jax.sharding.Mesh
    rules: ShardingRules = ShardingRules()

    def sharding(self, axes: Sequence[str | None], sizes: Sequence[int]) -> Any:
        """Sharding of an array.

        Args:
            axes: Logical axis of each dimension; None is whole.
            sizes: Number of parts that each dimension may be cut into at most, such as heads, not channels.
        """
        names = [None if axis is None else getattr(self.rules, axis) for axis in axes]
        placed = [
            name if name and self.mesh.shape[name] > 1 and size % self.mesh.shape[name] == 0 else None
            for name, size in zip(names, sizes, strict=True)
        ]
        while placed and placed[-1] is None:  # as XLA writes it, so that a result has the sharding of its argument
            placed.pop()
        return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(*placed))

    def place(self, x: Array, *axes: str | None) -> Array:
        """The array with this sharding, inside of a jitted function."""
        return jax.lax.with_sharding_constraint(x, self.sharding(axes, x.shape))

    def put(self, values: Any) -> Any:
        """Numbers of the host, in any nesting, whole on every device."""
        return jax.device_put(values, self.sharding((), ()))


def local_layout(devices: Sequence[Any] | None = None) -> Layout:
    """All devices of this process, or the given ones, as one axis of tensor parallelism."""
    devices = jax.local_devices() if devices is None else devices
    kinds = (jax.sharding.AxisType.Auto,)
    return Layout(jax.make_mesh((len(devices),), ("tensor",), axis_types=kinds, devices=devices))


# Logical axes of weights by the last part of their names; norms are whole.
AXES = {
    "embed_tokens": ("vocab", "embed"),
    "lm_head": ("vocab", "embed"),
    "q_proj": ("heads", "embed"),
    "k_proj": ("kv_heads", "embed"),
    "v_proj": ("kv_heads", "embed"),
    "o_proj": ("embed", "heads"),
    "gate_proj": ("mlp", "embed"),
    "up_proj": ("mlp", "embed"),
    "down_proj": ("embed", "mlp"),
}


def abstract_params(
    shapes: Mapping[str, Sequence[int]], dtype: Any, layout: Layout, *, heads: int, kv_heads: int
) -> dict[str, Any]:
    """Shape, dtype and sharding of each weight, without memory for it.

    Args:
        shapes: Shapes by the names of the checkpoint.
        heads, kv_heads: Of attention; a head is never cut.
    """
    parts = {"heads": heads, "kv_heads": kv_heads}
    found = {}
    for name, shape in shapes.items():
        axes = AXES.get(name.split(".")[-2], (None,) * len(shape))[: len(shape)]  # a bias has the first one only
        sizes = [parts.get(axis or "", size) for axis, size in zip(axes, shape, strict=True)]
        found[name] = jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=layout.sharding(axes, sizes))
    return found


def load_params(abstract: Mapping[str, Any], read: Callable[[str], torch.Tensor]) -> dict[str, Array]:
    """Weights on their devices, one tensor at a time. Only each device's shard of a tensor in a mapped file is
    read."""

    def put(name: str, like: Any) -> Array:
        tensor = read(name)
        return jax.make_array_from_callback(
            like.shape, like.sharding, lambda index: as_numpy(tensor[index]).astype(like.dtype)
        )

    return {name: put(name, like) for name, like in abstract.items()}


def as_numpy(tensor: torch.Tensor) -> Any:
    """A tensor's numbers in numpy, which has no bfloat16 of its own."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
    return tensor.numpy()


def rms_norm(x: Array, weight: Array, eps: float, plus_one: bool = False) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * (weight.astype(jnp.float32) + plus_one)).astype(x.dtype)


def linear(params: Params, name: str, x: Array) -> Array:
    out = jnp.einsum("...i,oi->...o", x, params[f"{name}.weight"])
    return out + params[f"{name}.bias"] if f"{name}.bias" in params else out


def angles(rope: Rope, positions: Array, dtype: Any) -> tuple[Array, Array]:
    """Cosines and sines `[B, N, 1, D / 2]` of positions `[B, N]`."""
    turned = (positions[..., None].astype(jnp.float32) * jnp.array(rope.inverse_frequencies, jnp.float32))[..., None, :]
    return (jnp.cos(turned) * rope.scale).astype(dtype), (jnp.sin(turned) * rope.scale).astype(dtype)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


@dataclass(frozen=True)
class Rows:
    """Rows of a batch in a cache: B ranges of its slots. Jitted functions take it as an argument.

    Attributes:
        firsts: `[B]` int32, first slot of each row.
        lengths: `[B]` int32, committed tokens of each row.
        slots: Slots of each row that are read, the bucket of the longest row; static.
    """

    firsts: Array
    lengths: Array
    slots: int

    def read(self, memory: Array, layer: int) -> Array:
        """Window `[B, heads, slots, D]` of a layer's keys or values; zero except at the row's committed tokens."""
        begin, _ = self._window(memory)
        each = jax.vmap(lambda first: jax.lax.dynamic_slice_in_dim(memory[layer], first, self.slots, axis=1))
        return jnp.where(self.known(memory)[:, None, :, None], each(begin), 0)

    def known(self, memory: Array) -> Array:
        """Slots `[B, slots]` of the window that hold committed tokens of the row."""
        _, at = self._window(memory)
        return (at >= 0) & (at < self.lengths[:, None])

    def masks(
        self, memory: Array, positions: Array, within: Array, window: int | None, latest: Array | int | None = None
    ) -> tuple[Array, Array]:
        """Masks of the slots, `[B, N, slots]`, and of the nodes, `[B, N, N]`, that nodes at these positions see.

        Args:
            within: Mask `[B, N, N]` of the nodes that a node sees without a window.
            window: Distance from which nodes and tokens are no longer seen; None is no limit.
            latest: Number of each row's last committed tokens that are seen; None is all.
        """
        at = self._window(memory)[1][:, None]
        seen = self.known(memory)[:, None]
        if latest is not None:
            seen = seen & (self.lengths[:, None, None] - at <= latest)
        if window is not None:
            seen = seen & (positions[:, :, None] - at < window)
            within = within & (jnp.abs(positions[:, :, None] - positions[:, None]) < window)
        return jnp.broadcast_to(seen, (*positions.shape, self.slots)), within

    def _window(self, memory: Array) -> tuple[Array, Array]:
        """First slot of each row's window, and the slots' places in the row, `[B, slots]`. The window of a row at the
        end of the memory begins before the row."""
        begin = jnp.minimum(self.firsts, memory.shape[2] - self.slots)
        return begin, (begin - self.firsts)[:, None] + jnp.arange(self.slots, dtype=jnp.int32)


if jax is not None:
    jax.tree_util.register_dataclass(Rows, data_fields=["firsts", "lengths"], meta_fields=["slots"])


def bucket(count: int, least: int = 1) -> int:
    """The next power of two, so that few shapes are compiled."""
    return max(least, 1 << (count - 1).bit_length()) if count > 0 else least


def wide_product(axes: str, left: Array, right: Array) -> Array:
    """`einsum` in float32. Of some shapes in bfloat16, XLA knows no such product on a CPU, and gets wider numbers."""
    if jax.default_backend() == "cpu":
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    return jnp.einsum(axes, left, right, preferred_element_type=jnp.float32)


def attend(
    queries: Array,
    nodes: Memory,
    context: Memory,
    masks: tuple[Array, Array],
    scale: float,
    softcap: float | None = None,
) -> Array:
    """Attention of N nodes over their rows' committed tokens and over each other.

    Args:
        queries: `[B, N, heads, D]`.
        nodes: Keys and values `[B, N, kv_heads, D]`.
        context: Keys and values `[B, kv_heads, slots, D]`.
        masks: Which slots, `[B, N, slots]`, and which nodes, `[B, N, N]`, a node sees.

    Returns:
        `[B, N, heads * D]`.
    """
    batch, count, heads, size = queries.shape
    grouped = queries.reshape(batch, count, nodes[0].shape[2], -1, size)
    before = wide_product("bnkgd,bktd->bkgnt", grouped, context[0]) * scale
    within = wide_product("bnkgd,bmkd->bkgnm", grouped, nodes[0]) * scale
    scores = jnp.concatenate([before, within], axis=-1)
    if softcap is not None:
        scores = jnp.tanh(scores / softcap) * softcap
    seen = jnp.concatenate(masks, axis=-1)[:, None, None]
    shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(queries.dtype)
    slots = before.shape[-1]
    out = wide_product("bkgnt,bktd->bnkgd", shares[..., :slots], context[1])
    out += wide_product("bkgnm,bmkd->bnkgd", shares[..., slots:], nodes[1])
    return out.reshape(batch, count, heads * size).astype(queries.dtype)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda x: jax.nn.silu(x),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def embed(params: Params, tokens: Array) -> Array:
    return params["model.embed_tokens.weight"][tokens]


def head(config: DecoderConfig, layout: Layout, params: Params, hidden: Array) -> Array:
    """Output projection, `[..., H]` to `[..., V]`, without soft-cap."""
    table = params["model.embed_tokens.weight" if config.tied_head else "lm_head.weight"]
    logits = jnp.einsum("...h,vh->...v", hidden, table)
    return layout.place(logits, *[None] * (logits.ndim - 1), "vocab")


def queries_keys_values(
    config: DecoderConfig, layout: Layout, params: Params, number: int, normed: Array, turns: tuple[Array, Array]
) -> list[Array]:
    """Queries, keys and values `[B, N, heads, D]` of a layer's normed input, rotated by its `angles`."""
    prefix, eps, plus_one = f"model.layers.{number}.self_attn.", config.norm_eps, config.norm_plus_one
    q, k, v = (
        linear(params, f"{prefix}{name}", normed).reshape(*normed.shape[:2], -1, config.head_dim)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    if config.qk_norm:
        q, k = (
            rms_norm(each, params[f"{prefix}{name}.weight"], eps, plus_one)
            for each, name in ((q, "q_norm"), (k, "k_norm"))
        )
    placed = zip((rotate(q, *turns), rotate(k, *turns), v), ("heads", "kv_heads", "kv_heads"), strict=True)
    return [layout.place(each, None, None, axis, None) for each, axis in placed]


def after_attention(
    config: DecoderConfig, layout: Layout, params: Params, number: int, x: Array, attended: Array
) -> Array:
    """Output `[B, N, H]` of a layer with the input x, of which attention made `[B, N, heads * D]`."""
    prefix, activation = f"model.layers.{number}.", ACTIVATIONS[config.activation]
    weights = {role: params[name] for role, name in config.norms(number).items()}
    norm = partial(rms_norm, eps=config.norm_eps, plus_one=config.norm_plus_one)
    added = linear(params, f"{prefix}self_attn.o_proj", attended)
    x = layout.place(x + (norm(added, weights["after_attention"]) if config.post_norms else added), None, None, "embed")
    normed = norm(x, weights["before_mlp"])
    gate, up = (linear(params, f"{prefix}mlp.{name}", normed) for name in ("gate_proj", "up_proj"))
    added = linear(params, f"{prefix}mlp.down_proj", layout.place(activation(gate) * up, None, None, "mlp"))
    return layout.place(x + (norm(added, weights["after_mlp"]) if config.post_norms else added), None, None, "embed")


def layers(
    config: DecoderConfig,
    layout: Layout,
    params: Params,
    memory: Memory,
    rows: Rows,
    x: Array,
    positions: Array,
    masks: Sequence[tuple[Array, Array]],
) -> tuple[list[Array], Memory]:
    """Run all layers over nodes `[B, N, H]` at positions `[B, N]`.

    Args:
        memory: Keys and values of all layers, `[layers, kv_heads, all slots, D]` each.
        masks: Of each layer, as `attend` takes them.

    Returns:
        Outputs of the layers, and the nodes' keys and values, each `[layers, B, N, kv_heads, D]`.
    """
    turns = {rope: angles(rope, positions, x.dtype) for rope in config.ropes}
    outputs, written = [], []
    for number, kind in enumerate(config.layers):
        weight = params[config.norms(number)["before_attention"]]
        normed = rms_norm(x, weight, config.norm_eps, config.norm_plus_one)
        q, k, v = queries_keys_values(config, layout, params, number, normed, turns[kind.rope])
        context = rows.read(memory[0], number), rows.read(memory[1], number)
        out = attend(q, (k, v), context, masks[number], config.query_scale, config.attention_softcap)
        x = after_attention(config, layout, params, number, x, out)
        outputs.append(x)
        written.append((k, v))
    keys, values = zip(*written, strict=True)
    return outputs, (jnp.stack(keys), jnp.stack(values))


def forward(
    config: DecoderConfig,
    layout: Layout,
    target_layers: Sequence[int],
    params: Params,
    memory: Memory,
    rows: Rows,
    tokens: Array,
    depths: Array,
    within: Array,
    scored: Array | None = None,
) -> tuple[Array, Array | None, Memory]:
    """Score N nodes behind each row's committed tokens. The memory stays as it is.

    Args:
        target_layers: As in `Target.forward`.
        tokens, depths: `[B, N]` int32; distance of each node from the last committed token's successor.
        within: `[B, N, N]` bool, which nodes a node sees.
        scored: `[B]` int32, the one node of each row whose logits are returned.

    Returns:
        Logits `[B, N or 1, V]`; features `[B, N, m * H]`, None without taps; and the nodes' keys and values, as
        `layers` returns them.
    """
    x = embed(params, tokens).astype(memory[0].dtype)
    if config.embedding_scale != 1:
        x = x * jnp.array(config.embedding_scale, x.dtype)  # rounded, as the models were trained
    positions = rows.lengths[:, None] + depths
    masks = {window: rows.masks(memory[0], positions, within, window) for window in config.windows}
    each = [masks[kind.window] for kind in config.layers]
    outputs, nodes = layers(config, layout, params, memory, rows, x, positions, each)
    outputs.append(rms_norm(outputs[-1], params["model.norm.weight"], config.norm_eps, config.norm_plus_one))
    hidden_states, x = (
        jnp.concatenate([outputs[target_layer] for target_layer in target_layers], axis=-1) if target_layers else None,
        outputs[-1],
    )
    if scored is not None:
        x = jnp.take_along_axis(x, scored[:, None, None], axis=1)
    logits, cap = head(config, layout, params, x), config.final_softcap
    return logits if cap is None else jnp.tanh(logits / cap) * cap, hidden_states, nodes


def best_tokens(logits: Array) -> Array:
    """Argmax int32 of the last axis, the lowest of equals; -1 where a logit is NaN or the largest is infinite."""
    highest = jnp.max(logits, axis=-1)
    return jnp.where(jnp.isfinite(highest), jnp.argmax(logits, axis=-1).astype(jnp.int32), -1)


def sample(logits: Array, temperature: Array, uniforms: Array) -> Array:
    """One token int32 after each node, by inverting its cumulative distribution as `decode.sampling.draw` does.

    Args:
        logits: `[B, N, V]`.
        temperature: `[B]`; 0 counts as 1.
        uniforms: `[B, N]` float64 in [0, 1).
    """
    scores = logits.astype(jnp.float32)
    scores = scores - jnp.max(scores, axis=-1, keepdims=True)
    probs = jax.nn.softmax(scores / jnp.where(temperature > 0, temperature, 1)[:, None, None], axis=-1)
    cumulative = jnp.cumsum(probs.astype(uniforms.dtype), axis=-1)
    # Rounding could push the threshold up to the total, beyond the last token that has mass.
    limit = cumulative[..., -1:] * jnp.minimum(uniforms, 1 - 1e-15)[..., None]
    return jnp.argmax(cumulative > limit, axis=-1).astype(jnp.int32)


def write(layout: Layout, memory: Memory, nodes: Memory, path: Array, slots: Array) -> Memory:
    """The memory with nodes of a forward written to it.

    Args:
        nodes: Keys and values as `forward` returns them.
        path: `[B, M]` int32, the nodes to keep, in order.
        slots: `[B, M]` int32, slots that they go to; one beyond the memory drops the node.
    """

    def put(store: Array, new: Array) -> Array:
        kept = jnp.take_along_axis(new, path[None, :, :, None, None], axis=2)  # [layers, B, M, kv_heads, D]
        store = store.at[:, :, slots].set(jnp.moveaxis(kept, 3, 1), mode="drop")
        return layout.place(store, None, "kv_heads", None, None)

    return tuple(put(store, new) for store, new in zip(memory, nodes, strict=True))
