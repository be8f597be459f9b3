"""One decoder for the Llama, Mistral, Qwen and Gemma families, written for decoding speed.

What differs between the families lies in `DecoderConfig`; tensors go by the names that their checkpoints share. The
experts of a layer lie in one tensor, so that they are read, named and kept like any other product. In some layers of
hybrids a gated delta net stands in the place of attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.nn.decoder_layer import DecoderLayer, Norm, Read, ReadFused, joining, plain
from blockdraft.nn.delta_net import DeltaRecurrence, GatedDeltaNet
from blockdraft.nn.exact import ExactAttention
from blockdraft.nn.packed import PackedLinear


def rope_frequencies(config: DecoderConfig) -> Tensor:
    """Frequencies [-f, f] of each of `config.ropes`, `[ropes, R]` for the R numbers of each head that are rotated: with
    them one cosine and one sine give cos and the signed sine of both halves. They are float32 in every dtype: rounded
    to bfloat16, positions blur."""
    halves = torch.tensor([rope.inverse_frequencies for rope in config.ropes], dtype=torch.float32)
    return torch.cat([-halves, halves], dim=1)


def rope_angles(
    config: DecoderConfig, frequencies: Tensor, positions: Tensor, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """cos and signed sin of the positions `[B, N]`, each `[B, N, 1, R]`, for each of `config.ropes`."""
    found = []
    for rope, own in zip(config.ropes, frequencies, strict=True):
        angles = (positions.unsqueeze(-1) * own).unsqueeze(-2)
        cos, sin = angles.cos(), angles.sin()
        if rope.scale != 1:
            cos, sin = cos * rope.scale, sin * rope.scale
        found.append((cos.to(dtype), sin.to(dtype)))
    return found


class Decoder(nn.Module):
    """A decoder over a store of keys and values that its caller keeps.

    `forward` is a pure function of its arguments but for the nodes that it writes into `stores`. Without experts it
    takes no branch on the numbers in tensors, so that it can be compiled: shapes alone decide what it does.

    Args:
        config: Its shape.
        read: Gives the tensors of `config.tensor_shapes()`, one at a time; only the fused ones are kept.
        fused: Gives the matrices of `config.products()` instead, where they come otherwise, such as laid out.
    """

    def __init__(self, config: DecoderConfig, read: Read, fused: ReadFused | None = None) -> None:
        super().__init__()
        self.config = config
        fused = fused or joining(read)
        self.embedding = PackedLinear(fused(["model.embed_tokens.weight"]))
        self.layers = nn.ModuleList(DecoderLayer(config, layer, read, fused) for layer in range(len(config.layers)))
        self.norm = Norm(config, [plain(read("model.norm.weight"))])
        self.head = self.embedding if config.tied_head else PackedLinear(fused(["lm_head.weight"]))
        for module in self.modules():
            if isinstance(module, PackedLinear):
                module.dtype = self.dtype
        # Rounded to the dtype of the weights, as the models were trained.
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
        """Memory that its weights take."""
        norms = (module for module in self.modules() if isinstance(module, Norm))
        products = (module for module in self.modules() if isinstance(module, PackedLinear))
        nets = (module for module in self.modules() if isinstance(module, GatedDeltaNet))
        others = sum(each.weight.nbytes for each in norms) + sum(each.nbytes for each in nets)
        return sum(each.nbytes for each in products) + others

    @property
    def bits(self) -> int | None:
        """Of the weights of its layers, where these are few: the fewest."""
        found = (module.bits for layer in self.layers for module in layer.modules() if isinstance(module, PackedLinear))
        return min((bits for bits in found if bits is not None), default=None)

    @property
    def rounded(self) -> str | None:
        """How the weights of its layers are rounded, as in `PackedLinear`."""
        return cast(DecoderLayer, self.layers[0]).qkv.rounded

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        masks: Sequence[Tensor | ExactAttention | None],
        stores: Sequence[Tensor | DeltaRecurrence],
        taps: Sequence[int] = (),
        logits_at: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Score N nodes a row, and write their keys and values.

        A caller that compiles it may pad: to more nodes, whose slots must be free and differ, and whose outputs mean
        nothing; and to more slots T, which the masks hide.

        Args:
            tokens: `[B, N]` int64.
            positions: `[B, N]` int64, or `[1, N]` where the rows share them.
            slots: Where the nodes are written, `[B, N]` int64, or `[N]` where the rows share them.
            masks: One for each of `config.windows`, `[B or 1, 1, groups * N, T]` as `attend_grouped` takes it. Or the
                attention of a piece, which knows its slots; then B is 1 and stores hold the slots of all rows.
            stores: One a layer, `[B, 2 * num_kv_heads, T, D]`, keys before values; of a recurrent layer its recurrence.
            taps: Layers whose outputs are wanted; the number of layers stands for the input of the head.
            logits_at: `[B]` int64, the one node of each row whose logits are wanted; `[0]` if none are.

        Returns:
            Logits `[B, N, V]`, or `[B, 1, V]` with `logits_at`; and features `[B, N, m * H]`, None without taps.
        """
        config, (batch, count) = self.config, tokens.shape
        x = self.embedding.rows(tokens.reshape(-1))  # rows [B * N, H], the shape in which products cost least
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        angles = rope_angles(config, self.frequencies, positions, x.dtype)
        outputs = []
        for layer, store in zip(self.layers, stores, strict=True):
            x = layer(x, angles, slots, masks, store)
            outputs.append(x)
        x = self.norm(x)
        outputs.append(x)
        features = torch.cat([outputs[tap] for tap in taps], dim=-1).view(batch, count, -1) if taps else None
        if logits_at is not None:
            x = x[torch.arange(0, batch * count, count, device=x.device) + logits_at]
        logits: Tensor = self.head(x).view(batch, -1, config.vocab_size)
        cap = config.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap, features

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors as the checkpoint names them; those of fused projections are views."""
        yield "model.embed_tokens.weight", self.embedding.weight
        for number, module in enumerate(self.layers):
            layer = cast(DecoderLayer, module)
            for projection, parts in self.config.projections(number).items():
                fused: PackedLinear = getattr(layer, projection)
                sizes = [rows for _, rows in parts]
                for kind, whole in (("weight", fused.weight), ("bias", fused.bias)):
                    if whole is not None:
                        for (name, _), part in zip(parts, whole.split(sizes), strict=True):
                            yield f"{name}.{kind}", part
            for role, name in self.config.norms(number).items():
                yield name, layer.given[role]
            if layer.delta_net is not None:
                yield from zip(self.config.delta_tensors(number), layer.delta_net.given.values(), strict=True)
        yield "model.norm.weight", self.norm.given[0]
        if not self.config.tied_head:
            yield "lm_head.weight", self.head.weight
