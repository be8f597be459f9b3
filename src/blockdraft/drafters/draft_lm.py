"""Speculative decoding in its original form (arXiv 2211.17192, arXiv 2302.01318).

A smaller language model with the target's tokens drafts one token after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockdraft.decode.drafting import draft_chain
from blockdraft.decode.proposal import Plan, Proposal, chain
from blockdraft.drafters.base import Drafter, DrafterSpec, check_same_tokens
from blockdraft.errors import UsageError
from blockdraft.formats.gguf import is_gguf
from blockdraft.nn.cache import KVCache, SequenceState
from blockdraft.targets import Target, load_target
from blockdraft.timing import PASS, mark
from blockdraft.types import Compile

BLOCK_SIZE = 8


class LMTokens(NamedTuple):
    """Tokens of a sequence.

    Attributes:
        committed: Committed tokens.
        cached: Tokens in the draft model's cache: a prefix of the committed tokens or, between `propose` and `observe`,
            all of them, the anchor and the draft tokens.
    """

    committed: list[int]
    cached: list[int]


class DraftState(SequenceState):
    """Tokens of the sequences of a batch, and the draft model's cache of them."""

    values: dict[int, LMTokens]

    def __init__(self, cache: KVCache, batch: int, capacity: int) -> None:
        super().__init__(batch, capacity, [cache])

    def new_value(self) -> LMTokens:
        return LMTokens([], [])

    def cut(self, value: LMTokens, length: int) -> LMTokens:
        committed = value.committed[:length]
        return LMTokens(committed, value.cached[: len(committed)])

    def value_of(self, start: int, tokens: Sequence[int]) -> LMTokens:
        return LMTokens(list(tokens), list(tokens[: self.cache.of([start]).lengths[0]]))

    @property
    def cache(self) -> Any:
        return self.inner[0]

    @property
    def capacity(self) -> int:
        """KV slots of the sequence that has the fewest."""
        return min(self._capacities[start] for start in self.starts)

    @property
    def committed(self) -> list[list[int]]:
        return [self.values[start].committed for start in self.starts]

    @property
    def cached(self) -> list[list[int]]:
        # After an exception, the cache may hold fewer or more tokens than recorded.
        both = zip(self.starts, self.cache.lengths, strict=True)
        return [self.values[start].cached[:length] for start, length in both]

    def record(self, committed: Sequence[list[int]], cached: Sequence[list[int]]) -> None:
        """Set the tokens of the sequences."""
        self.values.update(zip(self.starts, map(LMTokens, committed, cached), strict=True))

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep at most the given number of each sequence's tokens in the cache."""
        self.cache.truncate([min(new, old) for new, old in zip(lengths, self.cache.lengths, strict=True)])


