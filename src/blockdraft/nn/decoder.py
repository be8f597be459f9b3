"""One decoder for the Llama, Mistral, Qwen, Gemma and gpt-oss families, written for decoding speed.

`DecoderConfig` holds the differences between families; tensors have the names of their checkpoints. The experts of a
layer are one tensor, which is read, named and stored like any other matrix. Some layers of hybrid models have a gated
delta net or a short convolution instead of attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.nn.attention import ExactAttention
from blockdraft.nn.decoder_config import (
    LAYER_INPUT_NORM,
    LAYER_INPUT_PROJECTION,
    LAYER_INPUT_TABLE,
    DecoderConfig,
)
from blockdraft.nn.decoder_layer import DecoderLayer, Memory, Norm, Read, ReadFused, RunLayer, joining, plain
from blockdraft.nn.latent_layer import LatentLayer
from blockdraft.nn.mixed_layer import MixedLayer
from blockdraft.nn.packed import PackedLinear
from blockdraft.nn.recurrent_mixer import RecurrentMixer
from blockdraft.nn.short_convolution import ShortConvolution


def rope_frequencies(config: DecoderConfig) -> Tensor:
    """Return the frequencies [-f, f] of each of `config.ropes`, `[ropes, R]` for the R rotated channels of a head.

    The sines of both halves then have the signs that a rotation needs. They are always float32, because bfloat16 cannot
    distinguish neighbouring positions. Rows of layers with smaller heads are padded with zeros.
    """
    rows = []
    for rope in config.ropes:
        own = torch.tensor(rope.inverse_frequencies, dtype=torch.float32)
        rows.append(torch.cat([-own, own]))
    longest = max(map(len, rows))
    return torch.stack([F.pad(row, (0, longest - len(row))) for row in rows])


def rope_angles(
    config: DecoderConfig, frequencies: Tensor, positions: Tensor, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """Return cosines and signed sines `[B, N, 1, R]` of positions `[B, N]`, for each of `config.ropes`."""
    tables = []
    for rope, own in zip(config.ropes, frequencies, strict=True):
        angles = (positions.unsqueeze(-1) * own[: 2 * len(rope.inverse_frequencies)]).unsqueeze(-2)
        cos, sin = angles.cos(), angles.sin()
        if rope.scale != 1:
            cos, sin = cos * rope.scale, sin * rope.scale
        tables.append((cos.to(dtype), sin.to(dtype)))
    return tables


def layer_class(config: DecoderConfig) -> type[DecoderLayer]:
    """Return the class of a decoder's layers."""
    return LatentLayer if config.latent is not None else MixedLayer if config.mixed else DecoderLayer


