"""Llama, Mistral, Qwen and Gemma decoders as pure functions over a pytree of checkpoint tensors, sharded over a mesh.

The style follows jax-llm-examples: weights and activations have logical axes, `ShardingRules` maps them to mesh axes,
and XLA inserts the communication. Parameters keep the names and the `[out, in]` layout of the checkpoint. All shapes
are static: a forward reads a window of the cache whose size is a power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

import torch

from blockdraft.nn.decoder_config import DecoderConfig, Rope

try:
    jax: Any = import_module("jax")
    jnp: Any = import_module("jax.numpy")
except ImportError:  # JAX is not installed, and nothing below is called
    jax = jnp = None
jit: Any = jax.jit if jax is not None else lambda function, **_: function

Array: TypeAlias = Any  # jax.Array
Params: TypeAlias = Mapping[str, Array]
Memory: TypeAlias = "tuple[Array, ...]"  # keys, values, and anything else that a cache stores per KV slot

MIN_SLOTS = 256  # smallest cache window that a forward reads

# Logical axes of weights by the second-last part of their names. Other weights are replicated.
AXES = {
    "embed_tokens": ("vocab", None),
    "lm_head": ("vocab", None),
    "q_proj": ("heads", None),
    "k_proj": ("kv_heads", None),
    "v_proj": ("kv_heads", None),
    "o_proj": (None, "heads"),
    "gate_proj": ("mlp", None),
    "up_proj": ("mlp", None),
    "down_proj": (None, "mlp"),
}


@dataclass(frozen=True)
class ShardingRules:
    """Mesh axis of each logical axis; None replicates it on every device."""

    vocab: str | None = "tensor"
    heads: str | None = "tensor"
    kv_heads: str | None = "tensor"
    mlp: str | None = "tensor"


@dataclass(frozen=True)
class ShardedLayout:
    """A mesh and its sharding rules. An axis whose size the mesh does not divide is replicated."""

    mesh: Any  # jax.sharding.Mesh
    rules: ShardingRules = ShardingRules()

    def sharding(self, axes: Sequence[str | None], sizes: Sequence[int]) -> Any:
        """Return the sharding of an array.

        Args:
            axes: Logical axis of each dimension; None replicates it.
            sizes: Units into which each dimension may be divided: heads, for example, instead of channels.
        """
        names = [axis and getattr(self.rules, axis) for axis in axes]
        spec = [
            name if name and self.mesh.shape[name] > 1 and size % self.mesh.shape[name] == 0 else None
            for name, size in zip(names, sizes, strict=True)
        ]
        while spec and spec[-1] is None:  # XLA's normal form, so that results compare equal to their arguments
            spec.pop()
        return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(*spec))

    def place(self, x: Array, *axes: str | None) -> Array:
        """Constrain the sharding of the first dimensions of an array inside a jitted function."""
        return jax.lax.with_sharding_constraint(x, self.sharding(axes, x.shape[: len(axes)]))

    def put(self, values: Any) -> Any:
        """Replicate host values, in any nesting, on every device."""
        return jax.device_put(values, self.sharding((), ()))


def local_layout(devices: Sequence[Any] | None = None) -> ShardedLayout:
    """Return a mesh of one tensor-parallel axis over the given devices, by default all of this process."""
    devices = jax.local_devices() if devices is None else devices
    kinds = (jax.sharding.AxisType.Auto,)
    return ShardedLayout(jax.make_mesh((len(devices),), ("tensor",), axis_types=kinds, devices=devices))


def load_params(
    shapes: Mapping[str, Sequence[int]],
    read: Callable[[str], torch.Tensor],
    dtype: Any,
    layout: ShardedLayout,
    heads: int,
    kv_heads: int,
) -> dict[str, Array]:
    """Load weights onto their devices, one tensor at a time. Of a memory-mapped file, each device's shard is read.

    Args:
        shapes: Shape of each weight by its checkpoint name.
        heads, kv_heads: Attention heads, which are never divided.
    """
    units, params = {"heads": heads, "kv_heads": kv_heads}, {}
    for name, shape in shapes.items():
        axes = AXES.get(name.split(".")[-2], (None,) * len(shape))[: len(shape)]  # a bias has the first axis only
        sharding = layout.sharding(axes, [units.get(axis or "", size) for axis, size in zip(axes, shape, strict=True)])
        tensor = read(name)
        params[name] = jax.make_array_from_callback(
            tuple(shape), sharding, lambda index, tensor=tensor: as_numpy(tensor[index]).astype(dtype)
        )
    return params


def as_numpy(tensor: torch.Tensor) -> Any:
    """Convert a tensor to numpy; bfloat16, which numpy lacks, becomes JAX's."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
    return tensor.numpy()


