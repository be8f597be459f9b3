"""A request from its prompt to its completion, and what a user gets to see of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from blockdraft.decode.sampling import RandomNumbers
from blockdraft.engine.grammar import AnswerGrammar
from blockdraft.engine.stats import Stats
from blockdraft.engine.text import AnswerText
from blockdraft.errors import BlockdraftError, NumbersError, RequestError, UsageError, describe
from blockdraft.types import CycleTrace, FinishReason, RequestDrafting, SamplingParams, TokenLogprob


@dataclass(eq=False)
class Request:
    """One request while it waits and while it is decoded. `Engine.submit` returns it.

    Attributes:
        prompt: Token ids.
        stop_ids: Tokens that end it, the target's own included unless they are ignored.
        slots: FreeSlots that its row needs, those of guesses included.
        listener: Called with each new chunk of the answer, in the thread that decodes; an exception ends the request.
        drafting: How far it may be drafted for, where that is less than its engine drafts.
        grammar: How far its answer has come in its grammar, if it has one.
        trace: Whether its chunks tell of their cycles.
        cycle: The last one, where they do, until a chunk tells of it.
        token_ids: The answer so far; its last token is the anchor.
        drafted: For each token, whether the drafter had guessed it.
        logprobs: Of each token, where they are asked for.
        prompt_logprobs: As in `Completion`, as far as the prompt has been read; all of it before the first token.
        finish_reason: None until it has ended.
        failure: What went wrong where the finish reason is "error"; `error` says it in words.
        cancelled: Set by `cancel`; the row is freed before the next cycle.
    """

    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    random: RandomNumbers
    text: AnswerText
    slots: int = 0
    listener: Callable[[Chunk], object] | None = None
    drafting: RequestDrafting | None = None
    grammar: AnswerGrammar | None = None
    trace: bool = False
    cycle: CycleTrace | None = None
    token_ids: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    failure: BlockdraftError | None = None
    cancelled: bool = False
    stats: Stats = field(default_factory=Stats)
    _sent: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def remaining(self) -> int:
        return self.params.max_new_tokens - len(self.token_ids)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def cancel(self) -> None:
        """Stop decoding it; what it has so far stays. May be called from any thread."""
        self.cancelled = True

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for its end.

        Raises:
            TimeoutError: It has not ended after so many seconds; it goes on.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"The request has not ended after {timeout} s; wait on, or cancel it.")
        return self.completion()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end for so many seconds at most; whether it has come."""
        return self._ended.wait(timeout)

    def finish(self, reason: FinishReason) -> None:
        """End it."""
        try:
            self.text.finish()
        except Exception as error:
            self.fail(RequestError(f"The tokenizer failed: {describe(error)}"), error)
        else:
            self.finish_reason = reason

    def fail(self, error: BlockdraftError, cause: BaseException | None = None) -> None:
        """End it with an error."""
        error.__cause__ = cause
        self.finish_reason, self.failure = "error", error

    def dead_end(self) -> BlockdraftError:
        """Why nothing can follow the answer so far."""
        place = f"after token {len(self.token_ids)} of the answer"
        why = None if self.grammar is None else self.grammar.dead_end()
        if why is not None:
            return UsageError(f"The grammar allows no token {place}: {why}. A simpler grammar may do.")
        allowed = "" if self.grammar is None else ", or not for the tokens that the grammar allows"
        return NumbersError(f"The target's logits {place} are not finite numbers{allowed}.")

    def extend(self, token_ids: Sequence[int], drafted: Sequence[bool], logprobs: Sequence[TokenLogprob] = ()) -> int:
        """Add committed tokens up to a stop token, a stop string or the length limit; returns how many were taken. A
        tokenizer that fails ends the request."""
        for taken, (token, guessed) in enumerate(zip(token_ids, drafted, strict=True), start=1):
            self.token_ids.append(token)
            self.drafted.append(guessed)
            if logprobs:
                self.logprobs.append(logprobs[taken - 1])
            try:
                self.text.push(token)
            except Exception as error:
                self.fail(RequestError(f"The tokenizer failed: {describe(error)}"), error)
                return taken
            if token in self.stop_ids or self.text.stopped:
                self.finish("stop")
                return taken
            if self.remaining == 0:
                self.finish("length")
                return taken
            if self.grammar is not None and not self.grammar.advance(token):
                self.fail(self.dead_end())
                return taken
        return len(token_ids)

    def publish(self) -> None:
        """Hand what is new to the listener, and the end to those who wait for it."""
        if self.listener is not None and (self.finished or len(self.token_ids) > self._sent):
            try:
                self.listener(self._chunk())
            except BaseException as error:  # sys.exit() and the like too: who waits for the end must hear of it
                self.listener = None
                self.fail(RequestError(f"The listener failed: {describe(error)}"), error)
        if self.finished:
            self._ended.set()

    def _chunk(self) -> Chunk:
        new, drafted = tuple(self.token_ids[self._sent :]), tuple(self.drafted[self._sent :])
        self._sent = len(self.token_ids)
        text = "" if isinstance(self.failure, RequestError) else self.text.take()
        cycle, self.cycle = self.cycle, None
        logprobs = None if self.params.logprobs is None else tuple(self.logprobs[-len(new) :] if new else ())
        return Chunk(text, new, drafted, self.stats, self.finish_reason, self.failure, logprobs, cycle)

    @property
    def error(self) -> str | None:
        return _words(self.failure)

    def completion(self) -> Completion:
        """The answer of a request that has ended."""
        assert self.finish_reason is not None
        try:
            text = self.text.shown
        except Exception:  # of a tokenizer, which `error` tells of
            text = ""
        return Completion(
            text,
            self.token_ids,
            self.finish_reason,
            self.drafted,
            self.stats,
            len(self.prompt),
            self.failure,
            None if self.params.logprobs is None else self.logprobs,
            None if self.params.prompt_logprobs is None else self.prompt_logprobs,
        )


