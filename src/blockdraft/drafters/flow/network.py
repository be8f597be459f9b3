"""The flow-map draft network: DFlash whose slots hold points of the embedding space, on their way from noise to tokens.

A block at time s lies at `(1 - s) * noise + s * embeddings of its tokens`. A pass over it is a jump from s to a later
time t: it guesses the tokens, and the block moves towards the mean of their embeddings (flow maps, arXiv 2602.16813,
there over one-hot tokens). The noise that a block begins with settles which of the likely texts all its slots go to.
So guesses may know of each other, and each slot's distribution given the noise is exact, which is all that verification
needs.

A new network leaves states and times out of account: it computes what the v1 network in it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.nn.draft_config import DraftConfig


@dataclass(frozen=True, kw_only=True)
class FlowConfig(DraftConfig):
    """A flow-map draft model: DFlash v1 whose slots hold noise that its passes carry to the embeddings of tokens."""

    noise_std: float  # of the noise, in units of the target's embedding table
    diffusion_steps: int = 1  # passes of a block, unless decoding asks for another number


FREQUENCIES = 32  # by which a time is told from others
TIME_FEATURES = 4 * FREQUENCIES  # cos and sin of both times
LIKELY = 16  # tokens of a slot whose embeddings are averaged
PLACES = 1024  # positions of a text with noise of their own; behind them the same comes again
NOISE_SEED = 0


@cache
def place_noise(size: int) -> Tensor:
    """Noise of standard deviation 1 by position modulo `PLACES`, `[PLACES, H]` float32 on the CPU, always the same: a
    text is drafted alike each time, whatever its neighbours."""
    return torch.randn(PLACES, size, generator=torch.Generator().manual_seed(NOISE_SEED))


def moved(state: Tensor, clean: Tensor, begin: Tensor | float, end: Tensor | float) -> Tensor:
    """Where a jump between two times carries states that are on their way to `clean`."""
    return ((1 - end) * state + (end - begin) * clean) / (1 - begin)


def mean_embedding(logits: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
    """Mean of the embeddings of each slot's `LIKELY` likeliest tokens, weighted by how likely they are, `[..., H]`."""
    best = logits.float().topk(min(LIKELY, logits.size(-1)), dim=-1)
    chances, tokens = best.values.softmax(dim=-1).unbind(-1), best.indices.unbind(-1)
    shares = (chance.unsqueeze(-1) * embed(token).float() for chance, token in zip(chances, tokens, strict=True))
    return sum(shares, torch.zeros((), device=logits.device))


class FlowNetwork(DFlashNetwork):
    """DFlash v1 that is told a slot's state and the times of the jump. What has v1's parameter names is v1's."""

    config_class: type[DraftConfig] = FlowConfig
    config: FlowConfig

    def __init__(self, config: FlowConfig) -> None:
        super().__init__(config)
        self.state_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.time_proj = nn.Linear(TIME_FEATURES, config.hidden_size, bias=False)
        nn.init.zeros_(self.state_proj.weight)
        nn.init.zeros_(self.time_proj.weight)

    def entering(self, state: Tensor, begin: Tensor, end: Tensor) -> Tensor:
        """What is added to the mask's embedding in slots of these states, `[..., H]`.

        Args:
            state: `[..., H]`, in units of the embedding table.
            begin, end: Times of the jump, `[..., 1]`.
        """
        weight = self.time_proj.weight
        steps = math.pi * torch.arange(1, 1 + FREQUENCIES, device=weight.device)
        angles = torch.cat([begin, end], dim=-1).unsqueeze(-1) * steps
        times = torch.cat([angles.cos(), angles.sin()], dim=-1).flatten(-2)
        # Normed, since near noise and near tokens states are of different size.
        seen = F.rms_norm(state.float(), (state.size(-1),)).to(weight.dtype)
        added: Tensor = self.state_proj(seen) + self.time_proj(times.to(weight.dtype))
        return added

    def denoised(
        self,
        noise: Tensor,
        passes: int,
        share: Callable[[float], float],
        run: Callable[[Tensor], Tensor],
        clean: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Jump from noise to tokens.

        Args:
            noise: `[..., H]` of standard deviation 1.
            passes: How many jumps there are.
            share: The time after a share of them, from 0 to 1.
            run: The layers, of what is added to the mask's embedding to what comes out of the slots.
            clean: The mean embedding that such outputs guess.

        Returns:
            What comes out of the slots in the last pass.
        """
        state = self.config.noise_std * noise
        *jumps, last = pairwise(state.new_tensor([share(step / passes)]) for step in range(passes + 1))
        for begin, end in jumps:
            state = moved(state, clean(run(self.entering(state, begin, end))), begin, end)
        return run(self.entering(state, *last))
