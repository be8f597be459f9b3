"""The server process: its socket, its start, and its shutdown after a signal."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from blockdraft.serving.app import make_app
from blockdraft.serving.service import Service
from blockdraft.serving.settings import ServeSettings

SHUTDOWN_SECONDS = 3.0  # for clients to read the end of their responses
PROMPT_SECONDS = 0.25  # after a signal, until requests that are still reading their prompt end
# Most clients drop idle connections sooner, so they never send a request on one that the server has just closed.
KEEP_ALIVE_SECONDS = 75


def serve(service: Service, settings: ServeSettings, bound: socket.socket, ready: Callable[[], object]) -> None:
    """Serve until a signal arrives. Running responses then have `grace_seconds` to end. A second signal ends them.

    Args:
        ready: Called once clients can connect.
    """
    server_of(service, settings, ready).run(sockets=[bound])


def server_of(service: Service, settings: ServeSettings, ready: Callable[[], object]) -> uvicorn.Server:
    """Return the uvicorn server that `serve` runs."""
    config = uvicorn.Config(
        make_app(service, settings),
        log_level="warning",
        access_log=False,  # `Service` logs requests
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,  # type: ignore[arg-type]
    )
    return _Server(config, service, settings.grace_seconds, ready)


class _Server(uvicorn.Server):
    """Ends after the running responses instead of at the first signal."""

    def __init__(self, config: uvicorn.Config, service: Service, grace: float, ready: Callable[[], object]) -> None:
        super().__init__(config)
        self._service, self._grace, self._ready = service, grace, ready
        self._signals = 0
        self._stopped_at: float | None = None
        self._prompts_ended = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def on_tick(self, counter: int) -> bool:
        if self._signals and self._stopped_at is None:
            self._stopped_at = time.monotonic()
            self._service.admission.draining = True
        if self._stopped_at is not None:
            elapsed = time.monotonic() - self._stopped_at
            if elapsed > PROMPT_SECONDS and not self._prompts_ended:
                self._end_prompts()
            late = self._signals > 1 or elapsed > self._grace
            if late:
                self._service.stop()
            if late or not self._service.admission.active:
                return True
        return await super().on_tick(counter)

    def _end_prompts(self) -> None:
        """End requests whose prompt would take longer, and print what is ended and what is waited for."""
        self._prompts_ended = True
        ended = self._service.end_prompts()
        parts = [f"a prompt is ended after {read.num_prefilled} of {read.num_tokens} tokens" for read in ended]
        if responses := self._service.admission.active - len(ended):
            parts.append(f"{responses} running responses have {self._grace:g} s; a second signal ends them")
        if parts:
            print(f"Stopping: {'; '.join(parts)}.", file=sys.stderr, flush=True)
