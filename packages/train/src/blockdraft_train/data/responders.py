"""Writers of new responses to prompts: our own engine, or a server with OpenAI's protocol."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event
from typing import Any, Protocol

import httpx

from blockdraft.engine import Chunk, Engine, Request, loops
from blockdraft.errors import UsageError
from blockdraft.types import SamplingParams
from blockdraft_bench.settings import SERVER_KEY
from blockdraft_train.data.chats import Tools
from blockdraft_train.data.records import Message

RETRIES = 6
FIRST_WAIT = 1.0  # seconds before the first retry; the wait doubles with each further one
REQUEST_SECONDS = 1800.0
CHECKED_TOKENS = 32  # tokens of a response between checks for repetition


@dataclass(frozen=True)
class Response:
    """Response to a prompt.

    Attributes:
        text: Text without special tokens.
        token_ids: Token ids as they were generated, with the end token; None if a server does not report them.
        ended: Whether the target ended the response; False if it was cut at the maximum length.
        prompt_ids: Token ids of the prompt as a server read it; None if it does not report them.
        reasoning: Reasoning that a server reports apart from the text.
    """

    text: str
    token_ids: list[int] | None
    ended: bool
    prompt_ids: list[int] | None = None
    reasoning: str | None = None


class Responder(Protocol):
    """Writer of responses.

    Attributes:
        at_once: Number of prompts that should be running or waiting at any time.
    """

    at_once: int

    def submit(
        self, key: int, messages: Sequence[Message], prompt: list[int], params: SamplingParams, tools: Tools = None
    ) -> None:
        """Submit a prompt.

        Args:
            key: Identifies the response in `responses`.
            messages: Chat of the prompt; empty if the prompt is a text that is continued without a chat template.
            prompt: Token ids of the prompt.
            tools: Tools of the chat.
        """

    def responses(self) -> list[tuple[int, Response]]:
        """Wait until at least one response is complete, and return the keys and responses of all that are."""

    def close(self) -> None:
        """Drop the prompts whose responses are not complete."""


class EngineResponder:
    """Writes responses with our own engine. A response that becomes repetitive is cancelled."""

    def __init__(self, engine: Engine) -> None:
        self.at_once = 2 * engine.max_batch_size  # so that a prompt always waits for a free place in the batch
        self._engine = engine
        self._requests: dict[int, Request] = {}
        self._loops: dict[int, int] = {}  # number of tokens after which a response was repetitive
        self._ended: SimpleQueue[int] = SimpleQueue()

    def submit(
        self, key: int, messages: Sequence[Message], prompt: list[int], params: SamplingParams, tools: Tools = None
    ) -> None:
        token_ids, checked = list[int](), 0

        def receive(chunk: Chunk) -> None:
            nonlocal checked
            token_ids.extend(chunk.token_ids)
            if chunk.finish_reason is not None:
                self._ended.put(key)
            elif key not in self._loops and len(token_ids) >= checked + CHECKED_TOKENS:
                checked = len(token_ids) // CHECKED_TOKENS * CHECKED_TOKENS
                if loops(token_ids[:checked]):
                    self._loops[key] = checked  # a multiple, so that it does not depend on where a step ended
            if key in self._loops and key in self._requests:
                self._requests[key].cancel()

        self._requests[key] = self._engine.submit(prompt, params, receive)

    def responses(self) -> list[tuple[int, Response]]:
        keys = [self._ended.get()]
        while not self._ended.empty():
            keys.append(self._ended.get())
        responses = []
        for key in keys:
            completion, end = self._requests.pop(key).result().checked(), self._loops.pop(key, None)
            ended = end is None and completion.finish_reason == "stop"
            responses.append((key, Response(completion.text, completion.token_ids[:end], ended)))
        return responses

    def close(self) -> None:
        for request in self._requests.values():
            request.cancel()


class ServerResponder:
    """Writes responses with a server that has OpenAI's chat completions, such as vLLM or SGLang.

    Prompts without a chat go to its completions, as token ids. The API key is read from the environment variable
    `SERVER_KEY`.

    Args:
        url: Base URL, such as http://localhost:8000/v1.
        model: Name of the target on the server.
        at_once: Number of requests at a time.
        template_args: Further arguments of the chat template.
    """

    def __init__(self, url: str, model: str, at_once: int, template_args: dict[str, Any]) -> None:
        key = os.environ.get(SERVER_KEY)
        self._url, self._model, self.at_once = url.rstrip("/"), model, at_once
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(REQUEST_SECONDS, connect=30),
            limits=httpx.Limits(max_connections=at_once),
        )
        self._pool = ThreadPoolExecutor(at_once)
        self._extra = {"chat_template_kwargs": template_args} if template_args else {}
        self._running: dict[Future[Response], int] = {}
        self._closing = Event()

    def submit(
        self, key: int, messages: Sequence[Message], prompt: list[int], params: SamplingParams, tools: Tools = None
    ) -> None:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed,
            "return_token_ids": True,  # an extension of vLLM, which other servers ignore
            **({"top_k": params.top_k} if params.top_k else {}),
        }
        if messages:
            body |= {"messages": [_sent(message) for message in messages], **self._extra}
        else:
            body["prompt"] = prompt
        if tools:  # the text of a call is wanted, not a parsed call
            body |= {"tools": tools, "tool_choice": "none"}
        self._running[self._pool.submit(self._request, "chat/completions" if messages else "completions", body)] = key

    def responses(self) -> list[tuple[int, Response]]:
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        return [(self._running.pop(future), future.result()) for future in done]

    def close(self) -> None:
        self._closing.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _request(self, path: str, body: dict[str, Any]) -> Response:
        """Send a request, and repeat it while the server is busy or absent."""
        reason = "closed"
        for attempt in range(RETRIES + 1):
            if self._closing.wait(FIRST_WAIT * 2 ** (attempt - 1) if attempt else 0):
                break
            try:
                response = self._client.post(f"{self._url}/{path}", json=body)
            except (httpx.TransportError, httpx.InvalidURL) as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            reason = f"status {response.status_code}: {response.text[:300]}"
            if response.status_code == 200:
                return _parsed(response, self._url)
            if response.status_code < 500 and response.status_code not in (408, 425, 429):
                raise UsageError(f"{self._url} refuses a request ({reason}); check --server and --model.")
        raise UsageError(
            f"{self._url} did not answer after {RETRIES + 1} tries ({reason}); check that the server runs, then run "
            "the command again to go on."
        )


def _sent(message: Message) -> Message:
    """Return a message as OpenAI's API takes it, with the arguments of tool calls as text."""
    sent = {name: value for name, value in message.items() if name != "weight"}
    if "tool_calls" in sent:
        functions = [call["function"] for call in sent["tool_calls"]]
        texts = [json.dumps(function["arguments"], ensure_ascii=False) for function in functions]
        sent["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": text}}
            for call, text in zip(sent["tool_calls"], texts, strict=True)
        ]
    return sent


def _parsed(response: Any, url: str) -> Response:
    try:
        body = response.json()
        [choice] = body["choices"]
        message = choice["message"] if "message" in choice else {"content": choice["text"]}
        finish_reason = choice["finish_reason"]
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if finish_reason not in ("stop", "length"):
            raise UsageError(f"a response has the finish reason {finish_reason!r}")
        ids, prompt_ids = choice.get("token_ids"), choice.get("prompt_token_ids") or body.get("prompt_token_ids")
        return Response(message["content"] or "", ids, finish_reason == "stop", prompt_ids, reasoning)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{url} does not answer as OpenAI's chat completions do ({error}): {response.text[:300]}; check --server."
        ) from error
