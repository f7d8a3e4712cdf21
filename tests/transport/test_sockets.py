"""What the kernel says of sockets whose other end died, with real processes and real sockets."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import struct
import time
from pathlib import Path

import pytest

from pdstage.transport import _sockets

NBYTES = 64 << 20
TCP_REPAIR = 19
"""Linux's; Python names it nowhere."""


def held():
    """Of what is dead by now."""
    return _sockets.hold_bytes_of_the_dead(time.monotonic())


@pytest.fixture(params=["IPv4", "dual stack"])
def dead_writer(request):
    """A connection to a process that was killed in the middle of a long send. Mooncake's listener is dual stack."""
    dual = request.param == "dual stack"
    family = socket.AF_INET6 if dual else socket.AF_INET
    listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
    child = os.fork()
    if not child:
        with socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as out:
            out.sendall(bytes(NBYTES))
        os._exit(0)
    end, _ = listener.accept()
    listener.close()
    assert end.recv(1) == b"\0"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    yield end
    end.close()


def test_bytes_of_the_dead_are_held_until_the_end_was_read(dead_writer):
    """I2: an orphan's buffer goes on emptying into ours; only the end proves that nothing more will come."""
    assert held()
    n_read = 1
    while chunk := dead_writer.recv(1 << 20):
        n_read += len(chunk)
    assert 1 < n_read < NBYTES, "it was killed in the middle"
    assert not held()


def test_a_dead_writer_is_of_no_interest_once_its_socket_is_closed(dead_writer):
    dead_writer.close()
    assert not held()


def test_what_a_reset_connection_holds_can_still_be_read():
    """I2: a writer that died with an unread answer resets; no table lists our end then, and all its bytes are there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child, until_answered = os.fork(), 1 << 16
        if not child:
            with socket.create_connection(listener.getsockname()) as out:
                out.sendall(bytes(until_answered))
                out.recv(1, socket.MSG_PEEK)
            os._exit(0)  # with the answer unread
        with listener.accept()[0] as end:
            assert end.recv(1, socket.MSG_PEEK)
            end.sendall(b"answer")
            os.waitpid(child, 0)
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _sockets.CLOSE
            assert held()
            n_read = 0
            with contextlib.suppress(ConnectionResetError):
                while chunk := end.recv(1 << 20):
                    n_read += len(chunk)
            assert n_read == until_answered
            assert not held()


@contextlib.contextmanager
def connected():
    """A listener, and a connection to it that nobody has accepted."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as out:
        yield listener, out


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1"])
def test_an_end_whose_other_end_is_nowhere_may_get_what_was_sent(host):
    """I2: a reset may be on its way, behind bytes. Here none comes (tcp_repair), until the kernel asks for it. The ends
    have two addresses of this host where one is another than that by which the kernel connects.
    """
    with socket.create_server((host, 0)) as listener:
        out = socket.create_connection(listener.getsockname())
        with listener.accept()[0] as end:
            assert not held()
            try:
                out.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
            except PermissionError as error:
                pytest.skip(f"tcp_repair: {error}")
            finally:
                out.close()
            assert held()
            end.settimeout(60.0)
            with pytest.raises(ConnectionResetError):
                end.recv(1)
            assert not held()


def test_an_end_that_answers_from_elsewhere_hinders_nothing(monkeypatch, tmp_path):
    """Behind a translated address, as a container's published port on this host."""
    with connected() as (listener, out), listener.accept()[0]:
        unseen = f":{listener.getsockname()[1]:04X} 0100007F:{out.getsockname()[1]:04X} "
        lines = Path("/proc/self/net/tcp").read_text().splitlines(keepends=True)
        (tmp_path / "tcp").write_text("".join(line for line in lines if unseen not in line))
        monkeypatch.setattr(_sockets, "_TABLES", (tmp_path / "tcp",))
        died, until = time.monotonic(), time.monotonic() + 60.0
        assert _sockets.hold_bytes_of_the_dead(died), "not heard yet"
        while _sockets.hold_bytes_of_the_dead(died):
            assert time.monotonic() < until
        assert not _sockets.hold_bytes_of_the_dead(died), "nor for another who died then"
        assert held(), "what it said then proves nothing now"


def test_an_answer_counts_from_when_it_came():
    with connected() as (_, out):
        time.sleep(0.1)
        assert not _sockets._answers(out.fileno(), time.monotonic() - 0.5)


@pytest.mark.parametrize("how", ["closed", "reset"])
def test_what_a_distant_server_sent_before_it_closed_hinders_nothing(monkeypatch, how):
    """Such as an idle connection of an HTTP client, which nobody reads again. Where it cannot be told who was there,
    nothing is proved.
    """
    with connected() as (listener, idle):
        with listener.accept()[0] as server:
            server.sendall(b"I close")
            if how == "reset":
                idle.sendall(b"unread")
                assert server.recv(1, socket.MSG_PEEK)
        while (state := idle.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]) == _sockets.ESTABLISHED:
            time.sleep(0.01)
        assert state == (_sockets.CLOSE if how == "reset" else _sockets.CLOSE_WAIT)
        assert held()
        monkeypatch.setattr(_sockets, "_is_here", lambda host: host != "127.0.0.1")
        assert not held()

        def fails(_):
            raise OSError(errno.EMFILE, "no descriptor")

        monkeypatch.setattr(_sockets, "_is_here", fails)
        assert held()


def test_an_address_is_of_this_host_or_not():
    assert all(map(_sockets._is_here, ["127.0.0.1", "127.3.2.1"]))
    assert not _sockets._is_here("192.0.2.1")  # of no host: RFC 5737


def test_sockets_that_are_looked_at_stay_as_they_are(monkeypatch):
    """Whatever default timeout somebody has set: Python would make them non-blocking."""
    before = socket.getdefaulttimeout()
    with connected() as (listener, one):
        try:
            socket.setdefaulttimeout(10.0)
            held()
        finally:
            socket.setdefaulttimeout(before)
        assert os.get_blocking(listener.fileno())
        assert os.get_blocking(one.fileno())


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_bytes_wait_in_a_connection_that_nobody_has_accepted(reset):
    """I2: it has no descriptor yet; the thread that accepts it reads what a process sent that is long dead."""
    with connected() as (listener, _):
        assert not held(), "the living wait, too"
        child = os.fork()
        if not child:
            out = socket.create_connection(listener.getsockname())
            out.sendall(b"sent")
            if reset:
                out.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os._exit(0)
        os.waitpid(child, 0)
        assert held()
        with listener.accept()[0], listener.accept()[0] as end:
            assert held()
            assert end.recv(64) == b"sent"
            assert not held()


def test_the_living_prove_nothing_and_hinder_nothing():
    with connected() as (listener, one), listener.accept()[0]:
        one.sendall(b"unread")
        assert not held()


def test_where_nothing_can_be_read_nothing_is_proved(monkeypatch, tmp_path):
    monkeypatch.setattr(_sockets, "_TABLES", (tmp_path,))
    assert held()