@dataclass(frozen=True)
class Completion:
    """An answer.

    Attributes:
        text: Without special tokens and without the stop string that ended it; empty where the target has no tokenizer.
        token_ids: The stop token, or the tokens of the stop string, included.
        finish_reason: "stop" at a stop token or stop string, "length" at `max_new_tokens`, "cancelled", or "error".
        drafted: For each token, whether the drafter had guessed it.
        stats: Counts and times; `tau` is a short cut to the one most asked for.
        prompt_tokens: Length of the prompt.
        failure: What went wrong where the finish reason is "error", else None; `error` says it in words.
        logprobs: Of each token, where `SamplingParams` asks for it.
        prompt_logprobs: Of each token of the prompt, where asked for; None for the first, which nothing comes before.
            Fewer where the request was ended before its prompt was read.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    drafted: list[bool]
    stats: Stats
    prompt_tokens: int = 0
    failure: BlockdraftError | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def tau(self) -> float:
        return self.stats.tau

    @property
    def error(self) -> str | None:
        return _words(self.failure)

    def checked(self) -> Completion:
        """Itself.

        Raises:
            NumbersError: The target computed no finite numbers.
            RequestError: It ended in another error.
        """
        if self.failure is not None:
            raise self.failure
        return self


@dataclass(frozen=True)
class Chunk:
    """What one cycle adds to a streamed answer.

    Attributes:
        text: New text; never half a UTF-8 character and nothing that may still turn out to be a stop string, so it may
            be empty while `token_ids` is not.
        token_ids: New tokens.
        drafted: For each new token, whether the drafter had guessed it (False for the bonus token).
        stats: Counts and times so far; the same object in every chunk of an answer.
        finish_reason: Set on the last chunk.
        failure: Set on the last chunk where its finish reason is "error"; `error` says it in words.
        logprobs: Of each new token, where `SamplingParams` asks for it.
        cycle: The cycle that yielded it, where the request was submitted with `trace`; None for the first token, which
            the prompt yields.
    """

    text: str
    token_ids: tuple[int, ...]
    drafted: tuple[bool, ...]
    stats: Stats
    finish_reason: FinishReason | None = None
    failure: BlockdraftError | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    cycle: CycleTrace | None = None

    @property
    def error(self) -> str | None:
        return _words(self.failure)

    def checked(self) -> Chunk:
        """Itself. Raises as `Completion.checked` does."""
        if self.failure is not None:
            raise self.failure
        return self


def _words(failure: BlockdraftError | None) -> str | None:
    return None if failure is None else str(failure)


@dataclass(eq=False)
class Row:
    """A request that is decoded, and the slots that it has in the stores of target and drafter.

    Attributes:
        start: The first of its slots, by which it goes there.
        capacity: How many they are.
        read: Tokens of the prompt that have been read.
    """

    request: Request
    start: int
    capacity: int
    read: int = 0

    @property
    def reading(self) -> bool:
        return self.read < len(self.request.prompt)
