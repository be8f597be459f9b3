"""What a server allows, and to whom."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from pydantic import Field

from blockdraft.errors import UsageError
from blockdraft.settings import Amount, Count, Natural, Texts, settings

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@settings
class ServeSettings:
    """How `blockdraft serve` serves.

    Attributes:
        host: Address to listen at. One that other machines reach needs `api_key`, or `allow_open`.
        port: Port to listen at; 0 takes a free one.
        api_key: What clients must send as their key; None asks for none.
        served_model_name: Names that requests may give the model, the first of them in answers; none is the name of
            the target's folder.
        any_model: Answer requests that name another model too, instead of with 404.
        allow_open: Listen at an address that other machines reach without a key.
        allow_host: More names, as in `Host:`, under which the server may be called; "*" is any. Addresses, localhost
            and `host` always are.
        allow_origin: Web pages, such as https://example.org, that may call the server from a browser; "*" is any.
        max_batch_size: Most requests that are decoded together.
        max_queue: Most requests that wait for one of these places; more are answered with 429.
        max_body: Most bytes of a request's body.
        max_prompt_tokens: Most tokens of a prompt; None is what the context holds.
        max_answer_tokens: Most tokens of an answer; None is what the context has room for.
        max_unread: Tokens of a streamed answer that wait for a client that reads slowly; with more, it is ended.
        max_stored: Bytes, about, that the latest answers of /v1/responses may take which are kept in memory, for
            requests that go on from them; 0 keeps none.
        stall_seconds: Seconds that a client may take nothing of what it is sent before it is given up.
        grace_seconds: Seconds that running answers have to end after the server was told to.
        prefix_tokens: Tokens of ended requests that are remembered, so that the next turn of a chat reads only what is
            new; None is what four longest requests have.
        temperature: Of requests that name none, as in OpenAI's API.
        self_check: Prompts that are decoded with and without drafting at the start, to count those that differ.
        backends: What may run the target, such as native,hf; the first one serves, and others are loaded when a request
            names them. None given is the one of `--backend`.
        log_requests: Print a line for each request, without what it holds.
    """

    host: str = "127.0.0.1"
    port: Natural = 8000
    api_key: str | None = field(default=None, repr=False)
    served_model_name: Texts = ()
    any_model: bool = False
    allow_open: bool = False
    allow_host: Texts = ()
    allow_origin: Texts = ()
    max_batch_size: Count = 16
    max_queue: Natural = 64
    max_body: Count = 8 * 2**20
    max_prompt_tokens: Count | None = None
    max_answer_tokens: Count | None = None
    max_unread: Count = 4096
    max_stored: Natural = 64 * 2**20
    stall_seconds: Annotated[Amount, Field(gt=0)] = 60.0
    grace_seconds: Amount = 30.0
    prefix_tokens: Natural | None = None
    temperature: Amount = 1.0
    self_check: Natural = 0
    backends: Texts = ()
    log_requests: bool = False

    def __post_init__(self) -> None:
        if self.port > 65535:
            raise UsageError(f"port is {self.port}; it must be from 0 (any free one) to 65535.")
        if self.api_key is not None and not self.api_key.strip():
            raise UsageError("api_key is empty; give a key, or leave it out.")
        if self.host not in LOOPBACK and self.api_key is None and not self.allow_open:
            raise UsageError(
                f"host is {self.host}, which other machines reach, and there is no key; add --api-key, or --allow-open "
                f"to let anyone in who reaches it."
            )

    @property
    def places(self) -> int:
        """Most requests that there may be at a time, waiting ones included."""
        return self.max_batch_size + self.max_queue
