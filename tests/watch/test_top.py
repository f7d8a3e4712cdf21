"""`pdstage top`: what it reads of real endpoints, and what it shows of it, in a terminal and without one."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from fcntl import ioctl
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from rich.console import Console

from pdstage import State, UsageError, cli
from pdstage.tools.watch import expose, frame
from pdstage.tools.watch.scrape import Endpoints, Node, parse, url_of
from pdstage.tools.watch.top import Top, run
from tests.manager.engine import Rank
from tests.watch.conftest import TOKENS


def shown(top: Top, width: int = 132) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(top.frame(width))
    return console.export_text()


def row(text: str, start: str) -> str:
    """The one line that begins with `start`, without the panel's frame."""
    found = [line.strip("│ ") for line in text.splitlines() if line.strip("│ ").startswith(start)]
    assert found, f"no {start!r} in\n{text}"
    return found[0]


def test_a_frame_shows_what_the_nodes_did_in_the_interval(watched):
    receiver, sender, _ = watched.open("stays-open")
    with Endpoints([watched.endpoint.address]) as endpoints:
        top = Top(endpoints, 1.0)
        top.read()
        for room in range(3):
            watched.move(room, 16)
        top.read()
        text = shown(top)
    assert "2 nodes at 1 endpoint" in text
    assert re.search(r"prefill 0 +local +staged", text)
    assert re.search(r"decode 0 lane 0 +\S+ +0% of", text)
    assert re.search(r"prefill 0 buffers +\S+ 0 of 4 x 256 KiB", text)
    for stage in ("lease wait", "gather", "write", "scatter"):
        assert re.search(rf"{stage} +[1-9]", text), stage
    assert "staged/s" in text
    assert "stays-open" in row(text, "stays-open")
    assert "none" in text, "no errors"
    sender.abort("over")
    watched.drive(lambda: receiver.released and sender.released)
    with Endpoints([watched.endpoint.address]) as endpoints:
        top = Top(endpoints, 1.0)
        top.read()
        text = shown(top)
    assert re.search(r"prefill 0 +rooms failed Aborted +1", text)
    assert "none open" in text


def test_a_frame_keeps_to_any_width(watched):
    watched.move("r" * 200, TOKENS)
    receiver, sender, _ = watched.open("long" * 50)
    with Endpoints([watched.endpoint.address, "127.0.0.1:1"]) as endpoints:
        top = Top(endpoints, 1.0)
        top.read()
        top.read()
        for width in (30, 40, 60, 80, 109, 110, 132, 200, 400):
            lines = shown(top, width).splitlines()
            assert max(len(line) for line in lines) <= width
            assert "nodes" in "".join(lines)
    sender.abort()
    watched.drive(lambda: receiver.released and sender.released)


def test_a_node_that_is_gone_and_comes_back(site):
    first = site.decode(Rank())
    endpoint = expose(first, port=0)
    with Endpoints([endpoint.address]) as endpoints:
        top = Top(endpoints, 1.0)
        top.read()
        assert "decode 0" in shown(top)
        endpoint.close()
        first.close()
        top.read()
        text = shown(top)
        assert "no answer" in text
        assert "connection refused" in text
        assert "0 nodes at 1 endpoint" in text
        second = site.decode(Rank())
        with expose(second, port=endpoint.port):
            top.read()
            text = shown(top)
    assert "no answer" not in text
    assert re.search(r"decode 0 +local", text)


def test_a_counter_that_began_anew_gives_no_negative_rate():
    def node(at: float, total: float) -> Node:
        labels = '{role="decode",rank="0"'
        text = f"# TYPE pdstage_node_failed gauge\npdstage_node_failed{labels}}} 0\n"
        text += "# TYPE pdstage_rooms_ended_total counter\n"
        text += f'pdstage_rooms_ended_total{labels},outcome="success"}} {total}\n'
        (found,) = parse(text, at)
        return found

    before, same, less = node(10.0, 100), node(12.0, 130), node(14.0, 7)
    assert same.since(before).value("pdstage_rooms_ended_total", outcome="success") == 30
    assert less.since(same).value("pdstage_rooms_ended_total", outcome="success") == 7
    assert less.since(same).at == 2.0
    assert before.since(None).value("pdstage_rooms_ended_total", outcome="success") == 0, "nothing is known of before"


def test_quantiles_are_those_of_promql():
    buckets = {0.1: 10, 1.0: 30, 10.0: 30, float("inf"): 40}
    node = Node("decode 0", "decode", 0.0)
    for bound, count in buckets.items():
        node.samples["x_bucket"][frozenset({("le", str(bound))})] = count
    assert node.quantile(0.125, "x") == pytest.approx(0.05)
    assert node.quantile(0.5, "x") == pytest.approx(0.55)
    assert node.quantile(0.99, "x") == 10.0, "in the last bucket: its lower bound"
    assert node.quantile(0.5, "y") is None


