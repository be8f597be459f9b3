"""Training of flow maps (arXiv 2602.16813, there over one-hot tokens), which move noise to the embeddings of a block.

Some blocks learn from the data, by the recipe's objectives: their state is between noise and the embeddings of the
data, and they learn to predict the tokens. The other blocks learn to jump from a time s to a later time t as far as two
shorter jumps, from s to some m and on to t. The present network makes the shorter jumps, without a gradient. The longer
jump learns a mixture of their token distributions, whose mean embedding leads to the same state.

Training metrics include blocks with little noise. Metrics of held-out documents are of drafting from pure noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from blockdraft.drafters.base import NOISE_SCHEDULE, NOISE_SCHEDULES
from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.settings import Count, settings
from blockdraft.targets import Target
from blockdraft_diffusion.flow.network import POSITIONS, FlowNetwork, mean_embedding, moved, position_noise
from blockdraft_train.batches import PackedSequences, generator
from blockdraft_train.objectives import Slots
from blockdraft_train.recipe import Recipe
from blockdraft_train.variants.dflash import DFlashFamily, DFlashRecipe

MEASURED_TOKENS = 4096  # tokens whose embeddings determine the strength of the noise
LATEST = 0.99  # latest time, of 1, at which a jump begins
JUMP = "jump"


@settings
class FlowRecipe(DFlashRecipe):
    """Recipe of a flow map: that of DFlash and these fields."""

    diffusion_steps: Count = Field(
        1,
        description="Draft passes of a block, unless decoding asks for another number. Training does not depend on it.",
    )
    jumps: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.5,
        description="Share of the blocks that learn to jump; the others learn from the data.",
    )


class Moments(NamedTuple):
    """Random noise and times of blocks.

    Attributes:
        noise_BAKH: Noise of standard deviation 1.
        begin_BA11, middle_BA11, end_BA11: Times of a jump and of the end of its first part; equal if a block learns
            from the data.
        second_BA11: Share of the second part's distribution in the mixture that the jump learns; -1 if a block learns
            from the data.
    """

    noise_BAKH: Tensor
    begin_BA11: Tensor
    middle_BA11: Tensor
    end_BA11: Tensor
    second_BA11: Tensor


class FlowVariant(DFlashFamily[FlowRecipe, FlowNetwork]):
    recipe_class: ClassVar[type[Recipe]] = FlowRecipe
    free_fields: ClassVar[frozenset[str]] = DFlashFamily.free_fields | {"diffusion_steps"}
    network_class: type[DFlashNetwork] = FlowNetwork
    own_modules = ("state_proj", "time_proj")

    def is_quantized(self, name: str) -> bool:
        return False  # torch's operations run it

    def own_config(self, target: Target) -> Mapping[str, Any]:
        return {"noise_std": noise_std(target), "diffusion_steps": self.recipe.diffusion_steps}

    def factors(self) -> Mapping[str, float]:
        return {**super().factors(), JUMP: 1.0}

    def hidden(
        self, network: FlowNetwork, target: Target, hidden_states_BSF: Tensor, sequences: PackedSequences
    ) -> Tensor:
        """Return, in evaluation, the drafter's hidden states `[B, A, K, H]`.

        In training, return those of three passes, the one that learns and the two parts of its jump, and `second_BA11`:
        `[B, A, K, 3 * H + 1]`.
        """
        over_blocks = self.pass_over_blocks(network, target, hidden_states_BSF, sequences)

        def run(added: Tensor) -> Tensor:
            return over_blocks(added)[:, :, 1:]

        def clean(hidden: Tensor) -> Tensor:
            chunks = hidden.flatten(0, 1).split(self.recipe.chunk)
            means = [mean_embedding(self.logits(network, target, chunk), target.embed) for chunk in chunks]
            return torch.cat(means).view(hidden.shape)

        if not network.training:
            passes, share = self.recipe.diffusion_steps, NOISE_SCHEDULES[NOISE_SCHEDULE]
            return network.denoised(self._own_noise(sequences, target), passes, share, run, clean)
        noise, begin, middle, end, second = self.moments(sequences, target.hidden_size)
        data = target.embed(sequences.tokens_BAL[:, :, 1:]).float()
        state = moved(network.config.noise_std * noise, data, 0.0, begin)
        hidden = run(network.entering(state, begin, end))
        with torch.no_grad():
            first = run(network.entering(state, begin, middle))
            then = moved(state, clean(first), begin, middle)
            other = run(network.entering(then, middle, end))
        return torch.cat([hidden, first, other, second.expand(*hidden.shape[:-1], 1)], dim=-1)

    def logits(self, network: FlowNetwork, target: Target, hidden_CKH: Tensor) -> Tensor:
        """Return, in training, the logits and the probabilities that a jump learns, `[C, K, 2 * V]`."""
        size = network.config.hidden_size
        if hidden_CKH.size(-1) == size:
            return super().logits(network, target, hidden_CKH)
        hidden, first, other, second = hidden_CKH.split([size, size, size, 1], dim=-1)
        score = super().logits
        with torch.no_grad():
            first_probs, second_probs = (
                score(network, target, states).float().softmax(dim=-1) for states in (first, other)
            )
            taught = torch.lerp(first_probs, second_probs, second.clamp(min=0).float())
        return torch.cat([score(network, target, hidden).float(), taught], dim=-1)

    def losses(self, network: FlowNetwork, slots: Slots) -> dict[str, Tensor]:
        own, *taught = slots.logits_CKV.split(network.config.vocab_size, dim=-1)
        losses = super().losses(network, replace(slots, logits_CKV=own))
        if not taught:
            return {**losses, JUMP: torch.zeros_like(slots.taught_CK, dtype=torch.float32)}
        jumps = slots.hidden_CKH[..., -1] >= 0
        losses = {name: loss.masked_fill(jumps, 0) for name, loss in losses.items()}
        jump_loss = -(taught[0] * own.float().log_softmax(dim=-1)).sum(dim=-1)
        return {**losses, JUMP: jump_loss.masked_fill(~jumps, 0)}

    def draft_tokens(self, network: FlowNetwork, slots: Slots) -> Tensor:
        return slots.logits_CKV[..., : network.config.vocab_size].argmax(dim=-1)

    def _own_noise(self, sequences: PackedSequences, target: Target) -> Tensor:
        """Return the drafter's noise at the positions after each anchor, `[B, A, K, H]`."""
        first_BA1 = sequences.positions_BS.gather(1, sequences.anchors_BA.clamp(min=0)).unsqueeze(-1)
        places = first_BA1 + torch.arange(1, sequences.tokens_BAL.size(2), device=first_BA1.device)
        return position_noise(target.hidden_size).to(places.device)[places % POSITIONS]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def moments(self, sequences: PackedSequences, size: int) -> Moments:
        """Draw moments from the seed, a sequence's tokens and its anchors alone, so that a resumed run has the same."""
        device, (blocks, slots) = sequences.anchors_BA.device, sequences.taught_BAK.shape[1:]
        order = torch.arange(1, 1 + blocks, device=device)
        texts, anchors = sequences.tokens_BS.sum(dim=1), ((1 + sequences.anchors_BA) * order).sum(dim=1)
        noise, uniforms = [], []
        for text, anchor in torch.stack([texts, anchors], dim=1).tolist():
            seed = generator(self.recipe.seed, text, anchor).initial_seed()
            random = torch.Generator(device).manual_seed(seed)
            noise.append(torch.randn(blocks, slots, size, generator=random, device=device))
            uniforms.append(torch.rand(6, blocks, generator=random, device=device))
        jumps, from_noise, to_tokens, early, far, part = torch.stack(uniforms, dim=1)[..., None, None]
        # Half of all blocks begin at pure noise, and half of the jumps end at the tokens, as in drafting.
        begin = LATEST * torch.where(from_noise < 0.5, 0.0, early)
        end = torch.where(to_tokens < 0.5, 1.0, begin + (1 - begin) * far)
        middle = begin + (end - begin) * LATEST * part
        second = (1 - LATEST * part) * (1 - begin) / (1 - middle)
        is_jump = jumps < self.recipe.jumps
        times = begin, torch.where(is_jump, middle, begin), torch.where(is_jump, end, begin)
        return Moments(torch.stack(noise), *times, torch.where(is_jump, second, -1.0))


@torch.no_grad()
def noise_std(target: Target) -> float:
    """Return the standard deviation of noise at which, half-way to the tokens, a token is just distinguishable.

    Two embeddings of H numbers of standard deviation d lie about `d * sqrt(2 H)` apart. Half-way to the tokens, noise
    and embeddings have equal weight. There, noise of standard deviation `d / 2 * sqrt(H / ln V)` just carries a point
    over half of that distance towards one of V others.
    """
    sample = torch.linspace(0, target.vocab_size - 1, MEASURED_TOKENS, device=target.device).long().unique()
    embeddings = target.embed(sample).float()
    spread = float((embeddings - embeddings.mean(dim=0)).square().mean().sqrt())
    return float(f"{spread / 2 * math.sqrt(target.hidden_size / math.log(target.vocab_size)):.4g}")


VARIANT = FlowVariant
