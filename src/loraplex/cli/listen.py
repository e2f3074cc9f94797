"""The port of a server: taken before anything is loaded, so that a mistake shows at once."""

import errno
import os
import socket
from collections.abc import Callable

from loraplex.core import ConfigError


def bind_sockets(host: str, port: int) -> list[socket.socket]:
    """Sockets bound to every address of `host`, not yet listening. Raises ConfigError naming --host or --port."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"{host!r:.200} is not an address to listen on: {error.strerror} (--host).") from error
    bound: list[socket.socket] = []
    absent: OSError | None = None
    for family, kind, protocol, _, address in found:
        try:
            bound.append(_bind(family, kind, protocol, address))
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                absent = error  # "localhost" may name an IPv6 address that this machine lacks
                continue
            close_all(bound)
            raise _refusal(host, port, error) from error
    if not bound:
        raise ConfigError(f"{host!r:.200} is not an address of this machine (--host).") from absent
    return bound


def close_all(sockets: list[socket.socket]) -> None:
    """Close them; one that is closed stays so."""
    for one in sockets:
        one.close()


def run_bound(run: Callable[[list[socket.socket]], None], sockets: list[socket.socket], host: str, port: int) -> None:
    """Run a server on the sockets and close them. Raises ConfigError if another began to listen there meanwhile."""
    try:
        run(sockets)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise _refusal(host, port, error) from error
    finally:
        close_all(sockets)


def _bind(family: int, kind: int, protocol: int, address: tuple[object, ...]) -> socket.socket:
    one = socket.socket(family, kind, protocol)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(address)
    except OSError:
        one.close()
        raise
    return one


def _refusal(host: str, port: int, error: OSError) -> ConfigError:
    why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used: {os.strerror(error.errno or errno.EIO)}"
    return ConfigError(f"Port {port} of {host} {why}; choose another (--port, 0 takes a free one).")