def bucket(count: int, minimum: int = 1) -> int:
    """Round up to a power of two, so that few shapes are compiled."""
    return max(minimum, 1 << (count - 1).bit_length()) if count > 0 else minimum


@dataclass(frozen=True)
class CacheView:
    """Places of a batch of B sequences in a cache, an argument of jitted functions.

    Attributes:
        starts: `[B]` int32, first KV slot of each sequence.
        lengths: `[B]` int32, committed tokens of each sequence.
        slots: Number S of KV slots that are read per sequence, enough for the longest one; static.
    """

    starts: Array
    lengths: Array
    slots: int

    def read(self, memory: Array, layer: int) -> Array:
        """Return keys or values `[B, heads, S, D]` of a layer; zero except at committed tokens."""
        begin, _ = self._window(memory)
        cut = jax.vmap(lambda first: jax.lax.dynamic_slice_in_dim(memory[layer], first, self.slots, axis=1))
        return jnp.where(self._committed(memory)[:, None, :, None], cut(begin), 0)

    def masks(
        self,
        memory: Array,
        positions: Array,
        within: Array,
        window: int | None,
        latest: Array | None = None,
        others: Array | None = None,
    ) -> tuple[Array, Array]:
        """Return the attention masks of nodes at `positions` `[B, N]`.

        One is over KV slots, `[B, N, S]`, the other over nodes, `[B, N, M]`.

        Args:
            within: `[B, N, M]`, the nodes that each node attends to, apart from a window.
            window: Sliding window in tokens; None is full attention.
            latest: Number of the last committed tokens that are visible; None is all.
            others: Positions `[B, M]` of the nodes that may be attended to; None are the same nodes.
        """
        slot = self._window(memory)[1][:, None]
        visible = self._committed(memory)[:, None]
        if latest is not None:
            visible = visible & (self.lengths[:, None, None] - slot <= latest)
        if window is not None:
            visible = visible & (positions[:, :, None] - slot < window)
            others = positions if others is None else others
            within = within & (jnp.abs(positions[:, :, None] - others[:, None]) < window)
        return jnp.broadcast_to(visible, (*positions.shape, self.slots)), within

    def _committed(self, memory: Array) -> Array:
        """Return which KV slots `[B, S]` of the windows hold committed tokens of their sequence."""
        _, slot = self._window(memory)
        return (slot >= 0) & (slot < self.lengths[:, None])

    def _window(self, memory: Array) -> tuple[Array, Array]:
        """Return the first KV slot of each window, `[B]`, and its KV slots relative to the sequence, `[B, S]`.

        The window of a sequence near the end of the memory begins before the sequence."""
        begin = jnp.minimum(self.starts, memory.shape[2] - self.slots)
        return begin, (begin - self.starts)[:, None] + jnp.arange(self.slots, dtype=jnp.int32)


if jax is not None:
    jax.tree_util.register_dataclass(CacheView, data_fields=["starts", "lengths"], meta_fields=["slots"])


def rms_norm(x: Array, weight: Array, eps: float, plus_one: bool = False) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * (weight.astype(jnp.float32) + plus_one)).astype(x.dtype)


def linear(params: Params, name: str, x: Array) -> Array:
    out = jnp.einsum("...i,oi->...o", x, params[f"{name}.weight"])
    return out + params[f"{name}.bias"] if f"{name}.bias" in params else out


