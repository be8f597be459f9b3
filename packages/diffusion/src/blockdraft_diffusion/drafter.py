"""Block-diffusion language model as drafter (BD3-LM, arXiv 2503.09573).

It reads tokens alone, whereas DFlash reads the target's hidden states.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockdraft.decode.drafting import independent_draft_tokens
from blockdraft.decode.proposal import Plan, Proposal, SampledPlan, chain, cut
from blockdraft.drafters.base import (
    NOISE_SCHEDULE,
    NOISE_SCHEDULES,
    Drafter,
    DrafterSpec,
    check_same_tokens,
)
from blockdraft.formats.folder import open_folder
from blockdraft.formats.starting import Start
from blockdraft.nn.cache import KVCache, SequenceState
from blockdraft.targets import Target
from blockdraft.timing import DRAFT_CHOICE, HEAD, PASS, mark
from blockdraft.types import RequestDrafting
from blockdraft_diffusion.folder import FAMILY_OF, load_model
from blockdraft_diffusion.model import DiffusionModel, hide_mask_token

if TYPE_CHECKING:
    from blockdraft_tools.inspect import Report

PIECE = 512  # maximum tokens of a prompt to read at once, unless a block is larger


class _BlockCache(KVCache):
    """Keys and values of whole blocks only: those of an unfinished block depend on its missing tokens."""

    def __init__(self, batch: int, capacity: int, block_size: int) -> None:
        self._block_size = block_size
        super().__init__(batch, capacity)

    def cut(self, value: int, length: int) -> int:
        length = min(value, length)
        return length - length % self._block_size


class BlockState(SequenceState):
    """Committed tokens of the sequences, and the model's keys and values of their first blocks."""

    values: dict[int, list[int]]

    def __init__(self, batch: int, capacity: int, block_size: int) -> None:
        super().__init__(batch, capacity, [_BlockCache(batch, capacity, block_size)])

    def new_value(self) -> list[int]:
        return []

    def cut(self, value: list[int], length: int) -> list[int]:
        return value[:length]

    def value_of(self, start: int, tokens: Sequence[int]) -> list[int]:
        return list(tokens)

    @property
    def cache(self) -> Any:
        return self.inner[0]

    @property
    def committed(self) -> list[list[int]]:
        return [self.values[start] for start in self.starts]


