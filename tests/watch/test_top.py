"""`pdstage top`: what it reads of real endpoints, and what it shows of it, in a terminal and without one."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from xml.etree import ElementTree

import pytest
from rich.console import Console

from pdstage import State, UsageError, cli
from pdstage.tools.watch import expose
from pdstage.tools.watch.scrape import Node, parse, read, url_of
from pdstage.tools.watch.top import Top, run
from tests.manager.engine import Rank
from tests.watch.conftest import TOKENS


def shown(top: Top, width: int = 132) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(top.frame())
    return console.export_text()


def test_a_frame_shows_what_the_nodes_did_in_the_interval(watched):
    receiver, sender, _ = watched.open("stays-open")
    top = Top([watched.endpoint.address, "127.0.0.1:1"], 1.0)
    top.read()
    for room in range(3):
        watched.move(room, 16)
    top.read()
    text = shown(top)
    assert "2 nodes at 2 endpoints" in text
    assert "no answer  127.0.0.1:1: connection refused" in text
    assert re.search(r"prefill 0 +local +staged", text)
    assert re.search(r"decode 0 .* \d+% of 1 MiB", text)
    assert re.search(r"prefill 0 .* 0 of 4", text)
    assert re.search(r"stays-open +decode 0", text)
    assert "none" in text, "no errors"
    for width in (30, 80, 200):
        assert max(map(len, shown(top, width).splitlines())) <= width
    sender.abort("over")
    watched.drive(lambda: receiver.released and sender.released)
    top.read()
    assert re.search(r"prefill 0 +rooms failed Aborted +1", shown(top))
    assert "none open" in shown(top)


def test_a_node_that_is_gone_and_comes_back(site):
    first = site.decode(Rank())
    endpoint = expose(first, port=0, rooms=False)
    top = Top([endpoint.address], 1.0)
    top.read()
    assert "decode 0" in shown(top) and "not served by this endpoint" in shown(top)
    endpoint.close()
    first.close()
    top.read()
    assert "0 nodes at 1 endpoint" in shown(top)
    with expose(site.decode(Rank()), port=endpoint.port):
        top.read()
    assert "no answer" not in shown(top)
    assert re.search(r"decode 0 +local", shown(top))


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
    assert same.since(before).rate("pdstage_rooms_ended_total", outcome="success") == 15
    assert less.since(same).value("pdstage_rooms_ended_total", outcome="success") == 7
    assert before.since(None).rate("pdstage_rooms_ended_total", outcome="success") == 0, "nothing is known of before"


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("9470", "http://127.0.0.1:9470"),
        ("node7:9470", "http://node7:9470"),
        ("[::1]:9470", "http://[::1]:9470"),
        ("https://node7:9470/metrics", "https://node7:9470"),
    ],
)
def test_endpoints_as_they_may_be_written(given, url):
    assert url_of(given) == url


@pytest.mark.parametrize("given", ["", "node7", "http://", "node7:port", "ftp://node7:21", "node7:99999"])
def test_what_is_no_endpoint_is_refused(given):
    with pytest.raises(UsageError, match="not a metrics endpoint"):
        Top([given], 1.0)


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
        answer = read(f"127.0.0.1:{server.server_address[1]}")
        thread.join()
    assert said in answer.problem


# The command.


def test_one_frame_as_text_or_as_a_picture(watched, capsys, tmp_path):
    file, ours = tmp_path / "top.svg", ("top", watched.endpoint.address, "--interval", "0.1")
    assert cli.main([*ours, "--once"]) == 0
    said = capsys.readouterr().out
    assert said.count("pdstage top") == 1
    assert "\x1b" not in said, "no colours where it is no terminal"
    assert cli.main(["top", "127.0.0.1:1", "--once", "--interval", "0.1"]) == 1
    assert cli.main([*ours, "--svg", str(file)]) == 0
    ElementTree.fromstring(file.read_text())
    assert "decode" in file.read_text()
    assert not re.findall(r"url\([\"']?http", file.read_text()), "it needs nothing from elsewhere"
    assert cli.main([*ours, "--svg", "/no/such/x.svg"]) == 2


@pytest.mark.parametrize("argv", [("nowhere",), ("1", "--interval", "0"), ()])
def test_bad_arguments_are_one_line(capsys, argv):
    try:
        code = cli.main(["top", *argv])
    except SystemExit as left:
        code = left.code
    assert code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_live_in_a_terminal_follows_the_node(make_watched):
    """The command in a pseudo-terminal: frames follow what happens; Ctrl-C ends it in order."""
    watched = make_watched(progress="thread")
    main, child = pty.openpty()
    command = [sys.executable, "-m", "pdstage.cli", "top", watched.endpoint.address, "--interval", "0.1"]
    env = os.environ | {"TERM": "xterm-256color", "COLUMNS": "140", "LINES": "60"}
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=env)
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