def angles(rope: Rope, positions: Array, dtype: Any) -> tuple[Array, Array]:
    """Return cosines and sines `[B, N, 1, D / 2]` of positions `[B, N]`."""
    turned = (positions[..., None].astype(jnp.float32) * jnp.array(rope.inverse_frequencies, jnp.float32))[..., None, :]
    return (jnp.cos(turned) * rope.scale).astype(dtype), (jnp.sin(turned) * rope.scale).astype(dtype)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def embed(params: Params, tokens: Array) -> Array:
    return params["model.embed_tokens.weight"][tokens]


def softcapped(x: Array, cap: float | None) -> Array:
    return x if cap is None else jnp.tanh(x / cap) * cap


def attend(
    queries: Array,
    nodes: Memory,
    context: Memory,
    masks: tuple[Array, Array],
    scale: float,
    softcap: float | None = None,
) -> Array:
    """Compute attention of N nodes over committed tokens and over each other.

    Args:
        queries: `[B, N, heads, D]`.
        nodes: Keys and values of the nodes, `[B, N, kv_heads, D]`.
        context: Keys and values of committed tokens, `[B, kv_heads, S, D]`.
        masks: As `CacheView.masks` returns them.

    Returns:
        `[B, N, heads * D]`.
    """
    batch, count, heads, size = queries.shape
    grouped = queries.reshape(batch, count, nodes[0].shape[2], -1, size)
    before = _float32_product("bnkgd,bktd->bkgnt", grouped, context[0])
    within = _float32_product("bnkgd,bmkd->bkgnm", grouped, nodes[0])
    scores = softcapped(jnp.concatenate([before, within], axis=-1) * scale, softcap)
    visible = jnp.concatenate(masks, axis=-1)[:, None, None]
    shares = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(queries.dtype)
    slots = before.shape[-1]
    out = _float32_product("bkgnt,bktd->bnkgd", shares[..., :slots], context[1])
    out += _float32_product("bkgnm,bmkd->bnkgd", shares[..., slots:], nodes[1])
    return out.reshape(batch, count, heads * size).astype(queries.dtype)


def _float32_product(axes: str, left: Array, right: Array) -> Array:
    """Compute an `einsum` with float32 results. On a CPU, XLA lacks some of these products for bfloat16 inputs."""
    if jax.default_backend() == "cpu":
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    return jnp.einsum(axes, left, right, preferred_element_type=jnp.float32)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda x: jax.nn.silu(x),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


