"""The server process: its socket, its start, and its end after a signal."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from ipaddress import ip_address
from types import FrameType

import uvicorn

from blockdraft.errors import UsageError, describe
from blockdraft.serving.app import make_app
from blockdraft.serving.core.service import Service
from blockdraft.serving.settings import ServeSettings

LAST_SECONDS = 3.0  # given to clients to read how their answers ended
# Seconds that a connection may idle. Most clients keep theirs for less, so they never send on one just closed.
IDLE_SECONDS = 75
# SO_REUSEADDR would let a second server take the same port on Windows.
EXCLUSIVE = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)


def bind(settings: ServeSettings) -> socket.socket:
    """A socket bound to the address of the settings. It does not accept connections yet.

    Raises:
        UsageError: The address is in use, or does not belong to this machine.
    """
    host, port = settings.host, settings.port
    with ExitStack() as undo:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            bound = undo.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, EXCLUSIVE, 1)
            # Also ends connections that the server has closed and whose client never reads the rest.
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                milliseconds = min(int(1000 * settings.stall_seconds), 2**31 - 1)
                bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
            bound.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                told = f"port is {port}, which is in use at {host}; choose another port, or 0 for a free one."
                raise UsageError(told) from error
            told = f"The server cannot listen at {host}, port {port} ({describe(error)}); choose another host or port."
            raise UsageError(told) from error
        undo.pop_all()
    return bound


def url_of(bound: socket.socket) -> str:
    """URL by which this machine reaches a bound socket."""
    host, port = bound.getsockname()[:2]
    if ip_address(host).is_unspecified:  # stands for all addresses, and cannot be called
        host = "::1" if ":" in host else "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(service: Service, settings: ServeSettings, bound: socket.socket, ready: Callable[[], object]) -> None:
    """Serve until a signal comes. The running answers then have `grace_seconds` to end; a second signal ends them at
    once.

    Args:
        ready: Called once clients can connect.
    """
    server_of(service, settings, ready).run(sockets=[bound])


def server_of(service: Service, settings: ServeSettings, ready: Callable[[], object]) -> uvicorn.Server:
    """The uvicorn server that `serve` runs."""
    config = uvicorn.Config(
        make_app(service, settings),
        log_level="info" if settings.log_requests else "warning",
        access_log=settings.log_requests,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=LAST_SECONDS,  # type: ignore[arg-type]
    )
    return _Server(config, service, settings.grace_seconds, ready)


class _Server(uvicorn.Server):
    """Ends after the running answers instead of at the first signal."""

    def __init__(self, config: uvicorn.Config, service: Service, grace: float, ready: Callable[[], object]) -> None:
        super().__init__(config)
        self._service, self._grace, self._ready = service, grace, ready
        self._signals = 0
        self._deadline: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def on_tick(self, counter: int) -> bool:
        if self._signals and self._deadline is None:
            self._deadline = time.monotonic() + self._grace
            self._service.admission.draining = True
        if self._deadline is not None:
            late = self._signals > 1 or time.monotonic() > self._deadline
            if late:
                self._service.stop()
            if late or not self._service.admission.active:
                return True
        return await super().on_tick(counter)
