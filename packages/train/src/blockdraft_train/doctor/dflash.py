"""Checks of the DFlash family: target layers, positions, mask token, windows, causality, rotary base, precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.drafters.dflash2.network import DFlash2Config, DFlash2Network
from blockdraft.drafters.dspark.network import DSparkConfig, DSparkNetwork
from blockdraft.formats import Checkpoint
from blockdraft.nn.draft_config import DraftConfig, LayerAttention
from blockdraft.nn.layers import ReducedHead
from blockdraft.targets import Target
from blockdraft_train.dflash_pass import draft_hidden
from blockdraft_train.doctor.checks import (
    CHUNK,
    Assumption,
    Checker,
    Text,
    neighbour_target_layers,
    precision,
    rope,
    variant_of,
)
from blockdraft_train.mask_token import usual_mask_tokens
from blockdraft_train.objectives import Slots
from blockdraft_train.variant import find_variant

WINDOWS = (32, 128, 512, 1024, 2048, 4096)  # windows to try, if shorter than the texts


class DFlashChecker(Checker):
    examines: ClassVar[type[DraftConfig]] = DraftConfig
    network: ClassVar[type[DFlashNetwork]] = DFlashNetwork
    config: DraftConfig

    def __init__(self, target: Target, checkpoint: Checkpoint) -> None:
        super().__init__(target, checkpoint)
        variant: Any = find_variant(variant_of(self.network))
        self._variant = variant(variant.recipe_class(block_size=self.block_size))
        self._first_slot = int(self._variant.first_slot)
        borrowed, self._head = checkpoint.borrowed, target.head
        if borrowed is not None and borrowed.kept is not None and borrowed.head is not None:
            reduced = ReducedHead(borrowed.head, borrowed.kept, target.vocab_size)
            self._head = reduced.to(target.device, target.dtype)

    def checks(self, longest: int) -> Iterator[Assumption]:
        target = self.target
        masks = usual_mask_tokens(target)
        return checks(self.config, self._first_slot, target.shape, target.dtype, longest, masks)

    @torch.no_grad()
    def right(self, check: Assumption, texts: Sequence[Text]) -> Tensor:
        """Return whether each position's most probable token is right, independent of the others."""
        count = max(1, self.block_size - 2)
        first = self._first_slot - check.shift
        network = self._network(check)
        return torch.cat(
            [
                (logits[:, first : first + count].argmax(dim=-1) == tokens[:, 1:]).long().cpu()
                for text in texts
                for _, logits, tokens in self._passes(network, check, *text, count)
            ]
        )

    @torch.no_grad()
    def lengths(self, tokens: Tensor, anchors: Sequence[int]) -> list[int]:
        check, count = Assumption(self.config), self._variant.taught_slots
        slots, lengths = slice(self._first_slot, self._first_slot + count), list[int]()
        network = self._network(check)
        for hidden, logits, text in self._passes(network, check, tokens, anchors, count):
            taught = Slots(hidden[:, slots], logits[:, slots], text.clamp(min=0), text[:, 1:] >= 0)
            right = self._variant.draft_tokens(network, taught) == text[:, 1:]
            lengths += right.long().cumprod(dim=1).sum(dim=1).tolist()
        return lengths

    def _network(self, check: Assumption) -> DFlashNetwork:
        dtype = check.dtype or self.target.dtype
        network = self.network(check.config).to(self.target.device, dtype).eval()
        network.load_state_dict(self.checkpoint.tensors)  # casts
        return network

    def _passes(
        self, network: DFlashNetwork, check: Assumption, tokens: Tensor, anchors: Sequence[int], count: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield hidden states `[C, N, H]`, logits `[C, N, V]` and tokens `[C, 1 + count]` of up to C anchors at a time.

        The tokens are the anchor and the `count` tokens after it, -1 after the end of the text.
        """
        target = self.target
        dtype, device = next(network.parameters()).dtype, target.device
        hidden_states = self.hidden_states(check.target_layers or self.config.target_layers, tokens).to(dtype)[None]
        padded = torch.cat([tokens, tokens.new_full((count,), -1)]).to(device)
        mask = target.embed(torch.tensor(network.config.mask_token_id, device=device)).to(dtype)
        places = torch.arange(len(tokens), device=device)[None]
        for chunk in torch.tensor(anchors, dtype=torch.int64, device=device).split(CHUNK):
            embedded = target.embed(padded[chunk]).to(dtype)[None]
            documents = torch.zeros_like(places)
            hidden = draft_hidden(network, hidden_states, documents, places, chunk[None], embedded, mask)[0]
            logits = network.adjust_logits(self._head(hidden.to(target.dtype)))
            yield hidden, logits, torch.stack([padded[chunk + k] for k in range(count + 1)], dim=1)


def checks(
    config: DraftConfig,
    first_slot: int,
    shape: Mapping[str, Any],
    dtype: torch.dtype,
    longest: int,
    masks: Sequence[int] = (),
) -> Iterator[Assumption]:
    """Yield all checks, the first of them with the drafter's own configuration.

    Args:
        first_slot: Position that predicts the token after the anchor.
        shape: `Target.shape`.
        dtype: Dtype of the target.
        longest: Number of tokens of the longest text.
        masks: Mask tokens to try.
    """
    yield Assumption(config)
    yield from neighbour_target_layers(config)
    for slot in {0, 1, 2} - {first_slot}:
        assumption = f"position {slot} drafts the token after the anchor, instead of position {first_slot}"
        remedy = (
            "Give the drafter the architecture, or the shift_label and sample_from_anchor, that it was trained with: "
            "position 0 drafts first in DSpark, position 1 in DFlash."
        )
        yield Assumption(config, fault="shift", assumption=assumption, remedy=remedy, shift=first_slot - slot)
    for token in masks:
        if token != config.mask_token_id:
            assumption = f"mask token {token} in place of {config.mask_token_id}"
            remedy = f"Set mask_token_id in config.json to {token}."
            yield Assumption(replace(config, mask_token_id=token), fault="mask", assumption=assumption, remedy=remedy)
    yield from _attention(config, longest)
    yield from rope(config, shape)
    yield from precision(config, dtype)


def _attention(config: DraftConfig, longest: int) -> Iterator[Assumption]:
    """Yield checks with other windows and other causality."""
    windows = {layer.window for layer in config.layers} - {None}
    seen = {config.layers}
    for window in (None, *(window for window in WINDOWS if window < longest)):
        for causal in (False, True, None):
            if window is None and causal is None:
                continue
            # None is vLLM's default: sliding layers are causal, full ones are not. If the configuration has
            # windows, only its sliding layers get one here.
            slides = [layer.window is not None or not windows for layer in config.layers]
            layers = tuple(
                LayerAttention(slide if causal is None else causal, window if slide else None) for slide in slides
            )
            if layers in seen:
                continue
            seen.add(layers)
            same_windows = [layer.window for layer in layers] == [layer.window for layer in config.layers]
            where = "full attention" if window is None else f"a sliding window of {window} tokens"
            how = {True: "causal", False: "bidirectional", None: "causal where it slides"}[causal]
            remedy = "Write layer_types, sliding_window and is_causal into config.json as it was trained."
            fault = "causality" if same_windows else "window"
            yield Assumption(
                replace(config, layers=layers), fault=fault, assumption=f"{where}, {how} inside a block", remedy=remedy
            )
    for causal in (False, True):
        layers = tuple(replace(layer, causal=causal) for layer in config.layers)
        if layers not in seen:
            seen.add(layers)
            assumption = f"the same windows, {'causal' if causal else 'bidirectional'} inside a block"
            remedy = f"Write is_causal: {str(causal).lower()} into config.json."
            yield Assumption(replace(config, layers=layers), fault="causality", assumption=assumption, remedy=remedy)


class DFlash2Checker(DFlashChecker):
    examines = DFlash2Config
    network = DFlash2Network


class DSparkChecker(DFlashChecker):
    examines = DSparkConfig
    network = DSparkNetwork


CHECKERS = (DFlashChecker, DFlash2Checker, DSparkChecker)
