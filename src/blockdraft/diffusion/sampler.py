"""Text from a block-diffusion model, block by block, for several prompts at once."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from blockdraft.diffusion.context import Context
from blockdraft.diffusion.model import DiffusionModel, hide_mask_token
from blockdraft.diffusion.settings import SampleSettings
from blockdraft.diffusion.strategies import Guesses, Strategy, read_strategy
from blockdraft.engine.text import AnswerText, encode
from blockdraft.errors import NumbersError, UsageError
from blockdraft.sampling.drawing import draw
from blockdraft.sampling.probabilities import probabilities
from blockdraft.types import Prompt, SamplingParams

# Of a row, called after each pass that settled some of its tokens: the block, with None for those not known yet.
Watch: TypeAlias = Callable[[int, Sequence[int | None]], None]


@dataclass(frozen=True)
class Chunk:
    """A block of one answer.

    Attributes:
        row: Number of the prompt.
        token_ids: New tokens, the end token included.
        text: New text, without it.
        finish_reason: "stop" for an end token or a stop text, "length" for as many tokens as were asked for; None as
            long as the answer goes on.
        forwards: Passes of the network that the answer has taken so far, that over the prompt not counted.
    """

    row: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: Literal["stop", "length"] | None
    forwards: int


@dataclass
class _Row:
    """A text in the making.

    Attributes:
        tokens: Of the prompt and of the answer, up to the end of the block in the making; None where not known yet.
        start: Tokens of the prompt.
        begin: Where the block in the making begins.
        told: Tokens that chunks have told, the prompt's among them.
        order: A uniform number for each place of the block.
    """

    number: int
    tokens: list[int | None]
    start: int
    generator: torch.Generator
    text: AnswerText
    begin: int = 0
    told: int = 0
    forwards: int = 0
    order: Tensor = field(default_factory=lambda: torch.empty(0))

    def unknown(self) -> list[int]:
        """Places in the block whose tokens are not known."""
        return [place for place, token in enumerate(self.tokens[self.begin :]) if token is None]

    def open_block(self, size: int) -> None:
        self.tokens += [None] * (self.begin + size - len(self.tokens))
        self.order = torch.rand(size, generator=self.generator, dtype=torch.float64)


class Sampler:
    """Samples answers of one model in one way.

    Args:
        strategy: None is the one that the settings name.
        stop: Texts that end an answer, which is cut before them.

    Raises:
        UsageError: There is no strategy of the name in the settings.
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
        self._seed = secrets.randbits(32) if settings.seed is None else settings.seed

    def stream(self, prompts: Sequence[Prompt], watch: Watch | None = None) -> Iterator[Chunk]:
        """Answer prompts together. Each row goes on to its next block as soon as it has one, whatever the others do,
        and leaves when it ends. Its tokens do not depend on the others, but for rounding.

        Args:
            prompts: Texts, which become the user's message where there is a chat template; chats; or token ids.
            watch: See `Watch`.

        Raises:
            UsageError: A prompt is empty, holds the mask token, or is too long for the context. It is raised before
                anything is sampled.
            NumbersError: The model computes no finite numbers.
        """
        rows = [self._row(number, self._checked(prompt)) for number, prompt in enumerate(prompts)]
        return self._run(rows, watch or (lambda row, block: None))

    def _checked(self, prompt: Prompt) -> list[int]:
        ids = encode(prompt, self.model.text)
        self.model.check_tokens(ids, "The prompt")
        if not ids:
            raise UsageError("The prompt is empty: its text has no tokens; give at least one.")
        size, most = self.model.config.block_size, self.model.text.max_context
        if self._slots(len(ids)) > most:
            room = most // size * size - len(ids)
            remedy = f"ask for at most {room}" if room > 0 else "shorten the prompt"
            raise UsageError(
                f"The prompt's {len(ids)} tokens and max_new_tokens {self.settings.max_new_tokens}, in blocks of "
                f"{size}, exceed the model's context of {most}; {remedy}."
            )
        return ids

    def _slots(self, prompt: int) -> int:
        """Of a row, which ends with a whole block."""
        size = self.model.config.block_size
        return -(-(prompt + self.settings.max_new_tokens) // size) * size

    def _row(self, number: int, ids: list[int]) -> _Row:
        generator = torch.Generator().manual_seed(self._seed + number)
        text = AnswerText(self.model.text.tokenizer, self._params.stop)
        return _Row(number, list(ids), len(ids), generator, text, told=len(ids))

    def _run(self, rows: list[_Row], watch: Watch) -> Iterator[Chunk]:
        size = self.model.config.block_size
        context = Context(self.model, len(rows), max((self._slots(row.start) for row in rows), default=0))
        for row in rows:
            row.begin = row.start // size * size
            context.read(row.number, [token for token in row.tokens[: row.begin] if token is not None])
            row.open_block(size)
        while rows:
            self._settle_first(context, rows, watch)
            ended = set()
            for row in rows:
                chunk = self._chunk(row)
                if chunk is not None:
                    yield chunk
                    if chunk.finish_reason is not None:
                        ended.add(row.number)
            rows = [row for row in rows if row.number not in ended]
            if rows:
                self._pass(context, rows, watch)

    def _pass(self, context: Context, rows: Sequence[_Row], watch: Watch) -> None:
        """One pass over all rows: blocks that are known are committed, in others tokens are settled."""
        size, mask = self.model.config.block_size, self.model.config.mask_token_id
        blocks = [[mask if token is None else token for token in row.tokens[row.begin :]] for row in rows]
        unknown = [row.unknown() for row in rows]
        states = context.look([row.number for row in rows], torch.tensor(blocks), [not places for places in unknown])
        waiting = [i for i, places in enumerate(unknown) if places]
        if waiting:
            about = torch.cat([states[i, unknown[i]] for i in waiting])
            self._settle([(rows[i], unknown[i]) for i in waiting], about, watch)
        for row, places in zip(rows, unknown, strict=True):
            row.forwards += 1
            if not places:
                row.begin += size
                row.open_block(size)

    def _settle_first(self, context: Context, rows: Sequence[_Row], watch: Watch) -> None:
        """With a token shift, what is left to be said of a block whose first token alone is not known is known already:
        so blocks of one token take one pass each, as in a causal model."""
        found = [row for row in rows if row.unknown() == [0] and context.knows_first(row.number)]
        if found:
            states = torch.stack([context.first(row.number) for row in found])
            self._settle([(row, [0]) for row in found], states, watch)

    @torch.no_grad()
    def _settle(self, rows: Sequence[tuple[_Row, list[int]]], states_MH: Tensor, watch: Watch) -> None:
        """Guess tokens, and let the strategy choose which of them stand.

        Args:
            rows: With the places of each block whose tokens are not known, of which there are some.
            states_MH: What the network thinks of these tokens, row by row.
        """
        logits = hide_mask_token(self.model.network.logits(states_MH), self.model.config.mask_token_id)
        laws = logits.log_softmax(dim=-1)
        if laws.isnan().any():
            raise NumbersError("The model computes numbers that are not finite; load it as float32.")
        probs = probabilities(logits[None], [self._params])[0]
        sizes = [len(places) for _, places in rows]
        numbers = [torch.rand(len(row.order), generator=row.generator, dtype=torch.float64) for row, _ in rows]
        uniforms = torch.cat([drawn[places] for drawn, (_, places) in zip(numbers, rows, strict=True)])
        tokens = draw(probs, uniforms)
        confidence = laws.gather(-1, tokens[:, None].to(laws.device)).squeeze(-1).exp().cpu()
        entropy = -(laws.exp() * laws.masked_fill(laws == -torch.inf, 0.0)).sum(dim=-1).cpu()
        parts = (each.split(sizes) for each in (tokens.cpu(), confidence, entropy))
        for (row, places), ids, sure, nats in zip(rows, *parts, strict=True):
            kept = self.strategy.choose(Guesses(sure, nats, row.order[places]))
            assert kept.any()
            for place, token, keep in zip(places, ids.tolist(), kept.tolist(), strict=True):
                if keep:
                    row.tokens[row.begin + place] = token
            watch(row.number, tuple(row.tokens[row.begin :]))

    def _chunk(self, row: _Row) -> Chunk | None:
        """What can be told of a row now: its block once that is known, or as far as its end."""
        end = next((at for at in range(row.told, len(row.tokens)) if row.tokens[at] is None), len(row.tokens))
        limit, reason = row.start + self.settings.max_new_tokens, None
        new = [token for token in row.tokens[row.told : min(end, limit)] if token is not None]
        stop = next((at for at, token in enumerate(new, 1) if token in self._ends), None)
        if stop is not None:
            new, reason = new[:stop], "stop"
        elif end >= limit:
            reason = "length"
        if reason is None and (end < len(row.tokens) or not new):
            return None
        for number, token in enumerate(new, 1):
            if stop != number:
                row.text.push(token)
            if row.text.stopped:
                new, reason = new[:number], "stop"
                break
        row.told += len(new)
        if reason is not None:
            row.text.finish()
        return Chunk(row.number, tuple(new), row.text.take(), reason, row.forwards)  # type: ignore[arg-type]
