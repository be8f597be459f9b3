"""The process that serves: from a bound socket to the last answer."""

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

LAST_SECONDS = 3.0  # that clients have to read how their answers ended
# That a connection may idle. Clients that keep theirs for less, as most do, never send on one that is just closed.
IDLE_SECONDS = 75
# On Windows the usual option would let a second server have the same port.
EXCLUSIVE = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)


def bind(settings: ServeSettings) -> socket.socket:
    """A socket at the address of the settings, which nobody can connect to yet.

    Raises:
        UsageError: The address is taken, or none of this machine.
    """
    host, port = settings.host, settings.port
    with ExitStack() as undo:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            bound = undo.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, EXCLUSIVE, 1)
            if hasattr(
                socket, "TCP_USER_TIMEOUT"
            ):  # ends those too that are closed, and whose client never reads the rest
                milliseconds = min(int(1000 * settings.stall_seconds), 2**31 - 1)
                bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
            bound.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                told = f"port is {port}, which is in use at {host}; give another one, or 0 for a free one."
                raise UsageError(told) from error
            told = f"The server cannot listen at {host}, port {port} ({describe(error)}); give others."
            raise UsageError(told) from error
        undo.pop_all()
    return bound


def url_of(bound: socket.socket) -> str:
    """Where this machine reaches it."""
    host, port = bound.getsockname()[:2]
    if ip_address(host).is_unspecified:  # all addresses, which is none to call
        host = "::1" if ":" in host else "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(service: Service, settings: ServeSettings, bound: socket.socket, ready: Callable[[], object]) -> None:
    """Serve until a signal comes, and then until the running answers have ended, or `grace_seconds` are over. A second
    signal ends them at once.

    Args:
        ready: Called once clients can connect.
    """
    server_of(service, settings, ready).run(sockets=[bound])


def server_of(service: Service, settings: ServeSettings, ready: Callable[[], object]) -> uvicorn.Server:
    """What `serve` runs."""
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
    """Counts signals instead of ending at the first."""

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
