"""The socket of the server. It imports little, so that a port in use is reported at once."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack
from ipaddress import ip_address

from blockdraft.errors import UsageError, describe
from blockdraft.serving.settings import ServeSettings

# SO_REUSEADDR would let a second server take the same port on Windows.
EXCLUSIVE = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
MAX_UNACCEPTED = 2048  # connections


def bind(settings: ServeSettings) -> socket.socket:
    """Return a socket that listens at the address of the settings.

    Connections wait until the server accepts them, which is after it has loaded its model.

    Raises:
        UsageError: The address is in use, or does not belong to this machine.
    """
    host, port = settings.host, settings.port
    with ExitStack() as cleanup:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            bound = cleanup.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, EXCLUSIVE, 1)
            # Also ends connections that the server has closed and whose client never reads the rest.
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                milliseconds = min(int(1000 * settings.stall_seconds), 2**31 - 1)
                bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
            bound.bind(address)
            bound.listen(MAX_UNACCEPTED)  # a second server could bind to the address until then
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UsageError(
                    f"port is {port}, which is in use at {host}; choose another port, or 0 for a free one."
                ) from error
            raise UsageError(
                f"The server cannot listen at {host}, port {port} ({describe(error)}); choose another host or port."
            ) from error
        cleanup.pop_all()
    return bound


def url_of(bound: socket.socket) -> str:
    """Return the URL by which this machine reaches a bound socket."""
    host, port = bound.getsockname()[:2]
    if ip_address(host).is_unspecified:  # stands for all addresses and cannot be called
        host = "::1" if ":" in host else "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
