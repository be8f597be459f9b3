"""`blockdraft serve`: a server with OpenAI's and Anthropic's API."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from blockdraft.cli.display import log_lines
from blockdraft.cli.target import (
    DecodingSettings,
    DecodingTarget,
    DrafterSettings,
    DraftingOptions,
    threads_in_words,
)
from blockdraft.errors import UsageError
from blockdraft.folders import check_writable
from blockdraft.plugins import RECORDERS, entry_points, install_hint
from blockdraft.plugins import load as load_plugin
from blockdraft.serving.settings import LOOPBACK, ServeSettings
from blockdraft.serving.sockets import bind, url_of
from blockdraft.types import DEFAULT_BACKEND

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

    from blockdraft.drafters import Drafter
    from blockdraft.engine import Engine, Recorder
    from blockdraft.serving.service import Service
    from blockdraft.targets import Target
    from blockdraft.types import Drafting

NEEDED = ("fastapi", "uvicorn", "llguidance")  # the extra `server`
RECORDED = 'finished conversations are recorded in {}, except requests with "store": false'
NETWORK = "other machines reach it at port {} of this machine's address; --allow-host NAME allows a name"


def serve(
    *,
    model: DecodingTarget,
    drafter: DrafterSettings,
    drafting: DraftingOptions,
    settings: ServeSettings,
) -> None:
    """Serve a model to programs that speak OpenAI's or Anthropic's API.

    It serves the model at http://127.0.0.1:8000/v1, and a page to try it at http://127.0.0.1:8000.
    Ctrl-C or SIGTERM lets running responses end; a second one ends the server at once.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(f"The server needs {', '.join(missing)}; run pip install 'blockdraft[server]'.")

    usual, *others = settings.backends or _default_backends(model)
    make_recorder = None if settings.record is None else _find_recorder(settings.record)
    with log_lines(), bind(settings) as bound:
        print("Loading the model ...", file=sys.stderr, flush=True)

        from blockdraft.serving import run
        from blockdraft.serving.backends import Backends
        from blockdraft.serving.service import Service

        recorders: list[Recorder] = []  # one for the engines of all backends
        load = partial(_engine, model, drafter, drafting, settings, make_recorder, recorders)
        backends = Backends(load(usual), {name: partial(load, name) for name in others})
        try:
            service = Service(backends, settings)
            check_result = _self_check(backends.usual, settings.self_check)
            run.serve(service, settings, bound, lambda: announce(service, bound, check_result))
        finally:
            backends.close()
            for recorder in recorders:
                recorder.close()


def _default_backends(model: DecodingSettings) -> tuple[str, ...]:
    """Return the backends if none are named: two for the bundled pair, so that its page can compare them."""
    from blockdraft.models import TINY, default_target

    if (
        model.target is None
        and default_target().is_relative_to(TINY)
        and model.backend == DEFAULT_BACKEND
        and not (model.quantize or model.kv_dtype)
    ):
        return ("native", "hf")
    return (model.backend,)


def _engine(
    model: DecodingSettings,
    drafter: DrafterSettings,
    drafting: Drafting,
    settings: ServeSettings,
    make_recorder: Callable[..., Recorder] | None,
    recorders: list[Recorder],
    backend: str,
) -> Engine:
    from blockdraft.engine import Engine
    from blockdraft.engine.prefix_store import STORED_TOKENS

    target = replace(model, backend=backend).load_for(drafter.drafter, drafter.draft_vocab)
    on_cpu = target.device.type == "cpu"
    loaded = drafter.load(target)
    if make_recorder is not None and not recorders:
        layers = _recorded_layers(target, loaded) if settings.record_hidden_states else ()
        recorders.append(make_recorder(settings.record, target, layers, settings.record_bytes))
    cache_tokens, prefix_tokens = settings.memory_tokens(target.max_context, on_cpu)
    return Engine(
        target,
        loaded,
        settings.max_batch_size,
        drafting,
        prefix_tokens=prefix_tokens,
        cache_tokens=cache_tokens,
        shares_memory=on_cpu and settings.cache_tokens is None,
        stored_prefix_tokens=STORED_TOKENS if settings.stored_prefixes else 0,
        recorder=next(iter(recorders), None),
    )