class DraftLMDrafter(Drafter):
    """Drafts chains with a causal language model.

    A draft token is the model's most probable token or, with a `SampledPlan`, sampled from its distribution under the
    sequence's sampling parameters, cut to the `SPARSE_SIZE` most probable tokens. A sequence near the end of the
    model's context gets fewer draft tokens, at its end none.

    With `plan.step_seconds` drafting ends as soon as a further token, even one as probable as the last, would not save
    time; the model's probabilities serve as acceptance probabilities. If draft tokens are sampled, `plan.step_seconds`
    is ignored: each distribution depends on the tokens before it, and the length of a sampled chain must not depend on
    the sample.

    Args:
        model: Draft model.
        target: Target that it drafts for.
        block_size: Maximum number of tokens of a block, anchor included.

    Raises:
        ValueError: The model has recurrent layers, or other tokens than the target. If both have a tokenizer, tokens
            are compared, and the embeddings may be padded to different sizes. Else only the sizes of the vocabularies
            are compared.
    """

    target_layers: tuple[int, ...] = ()
    chooses_tree_size = chooses_length = True

    def __init__(self, model: Target, target: Target, block_size: int = BLOCK_SIZE) -> None:
        if not model.can_truncate:
            raise UsageError(
                f"The draft model ({model.path}) has recurrent layers, whose states cannot be cut back to the accepted "
                "tokens; use a model with attention layers only."
            )
        check_same_tokens(model.tokenizer, model.vocab_size, target)
        self.model = model
        self.path = model.path
        self.block_size = block_size
        self._vocab_size = target.vocab_size

    @property
    def compile_reason(self) -> str | None:
        return None if self.model.is_compiled else f"{self.model.path} is not compiled"

    def new_state(self, batch: int, capacity: int) -> DraftState:
        return DraftState(self.model.new_cache(batch, capacity), batch, capacity)

    def state_bytes(self, batch: int, capacity: int) -> int:
        return self.model.cache_bytes(batch, capacity)

    def weight_bytes(self) -> int:
        return self.model.weight_bytes()

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        return self.model.forward_bytes(batch, nodes, slots)

    def observe(self, state: DraftState, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        new = [ids[:length] for ids, length in zip(tokens.tolist(), lengths, strict=True)]
        state.truncate(
            [
                min(len(committed), len(cached)) + len(commonprefix([cached[len(committed) :], ids]))
                for committed, cached, ids in zip(state.committed, state.cached, new, strict=True)
            ]
        )
        state.record([committed + ids for committed, ids in zip(state.committed, new, strict=True)], state.cached)
        # A few tokens are read later, together with the next anchor. A prompt is read now, before its sequence joins a
        # batch that would have to wait for it.
        if max(lengths) > self.block_size:
            self._read(state, [ids if len(ids) <= self.model.max_context else [] for ids in state.committed])

    @torch.no_grad()
    def propose(self, state: DraftState, anchor: Tensor, plan: Plan) -> Proposal:
        room = [max(0, min(plan.block_size - 1, self.model.max_context - len(ids))) for ids in state.committed]
        known = [
            [*committed, token] if free else []
            for committed, token, free in zip(state.committed, anchor.tolist(), room, strict=True)
        ]
        drafted = 0

        def next_logits(tokens: Tensor) -> Tensor:
            nonlocal drafted
            drafted += 1
            if drafted == 1:
                return self._read(state, known)
            logits = self._forward(tokens[:, None], state.cache)[:, 0]
            state.cache.commit([[0] if free >= drafted else [] for free in room])
            return logits

        proposal = draft_chain(anchor, plan, room, next_logits)
        if drafted:  # the model has not read the last draft token
            read = [ids[: min(free, drafted)] for ids, free in zip(proposal.tokens.tolist(), room, strict=True)]
            state.record(state.committed, [text[:-1] + ids for text, ids in zip(known, read, strict=True)])
        return proposal

    @torch.no_grad()
    def _read(self, state: DraftState, texts: Sequence[list[int]]) -> Tensor:
        """Read texts into the cache. Each text begins with the tokens that are cached already, or is empty.

        A sequence that lacks fewer tokens than others reads some of its last tokens again instead of padding. This
        costs the same, and no sequence needs KV slots beyond its text.

        Returns:
            Logits `[B, V]` after each sequence's last token.
        """
        state.truncate([min(len(text), len(cached)) for text, cached in zip(texts, state.cached, strict=True)])
        # At least one, even if all texts exceed the model's context.
        count = max(1, *(len(text) - len(cached) for text, cached in zip(texts, state.cached, strict=True)))
        # The longest text does not fit the sequence with the fewest slots. Padding would overwrite what follows it.
        if count > state.capacity:
            alone = [
                self._read(state.of([start]), [text])
                if text
                else torch.zeros(1, self._vocab_size, device=self.model.device)
                for start, text in zip(state.starts, texts, strict=True)
            ]
            return torch.cat([logits.float() for logits in alone])
        state.truncate([max(0, len(text) - count) for text in texts])
        new = [text[len(cached) :] for text, cached in zip(texts, state.cached, strict=True)]
        tokens = torch.tensor([[*ids, *[0] * (count - len(ids))] for ids in new], device=self.model.device)
        last = torch.tensor([max(len(ids) - 1, 0) for ids in new], device=self.model.device)
        # With `logits_at`, logits of one position per sequence are computed, else of all `count`.
        logits = self._forward(tokens, state.cache, logits_at=last if count > len(new) else None)
        state.cache.commit([range(len(ids)) for ids in new])
        state.record(state.committed, [list(text) for text in texts])
        return logits[torch.arange(len(new)), last.clamp(max=logits.size(1) - 1)]

    def _forward(self, tokens: Tensor, cache: KVCache, logits_at: Tensor | None = None) -> Tensor:
        """Return logits of chains over the target's vocabulary.

        If the two models' embeddings are padded to different sizes, a token that the draft model lacks is read as its
        last one. The tokenizer never produces such a token.
        """
        known = tokens.clamp(max=self.model.vocab_size - 1)
        logits = self.model.forward(known, chain(known).parents, cache, logits_at=logits_at).logits
        mark(PASS)
        return logits[..., : self._vocab_size]


def load_draft_lm(path: Path, target: Target) -> DraftLMDrafter:
    dtype = None if is_gguf(path) else target.dtype  # a GGUF file has a dtype of its own
    # On a GPU a draft model is compiled where its target is.
    is_eager = target.device.type == "cuda" and not target.is_compiled
    compile: Compile = "off" if is_eager else "auto"
    model = load_target(path, dtype=dtype, device=target.device, compile=compile, threads=torch.get_num_threads())
    return DraftLMDrafter(model, target)


class CausalLMs(Sequence[str]):
    """Architectures of the causal language models of transformers, which is imported at the first use."""

    @cached_property
    def _names(self) -> list[str]:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()})

    def __getitem__(self, index: Any) -> Any:
        return self._names[index]

    def __len__(self) -> int:
        return len(self._names)


DRAFTER = DrafterSpec(load_draft_lm, architectures=CausalLMs())