class Decoder(nn.Module):
    """A decoder whose caller owns the keys and values.

    `forward` is a pure function of its arguments, except for the nodes that it writes to `stores`. Without experts, no
    branch depends on the numbers in tensors, so it can be captured as a CUDA graph.

    Args:
        config: Shape of the decoder.
        read: Reads the tensors of `config.tensor_shapes()`, one at a time; fused ones are not stored separately.
        fused: Reads the matrices of `config.products()` instead of `read`, such as packed ones.
    """

    def __init__(self, config: DecoderConfig, read: Read, fused: ReadFused | None = None) -> None:
        super().__init__()
        self.config = config
        fused = fused or joining(read)
        self.embedding = PackedLinear(fused(["model.embed_tokens.weight"]))
        made = layer_class(config)
        self.layers = nn.ModuleList(made(config, layer, read, fused) for layer in range(len(config.layers)))
        if config.layer_input_size:
            self.input_table = PackedLinear(fused([LAYER_INPUT_TABLE]))
            self.input_projection = PackedLinear(fused([LAYER_INPUT_PROJECTION]))
            self.input_norm = Norm(config, [plain(read(LAYER_INPUT_NORM))])
        self.norm = Norm(config, [plain(read(config.last_norm))])
        self.head = self.embedding if config.tied_head else PackedLinear(fused(["lm_head.weight"]))
        for module in self.modules():
            if isinstance(module, PackedLinear):
                module.dtype = self.dtype
        # The models were trained with the scale rounded to the dtype of the weights.
        self.embedding_scale = float(torch.tensor(config.embedding_scale, dtype=self.dtype))
        self.frequencies: Tensor
        self.register_buffer("frequencies", rope_frequencies(config).to(self.device))

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.given[0].dtype

    @property
    def device(self) -> torch.device:
        return self.norm.given[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        norms = (module for module in self.modules() if isinstance(module, Norm))
        products = (module for module in self.modules() if isinstance(module, PackedLinear))
        nets = (module for module in self.modules() if isinstance(module, RecurrentMixer | ShortConvolution))
        others = sum(norm.weight.nbytes for norm in norms) + sum(part.nbytes for net in nets for part in net.buffers())
        others += sum(part.nbytes for layer in self.layers for part in cast(DecoderLayer, layer).others.values())
        return sum(product.nbytes for product in products) + others

    @property
    def bits(self) -> int | None:
        """Fewest bits of the layers' weights, where quantized; else None."""
        bit_widths = (
            module.bits for layer in self.layers for module in layer.modules() if isinstance(module, PackedLinear)
        )
        return min((bits for bits in bit_widths if bits is not None), default=None)

    @property
    def rounded(self) -> str | None:
        """Quantization of the layers' weights on a GPU, as in `PackedLinear`."""
        return next(module.rounded for module in self.layers[0].modules() if isinstance(module, PackedLinear))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        masks: Sequence[Tensor | ExactAttention | None],
        stores: Sequence[Memory],
        target_layers: Sequence[int] = (),
        logits_at: Tensor | None = None,
        run_layer: RunLayer = DecoderLayer.__call__,
    ) -> tuple[Tensor, Tensor | None]:
        """Score N nodes per sequence, and write their keys and values.

        A caller that captures the forward pass may add padding nodes on free and distinct slots, and ignore their
        outputs, and slots that the masks hide.

        Args:
            tokens: `[B, N]` int64.
            positions: `[B, N]` int64, or `[1, N]` if all sequences have the same.
            slots: KV slots of the nodes, `[B, N]` int64, or `[N]` if all sequences have the same.
            masks: Mask for each of `config.windows`, `[B or 1, 1, groups * N, T]` as in `attend_grouped`; or the
                `ExactAttention` of a piece. Then B is 1, and stores hold the slots of all sequences.
            stores: Memory of each layer: `[B, 2 * num_kv_heads, T, D]`, keys before values, `[B, 1, T, D]` with latent
                attention, or that of its recurrence or convolution.
            target_layers: Target layers whose hidden states are returned; the number of layers is the input of the
                head.
            logits_at: `[B]` int64, the one node of each sequence whose logits are returned; `[0]` returns none.
            run_layer: Calls a layer, for example compiled.

        Returns:
            Logits `[B, N, V]`, or `[B, 1, V]` with `logits_at`; and hidden states `[B, N, m * H]`, None without target
            layers.
        """
        config, (batch, count) = self.config, tokens.shape
        x = self.embedding.lookup(tokens.reshape(-1))  # [B * N, H], the fastest shape for products
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        angles = rope_angles(config, self.frequencies, positions, x.dtype)
        outputs = []
        inputs = self.layer_inputs(tokens.reshape(-1), x) if config.layer_input_size else None
        layers = cast("list[DecoderLayer]", list(self.layers))
        for number, (layer, store) in enumerate(zip(layers, stores, strict=True)):
            x = run_layer(layer, x, angles[layer.rope], slots, masks[layer.mask], store)
            if isinstance(layer, MixedLayer):
                x = layer.finish(x, None if inputs is None else inputs[:, number])
            outputs.append(x)
        x = self.norm(x)
        outputs.append(x)
        hidden_states = (
            torch.cat([outputs[target_layer] for target_layer in target_layers], dim=-1).view(batch, count, -1)
            if target_layers
            else None
        )
        if logits_at is not None:
            x = x[torch.arange(0, batch * count, count, device=x.device) + logits_at]
        logits = self.logits(x).view(batch, -1, config.vocab_size)
        cap = config.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap, hidden_states

    def layer_inputs(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        """Return what each layer adds for R tokens, `[R, layers, size]`.

        Args:
            tokens: `[R]` int64.
            embedded: Their embeddings, scaled, `[R, H]`.
        """
        size = self.config.layer_input_size
        projected = self.input_projection(embedded) * self.config.hidden_size**-0.5
        projected = self.input_norm(projected.view(len(tokens), -1, size))
        scale = float(torch.tensor(size**0.5, dtype=self.dtype))
        own = self.input_table.lookup(tokens).view(len(tokens), -1, size) * scale
        inputs: Tensor = (projected + own) * 2**-0.5
        return inputs

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., V]` of hidden states `[..., H]`, without soft-cap."""
        logits: Tensor = self.head(hidden)
        return logits if self.config.logit_scale == 1 else logits * self.config.logit_scale

    def named_weights(self, part: str = "") -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors whose names in the checkpoint contain `part`. Parts of fused projections are views."""
        if part in "model.embed_tokens.weight":
            yield "model.embed_tokens.weight", self.embedding.weight
        for number, module in enumerate(self.layers):
            layer = cast(DecoderLayer, module)
            for projection, parts in self.config.projections(number).items():
                fused: PackedLinear = getattr(layer, projection)
                sizes = [outputs for _, outputs in parts]
                for kind in ("weight", "bias"):
                    names = [f"{name}.{kind}" for name, _ in parts]
                    if any(part in name for name in names) and (whole := getattr(fused, kind)) is not None:
                        tensors = zip(names, whole.split(sizes), strict=True)
                        yield from ((name, tensor) for name, tensor in tensors if part in name)
            others = {name: layer.given[role] for role, name in self.config.norms(number).items()}
            yield from ((name, tensor) for name, tensor in (others | layer.others).items() if part in name)
        if self.config.layer_input_size:
            tables = {LAYER_INPUT_TABLE: self.input_table, LAYER_INPUT_PROJECTION: self.input_projection}
            yield from ((name, table.weight) for name, table in tables.items() if part in name)
            if part in LAYER_INPUT_NORM:
                yield LAYER_INPUT_NORM, self.input_norm.given[0]
        if part in self.config.last_norm:
            yield self.config.last_norm, self.norm.given[0]
        if not self.config.tied_head and part in "lm_head.weight":
            yield "lm_head.weight", self.head.weight
