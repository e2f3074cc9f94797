"""The port is taken before anything is loaded."""

import errno
import socket
from collections.abc import Iterator

import pytest

from loraplex.cli.listen import bind_sockets, close_all, run_bound
from loraplex.core import ConfigError


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which something listens."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield int(other.getsockname()[1])


def test_a_free_port_is_bound_and_not_yet_listening() -> None:
    (bound,) = bind_sockets("127.0.0.1", 0)
    with bound:
        address = bound.getsockname()
        assert address[1] > 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
        bound.listen()
        socket.create_connection(address, timeout=5).close()


def test_a_taken_port_is_refused_with_the_option(taken: int) -> None:
    with pytest.raises(ConfigError, match="--port") as caught:
        bind_sockets("127.0.0.1", taken)
    assert str(taken) in caught.value.message
    assert "is taken" in caught.value.message


def test_localhost_binds_what_the_machine_has() -> None:
    bound = bind_sockets("localhost", 0)
    assert bound
    close_all(bound)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.7"])
def test_an_address_of_no_use_is_refused_with_the_option(host: str) -> None:
    with pytest.raises(ConfigError, match="--host") as caught:
        bind_sockets(host, 0)
    assert host in caught.value.message


def test_sockets_are_closed_after_the_run_and_a_late_rival_is_named() -> None:
    bound = bind_sockets("127.0.0.1", 0)
    run_bound(lambda sockets: None, bound, "127.0.0.1", 0)
    assert [one.fileno() for one in bound] == [-1]

    def fail(sockets: list[socket.socket]) -> None:
        raise OSError(errno.EADDRINUSE, "in use")

    with pytest.raises(ConfigError, match="Port 8000"):
        run_bound(fail, [], "127.0.0.1", 8000)

    def break_down(sockets: list[socket.socket]) -> None:
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        run_bound(break_down, [], "127.0.0.1", 8000)