def _find_recorder(folder: Path) -> Callable[..., Recorder]:
    """Return what makes the recorder of a server, which holds its folder.

    Raises:
        UsageError: The folder cannot be written, or blockdraft-train is missing.
    """
    check_writable(folder, "--record")
    make: Callable[..., Recorder] | None = (
        load_plugin(RECORDERS, "folder") if "folder" in entry_points(RECORDERS) else None
    )
    if make is None:
        raise UsageError(f"--record needs another package; run {install_hint(RECORDERS, 'folder')}.")
    return make


def _recorded_layers(target: Target, drafter: Drafter) -> tuple[int, ...]:
    """Return the target layers whose hidden states a drafter reads, and the last one, from which it learns.

    Raises:
        UsageError: The drafter reads no hidden states.
    """
    if not drafter.target_layers:
        raise UsageError(
            f"The drafter {drafter.kind} reads no hidden states, so there are none to record; name a drafter with "
            "a network, or leave out --record-hidden-states."
        )
    return tuple(sorted({*drafter.target_layers, target.num_layers}))


def _self_check(engine: Engine, count: int) -> str | None:
    """Decode prompts with and without drafting and return a line on how many responses differ."""
    if not count:
        return None
    from blockdraft.serving.backends import count_differences

    differences = count_differences(engine, count)
    return f"Self-check: {differences} of {count} greedy responses differ between drafting and plain decoding."


def announce(service: Service, bound: socket.socket, check_result: str | None) -> None:
    """Print what was started. The last line, "Ready", tells programs that the server takes requests."""
    from blockdraft.cli.answers import drafter_note

    engine, url = service.backends.usual, url_of(bound)
    key = " -H 'Authorization: Bearer KEY'" if service.settings.api_key is not None else ""
    name, drafting = service.model_names[0], engine.drafting
    about = service.card(name)["blockdraft"]
    path, call = "completions", f'{{"model": "{name}", "prompt": "Hello", "max_tokens": 32}}'
    if about["has_chat_template"]:
        path = "chat/completions"
        call = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    trees = f"trees of up to {drafting.tree_budget} draft tokens, " if drafting.tree_budget else ""
    limits = f"{trees}blocks of {about['block_size']} tokens"
    if drafting.automatic:
        limits = f"as far as it pays, blocks of at most {about['block_size']} tokens"
    if note := drafter_note(engine):
        limits += f", {note}"
    lines = [
        f"Model    {', '.join(service.model_names)}{' (and any other name)' if service.settings.any_model else ''}",
        f"Target   {about['target']}, {about['parameters'] / 1e6:.1f} M parameters, context {about['max_context']}, "
        f"{engine.target.running}",
        *([f"Threads  {threads_in_words()}"] if engine.target.device.type == "cpu" else []),
        f"Drafter  {about['drafter']}, {limits}" if engine.controller.max_draft_tokens else "Drafter  none",
        f"Memory   up to {engine.memory_bytes() / 2**20:.0f} MiB besides the weights, for {engine.cache_tokens} tokens "
        f"of {engine.max_batch_size} requests at a time and of kept prefixes",
        *([] if service.settings.host in LOOPBACK else [f"Network  {NETWORK.format(bound.getsockname()[1])}"]),
        *([] if service.settings.record is None else [f"Record   {RECORDED.format(service.settings.record)}"]),
        f"Page     {url}/",
        f"Call     curl {url}/v1/{path} -H 'Content-Type: application/json'{key} -d '{call}'",
        *([check_result] if check_result else []),
        f"Ready: {url}/v1",
    ]
    print("\n".join(lines), flush=True)
