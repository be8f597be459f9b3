"""Client of a server with OpenAI's API that records when each piece of a response arrives."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx

from blockdraft.errors import UsageError, describe
from blockdraft.types import SamplingParams
from blockdraft_bench.servers.metrics import Snapshot, parse
from blockdraft_bench.settings import LoadSettings

CONNECT_SECONDS = 30.0
MAX_TOKENS = 2**31  # of a response
SHOWN = 200  # characters of a server's error message


@dataclass
class Answer:
    """A streamed response. Times are those of `time.perf_counter`, in seconds.

    Attributes:
        sent: Time of the request.
        ended: Time of the end of the response.
        pieces: Time and number of characters of each piece.
        text: The whole text.
        finish: Finish reason.
        tokens: Tokens as counted by the server; 0 if it does not count them.
        cached: Prompt tokens that the server had cached; None if it does not report them.
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
        key: API key, if any.
        raw: Send prompts unchanged to /v1/completions, instead of as chats.
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
        self.raw, self.silence, self._model = raw, silence, model
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
        """Return the name of the model. Raises a UsageError if the server lists none or cannot be reached."""
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
        """Return the counters of /metrics, or None if there is no such page or only a web page for any address."""
        page = await self._get("/metrics")
        is_web_page = "html" in page.headers.get("content-type", "")
        return parse(page.text) if page.status_code == 200 and not is_web_page else None

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
        """Request a response. Other failures than a silent server are its `problem`.

        Raises:
            UsageError: The server is silent for too long.
        """
        path = "/v1/completions" if self.raw else "/v1/chat/completions"
        body = {
            "model": await self.model(),
            **({"prompt": prompt} if self.raw else {"messages": [{"role": "user", "content": prompt}]}),
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            **({"top_k": params.top_k} if params.top_k else {}),
            **({} if params.seed is None else {"seed": params.seed}),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        lines, answer = list[tuple[float, str]](), Answer(time.perf_counter())
        try:
            with anyio.fail_after(self.silence) as patience:
                async with self._http.stream("POST", self.url + path, json=body) as response:
                    if response.status_code != 200:
                        text = (await response.aread()).decode(errors="replace")
                        answer.problem = f"status {response.status_code}: {text[:SHOWN]}"
                    else:
                        async for line in _lines(response):
                            # Only data counts: a server that hangs also sends comments and incomplete lines.
                            if line.startswith("data:"):
                                lines.append((time.perf_counter(), line.removeprefix("data:").strip()))
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


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Yield the lines of a stream. httpx's own would also end at U+2028 and the like inside of JSON."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    yield rest.decode(errors="replace")


def _read(answer: Answer, lines: list[tuple[float, str]]) -> None:
    """Fill in a response from the data of its stream, each with its time."""
    usage: Mapping[str, Any] = {}
    for moment, data in lines:
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
    tokens = usage.get("completion_tokens", 0)
    if type(tokens) is not int or not 0 <= tokens <= MAX_TOKENS or (usage and answer.text and not tokens):
        raise ValueError(f"completion_tokens is {tokens!r} for {len(answer.text)} characters")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    answer.tokens, answer.cached = tokens, cached if type(cached) is int else None
    done = any(data == "[DONE]" for _, data in lines)
    present = {"finish reason": answer.finish, "end": done, "count of tokens (usage)": usage}
    answer.problem = ", ".join(f"no {name}" for name, value in present.items() if not value)


def _text(choice: Mapping[str, Any]) -> str:
    """Return the text of a piece, including reasoning, which servers send under two names or both."""
    if "text" in choice:
        return choice["text"] or ""
    delta = choice.get("delta") or {}
    return (delta.get("reasoning_content") or delta.get("reasoning") or "") + (delta.get("content") or "")
