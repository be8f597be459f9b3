"""Responses written by the target itself: what a drafter should learn from, since it will guess the target's tokens.

Who answers is an `Answerer`: our own engine, or a server that speaks OpenAI's protocol. Conversations come in turns:
each answer is part of the next prompt.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from threading import Event
from typing import Any, Protocol

from torch import tensor

from blockdraft.engine import Engine, Request, Scheduler, loops
from blockdraft.training.chats import ChatEncoder, answer_places
from blockdraft.training.data import DataWriter, Document
from blockdraft.training.rows import Message
from blockdraft.types import SamplingParams

RETRIES = 6
FIRST_WAIT = 1.0  # seconds before the first retry, twice as long before each further one
REQUEST_SECONDS = 1800.0
SERVER_KEY = "BLOCKDRAFT_SERVER_KEY"


@dataclass(frozen=True)
class Answer:
    """Attributes:
    text: Without special tokens.
    token_ids: As they were generated, the end token included; None where a server does not tell.
    ended: Whether the target ended it; False where it was cut at the longest length.
    prompt_ids: The prompt as a server read it, where it tells.
    reasoning: What a server has taken out of the text and told apart.
    """

    text: str
    token_ids: list[int] | None
    ended: bool
    prompt_ids: list[int] | None = None
    reasoning: str | None = None


class Answerer(Protocol):
    """Attributes:
    at_once: Questions that it should have at any time.
    """

    at_once: int

    def ask(self, key: int, messages: Sequence[Message], prompt: list[int], params: SamplingParams) -> None:
        """Have a prompt answered."""

    def answers(self) -> list[tuple[int, Answer]]:
        """Wait until at least one question is answered; the keys and answers of those that are."""

    def close(self) -> None:
        """Drop what is unanswered."""


class EngineAnswerer:
    """Our own engine."""

    def __init__(self, engine: Engine) -> None:
        self.at_once = 2 * engine.max_batch_size  # so that one is always waiting for a free row
        self._scheduler = Scheduler(engine)
        self._keys: dict[Request, int] = {}

    def ask(self, key: int, messages: Sequence[Message], prompt: list[int], params: SamplingParams) -> None:
        self._keys[self._scheduler.submit(prompt, params)] = key

    def answers(self) -> list[tuple[int, Answer]]:
        ended: list[Request] = []
        while not ended:
            ended = self._scheduler.step()
        found = [request.completion().checked() for request in ended]
        keys = [self._keys.pop(request) for request in ended]
        return [
            (key, Answer(c.text, c.token_ids, c.finish_reason == "stop")) for key, c in zip(keys, found, strict=True)
        ]

    def close(self) -> None:
        pass


class ServerAnswerer:
    """A server with OpenAI's chat completions, such as vLLM or SGLang. A key for it may stand in the environment.

    Args:
        url: Such as http://localhost:8000/v1.
        model: The name under which the server has the target.
        at_once: Requests at a time.
        template_args: Further arguments of the chat template.
    """

    def __init__(self, url: str, model: str, at_once: int, template_args: dict[str, Any]) -> None:
        try:
            import httpx
        except ImportError as error:
            raise ValueError("A server takes `httpx`; pip install 'blockdraft[train]' brings it.") from error
        self._broken: tuple[type[Exception], ...] = (httpx.TransportError, httpx.InvalidURL)
        key = os.environ.get(SERVER_KEY)
        self._url, self._model, self.at_once = url.rstrip("/"), model, at_once
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(REQUEST_SECONDS, connect=30),
            limits=httpx.Limits(max_connections=at_once),
        )
        self._pool = ThreadPoolExecutor(at_once)
        self._extra = {"chat_template_kwargs": template_args} if template_args else {}
        self._running: dict[Future[Answer], int] = {}
        self._closing = Event()

    def ask(self, key: int, messages: Sequence[Message], prompt: list[int], params: SamplingParams) -> None:
        body = {
            "model": self._model,
            "messages": list(messages),
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed,
            "return_token_ids": True,  # vLLM's; other servers pass over it
            **({"top_k": params.top_k} if params.top_k else {}),
            **self._extra,
        }
        self._running[self._pool.submit(self._request, body)] = key

    def answers(self) -> list[tuple[int, Answer]]:
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        return [(self._running.pop(future), future.result()) for future in done]

    def close(self) -> None:
        self._closing.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _request(self, body: dict[str, Any]) -> Answer:
        """Ask, and ask again where the server is busy or away."""
        told = "closed"
        for attempt in range(RETRIES + 1):
            if self._closing.wait(FIRST_WAIT * 2 ** (attempt - 1) if attempt else 0):
                break
            try:
                response = self._client.post(f"{self._url}/chat/completions", json=body)
            except self._broken as error:
                told = f"{type(error).__name__}: {error}"
                continue
            told = f"status {response.status_code}: {response.text[:300]}"
            if response.status_code == 200:
                return _parsed(response, self._url)
            if response.status_code < 500 and response.status_code not in (408, 425, 429):
                raise ValueError(f"{self._url} refuses a request ({told}); check --server and --model.")
        raise ValueError(f"{self._url} did not answer after {RETRIES + 1} tries ({told}).")


def _parsed(response: Any, url: str) -> Answer:
    try:
        body = response.json()
        [choice] = body["choices"]
        message, reason = choice["message"], choice["finish_reason"]
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reason not in ("stop", "length"):
            raise ValueError(f"an answer has the finish reason {reason!r}")
        ids, prompt_ids = choice.get("token_ids"), body.get("prompt_token_ids")
        return Answer(message["content"] or "", ids, reason == "stop", prompt_ids, reasoning)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{url} answers in another way than OpenAI's chat completions ({error}): {response.text[:300]}"
        ) from error


def prompts_of(messages: Sequence[Message]) -> list[list[Message]]:
    """What comes before each answer that is to be written, the answers themselves left out. A chat that ends with a
    user's message gets an answer to it."""
    parts: list[list[Message]] = [[]]
    replaced = answer_places(messages)
    for i, message in enumerate(messages):
        if i not in replaced:
            parts[-1].append(message)
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


