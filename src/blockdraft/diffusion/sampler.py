"""Text from a block-diffusion model, block by block, for several prompts at once."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from blockdraft.decode.distributions import probabilities
from blockdraft.decode.sampling import draw
from blockdraft.diffusion.context import Context
from blockdraft.diffusion.model import DiffusionModel, hide_mask_token
from blockdraft.diffusion.settings import SampleSettings
from blockdraft.diffusion.strategies import Guesses, Strategy, read_strategy
from blockdraft.diffusion.unfinished import Chunk, Step, Unfinished, Watch
from blockdraft.engine.text import AnswerText, encode
from blockdraft.errors import UsageError
from blockdraft.types import Prompt, SamplingParams

__all__ = ["Chunk", "Sampler", "Step", "Watch"]


class Sampler:
    """Samples answers of one model in one way.

    Args:
        strategy: None is the one that the settings name.
        stop: Texts that end an answer, which is cut before them.

    Attributes:
        given: What was there of each text before the last call of `stream` or `fill`, by the number of its row; None
            for tokens of gaps.
        history: The passes over each text that settled tokens.

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
        self.given: list[list[int | None]] = []
        self.history: list[list[Step]] = []
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
        rows = []
        for number, prompt in enumerate(prompts):
            ids = self._checked(prompt)
            limit = len(ids) + self.settings.max_new_tokens
            rows.append(
                Unfinished(number, [*ids], limit, self._random(number), self._text(self._params.stop), told=len(ids))
            )
        return self._run(rows, watch)

    def fill(self, texts: Sequence[Sequence[int | None]], watch: Watch | None = None) -> Iterator[Chunk]:
        """Fill the gaps of texts, together. A token of a gap is found given all tokens before its block, and those of
        its block that are known, also behind it; what follows its block it does not see. No token of a gap ends the
        text. `max_new_tokens`, stop texts and `ignore_eos` mean nothing here.

        Args:
            texts: Token ids, with None for those to be found.

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
        """Of a row, which ends with a whole block."""
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
        """Read what comes before the first block with tokens that are not known."""
        size = self.model.config.block_size
        known = row.tokens.index(None) if None in row.tokens else len(row.tokens)
        row.slot = slot
        row.open_block(known // size * size, size)
        context.clear(slot)
        context.read(slot, [token for token in row.tokens[: row.begin] if token is not None])

    def _pass(self, context: Context, rows: Sequence[Unfinished], watch: Watch | None) -> None:
        """One pass over all rows: blocks that are known are committed, in others tokens are settled."""
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
        """With a token shift, what is left to be said of a block whose first token alone is not known is known already:
        so blocks of one token take one pass each, as in a causal model."""
        found = [row for row in rows if row.unknown() == [0] and context.knows_first(row.slot)]
        if found:
            states = torch.stack([context.first(row.slot) for row in found])
            self._settle([(row, [0]) for row in found], states, watch)

    @torch.no_grad()
    def _settle(self, rows: Sequence[tuple[Unfinished, list[int]]], states_MH: Tensor, watch: Watch | None) -> None:
        """Guess tokens, and let the strategy choose which of them stand.

        Args:
            rows: With the places of each block whose tokens are not known, of which there are some.
            states_MH: What the network thinks of these tokens, row by row.
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
            kept = self.strategy.choose(Guesses(sure, nats, row.order[places]))
            assert kept.any()
            guessed = zip(places, ids.tolist(), kept.tolist(), strict=True)
            row.settle({place: token for place, token, keep in guessed if keep}, watch)
