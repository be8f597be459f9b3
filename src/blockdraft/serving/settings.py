"""Settings of `blockdraft serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from blockdraft.errors import UsageError
from blockdraft.settings import Amount, Count, Flag, Natural, SettingsError, Texts, settings
from blockdraft.types import MIN_RECORD_BYTES, RECORD_BYTES

LOOPBACK = ("127.0.0.1", "::1", "localhost")
LIMITS, ACCESS, RECORDING = "Limits", "Who may call", "Recording"  # panels of --help


@settings
class ServeSettings:
    """How `blockdraft serve` serves."""

    host: Annotated[str, Flag(metavar="ADDRESS")] = Field(
        "127.0.0.1",
        description="Address to listen on. One that other machines reach, such as 0.0.0.0, needs --api-key or "
        "--allow-open.",
    )
    port: Annotated[Natural, Flag(metavar="PORT")] = Field(8000, description="Port to listen on; 0 picks a free one.")
    api_key: Annotated[str | None, Flag(metavar="KEY", panel=ACCESS, environment="BLOCKDRAFT_API_KEY")] = Field(
        None, repr=False, description="Key that clients must send; by default none is needed."
    )
    served_model_name: Annotated[Texts, Flag(metavar="NAME", repeat=True)] = Field(
        (),
        description="Model name in requests; repeat the option for more. By default the hub or folder name of the "
        "target, and its catalogue name.",
    )
    any_model: bool = Field(False, description="Accept any model name, instead of answering unknown ones with 404.")
    allow_open: Annotated[bool, Flag(panel=ACCESS)] = Field(False, description="Let other machines in without a key.")
    allow_host: Annotated[Texts, Flag(metavar="NAME", repeat=True, panel=ACCESS)] = Field(
        (),
        description='Host name that clients may use for this server, such as box.local; repeat for more, "*" allows '
        "any. Addresses, localhost and --host are always allowed.",
    )
    allow_origin: Annotated[Texts, Flag(metavar="ORIGIN", repeat=True, panel=ACCESS)] = Field(
        (),
        description="Site whose pages may call the server from a browser, such as https://ui.example; repeat for more, "
        '"*" allows any.',
    )
    lookup_outputs: bool = Field(
        True,
        description="Let the drafter lookup draft from earlier outputs to the same client, known by its address and "
        "key. They are kept in memory, at most 65536 tokens.",
    )
    stored_prefixes: bool = Field(
        True,
        description="Store keys and values of long system messages and tools in the cache folder once they come a "
        "second time, and those of a prompt whose prefill was cut short, readable by you only, so that the first "
        "request after a restart need not prefill them.",
    )
    record: Annotated[Path | None, Flag(metavar="DIR", panel=RECORDING)] = Field(
        None,
        description="Record finished conversations in this folder, as training data: tokens, sampling parameters, and "
        "which draft tokens were accepted, but no keys or names of clients. By default nothing is recorded. A request "
        'with "store": false never is.',
    )
    record_hidden_states: Annotated[bool, Flag(panel=RECORDING)] = Field(
        False,
        description="Record the target's hidden states too, which training a drafter like the one in use needs. They "
        "take kilobytes per token, in memory and on disk. Instructions are then not stored between starts.",
    )
    record_bytes: Annotated[Count, Flag(metavar="BYTES", panel=RECORDING)] = Field(
        RECORD_BYTES,
        ge=MIN_RECORD_BYTES,
        description="Most bytes that the folder of --record takes. Beyond it, the oldest conversations are deleted.",
    )
    max_batch_size: Annotated[Count, Flag(panel=LIMITS)] = Field(
        16, description="Maximum number of requests decoded together; others wait."
    )
    max_queue: Annotated[Natural, Flag(panel=LIMITS)] = Field(
        64, description="Maximum number of waiting requests; more are answered with 429."
    )
    max_body: Annotated[Count, Flag(metavar="BYTES", panel=LIMITS)] = Field(
        8 * 2**20, description="Maximum size of a request body; larger ones are answered with 413."
    )
    max_prompt_tokens: Annotated[Count | None, Flag(metavar="TOKENS", panel=LIMITS)] = Field(
        None, description="Maximum length of a prompt; by default what the context holds."
    )
    max_answer_tokens: Annotated[Count | None, Flag(metavar="TOKENS", panel=LIMITS)] = Field(
        None, description="Maximum length of an answer; by default what the context has room for."
    )
    max_unread: Annotated[Count, Flag(metavar="TOKENS", panel=LIMITS)] = Field(
        4096, description="Maximum number of tokens that a slow client may leave unread before its answer is aborted."
    )
    max_stored: Annotated[Natural, Flag(metavar="BYTES", panel=LIMITS)] = Field(
        64 * 2**20,
        description="Approximate memory for /v1/responses answers that later requests may continue; 0 stores none. "
        "The oldest are dropped first.",
    )
    stall_seconds: Annotated[Amount, Field(gt=0), Flag(metavar="SECONDS", panel=LIMITS)] = Field(
        60.0, description="Time without progress, sending or reading, after which a connection is closed."
    )
    grace_seconds: Annotated[Amount, Flag(metavar="SECONDS", panel=LIMITS)] = Field(
        30.0, description="Time that running answers get to finish after Ctrl-C or SIGTERM."
    )
    prefix_tokens: Annotated[Natural | None, Flag(metavar="TOKENS")] = Field(
        None,
        description="Tokens of finished requests to keep in memory, so that the next turn of a chat only computes "
        "what is new. By default four times the context.",
    )
    cache_tokens: Annotated[Count | None, Flag(metavar="TOKENS", panel=LIMITS)] = Field(
        None,
        description="Tokens of all requests and kept prefixes together; requests that do not fit wait. By default four "
        "times the context, or 65536 if that is more, on a CPU, and fewer if these take more than 1.5 GiB and a "
        "quarter of the free memory; elsewhere room for all requests of a full batch.",
    )
    temperature: Annotated[Amount, Flag(metavar="T", panel="Sampling")] = Field(
        1.0, description="Temperature of requests that set none, as in OpenAI's API; 0 decodes greedily."
    )
    self_check: Natural = Field(
        0, description="Decode N prompts with and without drafting before the server is ready, and report differences."
    )
    backends: Annotated[Texts, Flag(metavar="NAME,...")] = Field(
        (),
        description="Backends that may run the target, such as native,hf. The first serves; the others load when a "
        "request names them. By default that of --backend, and native,hf for the bundled pair.",
    )
    log_requests: bool = Field(
        True, description="Log a line per generated response: time, client, path, tokens and seconds, but no text."
    )

    def __post_init__(self) -> None:
        if self.port > 65535:
            raise SettingsError.of("port", "from 0 (any free port) to 65535", self.port)
        if self.api_key is not None and not self.api_key.strip():
            raise UsageError("api_key is empty; give a key, or leave the option out.")
        if self.host not in LOOPBACK and self.api_key is None and not self.allow_open:
            raise UsageError(
                f"host is {self.host}, which other machines reach, and no key is set; set BLOCKDRAFT_API_KEY, or add "
                f"--allow-open to let everyone in."
            )
        if self.record_hidden_states and self.record is None:
            raise UsageError("record_hidden_states has no folder; add --record DIR.")
        if not all(name.strip() for name in self.served_model_name):
            raise UsageError("served_model_name holds an empty name; give another, or leave the option out.")

    def memory_tokens(self, context: int, cpu: bool) -> tuple[int | None, int]:
        """Return the KV slots of the engine, None for room for a full batch, and how many of them keep prefixes.

        Args:
            context: Maximum number of tokens of a request.
            cpu: Whether the target runs on a CPU, whose memory other programs use as well.
        """
        prefixes = 4 * context if self.prefix_tokens is None else self.prefix_tokens
        slots = self.cache_tokens
        if slots is None and cpu:
            full = self.max_batch_size * context + prefixes
            slots = max(4 * context, 65_536, prefixes)
            slots = None if slots >= full else slots
        return slots, prefixes

    @property
    def places(self) -> int:
        """Maximum number of requests at a time, waiting ones included."""
        return self.max_batch_size + self.max_queue
