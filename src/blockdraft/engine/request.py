"""A request from prompt to completion, its running sequence, and what users see of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from blockdraft.decode.prediction import Prediction
from blockdraft.decode.sampling import RandomNumbers
from blockdraft.engine.grammar import AnswerGrammar
from blockdraft.engine.stats import Stats
from blockdraft.engine.text import AnswerText
from blockdraft.errors import BlockdraftError, NumbersError, RequestError, UsageError, describe
from blockdraft.types import FinishReason, RequestDrafting, SamplingParams, StepTrace, TokenLogprob

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

SHORT_PROMPT, SHORT_OUTPUT = 256, 128  # most tokens that a short request reads, and may write


@dataclass(eq=False, kw_only=True)
class Request:
    """One request while it waits and while it is decoded. `Engine.submit` returns it.

    Attributes:
        prompt: Token ids.
        tokenizer: Decodes the answer; None leaves the text empty.
        stop_ids: Tokens that end the answer, the target's own included unless they are ignored.
        slots: KV slots that its sequence needs, those of draft tokens included.
        listener: Called with each chunk of the answer, in the worker thread. An exception in it ends the request.
        drafting: Draft limits that are stricter than the engine's, or None.
        grammar: State of its grammar after the tokens so far, if it has one.
        prediction: Its predicted output, if it has one.
        max_depth: Most draft tokens on a path by the request's limits, or None.
        trace: Whether chunks report the steps they come from.
        instruction_tokens: Leading tokens of the prompt that are a program's instructions, which may be stored on disk.
        num_prefilled: Tokens of the prompt that have been read or copied.
        urgent: Whether it goes before others, as `is_short`.
        passed: Later requests that were admitted while it waited.
        step: The last step, until a chunk has reported it.
        token_ids: The answer so far. The last token is the anchor.
        drafted: For each token, whether it was a draft token.
        logprobs: Log probabilities of each token, if requested.
        prompt_logprobs: Those of the prompt tokens read so far, if requested; complete before the first token.
        finish_reason: None while it waits or runs.
        failure: The error that ended it, if the finish reason is "error"; `error` is its message.
        cancelled: Set by `cancel`. The scheduler ends the request before the next step.
        complete: Whether the answer is complete, although it was cancelled.
        recorded: Whether the engine's recorder gets it.
    """

    prompt: list[int]
    params: SamplingParams
    tokenizer: PreTrainedTokenizerBase | None = None
    stop_ids: frozenset[int] = frozenset()
    slots: int = 0
    listener: Callable[[Chunk], object] | None = None
    drafting: RequestDrafting | None = None
    grammar: AnswerGrammar | None = None
    prediction: Prediction | None = None
    max_depth: int | None = None
    trace: bool = False
    instruction_tokens: int = 0
    num_prefilled: int = 0
    urgent: bool = False
    passed: int = 0
    step: StepTrace | None = None
    token_ids: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    failure: BlockdraftError | None = None
    cancelled: bool = False
    complete: bool = False
    recorded: bool = True
    stats: Stats = field(default_factory=Stats)

    def __post_init__(self) -> None:
        self.random = RandomNumbers(self.params.seed)
        self.text = AnswerText(self.tokenizer, self.params.stop, self.token_ids, self.prompt, self.stop_ids)
        self._drafts_prediction = False  # in this step
        self._sent = 0  # tokens that chunks have reported
        self._ended = threading.Event()

    @property
    def remaining(self) -> int:
        """Number of tokens that may still be added to the answer."""
        return self.params.max_new_tokens - len(self.token_ids)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def is_short(self, num_known: int = 0) -> bool:
        """Return whether it goes before long requests: it is urgent, or has little to read and to write.

        Args:
            num_known: Tokens of its prompt that need not be read.
        """
        short = len(self.prompt) - num_known <= SHORT_PROMPT and self.params.max_new_tokens <= SHORT_OUTPUT
        return self.urgent or short

    @property
    def has_own_drafts(self) -> bool:
        """Whether it provides draft tokens itself."""
        return self.prediction is not None or self.grammar is not None

    def own_draft(self, most: int) -> tuple[list[int], list[float]]:
        """Return the tokens of its prediction if these begin with what its grammar forces, else those of its grammar.

        Returns:
            At most `most` tokens, and the probability of each that it is accepted with all before it.
        """
        budget = None if self.drafting is None else self.drafting.tree_budget
        limits = [most, self.remaining - 1, self.max_depth, budget or None]
        most = min(limit for limit in limits if limit is not None)
        self._drafts_prediction = False
        if most <= 0:
            return [], []
        if self.prediction is not None:
            self.prediction.follow(self.token_ids[self.prediction.length :])
            predicted, acceptance_probs = self.prediction.draft(most)
            forced = [] if self.grammar is None else self.grammar.forced_tokens()[:most]
            if predicted and predicted[: len(forced)] == forced:
                self._drafts_prediction = True
                return predicted, acceptance_probs
        return ([], []) if self.grammar is None else self.grammar.draft(most)

    def count_own_draft(self, num_drafted: int, path: Sequence[int]) -> None:
        """Count the draft tokens of its prediction on an accepted path.

        Args:
            num_drafted: Its own draft tokens, which are the first nodes behind the anchor.
            path: The nodes whose tokens the answer has.
        """
        if self._drafts_prediction:
            accepted = sum(0 < node <= num_drafted for node in path)
            self.stats.accepted_prediction += accepted
            self.stats.rejected_prediction += num_drafted - accepted

    def cancel(self, complete: bool = False) -> None:
        """End the request early and keep the tokens so far. May be called from any thread.

        Args:
            complete: Whether the reader needs no more, so that the tokens so far are the whole answer.
        """
        self.complete = self.complete or complete
        self.cancelled = True

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end, and return the completion.

        Args:
            timeout: Seconds; None waits forever.

        Raises:
            TimeoutError: The request has not ended by then. It goes on.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"The request has not ended after {timeout} s; wait longer, or cancel it.")
        return self.completion()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end for at most `timeout` seconds, and return whether the request has ended."""
        return self._ended.wait(timeout)

    def finish(self, reason: FinishReason) -> None:
        """End the request."""
        try:
            self.text.finish()
        except Exception as error:
            self.fail(RequestError(f"The tokenizer failed: {describe(error)}"), error)
        else:
            self.finish_reason = reason

    def fail(self, error: BlockdraftError, cause: BaseException | None = None) -> None:
        """End the request with an error."""
        error.__cause__ = cause
        self.finish_reason, self.failure = "error", error

    def dead_end(self) -> BlockdraftError:
        """Return the error for an answer that no token can continue."""
        place = f"after token {len(self.token_ids)} of the answer"
        why = None if self.grammar is None else self.grammar.dead_end()
        if why is not None:
            return UsageError(f"The grammar allows no token {place}: {why}. A simpler grammar may do.")
        allowed = "" if self.grammar is None else ", or not for the tokens that the grammar allows"
        return NumbersError(f"The target's logits {place} are not finite numbers{allowed}.")

    def extend(self, token_ids: Sequence[int], drafted: Sequence[bool], logprobs: Sequence[TokenLogprob] = ()) -> int:
        """Add committed tokens up to a stop token, a stop string or the length limit, and return how many were added.

        A tokenizer that fails ends the request.
        """
        for count, (token, is_draft) in enumerate(zip(token_ids, drafted, strict=True), start=1):
            self.token_ids.append(token)
            self.drafted.append(is_draft)
            if logprobs:
                self.logprobs.append(logprobs[count - 1])
            if self.params.stop:  # else the text is not needed yet
                try:
                    self.text.read()
                except Exception as error:
                    self.fail(RequestError(f"The tokenizer failed: {describe(error)}"), error)
                    return count
            if token in self.stop_ids or self.text.stopped:
                self.finish("stop")
                return count
            if self.remaining == 0:
                self.finish("length")
                return count
            if self.grammar is not None and not self.grammar.advance(token):
                self.fail(self.dead_end())
                return count
        return len(token_ids)

    def publish(self) -> None:
        """Pass new tokens to the listener, and wake whoever waits for the end."""
        if self.listener is not None and (self.finished or len(self.token_ids) > self._sent):
            try:
                chunk = self._chunk()
            except Exception as error:  # the listener must get it, or it would wait forever
                self.fail(RequestError(f"The tokenizer failed: {describe(error)}"), error)
                chunk = self._chunk()
            try:
                self.listener(chunk)
            except BaseException as error:  # also sys.exit(): whoever waits for the end must not wait forever
                self.listener = None
                self.fail(RequestError(f"The listener failed: {describe(error)}"), error)
        if self.finished:
            self._ended.set()

    def _chunk(self) -> Chunk:
        text = "" if isinstance(self.failure, RequestError) else self.text.take()  # first, since a tokenizer may fail
        new, drafted = tuple(self.token_ids[self._sent :]), tuple(self.drafted[self._sent :])
        self._sent = len(self.token_ids)
        step, self.step = self.step, None
        return Chunk(
            text=text,
            token_ids=new,
            drafted=drafted,
            stats=self.stats,
            finish_reason=self.finish_reason,
            failure=self.failure,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs[-len(new) :] if new else ()),
            step=step,
        )

    @property
    def error(self) -> str | None:
        """Message of the error that ended the request."""
        return _message(self.failure)

    def completion(self) -> Completion:
        """Return the completion of a request that has ended."""
        assert self.finish_reason is not None
        try:
            text = self.text.shown
        except Exception:  # of the tokenizer; `error` reports it
            text = ""
        return Completion(
            text=text,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            drafted=self.drafted,
            stats=self.stats,
            prompt_tokens=len(self.prompt),
            failure=self.failure,
            logprobs=None if self.params.logprobs is None else self.logprobs,
            prompt_logprobs=None if self.params.prompt_logprobs is None else self.prompt_logprobs,
        )


