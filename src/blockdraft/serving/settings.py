"""Settings of `blockdraft serve`."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from pydantic import Field

from blockdraft.errors import UsageError
from blockdraft.settings import Amount, Count, Natural, Texts, settings

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@settings
class ServeSettings:
    """Settings of `blockdraft serve`.

    Attributes:
        host: Address to listen at. One that other machines reach, such as 0.0.0.0, needs a key or `--allow-open`.
        port: Port to listen at; 0 takes a free one.
        api_key: Key that clients must send. None lets them in without a key.
        served_model_name: Name of the model in requests; repeat the option for more names. The default is the name on
            the hub, or that of the target's folder, and the catalogue's name.
        any_model: Accept any model name in requests. Otherwise unknown names get status 404.
        allow_open: Let other machines in without a key.
        allow_host: Host name by which clients may call the server, such as box.local; repeat the option for more, "*"
            allows any. Addresses, localhost and `--host` are always allowed.
        allow_origin: Site whose pages may call the server from a browser, such as https://ui.example; repeat the option
            for more, "*" allows any.
        max_batch_size: Maximum requests that are decoded together; others wait.
        max_queue: Maximum requests that wait; more get status 429.
        max_body: Maximum bytes of a request body; a larger one gets status 413.
        max_prompt_tokens: Maximum tokens of a prompt. None allows what the context holds.
        max_answer_tokens: Maximum tokens of a response. None allows what the context has room for.
        max_unread: Maximum tokens of a response that may wait for a slow client; more end it with an error.
        max_stored: Approximate bytes of memory for responses of /v1/responses that later requests can continue; the
            oldest are dropped first, and 0 keeps none.
        stall_seconds: Seconds without progress, reading the response or sending the request, after which a client's
            connection is closed.
        grace_seconds: Seconds that running responses have to end after Ctrl-C or SIGTERM.
        prefix_tokens: Tokens of ended requests that stay in the prefix cache, so that the next turn of a chat computes
            only what is new. None keeps four times the context.
        temperature: Temperature of requests that name none, as in OpenAI's API; 0 decodes greedily.
        self_check: Prompts that are decoded with and without drafting before the server is ready; it prints how many
            responses differ. 0 skips the check.
        backends: Backends that may run the target, such as native,hf. The first serves; the others are loaded when a
            request names them. The default is that of `--backend`, and native,hf for the bundled pair.
        log_requests: Print a line for each request, with its client, path and status, and none of its text.
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
            raise UsageError("api_key is empty; give a key, or leave the option out.")
        if self.host not in LOOPBACK and self.api_key is None and not self.allow_open:
            raise UsageError(
                f"host is {self.host}, which other machines reach, and no key is set; set BLOCKDRAFT_API_KEY, or add "
                f"--allow-open to let everyone in."
            )
        if not all(name.strip() for name in self.served_model_name):
            raise UsageError("served_model_name holds an empty name; give another, or leave the option out.")

    @property
    def places(self) -> int:
        """Maximum requests at a time, waiting ones included."""
        return self.max_batch_size + self.max_queue
