"""Client of a server with OpenAI's API, which records when each piece of an answer arrives."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx

from blockdraft.errors import UsageError, describe
from blockdraft.evaluation.servers.metrics import Snapshot, parse
from blockdraft.evaluation.settings import LoadSettings
from blockdraft.types import SamplingParams

CONNECT_SECONDS = 30.0
MOST_TOKENS = 2**31  # of an answer
SHOWN = 200  # characters of a server's error message


@dataclass
class Answer:
    """A streamed answer. Times are those of `time.perf_counter`, in seconds.

    Attributes:
        sent: Time of the request.
        ended: Time of the answer's end.
        pieces: Time and number of characters of each piece of the answer.
        text: The whole answer.
        finish: Finish reason.
        tokens: Tokens of the answer, as the server counts them; 0 if it does not.
        cached: Tokens of the prompt that the server had cached; None if it does not say.
        problem: Description of a failure; empty if there was none.
    """

    sent: float
    ended: float = 0.0
    pieces: list[tuple[float, int]] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    tokens: int = 0
    cached: int | None = None
    problem: str = ""


class Client:
    """Client of one server, for `async with`.

    Args:
        url: Address such as http://localhost:8000, with or without /v1.
        model: Name of the model; None is the first that the server lists.
        key: API key; None sends none.
        raw: Send prompts as they are to /v1/completions, instead of as chats.
        silence: As in `LoadSettings`.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        key: str | None = None,
        raw: bool = False,
        silence: float = LoadSettings.silence,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.raw = raw
        self.silence = silence
        self._model = model
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),  # later waits are limited by `silence`
            limits=httpx.Limits(max_connections=None),
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """Name of the model. Raises a UsageError if the server lists none, or cannot be reached."""
        if self._model is None:
            listed = await self._get("/v1/models")
            try:
                listed.raise_for_status()
                self._model = str(listed.json()["data"][0]["id"])
            except (httpx.HTTPStatusError, ValueError, LookupError, TypeError, RecursionError) as error:
                raise UsageError(
                    f"{self.url}/v1/models names no model (status {listed.status_code}: {listed.text[:SHOWN]}); give "
                    "the model's name (--model), and the key ($BLOCKDRAFT_SERVER_KEY) if there is one."
                ) from error
        return self._model

    async def metrics(self) -> Snapshot | None:
        """Counters of /metrics; None if the server has no such page, or shows a web page at any address."""
        answer = await self._get("/metrics")
        is_web_page = "html" in answer.headers.get("content-type", "")
        return parse(answer.text) if answer.status_code == 200 and not is_web_page else None

    async def _get(self, path: str) -> httpx.Response:
        try:
            with anyio.fail_after(self.silence):
                return await self._http.get(self.url + path, follow_redirects=True)
        except TimeoutError as error:
            raise self._hangs() from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UsageError(
                f"{self.url} cannot be reached ({describe(error)}); give the address of a running server."
            ) from error

    def _hangs(self) -> UsageError:
        return UsageError(
            f"{self.url} has gone {self.silence:g} s without an answer or a line of one, so it seems to hang; restart "
            "it, or wait longer by --silence SECONDS."
        )

    async def ask(self, prompt: str, params: SamplingParams) -> Answer:
        """Request an answer. Raises a UsageError if the server is silent too long; other failures are the answer's
        `problem`."""
        body = self._body(prompt, await self.model(), params)
        lines = list[tuple[float, str]]()
        answer = Answer(time.perf_counter())
        try:
            path = "/v1/completions" if self.raw else "/v1/chat/completions"
            with anyio.fail_after(self.silence) as patience:
                async with self._http.stream("POST", self.url + path, json=body) as response:
                    if response.status_code != 200:
                        told = (await response.aread()).decode(errors="replace")
                        answer.problem = f"status {response.status_code}: {told[:SHOWN]}"
                    else:
                        async for line in response.aiter_lines():
                            # Only data counts: comments and incomplete lines also come from a server that hangs.
                            if line.startswith("data:"):
                                lines.append((time.perf_counter(), line))
                                patience.deadline = anyio.current_time() + self.silence
        except TimeoutError as error:
            raise self._hangs() from error
        except httpx.HTTPError as error:
            answer.problem = describe(error)
        answer.ended = time.perf_counter()
        if not answer.problem:
            try:
                _read(answer, lines)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                answer.problem = f"an answer in another form than OpenAI's ({describe(error)})"
        return answer

    def _body(self, prompt: str, model: str, params: SamplingParams) -> dict[str, Any]:
        asked = {"prompt": prompt} if self.raw else {"messages": [{"role": "user", "content": prompt}]}
        return {
            "model": model,
            **asked,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            **({"top_k": params.top_k} if params.top_k else {}),
            **({} if params.seed is None else {"seed": params.seed}),
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def _read(answer: Answer, lines: list[tuple[float, str]]) -> None:
    """Fill an answer from the events of its stream, each with its time."""
    usage: Mapping[str, Any] = {}
    done = False
    for moment, line in lines:
        data = line.removeprefix("data:").strip()
        done = done or data == "[DONE]"
        if not data or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            answer.problem = f"an error: {str(event['error'])[:SHOWN]}"
            return
        for choice in event.get("choices") or ():
            text = _text(choice)
            if text:
                answer.pieces.append((moment, len(text)))
                answer.text += text
            answer.finish = choice.get("finish_reason") or answer.finish
        usage = event.get("usage") or usage
    answer.tokens, answer.cached = _tokens(usage, answer.text), _cached(usage)
    missing = {"finish reason": answer.finish, "end": done, "count of tokens (usage)": usage}
    answer.problem = ", ".join(f"no {name}" for name, there in missing.items() if not there)


def _tokens(usage: Mapping[str, Any], text: str) -> int:
    """Number of tokens of an answer. Raises a ValueError if the server's count cannot be that of this text."""
    found = usage.get("completion_tokens", 0)
    if type(found) is not int or not 0 <= found <= MOST_TOKENS or (usage and text and not found):
        raise ValueError(f"completion_tokens is {found!r} for {len(text)} characters")
    return found


def _cached(usage: Mapping[str, Any]) -> int | None:
    found = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return found if type(found) is int else None


def _text(choice: Mapping[str, Any]) -> str:
    """Text of an answer's piece, reasoning included, which servers name in two ways or in both."""
    if "text" in choice:
        return choice["text"] or ""
    delta = choice.get("delta") or {}
    return (delta.get("reasoning_content") or delta.get("reasoning") or "") + (delta.get("content") or "")
