"""The flow-map draft network: DFlash whose positions hold points between noise and the embeddings of tokens.

At time s, the state of a block is `(1 - s) * noise + s * embeddings of its tokens`. A pass is a jump from s to a later
time t: the network predicts the tokens, and the state moves towards the mean of their embeddings (flow maps, arXiv
2602.16813, there over one-hot tokens). The noise decides which of the probable continuations all positions of a block
move to. So the draft tokens of a block agree with each other, and each has an exact distribution given the noise, as
verification needs.

A new network ignores states and times: it computes the same as the v1 network in it. Torch's operations run it on all
backends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.nn.draft_config import DraftConfig


@dataclass(frozen=True, kw_only=True)
class FlowConfig(DraftConfig):
    """Configuration of a flow-map drafter: DFlash v1 whose passes move noise to the embeddings of tokens."""

    noise_std: float  # standard deviation of the noise, in units of the target's embedding table
    diffusion_steps: int = 1  # passes of a block, unless decoding asks for another number


FREQUENCIES = 32  # of the sines and cosines of a time
TIME_FEATURES = 4 * FREQUENCIES  # cos and sin of both times
LIKELY = 16  # most probable tokens of a position, whose embeddings are averaged
POSITIONS = 1024  # positions with their own noise; further positions repeat it
NOISE_SEED = 0


@cache
def position_noise(size: int) -> Tensor:
    """Return noise of standard deviation 1 by position modulo `POSITIONS`, `[POSITIONS, H]` float32 on the CPU.

    It is always the same, so that the draft of a sequence does not depend on its neighbours in a batch.
    """
    return torch.randn(POSITIONS, size, generator=torch.Generator().manual_seed(NOISE_SEED))


def moved(state: Tensor, clean: Tensor, begin: Tensor | float, end: Tensor | float) -> Tensor:
    """Return states after a jump between two times towards `clean`, the mean embeddings of tokens; `[..., H]` each."""
    return ((1 - end) * state + (end - begin) * clean) / (1 - begin)


def mean_embedding(logits: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the mean embedding `[..., H]` of the `LIKELY` most probable tokens of logits `[..., V]`."""
    best = logits.float().topk(min(LIKELY, logits.size(-1)), dim=-1)
    probs, tokens = best.values.softmax(dim=-1).unbind(-1), best.indices.unbind(-1)
    terms = (prob.unsqueeze(-1) * embed(token).float() for prob, token in zip(probs, tokens, strict=True))
    return sum(terms, torch.zeros((), device=logits.device))


class FlowNetwork(DFlashNetwork):
    """DFlash v1 that also reads states and the times of a jump. Parameters of v1 keep their names."""

    config_class: type[DraftConfig] = FlowConfig
    config: FlowConfig

    def __init__(self, config: FlowConfig) -> None:
        super().__init__(config)
        self.description = replace(self.description, torch_only="flow maps")
        self.state_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.time_proj = nn.Linear(TIME_FEATURES, config.hidden_size, bias=False)
        nn.init.zeros_(self.state_proj.weight)
        nn.init.zeros_(self.time_proj.weight)

    def entering(self, state: Tensor, begin: Tensor, end: Tensor) -> Tensor:
        """Return what positions with these states add to the mask's embedding, `[..., H]`.

        Args:
            state: `[..., H]`, in units of the embedding table.
            begin, end: Times of the jump, `[..., 1]`.
        """
        weight = self.time_proj.weight
        steps = math.pi * torch.arange(1, 1 + FREQUENCIES, device=weight.device)
        angles = torch.cat([begin, end], dim=-1).unsqueeze(-1) * steps
        times = torch.cat([angles.cos(), angles.sin()], dim=-1).flatten(-2)
        # Normed, because states near the noise and near tokens differ in size.
        normed = F.rms_norm(state.float(), (state.size(-1),)).to(weight.dtype)
        added: Tensor = self.state_proj(normed) + self.time_proj(times.to(weight.dtype))
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
            passes: Number of jumps.
            share: Function from the completed share of jumps to the time, both from 0 to 1.
            run: The layers: from the addition to the mask's embedding to hidden states, `[..., H]` each.
            clean: Function from hidden states to the mean embeddings of the predicted tokens, `[..., H]` each.

        Returns:
            Hidden states of the last pass, `[..., H]`.
        """
        state = self.config.noise_std * noise
        *jumps, last = pairwise(state.new_tensor([share(step / passes)]) for step in range(passes + 1))
        for begin, end in jumps:
            state = moved(state, clean(run(self.entering(state, begin, end))), begin, end)
        return run(self.entering(state, *last))
