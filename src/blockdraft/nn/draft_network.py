"""Base of draft networks, what they borrow from their target, and the layer that several of them use.

Training and decoding run the same layers with different sources of keys and values, so both pass in an `attend`
function. Parameters have the names of z-lab's checkpoints.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from blockdraft.nn.cache import KVCache
from blockdraft.nn.layers import GatedMLP, RMSNorm, rotate


@dataclass(frozen=True, kw_only=True)
class DraftHost:
    """What a draft network borrows from its target.

    Attributes:
        dtype: Dtype of the target, in which the network computes.
        embed: The target's embedding, tokens `[...]` int64 to `[..., H]`.
        target_head: The target's output projection, hidden states `[..., H]` to logits `[..., V]`.
        own_head: Output projection to use in its place, or None.
        compile_reason: Reason why the network is not compiled, where it might have been; else None.
    """

    dtype: torch.dtype
    embed: Callable[[Tensor], Tensor]
    target_head: Callable[[Tensor], Tensor]
    own_head: Callable[[Tensor], Tensor] | None = None
    compile_reason: str | None = None

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """Output projection that the network uses."""
        return self.own_head or self.target_head


class DraftNetwork(nn.Module):
    """Base of all draft networks.

    Attributes:
        architecture: Key of the network in `plugins.RUNNERS`, or None where only torch's operations run it. A subclass
            that computes something else sets another one.
        qat_bits: Bits to which the weights were quantized in training, as in `Trained`; None if they were not.
    """

    architecture: ClassVar[str | None] = None
    qat_bits: int | None = None

    @abstractmethod
    def runner(self, host: DraftHost) -> Any:
        """Return a runner that uses torch's operations. The network is on the host's device and in its dtype."""


def shapes_of(make: Callable[[], nn.Module]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors of a new network, which gets no memory."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in make().state_dict().items()}


class NetworkRunner(Protocol):
    """Runs a draft network on the target's backend. Methods not described here are as in `Drafter`.

    Attributes:
        compile_reason: Reason why a network that could have been compiled is not; else None.
    """

    compile_reason: str | None = None

    @property
    def bits(self) -> int | None:
        return None

    def new_state(self, batch: int, capacity: int) -> Any:
        return KVCache(batch, capacity)

    def state_bytes(self, batch: int, capacity: int) -> int: ...

    def weight_bytes(self) -> int:
        """Return the bytes of weights besides the network's own."""
        return 0

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        return 0  # torch's operations free theirs


# (layer, queries [B, heads, N, D], keys and values of the block [B, kv_heads, N, D]) -> [B, heads, N, D]
Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class DraftAttention(nn.Module):
    """Attention of a draft layer.

    Args:
        config: Sizes of the layer, with the names of `DraftConfig`.
        inputs: Size of the input; None is the hidden size.
        qk_norm: Whether queries and keys are normed.
    """

    def __init__(self, config: Any, inputs: int | None = None, qk_norm: bool = True) -> None:
        super().__init__()
        size, bias, self.head_dim = config.hidden_size, config.attention_bias, config.head_dim
        inputs = inputs or size
        self.q_proj = nn.Linear(inputs, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(inputs, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(inputs, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, size, bias=bias)
        self.q_norm: Any
        self.k_norm: Any
        self.q_norm, self.k_norm = (
            RMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else nn.Identity() for _ in "qk"
        )

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of inputs `[B, N, inputs]`, each `[B, kv_heads, N, D]`."""
        keys, values = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.k_proj, self.v_proj))
        return rotate(self.k_norm(keys), cos, sin).transpose(1, 2), values.transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        queries = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), cos, sin)
        out = attend(layer, queries.transpose(1, 2), *self.keys_values(x, cos, sin))
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(-2))
        return projected


class DraftLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, layer, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out