def test_bars_show_what_is_little_and_fit():
    assert frame.bar(10, 100, {"cyan": 1, "red": 1}).plain == "██" + "░" * 8
    assert frame.bar(10, 100, {"cyan": 100, "blue": 50}).plain == "█" * 10
    assert frame.bar(10, 0, {"cyan": 0}).plain == "░" * 10
    assert frame.sparkline([0, 1, 2, 4]) == " ▂▄█"
    assert frame.sparkline([0, 0]) == "  "


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("9470", "http://127.0.0.1:9470"),
        ("node7:9470", "http://node7:9470"),
        ("[::1]:9470", "http://[::1]:9470"),
        ("http://node7:9470/metrics", "http://node7:9470"),
        ("https://node7:9470", "https://node7:9470"),
    ],
)
def test_endpoints_as_they_may_be_written(given, url):
    assert url_of(given) == url


@pytest.mark.parametrize("given", ["", "node7", "http://", "node7:port", "ftp://node7:21", "node7:99999"])
def test_what_is_no_endpoint_is_refused(given):
    with pytest.raises(UsageError, match="not a metrics endpoint"):
        url_of(given)


class _Strange(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html>hello</html>", "no metrics"),
        (b"", "no node here yet"),
        (b"# TYPE python_info gauge\npython_info 1\n", "no node here yet"),
        (b'pdstage_node_failed{role="decode",rank="0"} nonsense\n', "no metrics"),
        (b"\xff\xfe\x00", "no metrics"),
    ],
)
def test_other_servers_are_named_not_believed(body, said):
    with HTTPServer(("127.0.0.1", 0), _Strange) as server:
        server.body = body
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with Endpoints([f"127.0.0.1:{server.server_address[1]}"]) as endpoints:
            (answer,) = endpoints.read()
        thread.join()
    assert said in answer.problem


def test_an_endpoint_that_tells_no_rooms(site):
    with expose(site.decode(Rank()), port=0, rooms=False) as endpoint, Endpoints([endpoint.address]) as endpoints:
        top = Top(endpoints, 1.0)
        top.read()
        assert "not served by this endpoint" in shown(top)


# The command.


def test_once_prints_one_frame_and_says_by_its_code_who_answered(watched, capsys):
    assert cli.main(["top", watched.endpoint.address, "--once", "--interval", "0.1"]) == 0
    said = capsys.readouterr().out
    assert said.count("pdstage top") == 1
    assert "\x1b" not in said, "no colours where it is no terminal"
    assert cli.main(["top", "127.0.0.1:1", "--once", "--interval", "0.1"]) == 1


def test_svg_is_a_picture_that_needs_nothing_from_elsewhere(watched, tmp_path):
    from xml.etree import ElementTree  # noqa: PLC0415

    file = tmp_path / "top.svg"
    assert cli.main(["top", watched.endpoint.address, "--svg", str(file), "--interval", "0.1"]) == 0
    text = file.read_text()
    ElementTree.fromstring(text)
    assert "decode" in text
    assert not re.findall(r"url\([\"']?http", text)
    assert cli.main(["top", watched.endpoint.address, "--svg", "/no/such/x.svg", "--interval", "0.1"]) == 2


@pytest.mark.parametrize("argv", [("nowhere",), ("1", "--interval", "0"), ("1", "--frames", "0", "--once"), ()])
def test_bad_arguments_are_one_line(capsys, argv):
    try:
        code = cli.main(["top", *argv])
    except SystemExit as left:
        code = left.code
    said = capsys.readouterr()
    assert code == 2
    assert said.err.count("\n") == 1, said.err


def test_live_in_a_terminal_follows_the_node_and_its_size(make_watched):
    """The command in a pseudo-terminal: frames follow what happens and its width; Ctrl-C ends it in order."""
    watched = make_watched(progress="thread")
    main, child = pty.openpty()
    ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 140, 0, 0))
    command = [sys.executable, "-m", "pdstage.cli", "top", watched.endpoint.address, "--interval", "0.1"]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        command, stdin=child, stdout=child, stderr=child, env=environment | {"TERM": "xterm-256color"}
    )
    os.close(child)
    said = b""

    def until(wanted: str) -> None:
        nonlocal said
        deadline_at = time.monotonic() + 60
        while wanted not in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said.decode(errors="replace")):
            assert time.monotonic() < deadline_at, said[-4000:]
            if select.select([main], [], [], 1.0)[0]:
                said += os.read(main, 1 << 16)

    try:
        until("none open")
        receiver, sender, pages = watched.open("seen-while-open", TOKENS)
        until("seen-while-open")
        sender.chunk(pages, TOKENS)
        sender.finish()
        assert receiver.wait(60) is State.SUCCESS
        said = b""
        until("none open")
        assert "chunk p50" in said.decode(errors="replace"), "wide"
        ioctl(main, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 70, 0, 0))
        os.kill(process.pid, signal.SIGWINCH)
        until("─" * 40 + "╮")
        process.send_signal(signal.SIGINT)
        while True:  # what it still says must be taken, or it waits for us
            try:
                if not os.read(main, 1 << 16):
                    break
            except OSError:
                break
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(main)


def test_run_ends_when_it_is_told_to(watched):
    stop, console = threading.Event(), Console(width=100, file=io.StringIO())
    stop.set()
    assert run([watched.endpoint.address], console=console, stop=stop) == 0