@dataclass(eq=False)
class RunningSequence:
    """A running request, and its range of KV slots in the caches of target and drafter.

    Attributes:
        start: First of its slots, which names it in both caches.
        capacity: Number of its slots.
        short: Whether the request was short when it was admitted.
    """

    request: Request
    start: int
    capacity: int
    short: bool = False

    @property
    def prefilled(self) -> int:
        """Tokens of the prompt that have been read or copied."""
        return self.request.num_prefilled

    @property
    def num_unread(self) -> int:
        """Tokens of the prompt that have not been read."""
        return len(self.request.prompt) - self.prefilled

    @property
    def in_prefill(self) -> bool:
        return self.request.num_prefilled < len(self.request.prompt)


@dataclass(frozen=True)
class Completion:
    """An answer.

    Attributes:
        text: Text without special tokens and without the stop string that ended it. Empty without a tokenizer.
        token_ids: Tokens, including the stop token or those of the stop string.
        finish_reason: "stop" at a stop token or stop string, "length" at `max_new_tokens`, "cancelled", or "error".
        drafted: For each token, whether it was a draft token.
        stats: Counts and times; `tau` is a shortcut to the most common one.
        prompt_tokens: Length of the prompt.
        failure: Error that ended it, if the finish reason is "error"; `error` is its message.
        logprobs: Log probabilities of each token, if requested.
        prompt_logprobs: Those of each prompt token, if requested; None for the first, which follows nothing. Fewer if
            the request ended before its prompt was read.
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
        return _message(self.failure)

    def checked(self) -> Completion:
        """Return this completion, or raise the error that ended it.

        Raises:
            NumbersError: The target computed no finite logits.
            RequestError: Any other error.
        """
        if self.failure is not None:
            raise self.failure
        return self


@dataclass(frozen=True)
class Chunk:
    """Part of a streamed answer that one step adds.

    Attributes:
        text: New text. It holds whole characters only, and nothing that may still become a stop string, so it may be
            empty while `token_ids` is not.
        token_ids: New tokens.
        drafted: For each new token, whether it was a draft token; False for the bonus.
        stats: Counts and times so far; the same object in every chunk of an answer.
        finish_reason: Set on the last chunk.
        failure: Set on the last chunk if its finish reason is "error"; `error` is its message.
        logprobs: Log probabilities of each new token, if requested.
        step: Step that the tokens come from, if the request was submitted with `trace`; None for the first token,
            which comes from prefill.
    """

    text: str
    token_ids: tuple[int, ...]
    drafted: tuple[bool, ...]
    stats: Stats
    finish_reason: FinishReason | None = None
    failure: BlockdraftError | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    step: StepTrace | None = None

    @property
    def error(self) -> str | None:
        return _message(self.failure)

    def checked(self) -> Chunk:
        """Return this chunk, or raise as `Completion.checked` does."""
        if self.failure is not None:
            raise self.failure
        return self


def _message(failure: BlockdraftError | None) -> str | None:
    return None if failure is None else str(failure)


class Recorder(Protocol):
    """Gets the finished requests of an engine.

    Attributes:
        target_layers: Target layers whose hidden states it needs, 0-based; empty for none.
    """

    target_layers: tuple[int, ...]

    def record(self, request: Request, hidden_states: Tensor | None) -> None:
        """Take a request that has ended without an error. Called in the engine's thread, so it should be quick.

        Args:
            hidden_states: `[S, m * H]` bfloat16, those of the prompt and of all tokens of the answer but the last, or
                more; None without `target_layers`.
        """

    def close(self) -> None:
        """Finish writing."""
