"""Block-by-block sampling from a block-diffusion model, for several prompts at once."""

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
from blockdraft.engine.text import AnswerText, encode
from blockdraft.errors import UsageError
from blockdraft.types import Prompt, SamplingParams
from blockdraft_diffusion.block_cache import BlockCache
from blockdraft_diffusion.model import DiffusionModel, hide_mask_token
from blockdraft_diffusion.settings import SampleSettings
from blockdraft_diffusion.strategies import DraftTokens, Strategy, read_strategy


@dataclass(frozen=True)
class DenoisingStep:
    """A forward pass that unmasked tokens.

    Attributes:
        begin: Position of the block in the sequence.
        block: Tokens of the block after the pass; None for unknown ones.
        unmasked: Positions in the block of the tokens that the pass unmasked.
    """

    begin: int
    block: tuple[int | None, ...]
    unmasked: tuple[int, ...]


# Called after each pass that unmasked tokens, with the sequence's index and its block (None for unknown tokens).
Watch: TypeAlias = Callable[[int, Sequence[int | None]], None]


@dataclass(frozen=True)
class BlockChunk:
    """New tokens of one completion, about a block.

    Attributes:
        index: Index of the prompt.
        token_ids: New tokens, including the end token. When gaps are filled, given tokens are included too.
        text: New text, without the end token.
        finish_reason: "stop" for an end token or a stop string, "length" at the requested number of tokens, None
            before the last chunk.
        forwards: Forward passes for the completion so far, without prefill.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: Literal["stop", "length"] | None
    forwards: int


@dataclass(eq=False)
class ActiveSequence:
    """A sequence that is waiting or being sampled.

    Attributes:
        index: Index of the prompt.
        tokens: Tokens, at least up to the end of the current block; None for unknown ones.
        max_length: Number of tokens at which the sequence ends.
        generator: Random number generator of this sequence.
        output: Text of the completion.
        is_infill: Whether gaps are filled. Then no token is sampled beyond `max_length`, and no token ends the text.
        cache_index: Batch index in the cache.
        begin: Position of the current block.
        emitted: Number of tokens in earlier chunks and in the prompt.
        forwards: Forward passes so far, without prefill.
        order: Uniform random number of each position of the block.
        history: Passes that unmasked tokens.
    """

    index: int
    tokens: list[int | None]
    max_length: int
    generator: torch.Generator
    output: AnswerText
    is_infill: bool = False
    cache_index: int = 0
    begin: int = 0
    emitted: int = 0
    forwards: int = 0
    order: Tensor = field(default_factory=lambda: torch.empty(0))
    history: list[DenoisingStep] = field(default_factory=list)

    @property
    def block(self) -> tuple[int | None, ...]:
        return tuple(self.tokens[self.begin : self.begin + len(self.order)])

    def masked(self) -> list[int]:
        """Return the positions of unknown tokens in the block, up to `max_length` if gaps are filled."""
        end = self.max_length - self.begin if self.is_infill else len(self.order)
        return [position for position, token in enumerate(self.block[:end]) if token is None]

    def open_block(self, begin: int, size: int) -> None:
        self.begin = begin
        self.tokens += [None] * (begin + size - len(self.tokens))
        self.order = torch.rand(size, generator=self.generator, dtype=torch.float64)

    def unmask(self, new_tokens: Mapping[int, int], watch: Watch | None) -> None:
        """Set tokens by their positions in the block, and record the pass."""
        for position, token in new_tokens.items():
            self.tokens[self.begin + position] = token
        self.history.append(DenoisingStep(self.begin, self.block, tuple(new_tokens)))
        if watch is not None:
            watch(self.index, self.block)

    def next_chunk(self, eos_token_ids: frozenset[int]) -> BlockChunk | None:
        """Return the current block once it is complete, or its part up to the end of the text; None before that.

        Args:
            eos_token_ids: Tokens that end the text, unless gaps are filled.
        """
        block_end = self.begin + len(self.order)
        known_end = next((at for at in range(self.emitted, block_end) if self.tokens[at] is None), block_end)
        reason: Literal["stop", "length"] | None = None
        new = [token for token in self.tokens[self.emitted : min(known_end, self.max_length)] if token is not None]
        stop = next((n for n, token in enumerate(new, 1) if token in eos_token_ids and not self.is_infill), None)
        if stop is not None:
            new, reason = new[:stop], "stop"
        elif known_end >= self.max_length:
            reason = "length"
        elif known_end < block_end:
            new = new[: max(0, self.begin - self.emitted)]
        if reason is None and not new:
            return None
        for count, token in enumerate(new, 1):
            if count != stop:
                self.output.push(token)
            if self.output.stopped:
                new, reason = new[:count], "stop"
                break
        self.emitted += len(new)
        if reason is not None:
            self.output.finish()
        return BlockChunk(self.index, tuple(new), self.output.take(), reason, self.forwards)


class Sampler:
    """Samples completions of prompts, and tokens for gaps in texts.

    Args:
        strategy: Selects the tokens that a pass unmasks; None uses the strategy named in the settings.
        stop: Stop strings. The completion is cut before the first one.

    Attributes:
        inputs: Tokens of each sequence of the last `stream` or `fill` call, before sampling; None for gaps.
        history: Passes that unmasked tokens, for each sequence of the last call.

    Raises:
        UsageError: The settings name an unknown strategy.
    """

    def __init__(
        self,
        model: DiffusionModel,
        settings: SampleSettings = SampleSettings(),  # noqa: B008 (frozen)
        strategy: Strategy | None = None,
        stop: tuple[str, ...] = (),
    ) -> None:
        self.model, self.settings = model, settings
        self.strategy = strategy or read_strategy(settings.strategy)
        self._params = SamplingParams(
            temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p, stop=stop
        )
        self._eos_token_ids = frozenset() if settings.ignore_eos else model.text.eos_token_ids
        self.inputs: list[list[int | None]] = []
        self.history: list[list[DenoisingStep]] = []
        self._seed = secrets.randbits(32) if settings.seed is None else settings.seed

    def stream(self, prompts: Sequence[Prompt], watch: Watch | None = None) -> Iterator[BlockChunk]:
        """Complete prompts in one batch.

        Each sequence moves to its next block when its current block is complete, and frees its place when it ends.
        Its tokens do not depend on the other sequences, except for rounding.

        Args:
            prompts: Texts (sent as a user message if the model has a chat template), chats, or token ids.
            watch: Called after each pass; see `Watch`.

        Raises:
            UsageError: A prompt is empty, contains the mask token, or exceeds the context. Raised before sampling.
            NumbersError: The model computes NaN or infinity.
        """
        sequences = []
        for index, prompt in enumerate(prompts):
            ids = self._checked(prompt)
            max_length = len(ids) + self.settings.max_new_tokens
            output = self._output(self._params.stop, ids)
            sequences.append(
                ActiveSequence(index, [*ids], max_length, self._generator(index), output, emitted=len(ids))
            )
        return self._run(sequences, watch)

    def fill(self, texts: Sequence[Sequence[int | None]], watch: Watch | None = None) -> Iterator[BlockChunk]:
        """Fill the gaps of texts in one batch.

        A token in a gap depends on all tokens before its block and on the known tokens of its block, including later
        ones, but not on later blocks. `max_new_tokens`, stop strings and `ignore_eos` have no effect, and no end token
        is sampled.

        Args:
            texts: Token ids, with None for the tokens of gaps.
            watch: Called after each pass; see `Watch`.

        Raises:
            UsageError: A text has no gap, begins with one, contains the mask token, or exceeds the context.
            NumbersError: The model computes NaN or infinity.
        """
        sequences = []
        for index, tokens in enumerate(texts):
            self.model.check_tokens([token for token in tokens if token is not None], "The text")
            if None not in tokens or tokens[0] is None:
                raise UsageError("The text has no gap, or begins with one; give text before the gap.")
            self._check_length(len(tokens), f"The text's {len(tokens)} tokens, gaps included", "shorten it")
            generator, output = self._generator(index), self._output()
            sequences.append(ActiveSequence(index, [*tokens], len(tokens), generator, output, is_infill=True))
        return self._run(sequences, watch)

    def _checked(self, prompt: Prompt) -> list[int]:
        ids = encode(prompt, self.model.text)
        self.model.check_tokens(ids, "The prompt")
        if not ids:
            raise UsageError("The prompt is empty: its text has no tokens; give at least one.")
        new, size, context = self.settings.max_new_tokens, self.model.config.block_size, self.model.text.max_context
        room = context // size * size - len(ids)
        remedy = f"ask for at most {room}" if room > 0 else "shorten the prompt"
        self._check_length(len(ids) + new, f"The prompt's {len(ids)} tokens and max_new_tokens {new}", remedy)
        return ids

    def _check_length(self, tokens: int, description: str, remedy: str) -> None:
        size, context = self.model.config.block_size, self.model.text.max_context
        if size > context:
            raise UsageError(f"block_size must be at most {context}, the model's context, got {size}.")
        if self._whole_blocks(tokens) > context:
            raise UsageError(f"{description}, in blocks of {size}, exceed the model's context of {context}; {remedy}.")

    def _whole_blocks(self, tokens: int) -> int:
        """Round a number of tokens up to whole blocks."""
        size = self.model.config.block_size
        return -(-tokens // size) * size

    def _generator(self, index: int) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed + index)

    def _output(self, stop: Sequence[str] = (), prompt: Sequence[int] = ()) -> AnswerText:
        return AnswerText(self.model.text.tokenizer, stop, prompt=prompt)

    def _run(self, sequences: list[ActiveSequence], watch: Watch | None) -> Iterator[BlockChunk]:
        self.inputs = [[*sequence.tokens] for sequence in sequences]
        self.history = [sequence.history for sequence in sequences]
        free = list(range(min(len(sequences), self.settings.batch_size)))
        capacity = max((self._whole_blocks(sequence.max_length) for sequence in sequences), default=0)
        cache = BlockCache(self.model, len(free), capacity)
        waiting, running = deque(sequences), list[ActiveSequence]()
        while waiting or running:
            while waiting and free:
                running.append(waiting.popleft())
                self._prefill(running[-1], free.pop(0), cache)
            self._unmask_first(cache, running, watch)
            for sequence in list(running):
                chunk = sequence.next_chunk(self._eos_token_ids)
                if chunk is not None:
                    yield chunk
                    if chunk.finish_reason is not None:
                        running.remove(sequence)
                        free.append(sequence.cache_index)
            if running:
                self._step(cache, running, watch)

    def _prefill(self, sequence: ActiveSequence, cache_index: int, cache: BlockCache) -> None:
        """Commit the blocks before the first unknown token."""
        size, tokens = self.model.config.block_size, sequence.tokens
        num_known = tokens.index(None) if None in tokens else len(tokens)
        sequence.cache_index = cache_index
        sequence.open_block(num_known // size * size, size)
        cache.clear(cache_index)
        cache.prefill(cache_index, [token for token in tokens[: sequence.begin] if token is not None])

    def _step(self, cache: BlockCache, sequences: Sequence[ActiveSequence], watch: Watch | None) -> None:
        """Run one forward pass: commit complete blocks, and unmask tokens of the others."""
        size, mask = self.model.config.block_size, self.model.config.mask_token_id
        blocks = [[mask if token is None else token for token in sequence.block] for sequence in sequences]
        masked = [sequence.masked() for sequence in sequences]
        indices = [sequence.cache_index for sequence in sequences]
        states = cache.forward(indices, torch.tensor(blocks), [not positions for positions in masked])
        incomplete = [b for b, positions in enumerate(masked) if positions]
        if incomplete:
            states_MH = torch.cat([states[b, masked[b]] for b in incomplete])
            self._unmask([(sequences[b], masked[b]) for b in incomplete], states_MH, watch)
        for sequence, positions in zip(sequences, masked, strict=True):
            sequence.forwards += 1
            if not positions:
                sequence.open_block(sequence.begin + size, size)

    def _unmask_first(self, cache: BlockCache, sequences: Sequence[ActiveSequence], watch: Watch | None) -> None:
        """Unmask the first token of blocks in which only that token is unknown, without a forward pass.

        With a token shift, the pass over the block before has predicted it already. So blocks of one token take one
        pass each, as in a causal model.
        """
        ready = [s for s in sequences if s.masked() == [0] and cache.predicts_first(s.cache_index)]
        if ready:
            states = torch.stack([cache.first_state(sequence.cache_index) for sequence in ready])
            self._unmask([(sequence, [0]) for sequence in ready], states, watch)

    @torch.no_grad()
    def _unmask(
        self, masked: Sequence[tuple[ActiveSequence, list[int]]], states_MH: Tensor, watch: Watch | None
    ) -> None:
        """Sample draft tokens for masked positions, and keep those that the strategy chooses.

        Args:
            masked: Sequences with the masked positions of their blocks, at least one each.
            states_MH: Hidden states that predict these M tokens, sequence by sequence.
        """
        logits = self.model.network.logits(states_MH)
        self.model.check_finite(logits)
        logits = hide_mask_token(logits, self.model.config.mask_token_id)
        if masked[0][0].is_infill:
            logits[:, [token for token in self.model.text.eos_token_ids if token < logits.size(-1)]] = -torch.inf
        log_probs = logits.log_softmax(dim=-1)
        probs = probabilities(logits[None], [self._params])[0]
        uniforms = torch.cat(
            [
                torch.rand(len(sequence.order), generator=sequence.generator, dtype=torch.float64)[positions]
                for sequence, positions in masked
            ]
        )
        tokens = draw(probs, uniforms)
        confidence = log_probs.gather(-1, tokens[:, None].to(log_probs.device)).squeeze(-1).exp().cpu()
        entropy = -(log_probs.exp() * log_probs.masked_fill(log_probs == -torch.inf, 0.0)).sum(dim=-1).cpu()
        sizes = [len(positions) for _, positions in masked]
        splits = (values.split(sizes) for values in (tokens.cpu(), confidence, entropy))
        for (sequence, positions), ids, probability, nats in zip(masked, *splits, strict=True):
            chosen = self.strategy.choose(DraftTokens(probability, nats, sequence.order[positions]))
            assert chosen.any()
            choices = zip(positions, ids.tolist(), chosen.tolist(), strict=True)
            sequence.unmask({position: token for position, token, is_chosen in choices if is_chosen}, watch)
