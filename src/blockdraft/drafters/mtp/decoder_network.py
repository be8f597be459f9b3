"""Network of the MTP heads in GGUF files: an `MTPHead` around a layer of the native decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from blockdraft.drafters.mtp.network import MTPHead
from blockdraft.nn.decoder import rope_angles, rope_frequencies
from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.nn.decoder_layer import DecoderLayer
from blockdraft.nn.draft_network import Attend
from blockdraft.nn.packed import PackedLinear


@dataclass(frozen=True)
class DecoderMTPConfig:
    """Configuration of an MTP head in a GGUF file.

    Attributes:
        decoder: Configuration of the decoder with the head's layer as its last.
        block_size: Tokens per path, anchor included; files do not state it.
        normed_feedback: Whether the next step reads the output of the last norm.
    """

    decoder: DecoderConfig
    block_size: int = 8
    normed_feedback: bool = True

    @property
    def hidden_size(self) -> int:
        return self.decoder.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    @property
    def rms_norm_eps(self) -> float:
        return self.decoder.norm_eps

    @property
    def num_key_value_heads(self) -> int:
        return self.decoder.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.decoder.head_dim

    @property
    def target_layers(self) -> tuple[int, ...]:
        """The input of the target's head, as `Target.forward` names it."""
        return (len(self.decoder.layers) - 1,)


class DecoderMTPNetwork(MTPHead):
    """MTP head whose weights are already on the target's device, and which cannot be trained.

    Args:
        decoder: Configuration of the decoder with the head's layer as its last.
        layer: The head's layer.
        fc: Projection of embedding and hidden state.
        norms: Weights of the norms by name.
    """

    config: DecoderMTPConfig

    def __init__(
        self, decoder: DecoderConfig, layer: DecoderLayer, fc: PackedLinear, norms: Mapping[str, Tensor]
    ) -> None:
        with torch.device("meta"):
            super().__init__(DecoderMTPConfig(decoder), lambda: layer, packed_decoder=True)
        self.fc = fc  # type: ignore[assignment]
        for name, weight in norms.items():
            self.get_submodule(name).register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        self._frequencies = rope_frequencies(decoder).to(next(iter(norms.values())).device)

    @property
    def layer(self) -> DecoderLayer:
        """The only layer."""
        return cast(DecoderLayer, self.layers[0])

    def _heads(self, entries: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        layer = self.layer
        angles = rope_angles(self.config.decoder, self._frequencies, positions, entries.dtype)[layer.rope]
        return layer.heads(layer.before_attention(entries.flatten(0, 1)), *angles, len(entries))

    def keys_values(
        self, embedded: Tensor, hidden_state: Tensor, positions: Tensor, attend: Attend | None = None
    ) -> tuple[Tensor, Tensor]:
        _, new, _ = self._heads(self.entries(embedded, hidden_state)[0], positions)
        return self._stored(new)

    def _stored(self, new: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values in a result of `_heads`, which are the same with latent attention."""
        new = new.transpose(1, 2)
        keys, values = (new, new) if self.config.decoder.latent is not None else new.chunk(2, dim=1)
        return keys, values

    def forward(
        self, embedded: Tensor, positions: Tensor, attend: Attend, hidden_state: Tensor | None = None
    ) -> Tensor:
        (entries, _), layer = self.entries(embedded, hidden_state), self.layer
        queries, new, gate = self._heads(entries, positions)
        factor = self.config.decoder.query_scale * self.config.head_dim**0.5  # `attend` divides by the root
        attended = attend(0, queries.transpose(1, 2) * factor, *self._stored(new))
        x = entries.flatten(0, 1) + layer.attended(attended.transpose(1, 2), gate)
        return (x + layer.feed_forward(x)).view_as(entries)

    def to(self, *args: Any, **kwargs: Any) -> DecoderMTPNetwork:
        """Return the network, whose weights are in place. Norms of the layer are float32 beside any dtype."""
        return self
