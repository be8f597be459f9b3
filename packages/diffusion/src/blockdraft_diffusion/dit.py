"""Network of the models of arXiv 2503.09573: a transformer with adaptive norms, without dropout.

A time embedding shifts and scales its norms. The models are not conditioned on time, so the time is always zero. The
checkpoints contain the layers for it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.nn.attention import Visible, attend
from blockdraft.nn.layers import rotate
from blockdraft.settings import Count, settings
from blockdraft_diffusion.denoiser import Denoiser, KeysValues

TIMES = 256  # channels of the time embedding
ROPE_THETA = 10_000.0


@settings
class DiTConfig:
    """Configuration with the names and meanings of config.json.

    Attributes:
        vocab_size: Number of tokens, including the mask token, which is the last.
        model_length: Maximum number of tokens of a sequence.
        hidden_dim: Size of a hidden state.
        n_blocks: Number of layers.
        n_heads: Heads of attention.
        cond_dim: Size of the time embedding that conditions the norms.
    """

    vocab_size: Count
    model_length: Count
    hidden_dim: Count
    n_blocks: Count
    n_heads: Count
    cond_dim: Count


class DiT(Denoiser):
    """The network. Parameters and buffers have the names of the published checkpoints."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config, self.vocab_size = config, config.vocab_size
        # Range of times in training, which checkpoints hold. It is unused here.
        self.register_buffer("sampling_eps_min", torch.tensor(1e-3))
        self.register_buffer("sampling_eps_max", torch.tensor(1.0))
        self.backbone = _Backbone(config)

    def hidden(
        self, tokens: Tensor, positions: Tensor, visible: Visible | None = None, cache: KeysValues | None = None
    ) -> Tensor:
        out: Tensor = self.backbone(tokens, positions, visible, cache)
        return out

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        return self.config.n_blocks, self.config.n_heads, self.config.hidden_dim // self.config.n_heads

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.backbone.output_layer.linear(hidden)
        return out


class _Backbone(nn.Module):
    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.vocab_embed = _Table(config.vocab_size, config.hidden_dim)
        self.sigma_map = _Times(config.cond_dim)
        self.rotary_emb = _Rotary(config.hidden_dim // config.n_heads)
        self.blocks = nn.ModuleList(_Block(config, number) for number in range(config.n_blocks))
        self.output_layer = _OutputLayer(config)

    def forward(self, tokens: Tensor, positions: Tensor, visible: Visible | None, cache: KeysValues | None) -> Tensor:
        x = F.embedding(tokens, self.vocab_embed.embedding)
        condition, angles = F.silu(self.sigma_map(x)), self.rotary_emb(positions, x.dtype)
        for block in self.blocks:
            x = block(x, condition, angles, visible, cache)
        out: Tensor = self.output_layer(x, condition)
        return out


class _Table(nn.Module):
    def __init__(self, vocab_size: int, size: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(vocab_size, size))
        nn.init.kaiming_uniform_(self.embedding, a=5**0.5)


class _Times(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(TIMES, size), nn.SiLU(), nn.Linear(size, size))

    def forward(self, like: Tensor) -> Tensor:
        """Return the embedding of time zero, whose cosines are all 1 and whose sines are 0."""
        out: Tensor = self.mlp(torch.cat([like.new_ones(TIMES // 2), like.new_zeros(TIMES // 2)]))
        return out


class _Rotary(nn.Module):
    def __init__(self, head_dim: int) -> None:
        super().__init__()
        # Checkpoints hold the buffer. Casting the weights rounds it, so we use a copy.
        with torch.device("cpu"):
            self.frequencies = 1 / ROPE_THETA ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        self.register_buffer("inv_freq", self.frequencies.clone())

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        self.frequencies = self.frequencies.to(positions.device)
        angles = positions.unsqueeze(-1) * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class _Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        normed = F.layer_norm(x.float(), self.weight.shape).to(self.weight.dtype) * self.weight
        return normed * (1 + scale) + shift


class _Block(nn.Module):
    def __init__(self, config: DiTConfig, number: int) -> None:
        super().__init__()
        size, self.number, self.heads = config.hidden_dim, number, config.n_heads
        self.norm1, self.norm2 = _Norm(size), _Norm(size)
        self.attn_qkv = nn.Linear(size, 3 * size, bias=False)
        self.attn_out = nn.Linear(size, size, bias=False)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU("tanh"), nn.Linear(4 * size, size))
        self.adaLN_modulation = _zero_linear(config.cond_dim, 6 * size)

    def forward(
        self,
        x: Tensor,
        condition: Tensor,
        angles: tuple[Tensor, Tensor],
        visible: Visible | None,
        cache: KeysValues | None,
    ) -> Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.adaLN_modulation(condition).chunk(6)
        qkv = self.attn_qkv(self.norm1(x, shift, scale)).unflatten(-1, (3, self.heads, -1))
        queries, keys = (rotate(qkv[:, :, part], *angles).transpose(1, 2) for part in (0, 1))
        values = qkv[:, :, 2].transpose(1, 2)
        if cache is not None:
            keys, values = cache.write(self.number, keys, values)
        attended = attend(queries, keys, values, visible).transpose(1, 2).flatten(-2)
        x = x + gate * self.attn_out(attended)
        out: Tensor = x + mlp_gate * self.mlp(self.norm2(x, mlp_shift, mlp_scale))
        return out


class _OutputLayer(nn.Module):
    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.norm_final = _Norm(config.hidden_dim)
        self.linear = _zero_linear(config.hidden_dim, config.vocab_size)
        self.adaLN_modulation = _zero_linear(config.cond_dim, 2 * config.hidden_dim)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        out: Tensor = self.norm_final(x, *self.adaLN_modulation(condition).chunk(2))
        return out


def _zero_linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a layer whose output is zero before training."""
    made = nn.Linear(inputs, outputs)
    nn.init.zeros_(made.weight)
    nn.init.zeros_(made.bias)
    return made
