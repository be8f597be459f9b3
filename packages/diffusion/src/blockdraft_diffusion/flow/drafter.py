"""Flow map as drafter: DFlash that starts from noise instead of masks and reaches tokens in one pass or a few.

The noise of a position is always the same, so the same sequence gets the same draft. Given the noise, each draft token
has its own distribution, which is q. Chains, sampled chains and trees are those of DFlash.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from blockdraft.decode.proposal import Plan
from blockdraft.drafters.base import NOISE_SCHEDULES, DrafterSpec
from blockdraft.drafters.dflash.drafter import DFlashDrafter, load_dflash
from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.machine import send
from blockdraft.nn.cache import KVCache
from blockdraft.nn.torch_runner import TorchDraftRunner
from blockdraft.targets import Target
from blockdraft.timing import HEAD, PASS, mark
from blockdraft_diffusion.flow.network import POSITIONS, FlowConfig, FlowNetwork, mean_embedding, position_noise


class FlowDrafter(DFlashDrafter):
    """Drafts with a flow map.

    Each diffusion step is a jump between two times of the noise schedule. The checkpoint states the default number of
    steps.
    """

    network: FlowNetwork
    config: FlowConfig
    network_class: type[DFlashNetwork] = FlowNetwork

    @cached_property
    def noise(self) -> Tensor:
        return position_noise(self.config.hidden_size).to(self.target.device)

    @cached_property
    def _mask(self) -> Tensor:
        return self.target.embed(self._masks[0, 0])

    def refined_pass(self, state: KVCache, anchor: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        network, target, runner = self.network, self.target, cast(TorchDraftRunner, self.runner)
        head, embedded = self.reduced_head or target.draft_head or target.head, target.embed(anchor)[:, None]

        def run(added: Tensor) -> Tensor:
            slots = (self._mask + added).to(embedded.dtype)
            hidden = runner.block_pass(state, torch.cat([embedded, slots], dim=1), plan.draft_window)[:, 1:]
            mark(PASS)
            return hidden

        def scored(hidden: Tensor) -> Tensor:
            logits = network.adjust_logits(head(hidden))
            mark(HEAD)
            return logits

        places = torch.tensor(state.lengths)[:, None] + torch.arange(1, plan.block_size)
        noise = self.noise[send(places % POSITIONS, anchor.device)]
        passes, share = plan.draft_passes or self.config.diffusion_steps, NOISE_SCHEDULES[self.noise_schedule]
        hidden = network.denoised(noise, passes, share, run, lambda out: mean_embedding(scored(out), target.embed))
        return hidden, scored(hidden)


def load(path: Path, target: Target) -> DFlashDrafter:
    return load_dflash(path, target, FlowDrafter)


DRAFTER = DrafterSpec(
    load,
    architectures=("FlowMapDraftModel",),
    network=FlowNetwork,
    layouts=("zlab",),
    drafter=FlowDrafter,
)
