"""A flow map drafts: DFlash that begins at noise in place of masks, and comes to tokens in one pass or a few.

The noise of a position is always the same, so a text is drafted alike each time it is met. Given the noise each slot
has a distribution of its own, which is q; chains, sampled chains and trees are those of DFlash.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from blockdraft.decode.proposal import Plan
from blockdraft.drafters.base import NOISE_SCHEDULE, NOISE_SCHEDULES, Entry
from blockdraft.drafters.dflash.drafter import DFlashDrafter
from blockdraft.drafters.dflash.drafter import load as load_dflash
from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.drafters.flow.network import PLACES, FlowConfig, FlowNetwork, mean_embedding, place_noise
from blockdraft.machine import send
from blockdraft.nn.cache import KVCache
from blockdraft.nn.layers import ReducedHead
from blockdraft.targets import Target
from blockdraft.timing import HEAD, PASS, mark


class FlowDrafter(DFlashDrafter):
    """Drafts with a flow map. Its diffusion steps are jumps, whose times are those of the noise schedule; without a
    word they are as many as the checkpoint says."""

    network: FlowNetwork
    config: FlowConfig
    network_class: type[DFlashNetwork] = FlowNetwork

    def __init__(
        self,
        network: DFlashNetwork,
        target: Target,
        diffusion_steps: int | None = None,
        noise_schedule: str = NOISE_SCHEDULE,
        path: Path | None = None,
        reduced_head: ReducedHead | None = None,
        owned: bool = False,
    ) -> None:
        super().__init__(network, target, diffusion_steps, noise_schedule, path, reduced_head, owned)
        self._noise = place_noise(target.hidden_size).to(target.device)
        self._mask = target.embed(self._masks[0, 0])

    @property
    def usual_steps(self) -> int:
        return self.config.diffusion_steps

    def _refined_pass(self, state: KVCache, anchor: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        network, target = self.network, self._target
        head, embedded = self.reduced_head or target.head, target.embed(anchor)[:, None]

        def run(added: Tensor) -> Tensor:
            slots = (self._mask + added).to(embedded.dtype)
            hidden = self._run(state, torch.cat([embedded, slots], dim=1), plan.draft_window)[:, 1:]
            mark(PASS)
            return hidden

        def scored(hidden: Tensor) -> Tensor:
            logits = network.adjust_logits(head(hidden))
            mark(HEAD)
            return logits

        places = torch.tensor(state.lengths)[:, None] + torch.arange(1, plan.block_size)
        noise = self._noise[send(places % PLACES, anchor.device)]
        passes, share = plan.draft_passes or self.diffusion_steps, NOISE_SCHEDULES[self.noise_schedule]
        hidden = network.denoised(noise, passes, share, run, lambda out: mean_embedding(scored(out), target.embed))
        return hidden, scored(hidden)


def load(path: Path, target: Target) -> DFlashDrafter:
    return load_dflash(path, target, FlowDrafter)


DRAFTER = Entry(
    load,
    architectures=("FlowMapDraftModel",),
    network=FlowNetwork,
    layouts=("zlab",),
    drafter=FlowDrafter,
)
