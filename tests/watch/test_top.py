"""`pdstage top`: what it reads of real endpoints, and what it shows of it, in a terminal and without one."""

from __future__ import annotations

import os
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pdstage import UsageError, cli
from pdstage.watch import expose
from pdstage.watch.scrape import Node, parse, read, url_of
from pdstage.watch.top import Top, run
from tests import processes
from tests.manager.engine import Rank


def test_a_frame_shows_what_the_nodes_did_in_the_interval(watched):
    room = watched.open("stays-open")
    top = Top([watched.endpoint.address, "127.0.0.1:1"], 1.0)
    top.read()
    for number in range(3):
        watched.move(number, 16)
    top.read()
    text = top.frame(132)
    assert "2 nodes at 2 endpoints" in text
    assert "no answer  127.0.0.1:1: connection refused" in text
    assert re.search(r"prefill 0 +local +staged", text)
    assert re.search(r"decode 0 .* \d+% of 1 MiB", text)
    assert re.search(r"prefill 0 .* 0 of 4", text)
    assert re.search(r"stays-open +decode 0", text)
    assert "none" in text, "no errors"
    for width in (30, 80, 200):
        assert max(map(len, top.frame(width).splitlines())) <= width
    room.sender.abort("over")
    watched.end(room)
    top.read()
    assert re.search(r"prefill 0 +rooms failed Aborted +1", top.frame(132))
    assert "none open" in top.frame(132)


def test_a_node_that_is_gone_and_comes_back(site):
    first = site.decode(Rank())
    endpoint = expose(first, port=0, rooms=False)
    top = Top([endpoint.address], 1.0)
    top.read()
    assert "decode 0" in top.frame(132) and "not served by this endpoint" in top.frame(132)
    endpoint.close()
    first.close()
    top.read()
    assert "0 nodes at 1 endpoint" in top.frame(132)
    with expose(site.decode(Rank()), port=endpoint.port):
        top.read()
    assert "no answer" not in top.frame(132)
    assert re.search(r"decode 0 +local", top.frame(132))


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


def test_one_frame(watched, capsys):
    assert cli.main(["top", watched.endpoint.address, "--interval", "0.1", "--once"]) == 0
    said = capsys.readouterr().out
    assert said.count("pdstage top") == 1
    assert "\x1b" not in said, "no colours where it is no terminal"


class Ticks(threading.Event):
    """Calls each of `steps` in turn while it is waited for; after the last, as Ctrl-C."""

    def __init__(self, *steps) -> None:
        super().__init__()
        self.steps = iter(steps)

    def wait(self, timeout=None):
        step = next(self.steps, None)
        if step is None:
            raise KeyboardInterrupt
        step()
        return False


def test_live_frames_follow_the_node_until_ctrl_c(watched, capsys):
    opened = []

    def end() -> None:
        opened[0].sender.abort("over")
        watched.end(*opened)

    ticks = Ticks(lambda: None, lambda: opened.append(watched.open("seen-while-open")), end)
    assert run([watched.endpoint.address], stop=ticks) == 0
    before, _, after = capsys.readouterr().out.partition("seen-while-open")
    assert "none open" in before and "none open" in after


def test_a_missing_client_is_one_error_that_names_the_extra(tmp_path):
    """Where prometheus_client is not installed, the command says so in one line and exits with 2."""
    (tmp_path / "prometheus_client.py").write_text("raise ModuleNotFoundError('no prometheus_client')\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = processes.python("-m", "pdstage.cli", "top", "1", "--once", env=environment)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "[top]" in done.stderr