class BlockDiffusionDrafter(Drafter):
    """Drafts with a block-diffusion model. Blocks are counted from the start of the sequence, as in training.

    A step drafts the missing tokens of the anchor's block, or the whole next block if none are missing. A sequence
    whose block would exceed the model's context gets no draft tokens. With `plan.draft_passes` above 1, each pass fixes
    its most confident tokens, and the next one reads them, as in a DFlash drafter.

    Args:
        model: Model, which is moved to the target's device and dtype.
        target: Target that it drafts for.
        path: Folder that the model was read from.

    Raises:
        UsageError: The model's tokens differ from the target's. A mask token that the target lacks is allowed.
    """

    target_layers: tuple[int, ...] = ()
    chooses_tree_size = True
    chooses_length = False

    def __init__(self, model: DiffusionModel, target: Target, path: Path | None = None) -> None:
        mask = model.config.mask_token_id
        check_same_tokens(model.text.tokenizer, model.network.vocab_size, target, own=(mask,))
        self.model, self.path = model, path
        self.block_size = 1 + model.config.block_size
        self._network = model.network.to(target.device, target.dtype).eval()
        self._vocab_size = target.vocab_size

    def new_state(self, batch: int, capacity: int) -> BlockState:
        return BlockState(batch, capacity, self.model.config.block_size)

    def state_bytes(self, batch: int, capacity: int) -> int:
        layers, heads, head_dim = self._network.kv_shape
        return 2 * layers * heads * head_dim * batch * capacity * next(self._network.parameters()).itemsize

    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self._network.parameters())

    @torch.no_grad()
    def observe(self, state: BlockState, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        for committed, new, length in zip(state.committed, tokens.tolist(), lengths, strict=True):
            committed += new[:length]
        # Few tokens are read together with the next block. A prompt is read here, before its sequence joins a batch
        # that would have to wait for it.
        size = self.model.config.block_size
        while max(lengths) > self.block_size:
            texts = [committed[: self.model.text.max_context] for committed in state.committed]
            begins = state.cache.lengths
            wholes = [len(text) - len(text) % size for text in texts]
            if begins == wholes:
                break
            step = max(1, PIECE // size) * size
            ends = [min(whole, begin + step) for whole, begin in zip(wholes, begins, strict=True)]
            self._pass(state, [text[:end] for text, end in zip(texts, ends, strict=True)], begins)

    @torch.no_grad()
    def propose(self, state: BlockState, anchor: Tensor, plan: Plan) -> Proposal:
        texts = [[*committed, token] for committed, token in zip(state.committed, anchor.tolist(), strict=True)]
        free = [self._free(len(text)) for text in texts]
        count = min(plan.block_size - 1, max(free))
        if count == 0:
            return chain(anchor[:, None])
        logits = self._logits(state, texts, free, plan.draft_passes or 1)[:, :count]
        plan = replace(plan, block_size=1 + count)
        if isinstance(plan, SampledPlan):
            plan = replace(plan, uniforms=plan.uniforms[:, :count])
        proposal = independent_draft_tokens(anchor, logits, plan)
        return cut(proposal, [RequestDrafting(block_size=1 + missing) for missing in free])

    def _free(self, known: int) -> int:
        """Return the missing tokens of the block after `known` tokens; 0 if the block exceeds the model's context."""
        free = self.model.config.block_size - known % self.model.config.block_size
        return free if known + free <= self.model.text.max_context else 0

    def _logits(self, state: BlockState, texts: Sequence[list[int]], free: Sequence[int], passes: int) -> Tensor:
        """Return logits `[B, max(free), V]` of the tokens behind the texts, after the last pass.

        A position that an earlier pass has fixed has one possible token. Logits past a sequence's block have no
        meaning.
        """
        share = NOISE_SCHEDULES[NOISE_SCHEDULE]
        settled: list[dict[int, int]] = [{} for _ in texts]
        logits = self._look(state, texts, free, settled)
        for step in range(1, passes):
            confidence, best = (result.tolist() for result in logits.softmax(dim=-1).max(dim=-1))
            before = sum(map(len, settled))
            for index, (fixed, count) in enumerate(zip(settled, free, strict=True)):
                wanted = max(1, round(share(step / passes) * count)) - len(fixed)
                others = sorted({*range(count)} - fixed.keys(), key=confidence[index].__getitem__, reverse=True)
                fixed.update({place: best[index][place] for place in others[: max(wanted, 0)]})
            if sum(map(len, settled)) > before:  # else the next pass would read the same input
                logits = self._look(state, texts, free, settled)
        for index, (fixed, count) in enumerate(zip(settled, free, strict=True)):
            logits[index, count:] = 0.0
            for place, token in fixed.items():
                logits[index, place] = -torch.inf
                logits[index, place, token] = 0.0
        return logits

    def _look(
        self, state: BlockState, texts: Sequence[list[int]], free: Sequence[int], settled: Sequence[dict[int, int]]
    ) -> Tensor:
        """Return logits `[B, max(free), V]` of the tokens behind the texts, after one pass.

        Args:
            free: Number of missing tokens of each sequence's block.
            settled: Fixed tokens of each sequence, by their distance from the first missing token.
        """
        shift, mask = self.model.config.token_shift, self.model.config.mask_token_id
        blocks, begins, places = [], [], []
        for text, count, cached, fixed in zip(texts, free, state.cache.lengths, settled, strict=True):
            blocks.append([*text, *(fixed.get(place, mask) for place in range(count))] if count else [])
            begins.append(cached if count else 0)
            # With a token shift, a token's output is at the position before it.
            first = len(text) - shift - cached if count else 0
            places.append([first + min(place, max(count - 1, 0)) for place in range(max(free))])
        states = self._pass(state, blocks, begins)
        at = torch.tensor(places, device=states.device)[..., None].expand(-1, -1, states.size(-1))
        logits = hide_mask_token(self._network.logits(states.gather(1, at)), mask)[..., : self._vocab_size]
        mark(HEAD)
        return logits

    def _pass(self, state: BlockState, texts: Sequence[Sequence[int]], begins: Sequence[int]) -> Tensor:
        """Run one pass over the tokens of these texts from `begins` on, which also reads the cached blocks before them.

        Add blocks that are complete in the committed tokens to the cache.

        Returns:
            Hidden states `[B, N, H]`; those past a text's end have no meaning.
        """
        mark(DRAFT_CHOICE)
        size, device = self.model.config.block_size, self._network.device
        count = max(len(text) - begin for text, begin in zip(texts, begins, strict=True))
        new = [[*text[begin:], *[0] * (count + begin - len(text))] for text, begin in zip(texts, begins, strict=True)]
        # A token that only the target has is read as the model's last token.
        tokens = torch.tensor(new, device=device).clamp(max=self._network.vocab_size - 1)
        starts = torch.tensor(begins, device=device)[:, None]
        positions = starts + torch.arange(count, device=device)
        blocks = positions // size
        new_keys_values = _NewKeysValues(state.cache)
        before = (torch.arange(max(state.cache.lengths), device=device) < starts)[:, None].expand(-1, count, -1)
        visible = torch.cat([before, blocks[:, :, None] >= blocks[:, None, :]], dim=-1)
        states = self._network.hidden(tokens, positions, visible, new_keys_values)
        wholes = [
            max(cached, min(len(text), len(committed)) // size * size)
            for committed, cached, text in zip(state.committed, state.cache.lengths, texts, strict=True)
        ]
        new_keys_values.keep(begins, wholes)
        mark(PASS)
        return states


class _NewKeysValues:
    """Keys and values of tokens that are not in the cache. They get KV slots only in `keep`."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._new: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self._new[layer] = keys, values
        cached = (self._cache.view(store, 0)[0] for store in self._cache.layer(layer, keys, values))
        keys, values = (torch.cat(both, dim=2) for both in zip(cached, (keys, values), strict=True))
        return keys, values

    def keep(self, begins: Sequence[int], lengths: Sequence[int]) -> None:
        """Commit the new tokens of each sequence, which begin at `begins`, up to these lengths."""
        cached = self._cache.lengths
        spans = [slice(old - begin, end - begin) for old, begin, end in zip(cached, begins, lengths, strict=True)]
        for layer, new in self._new.items():
            for store, nodes in zip(self._cache.layer(layer, *new), new, strict=True):
                self._cache.extend(store, [own[:, span] for own, span in zip(nodes, spans, strict=True)])
        self._cache.commit([range(length - old) for length, old in zip(lengths, cached, strict=True)])


def load(path: Path, target: Target) -> BlockDiffusionDrafter:
    return BlockDiffusionDrafter(load_model(path, target.device, target.dtype), target, path)


def inspect(folder: Path, raw: Mapping[str, Any]) -> Report:
    """Return the report of `blockdraft inspect` on a block-diffusion model."""
    from blockdraft_tools.inspect import Report

    opened = open_folder(folder)
    about = {
        "architecture": raw["model_type"],
        "block_size": raw.get("block_size"),
        "mask_token_id": raw.get("mask_token_id"),
        "parameters": sum(opened.kinds.values()),
        "bytes": opened.bytes,
    }
    starts = {"blockdraft": Start(shlex.join(["blockdraft", "diffusion", "generate", "--model", str(folder)]))}
    return Report(str(folder), "block-diffusion model", "transformers", about, starts=starts)


DRAFTER = DrafterSpec(
    load,
    architectures=("A2DQwen3LMHeadModel", "BD3LM"),
    claims=lambda raw: str(raw.get("model_type")) in FAMILY_OF,
    inspect=inspect,
)
