"""`blockdraft serve`: an OpenAI-compatible server."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from blockdraft.cli.loading import TargetOptions, takes_target
from blockdraft.cli.options import AutoBlockSize, DraftWindow, SamplingOptions, TreeBudget, need_drafter, option
from blockdraft.serving.settings import ServeSettings


@takes_target
def serve(
    *,
    run: TargetOptions,
    drafter: Annotated[
        str | None,
        typer.Option(metavar="DIR|NAME", help="Drafter, as in `blockdraft generate`; none decodes plainly."),
    ] = None,
    host: Annotated[str, option(ServeSettings, "host")] = ServeSettings.host,
    port: Annotated[int, option(ServeSettings, "port")] = ServeSettings.port,
    api_key: Annotated[
        str | None, option(ServeSettings, "api_key", envvar="BLOCKDRAFT_API_KEY", show_envvar=True)
    ] = ServeSettings.api_key,
    served_model_name: Annotated[list[str] | None, option(ServeSettings, "served_model_name")] = None,
    any_model: Annotated[bool, option(ServeSettings, "any_model")] = ServeSettings.any_model,
    block_size: AutoBlockSize = None,
    tree_budget: TreeBudget = None,
    draft_window: DraftWindow = None,
) -> None:
    """Serve a model to programs that speak OpenAI's API.

    Without options it is the bundled model, at http://127.0.0.1:8000/v1, and a page to try it at http://127.0.0.1:8000.
    """
    need_drafter(run.target, drafter, "or --drafter none to decode plainly")
    settings = ServeSettings(
        host=host, port=port, api_key=api_key, served_model_name=tuple(served_model_name or ()), any_model=any_model
    )
    drafting = SamplingOptions(block_size=block_size, tree_budget=tree_budget, draft_window=draft_window).drafting

    from blockdraft.drafters import load_drafter
    from blockdraft.engine import Engine
    from blockdraft.serving.backends import Backends
    from blockdraft.serving.run import bind, url_of
    from blockdraft.serving.run import serve as run_server
    from blockdraft.serving.service import Service

    with bind(settings) as bound:
        target = run.load()
        engine = Engine(
            target,
            load_drafter(drafter, target=target),
            settings.max_batch_size,
            drafting,
            prefix_tokens=4 * target.max_context if settings.prefix_tokens is None else settings.prefix_tokens,
        )
        backends = Backends(engine)
        service = Service(backends, settings)
        run_server(service, settings, bound, lambda: print(f"Ready: {url_of(bound)}", flush=True))
        backends.close()
