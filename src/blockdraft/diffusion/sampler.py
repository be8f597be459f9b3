"""Sampling from a block-diffusion model, block by block, for several prompts at once."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from blockdraft.decode.distributions import probabilities
from blockdraft.decode.sampling import draw
from blockdraft.diffusion.context import Context
from blockdraft.diffusion.model import DiffusionModel, hide_mask_token
from blockdraft.diffusion.settings import SampleSettings
from blockdraft.diffusion.strategies import DraftTokens, Strategy, read_strategy
from blockdraft.engine.text import AnswerText, encode
from blockdraft.errors import UsageError
from blockdraft.types import Prompt, SamplingParams


@dataclass(frozen=True)
class Step:
    """A pass that settled tokens of a text.

    Attributes:
        begin: Position of the block in the text.
        block: Tokens of the block after the pass; None for unknown ones.
        settled: Positions in the block of the tokens that the pass settled.
    """

    begin: int
    block: tuple[int | None, ...]
    settled: tuple[int, ...]


# Callback of a row's number and block, with None for unknown tokens, after each pass that settled some of them.
Watch: TypeAlias = Callable[[int, Sequence[int | None]], None]


@dataclass(frozen=True)
class Chunk:
    """A block of one answer.

    Attributes:
        row: Number of the prompt.
        token_ids: New tokens, the end token included. Where gaps are filled, given tokens are included too.
        text: New text, without the end token.
        finish_reason: "stop" for an end token or a stop text, "length" for as many tokens as were asked for; None
            before the answer's last chunk.
        forwards: Passes of the network for the answer so far, without that over the prompt.
    """

    row: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: Literal["stop", "length"] | None
    forwards: int


@dataclass(eq=False)
class Unfinished:
    """A text that is being written.

    Attributes:
        number: Number of the prompt.
        tokens: Tokens of the text, at least up to the end of the present block; None for unknown ones.
        limit: Tokens after which the text ends.
        generator: Source of its random numbers.
        text: Text of its answer.
        is_filled: Whether gaps are filled: then no token is sampled beyond the limit, and no token ends the text.
        slot: Row of the context that holds it.
        begin: Position of the present block.
        emitted: Tokens of earlier chunks, and of the prompt, which no chunk holds.
        order: Uniform random number of each position of the block.
        history: Passes that settled tokens.
    """

    number: int
    tokens: list[int | None]
    limit: int
    generator: torch.Generator
    text: AnswerText
    is_filled: bool = False
    slot: int = 0
    begin: int = 0
    emitted: int = 0
    forwards: int = 0
    order: Tensor = field(default_factory=lambda: torch.empty(0))
    history: list[Step] = field(default_factory=list)

    @property
    def block(self) -> tuple[int | None, ...]:
        return tuple(self.tokens[self.begin : self.begin + len(self.order)])

    def unknown(self) -> list[int]:
        """Positions in the block of unknown tokens, up to the limit if gaps are filled."""
        end = self.limit - self.begin if self.is_filled else len(self.order)
        return [place for place, token in enumerate(self.block[:end]) if token is None]

    def open_block(self, begin: int, size: int) -> None:
        self.begin = begin
        self.tokens += [None] * (begin + size - len(self.tokens))
        self.order = torch.rand(size, generator=self.generator, dtype=torch.float64)

    def settle(self, new: Mapping[int, int], watch: Watch | None) -> None:
        """Record tokens that a pass has settled, by their positions in the block."""
        for place, token in new.items():
            self.tokens[self.begin + place] = token
        self.history.append(Step(self.begin, self.block, tuple(new)))
        if watch is not None:
            watch(self.number, self.block)

    def chunk(self, ends: frozenset[int]) -> Chunk | None:
        """New part of the answer: the present block once it is known, or its part up to the text's end; None before.

        Args:
            ends: Tokens that end a text, unless gaps are filled.
        """
        after = self.begin + len(self.order)
        end = next((at for at in range(self.emitted, after) if self.tokens[at] is None), after)
        reason: Literal["stop", "length"] | None = None
        new = [token for token in self.tokens[self.emitted : min(end, self.limit)] if token is not None]
        stop = next((at for at, token in enumerate(new, 1) if token in ends and not self.is_filled), None)
        if stop is not None:
            new, reason = new[:stop], "stop"
        elif end >= self.limit:
            reason = "length"
        elif end < after:
            new = new[: max(0, self.begin - self.emitted)]
        if reason is None and not new:
            return None
        for number, token in enumerate(new, 1):
            if stop != number:
                self.text.push(token)
            if self.text.stopped:
                new, reason = new[:number], "stop"
                break
        self.emitted += len(new)
        if reason is not None:
            self.text.finish()
        return Chunk(self.number, tuple(new), self.text.take(), reason, self.forwards)


class Sampler:
    """Sampler of answers.

    Args:
        strategy: Choice of the tokens that a pass settles; None is the strategy that the settings name.
        stop: Texts that end an answer, which is cut before them.

    Attributes:
        given: Tokens of each text before the last call of `stream` or `fill`, by row; None for tokens of gaps.
        history: Passes over each text that settled tokens, by row.

    Raises:
        UsageError: The strategy that the settings name is unknown.
    """

    def __init__(
        self,
        model: DiffusionModel,
        settings: SampleSettings = SampleSettings(),  # noqa: B008 (frozen)
        strategy: Strategy | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        self.model, self.settings = model, settings
        self.strategy = strategy or read_strategy(settings.strategy)
        self._params = SamplingParams(
            temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p, stop=stop
        )
        self._ends = frozenset() if settings.ignore_eos else model.text.eos_token_ids
        self.given: list[list[int | None]] = []
        self.history: list[list[Step]] = []
        self._seed = secrets.randbits(32) if settings.seed is None else settings.seed

    def stream(self, prompts: Sequence[Prompt], watch: Watch | None = None) -> Iterator[Chunk]:
        """Answer prompts together. Each row proceeds to its next block as soon as it has one, whatever the others do,
        and makes room for another when it ends. Its tokens do not depend on the others, but for rounding.

        Args:
            prompts: Texts, which become the user's message where there is a chat template; chats; or token ids.
            watch: Callback after each pass, see `Watch`.

        Raises:
            UsageError: A prompt is empty, holds the mask token, or is too long for the context. Raised before anything
                is sampled.
            NumbersError: The model computes no finite numbers.
        """
        rows = []
        for number, prompt in enumerate(prompts):
            ids = self._checked(prompt)
            limit = len(ids) + self.settings.max_new_tokens
            text = self._text(self._params.stop)
            rows.append(Unfinished(number, [*ids], limit, self._random(number), text, emitted=len(ids)))
        return self._run(rows, watch)

    def fill(self, texts: Sequence[Sequence[int | None]], watch: Watch | None = None) -> Iterator[Chunk]:
        """Fill the gaps of texts, together. A token of a gap is predicted from all tokens before its block and from the
        known ones of its block, also after it, but not from later blocks. No token of a gap ends the text.
        `max_new_tokens`, stop texts and `ignore_eos` have no effect.

        Args:
            texts: Token ids, with None for the tokens of gaps.
            watch: Callback after each pass, see `Watch`.

        Raises:
            UsageError: A text has no gap or begins with one, holds the mask token, or is too long for the context.
            NumbersError: The model computes no finite numbers.
        """
        rows = []
        for number, tokens in enumerate(texts):
            self.model.check_tokens([token for token in tokens if token is not None], "The text")
            if None not in tokens or tokens[0] is None:
                raise UsageError("The text has no gap, or begins with one; give text before the gap.")
            self._check_room(len(tokens), f"The text's {len(tokens)} tokens, gaps included", "shorten it")
            rows.append(Unfinished(number, [*tokens], len(tokens), self._random(number), self._text(), is_filled=True))
        return self._run(rows, watch)

    def _checked(self, prompt: Prompt) -> list[int]:
        ids = encode(prompt, self.model.text)
        self.model.check_tokens(ids, "The prompt")
        if not ids:
            raise UsageError("The prompt is empty: its text has no tokens; give at least one.")
        new, size, most = self.settings.max_new_tokens, self.model.config.block_size, self.model.text.max_context
        room = most // size * size - len(ids)
        remedy = f"ask for at most {room}" if room > 0 else "shorten the prompt"
        self._check_room(len(ids) + new, f"The prompt's {len(ids)} tokens and max_new_tokens {new}", remedy)
        return ids

    def _check_room(self, tokens: int, told: str, remedy: str) -> None:
        size, most = self.model.config.block_size, self.model.text.max_context
        if size > most:
            raise UsageError(f"block_size is {size} and the model's context {most} tokens; give at most {most}.")
        if self._slots(tokens) > most:
            raise UsageError(f"{told}, in blocks of {size}, exceed the model's context of {most}; {remedy}.")

    def _slots(self, tokens: int) -> int:
        """Slots of a row of so many tokens, rounded up to whole blocks."""
        size = self.model.config.block_size
        return -(-tokens // size) * size

    def _random(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed + number)

    def _text(self, stop: Sequence[str] = ()) -> AnswerText:
        return AnswerText(self.model.text.tokenizer, stop)

    def _run(self, rows: list[Unfinished], watch: Watch | None) -> Iterator[Chunk]:
        self.given, self.history = [[*row.tokens] for row in rows], [row.history for row in rows]
        free = list(range(min(len(rows), self.settings.batch_size)))
        context = Context(self.model, len(free), max((self._slots(row.limit) for row in rows), default=0))
        waiting, running = deque(rows), list[Unfinished]()
        while waiting or running:
            while waiting and free:
                running.append(waiting.popleft())
                self._begin(running[-1], free.pop(0), context)
            self._settle_first(context, running, watch)
            for row in list(running):
                chunk = row.chunk(self._ends)
                if chunk is not None:
                    yield chunk
                    if chunk.finish_reason is not None:
                        running.remove(row)
                        free.append(row.slot)
            if running:
                self._pass(context, running, watch)

    def _begin(self, row: Unfinished, slot: int, context: Context) -> None:
        """Read the blocks before the first one with unknown tokens."""
        size = self.model.config.block_size
        known = row.tokens.index(None) if None in row.tokens else len(row.tokens)
        row.slot = slot
        row.open_block(known // size * size, size)
        context.clear(slot)
        context.read(slot, [token for token in row.tokens[: row.begin] if token is not None])

    def _pass(self, context: Context, rows: Sequence[Unfinished], watch: Watch | None) -> None:
        """Run one pass over all rows: known blocks are committed, and tokens of the others settled."""
        size, mask = self.model.config.block_size, self.model.config.mask_token_id
        blocks = [[mask if token is None else token for token in row.block] for row in rows]
        unknown = [row.unknown() for row in rows]
        states = context.look([row.slot for row in rows], torch.tensor(blocks), [not places for places in unknown])
        waiting = [i for i, places in enumerate(unknown) if places]
        if waiting:
            about = torch.cat([states[i, unknown[i]] for i in waiting])
            self._settle([(rows[i], unknown[i]) for i in waiting], about, watch)
        for row, places in zip(rows, unknown, strict=True):
            row.forwards += 1
            if not places:
                row.open_block(row.begin + size, size)

    def _settle_first(self, context: Context, rows: Sequence[Unfinished], watch: Watch | None) -> None:
        """Settle first tokens of blocks without a pass, where the pass over the block before has predicted them already
        (with a token shift) and no other token is unknown. So blocks of one token take one pass each, as in a causal
        model."""
        found = [row for row in rows if row.unknown() == [0] and context.knows_first(row.slot)]
        if found:
            states = torch.stack([context.first(row.slot) for row in found])
            self._settle([(row, [0]) for row in found], states, watch)

    @torch.no_grad()
    def _settle(self, rows: Sequence[tuple[Unfinished, list[int]]], states_MH: Tensor, watch: Watch | None) -> None:
        """Sample guesses of unknown tokens, and settle those that the strategy chooses.

        Args:
            rows: Rows with the positions of their blocks' unknown tokens, at least one each.
            states_MH: Hidden states that predict these M tokens, row by row.
        """
        logits = self.model.network.logits(states_MH)
        self.model.check_finite(logits)
        logits = hide_mask_token(logits, self.model.config.mask_token_id)
        if rows[0][0].is_filled:
            logits[:, [token for token in self.model.text.eos_token_ids if token < logits.size(-1)]] = -torch.inf
        log_probs = logits.log_softmax(dim=-1)
        probs = probabilities(logits[None], [self._params])[0]
        sizes = [len(places) for _, places in rows]
        numbers = [torch.rand(len(row.order), generator=row.generator, dtype=torch.float64) for row, _ in rows]
        uniforms = torch.cat([drawn[places] for drawn, (_, places) in zip(numbers, rows, strict=True)])
        tokens = draw(probs, uniforms)
        confidence = log_probs.gather(-1, tokens[:, None].to(log_probs.device)).squeeze(-1).exp().cpu()
        entropy = -(log_probs.exp() * log_probs.masked_fill(log_probs == -torch.inf, 0.0)).sum(dim=-1).cpu()
        parts = (each.split(sizes) for each in (tokens.cpu(), confidence, entropy))
        for (row, places), ids, sure, nats in zip(rows, *parts, strict=True):
            kept = self.strategy.choose(DraftTokens(sure, nats, row.order[places]))
            assert kept.any()
            from_draft = zip(places, ids.tolist(), kept.tolist(), strict=True)
            row.settle({place: token for place, token, keep in from_draft if keep}, watch)
