"""`blockdraft serve`: a server with OpenAI's and Anthropic's API."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

from blockdraft.cli.options import (
    AutoBlockSize,
    DrafterOptions,
    DrafterPlace,
    DraftPasses,
    DraftWindow,
    Sampled,
    SamplingOptions,
    TargetOptions,
    TreeBudget,
    drafter_or_lookup,
    option,
)
from blockdraft.errors import UsageError
from blockdraft.serving.settings import LOOPBACK, ServeSettings
from blockdraft.types import DEFAULT_BACKEND, DraftModel

if TYPE_CHECKING:
    import socket

    from blockdraft.engine import Engine
    from blockdraft.serving.core.service import Service
    from blockdraft.types import Drafting

NEEDED = ("fastapi", "uvicorn", "llguidance")  # the extra `server`
NETWORK = "other machines reach it at port {} of this machine's address; --allow-host NAME allows a name"


def _of(name: str, **more: Any) -> Any:
    """The option of a setting; limits, and who may call, have panels of their own."""
    part = None
    if name.startswith("max_") or name.endswith("_seconds"):
        part = "Limits"
    elif name.startswith("allow_") or name == "api_key":
        part = "Who may call"
    return option(ServeSettings, name, rich_help_panel=part, **more)


@dataclass(frozen=True)
class ServeOptions:
    """Settings of a server, as options."""

    host: Annotated[str, _of("host", metavar="ADDRESS")] = ServeSettings.host
    port: Annotated[int, _of("port", metavar="PORT")] = ServeSettings.port
    api_key: Annotated[str | None, _of("api_key", envvar="BLOCKDRAFT_API_KEY", metavar="KEY")] = None
    served_model_name: Annotated[list[str] | None, _of("served_model_name", metavar="NAME")] = None
    any_model: Annotated[bool, _of("any_model")] = ServeSettings.any_model
    backends: Annotated[str | None, _of("backends", metavar="NAME,NAME")] = None
    self_check: Annotated[int, _of("self_check", metavar="N")] = ServeSettings.self_check
    max_batch_size: Annotated[int, _of("max_batch_size", metavar="N")] = ServeSettings.max_batch_size
    max_queue: Annotated[int, _of("max_queue", metavar="N")] = ServeSettings.max_queue
    max_prompt_tokens: Annotated[int | None, _of("max_prompt_tokens", metavar="TOKENS")] = (
        ServeSettings.max_prompt_tokens
    )
    max_answer_tokens: Annotated[int | None, _of("max_answer_tokens", metavar="TOKENS")] = (
        ServeSettings.max_answer_tokens
    )
    max_body: Annotated[int, _of("max_body", metavar="BYTES")] = ServeSettings.max_body
    max_unread: Annotated[int, _of("max_unread", metavar="TOKENS")] = ServeSettings.max_unread
    max_stored: Annotated[int, _of("max_stored", metavar="BYTES")] = ServeSettings.max_stored
    prefix_tokens: Annotated[int | None, _of("prefix_tokens", metavar="TOKENS")] = ServeSettings.prefix_tokens
    temperature: Annotated[float, _of("temperature", metavar="T")] = ServeSettings.temperature
    stall_seconds: Annotated[float, _of("stall_seconds", metavar="SECONDS")] = ServeSettings.stall_seconds
    grace_seconds: Annotated[float, _of("grace_seconds", metavar="SECONDS")] = ServeSettings.grace_seconds
    allow_open: Annotated[bool, _of("allow_open")] = ServeSettings.allow_open
    allow_host: Annotated[list[str] | None, _of("allow_host", metavar="NAME")] = None
    allow_origin: Annotated[list[str] | None, _of("allow_origin", metavar="ORIGIN")] = None
    log_requests: Annotated[bool, _of("log_requests")] = ServeSettings.log_requests

    @property
    def settings(self) -> ServeSettings:
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("served_model_name", "allow_host", "allow_origin"):
            given[name] = tuple(given[name] or ())
        given["backends"] = tuple(name.strip() for name in (self.backends or "").split(",") if name.strip())
        return ServeSettings(**given)


def serve(
    *,
    run: TargetOptions,
    drafter: DrafterPlace = None,
    model: DrafterOptions,
    block_size: AutoBlockSize = None,
    tree_budget: TreeBudget = None,
    draft_window: DraftWindow = None,
    draft_passes: DraftPasses = None,
    sampled: Sampled = SamplingOptions.sampled,
    options: ServeOptions,
) -> None:
    """Serve a model to programs that speak OpenAI's or Anthropic's API.

    It serves the model at http://127.0.0.1:8000/v1, and a page to try it at http://127.0.0.1:8000.
    Ctrl-C or SIGTERM lets running answers end; a second one ends the server at once.
    """
    drafter = drafter_or_lookup(run.target, drafter)
    settings = options.settings
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if lacking:
        raise UsageError(f"The server needs {', '.join(lacking)}; run pip install 'blockdraft[server]'.")
    drafting = SamplingOptions(
        block_size=block_size,
        tree_budget=tree_budget,
        draft_window=draft_window,
        draft_passes=draft_passes,
        sampled=sampled,
    ).drafting

    from blockdraft.serving import run as server
    from blockdraft.serving.core.backends import Backends
    from blockdraft.serving.core.service import Service

    usual, *others = settings.backends or _both(run)
    with server.bind(settings) as bound:
        print("Loading the model ...", file=sys.stderr, flush=True)
        load = partial(_engine, run, drafter, model, drafting, settings)
        backends = Backends(load(usual), {name: partial(load, name) for name in others})
        try:
            service = Service(backends, settings)
            checked = _self_check(backends.usual, settings.self_check)
            server.serve(service, settings, bound, lambda: tell(service, bound, checked))
        finally:
            backends.close()


def _both(run: TargetOptions) -> tuple[str, ...]:
    """Backends if none are named: both for the bundled pair, so that its page can compare them."""
    from blockdraft.models import TINY, default_target

    if (
        run.target is None
        and default_target().is_relative_to(TINY)
        and run.backend == DEFAULT_BACKEND
        and not (run.quantize or run.kv_dtype)
    ):
        return ("native", "hf")
    return (run.backend,)


def _engine(
    run: TargetOptions,
    drafter: str | None,
    model: DraftModel,
    drafting: Drafting,
    settings: ServeSettings,
    backend: str,
) -> Engine:
    from blockdraft.drafters import load_drafter
    from blockdraft.engine import Engine

    target = replace(run, backend=backend).load(drafter)
    remembered = settings.prefix_tokens
    return Engine(
        target,
        load_drafter(drafter, target=target, **model.options()),
        settings.max_batch_size,
        drafting,
        prefix_tokens=4 * target.max_context if remembered is None else remembered,
    )


def _self_check(engine: Engine, count: int) -> str | None:
    """Decode prompts with and without drafts, and report how many answers differ."""
    if not count:
        return None
    from blockdraft.serving.core.backends import answers_differ

    differ = answers_differ(engine, count)
    return f"Self-check: {differ} of {count} greedy answers differ between drafting and plain decoding."


def tell(service: Service, bound: socket.socket, checked: str | None) -> None:
    """Print what was started. The last line, "Ready", tells programs that the server takes requests."""
    from blockdraft.cli.display import drafter_note
    from blockdraft.serving.run import url_of

    engine, url = service.backends.usual, url_of(bound)
    key = " -H 'Authorization: Bearer KEY'" if service.settings.api_key is not None else ""
    name = service.model_names[0]
    about = service.card(name)["blockdraft"]
    call = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    if not about["has_chat_template"]:
        call = f'{{"model": "{name}", "prompt": "Hello", "max_tokens": 32}}'
    path = "chat/completions" if about["has_chat_template"] else "completions"
    how = engine.drafting
    extent = f"trees of up to {how.tree_budget} guesses, " if how.tree_budget else ""
    extent += f"blocks of {how.block_size or about['block_size']} tokens"
    if "auto" in (how.block_size, how.tree_budget):
        extent = f"as far as it pays, blocks of at most {about['block_size']} tokens"
    if note := drafter_note(engine):
        extent += f", {note}"
    lines = [
        f"Model    {', '.join(service.model_names)}{' (and any other name)' if service.settings.any_model else ''}",
        f"Target   {about['target']}, {about['parameters'] / 1e6:.1f} M parameters, context {about['max_context']}, "
        f"{engine.target.running}",
        f"Drafter  {about['drafter']}, {extent}" if engine.controller.max_draft_tokens else "Drafter  none",
        f"Memory   up to {engine.memory_bytes() / 2**20:.0f} MiB for {engine.max_batch_size} requests at a time",
        *([] if service.settings.host in LOOPBACK else [f"Network  {NETWORK.format(bound.getsockname()[1])}"]),
        f"Page     {url}/",
        f"Call     curl {url}/v1/{path} -H 'Content-Type: application/json'{key} -d '{call}'",
        *([checked] if checked else []),
        f"Ready: {url}/v1",
    ]
    print("\n".join(lines), flush=True)
