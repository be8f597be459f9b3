"""One streamed request to a server with OpenAI's API, and what was heard when."""

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
from blockdraft.evaluation.servers.settings import LoadSettings
from blockdraft.types import SamplingParams

CONNECT_SECONDS = 30.0
MOST_TOKENS = 2**31  # of an answer
TOLD = 200  # characters of what a server says that went wrong


@dataclass
class Heard:
    """An answer. Times are those of `time.perf_counter`.

    Attributes:
        pieces: When something of the answer came, and how many characters.
        finish: Its finish reason.
        tokens: Of the answer, as the server counts them; 0 where it does not.
        cached: Tokens of the prompt that the server had in a cache, where it tells.
        problem: What went wrong; empty where nothing did.
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
    """A server, for `async with`.

    Args:
        url: Such as http://localhost:8000, with or without /v1.
        model: By the server's name; None is the first that it lists.
        key: That it asks for; None sends none.
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
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),  # for what comes after, see `silence`
            limits=httpx.Limits(max_connections=None),
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """The model's name. Raises UsageError where the server lists none, or cannot be reached."""
        if self._model is None:
            listed = await self._get("/v1/models")
            try:
                listed.raise_for_status()
                self._model = str(listed.json()["data"][0]["id"])
            except (httpx.HTTPStatusError, ValueError, LookupError, TypeError, RecursionError) as error:
                raise UsageError(
                    f"{self.url}/v1/models names no model (status {listed.status_code}: {listed.text[:TOLD]}); give "
                    "the model's name (--model), and the key ($BLOCKDRAFT_SERVER_KEY) if there is one."
                ) from error
        return self._model

    async def metrics(self) -> Snapshot | None:
        """What /metrics says; None where the server has no such page, or a web page at any address."""
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

    async def ask(self, prompt: str, params: SamplingParams) -> Heard:
        """Have a prompt answered. Raises UsageError where the server is silent too long; what else goes wrong is the
        `problem`."""
        body = self._body(prompt, await self.model(), params)
        lines = list[tuple[float, str]]()
        heard = Heard(time.perf_counter())
        try:
            path = "/v1/completions" if self.raw else "/v1/chat/completions"
            with anyio.fail_after(self.silence) as patience:
                async with self._http.stream("POST", self.url + path, json=body) as response:
                    if response.status_code != 200:
                        told = (await response.aread()).decode(errors="replace")
                        heard.problem = f"status {response.status_code}: {told[:TOLD]}"
                    else:
                        async for line in response.aiter_lines():
                            # Comments keep connections open, whatever hangs behind them, and so do bytes of no line.
                            if line.startswith("data:"):
                                lines.append((time.perf_counter(), line))
                                patience.deadline = anyio.current_time() + self.silence
        except TimeoutError as error:
            raise self._hangs() from error
        except httpx.HTTPError as error:
            heard.problem = describe(error)
        heard.ended = time.perf_counter()
        if not heard.problem:
            try:
                _read(heard, lines)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                heard.problem = f"an answer in another form than OpenAI's ({describe(error)})"
        return heard

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


def _read(heard: Heard, lines: list[tuple[float, str]]) -> None:
    """Take the events of a stream apart."""
    usage: Mapping[str, Any] = {}
    done = False
    for moment, line in lines:
        data = line.removeprefix("data:").strip()
        done = done or data == "[DONE]"
        if not data or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            heard.problem = f"an error: {str(event['error'])[:TOLD]}"
            return
        for choice in event.get("choices") or ():
            text = _text(choice)
            if text:
                heard.pieces.append((moment, len(text)))
                heard.text += text
            heard.finish = choice.get("finish_reason") or heard.finish
        usage = event.get("usage") or usage
    heard.tokens, heard.cached = _tokens(usage, heard.text), _cached(usage)
    missing = {"finish reason": heard.finish, "end": done, "count of tokens (usage)": usage}
    heard.problem = ", ".join(f"no {name}" for name, there in missing.items() if not there)


def _tokens(usage: Mapping[str, Any], text: str) -> int:
    """Of an answer. Raises ValueError where that is no count of the tokens of this text."""
    found = usage.get("completion_tokens", 0)
    if type(found) is not int or not 0 <= found <= MOST_TOKENS or (usage and text and not found):
        raise ValueError(f"completion_tokens is {found!r} for {len(text)} characters")
    return found


def _cached(usage: Mapping[str, Any]) -> int | None:
    found = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return found if type(found) is int else None


def _text(choice: Mapping[str, Any]) -> str:
    """What a part of an answer says, reasoning included, which servers name in two ways or in both."""
    if "text" in choice:
        return choice["text"] or ""
    delta = choice.get("delta") or {}
    return (delta.get("reasoning_content") or delta.get("reasoning") or "") + (delta.get("content") or "")