class Conversation:
    """A row on its way through its turns.

    Attributes:
        documents: Those that are whole. Turns share one as long as the template's next prompt begins with the very
            tokens so far; where it does not (it drops earlier reasoning, say), that turn begins a document of its own.
        reason: Why the conversation ended before its first answer, if it did.
    """

    def __init__(self, prompts: list[list[Message]], encoder: ChatEncoder, length: int) -> None:
        self.messages: list[Message] = []
        self.documents: list[Document] = []
        self.reason: str | None = None
        self._parts, self._encoder, self._length = prompts, encoder, length
        self._ids: list[int] = []
        self._written: list[bool] = []
        self._prompt: list[int] = []

    def next_prompt(self) -> list[int] | None:
        """Token ids of what is to be answered next; None where nothing is."""
        if self._parts:
            self.messages += self._parts.pop(0)
            self._prompt = self._encoder.prompt(self.messages)
            if len(self._prompt) < self._length:
                return self._prompt
            self.reason = "prompt too long"
        self._close()
        return None

    def take(self, answer: Answer) -> None:
        """Take the answer to the last prompt. Raises ValueError where a server and our template disagree."""
        message = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        self.messages.append(message)
        prompt, ids = self._prompt, answer.token_ids
        if answer.prompt_ids is not None and answer.prompt_ids != prompt:
            raise ValueError(
                f"The server reads a prompt as {len(answer.prompt_ids)} tokens and the target's chat template makes "
                f"{len(prompt)}, other ones; have it use the same model, or give --chat-template or --template-args."
            )
        if ids is None:
            prompt, ids = self._encoder.last_answer(self.messages)
            if answer.reasoning and answer.reasoning.strip() not in self._encoder.decode(ids):
                raise ValueError(
                    "The server tells reasoning apart and the target's chat template drops it; start the server "
                    "without its reasoning parser."
                )
            if not answer.ended:
                ids = self._encoder.without_end(ids)
        if loops(ids) or not ids:
            self.reason = "answer loops" if ids else "no supervised token"
            self._parts.clear()
            return
        if prompt[: len(self._ids)] != self._ids:
            self._close()
        self._written += [False] * (len(prompt) - len(self._written)) + [True] * len(ids)
        self._ids = prompt + ids
        if not answer.ended:
            self._parts.clear()  # nobody would go on behind half an answer

    def _close(self) -> None:
        if self._ids:
            over = len(self._ids) > self._length
            ids, written = self._ids[: self._length], self._written[: self._length]
            self.documents.append(Document(tensor(ids), tensor(written), over))
        self._ids, self._written = [], []


def regenerate(
    rows: Iterable[tuple[int, list[Message]]],
    answerer: Answerer,
    encoder: ChatEncoder,
    writer: DataWriter,
    params: SamplingParams,
    length: int,
    progress: Callable[[], None],
) -> None:
    """Have the answers of chats written anew, and write what comes of it.

    Args:
        rows: Source rows by number.
        params: Of every answer. Each gets a seed of its own, which follows from this one, the row and the turn.
        length: Tokens of a document at most; an answer is cut there.
        progress: Called after each row.
    """
    running: dict[int, Conversation] = {}
    waiting = iter(rows)

    def go_on(key: int, answer: Answer | None = None) -> None:
        chat = running[key]
        try:
            if answer is not None:
                chat.take(answer)
            prompt = chat.next_prompt()
        except ValueError as error:
            raise ValueError(f"Row {key + 1}: {error}") from error
        if prompt is None:
            writer.add(key, chat.documents, None if chat.documents else chat.reason)
            del running[key]
            progress()
            return
        seed = (((params.seed or 0) * 1_000_003 + key) * 1_009 + len(chat.messages)) % 2**31
        most = min(params.max_new_tokens, length - len(prompt))
        answerer.ask(key, chat.messages, prompt, replace(params, max_new_tokens=most, seed=seed))

    try:
        while True:
            while len(running) < answerer.at_once and (row := next(waiting, None)) is not None:
                running[row[0]] = Conversation(prompts_of(row[1]), encoder, length)
                go_on(row[0])
            if not running:
                return
            for key, answer in answerer.answers():
                go_on(key, answer)
    finally:
        answerer.close()