@dataclass(frozen=True, eq=False)
class JaxDecoder:
    """A decoder's shape and layout, with its computations as functions of the parameters."""

    config: DecoderConfig
    layout: ShardedLayout

    def norm(self, params: Params, name: str, x: Array) -> Array:
        return rms_norm(x, params[name], self.config.norm_eps, self.config.norm_plus_one)

    def head(self, params: Params, hidden: Array) -> Array:
        """Return logits `[..., V]` of hidden states `[..., H]`, without soft-cap."""
        table = params["model.embed_tokens.weight" if self.config.tied_head else "lm_head.weight"]
        logits = jnp.einsum("...h,vh->...v", hidden, table) * self.config.logit_scale
        return self.layout.place(logits, *[None] * (logits.ndim - 1), "vocab")

    def queries_keys_values(
        self, params: Params, layer: int, normed: Array, rotation: tuple[Array, Array]
    ) -> list[Array]:
        """Return queries, keys and values `[B, N, heads, D]` of a layer's normed input, rotated by `angles`."""
        q, k, v = (
            linear(params, f"model.layers.{layer}.self_attn.{name}", normed).reshape(
                *normed.shape[:2], -1, self.config.head_dim
            )
            for name in ("q_proj", "k_proj", "v_proj")
        )
        names = self.config.norms(layer)
        if self.config.qk_norm and names["query"] in params:  # layers of draft networks may differ
            q, k = self.norm(params, names["query"], q), self.norm(params, names["key"], k)
        heads = zip((rotate(q, *rotation), rotate(k, *rotation), v), ("heads", "kv_heads", "kv_heads"), strict=True)
        return [self.layout.place(x, None, None, axis, None) for x, axis in heads]

    def after_attention(self, params: Params, layer: int, x: Array, attended: Array) -> Array:
        """Return the output `[B, N, H]` of a layer from its input x and its attention output `[B, N, heads * D]`."""
        prefix, names, post_norms = f"model.layers.{layer}.", self.config.norms(layer), self.config.post_norms
        out = linear(params, f"{prefix}self_attn.o_proj", attended)
        scale = self.config.residual_scale
        x = self.layout.place(x + scale * (self.norm(params, names["after_attention"], out) if post_norms else out))
        normed = self.norm(params, names["before_mlp"], x)
        gate, up = (linear(params, f"{prefix}mlp.{name}", normed) for name in ("gate_proj", "up_proj"))
        inner = self.layout.place(ACTIVATIONS[self.config.activation](gate) * up, None, None, "mlp")
        out = linear(params, f"{prefix}mlp.down_proj", inner)
        return self.layout.place(x + scale * (self.norm(params, names["after_mlp"], out) if post_norms else out))

    def layers(
        self,
        params: Params,
        memory: Memory,
        view: CacheView,
        x: Array,
        positions: Array,
        masks: Sequence[tuple[Array, Array]],
    ) -> tuple[list[Array], Memory]:
        """Run all layers over nodes `[B, N, H]` at positions `[B, N]`.

        Args:
            memory: Keys and values, `[layers, kv_heads, all KV slots, D]` each.
            masks: Masks of each layer, as `attend` takes them.

        Returns:
            Outputs of the layers, and the nodes' keys and values, `[layers, B, N, kv_heads, D]` each.
        """
        config, outputs, written = self.config, list[Array](), list[Any]()
        rotations = {rope: angles(rope, positions, x.dtype) for rope in config.ropes}
        for layer, kind in enumerate(config.layers):
            normed = self.norm(params, config.norms(layer)["before_attention"], x)
            q, k, v = self.queries_keys_values(params, layer, normed, rotations[kind.rope])
            context = view.read(memory[0], layer), view.read(memory[1], layer)
            attended = attend(q, (k, v), context, masks[layer], config.query_scale, config.attention_softcap)
            x = self.after_attention(params, layer, x, attended)
            outputs.append(x)
            written.append((k, v))
        keys, values = zip(*written, strict=True)
        return outputs, (jnp.stack(keys), jnp.stack(values))

    def forward(
        self,
        target_layers: Sequence[int],
        params: Params,
        memory: Memory,
        view: CacheView,
        tokens: Array,
        depths: Array,
        within: Array,
        scored: Array | None,
    ) -> tuple[Array, Array, Array | None, Memory]:
        """Score N nodes behind the committed tokens of each sequence. The memory is not written.

        Args:
            target_layers: Target layers, as in `Target.forward`.
            tokens, depths: `[B, N]` int32; depth 0 follows the last committed token.
            within: `[B, N, N]` bool, the nodes that each node attends to.
            scored: `[B]` int32, the one node of each sequence whose logits are returned; None is all.

        Returns:
            Logits `[B, N or 1, V]`; their best tokens as in `TargetOutput`; hidden states `[B, N, m * H]`, None without
            target layers; and the nodes' keys and values, as `layers` returns them.
        """
        config, x = self.config, embed(params, tokens).astype(memory[0].dtype)
        if config.embedding_scale != 1:
            x = x * jnp.array(config.embedding_scale, x.dtype)  # rounded to the dtype, as in training
        positions = view.lengths[:, None] + depths
        by_window = {window: view.masks(memory[0], positions, within, window) for window in config.windows}
        masks = [by_window[kind.window] for kind in config.layers]
        outputs, nodes = self.layers(params, memory, view, x, positions, masks)
        x = self.norm(params, "model.norm.weight", outputs[-1])
        outputs.append(x)
        hidden = jnp.concatenate([outputs[layer] for layer in target_layers], axis=-1) if target_layers else None
        if scored is not None:
            x = jnp.take_along_axis(x, scored[:, None, None], axis=1)
        logits = softcapped(self.head(params, x), config.final_softcap)
        is_valid = jnp.isfinite(jnp.max(logits, axis=-1))
        best = jnp.where(is_valid, jnp.argmax(logits, axis=-1).astype(jnp.int32), -1)
        return logits, best, hidden, nodes
