"""The bench of whole requests between two hosts: what the other side obeys, and every byte between two of them."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest

from pdstage import cli
from pdstage.bench import kv_transfer, two_hosts
from pdstage.bench.harness import run_named
from pdstage.bench.kv_transfer import MODELS, Case, Kept
from pdstage.bench.two_hosts import Call, Place, Server, Start, There, fabrics_between
from pdstage.control.keys import Keys
from pdstage.errors import TransportError, UsageError
from pdstage.transport import available
from tests.bench.test_runs import check
from tests.cables import hosts
from tests.doctor.conftest import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Place("")
SMALL = """\
import sys
from pdstage import cli
from pdstage.bench import kv_transfer
from tests.bench.test_two_hosts import small
kv_transfer.cases = lambda scale, quick: small()
sys.exit(cli.main(sys.argv[1:]))
"""


def small() -> Iterator[Case]:
    llama = kv_transfer._scaled(MODELS[0], 80)
    yield Case(llama, 256, Kept(), Kept(), (2,))
    yield Case(llama, 256, Kept(2), Kept(1, 64, heads_first=True), (1,))


class Stub:
    """Stands for the case's process."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.closed = False

    def ready(self) -> Stub:
        return self

    def call(self, method: str, *given: object) -> object:
        self.asked.append((method, *given))
        if method == "check":
            raise RuntimeError("Traceback\nAssertionError: a request arrived with other bytes than were sent")
        return 0.5 if method == "pull" else None

    def pause(self) -> None:
        self.asked.append(("pause",))

    def resume(self) -> None:
        self.asked.append(("resume",))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def stubs():
    """A server whose processes are stubs, and these."""
    made: list[Stub] = []

    def start(*given: object) -> Stub:
        made.append(Stub())
        made[-1].asked.append(given)
        return made[-1]

    ended = threading.Event()
    with Server("127.0.0.1:0", Place(), start, lambda: 1 << 30) as server:
        thread = threading.Thread(target=server.serve, args=(ended.is_set,))
        thread.start()
        try:
            yield server.endpoint, made
        finally:
            ended.set()
            thread.join()


def started(there: There, fabric: str = "nixl") -> two_hosts.FarRank:
    return there.rank(next(small()).request(), "127.0.0.1:1", two_hosts.ways()[fabric]).ready()


needs_nixl = pytest.mark.skipif(bool(available()["nixl"]), reason=available()["nixl"])


@needs_nixl
def test_a_case_is_started_asked_and_ended(stubs):
    endpoint, made = stubs
    with There(endpoint, HERE) as there:
        assert there.place.host == "127.0.0.1" and there.side.memory == 1 << 30
        rank = started(there)
        assert rank.call("pull", 3, 1) == 0.5
        with pytest.raises(TransportError, match="at the peer: AssertionError: a request arrived with other bytes"):
            rank.call("check", 3, 1)
        assert made[0].closed, "of a process that failed nothing is asked again"
        again = started(there, "nixl, TCP")
        again.close()
    asked, directory, fabric, place, library = made[1].asked[0]
    assert (
        Case.asked(asked) == next(small()) and directory == "127.0.0.1:1" and place.host == "127.0.0.1" and not library
    )
    assert fabric.env == {"UCX_TLS": "tcp,self"}, "no lock to loopback"
    assert made[0].asked[1] == ("pull", 3, 1) and made[1].closed


@needs_nixl
def test_a_librarys_process_is_one_more_of_the_case_and_stands_still(stubs):
    endpoint, made = stubs
    with There(endpoint, HERE) as there:
        nodes = started(there)
        library = there.rank(next(small()).request(), "", two_hosts.ways()["nixl"], "a library").ready()
        library.pause()
        nodes.call("clear")
        library.resume()
        library.call("clear")
        started(there)
    assert [one.asked[0][4] for one in made] == ["", "a library", ""]
    assert [one.asked[1:] for one in made] == [[("clear",)], [("pause",), ("resume",), ("clear",)], []]
    assert [one.closed for one in made[:2]] == [True, True], "the next case ends all of the last"


@needs_nixl
def test_only_what_is_listed_is_obeyed(stubs):
    """No other method, no other types, no environment, and nothing for who has started no case."""
    endpoint, made = stubs
    with There(endpoint, HERE) as there, There(endpoint, HERE) as other:
        rank = started(there)
        for method, given, said in (
            ("close", (), "'close' may not be asked for"),
            ("__init__", (), "may not be asked for"),
            ("pull", ("3", 1), "cannot be read"),
            ("clear", (1,), "cannot be read"),
        ):
            with pytest.raises(TransportError, match=said):
                there.gave(Call(0, method, msgspec.Raw(msgspec.msgpack.encode(given))), None)
        with pytest.raises(TransportError, match="no case of yours"):
            two_hosts.FarRank(other, rank._start).call("clear")
        with pytest.raises(TransportError, match="no fabric 'local'"):
            there.gave(Start(next(small()).request(), "local", ""), None)
    assert made[0].asked[1:] == []


def test_every_method_that_a_bed_asks_decode_for_is_listed():
    """Else a row works on one host, and fails on two."""
    source = inspect.getsource(kv_transfer.Bed)
    asked = re.findall(r"(?:dst|one|other|rank|driver)\.(?:call|begin)\(\s*\"(\w+)|each\(\"(\w+)", source)
    assert len(asked) > 4 and {"".join(names) for names in asked} <= two_hosts.METHODS.keys()


def test_a_model_that_the_other_release_does_not_know():
    asked = msgspec.structs.replace(next(small()).request(), model="Llama-9")
    with pytest.raises(UsageError, match="no model 'Llama-9'"):
        Case.asked(asked)


def test_fabrics_between_two_hosts_are_what_both_offer():
    here = available()
    found, left_out = fabrics_between(two_hosts.Side([], dict.fromkeys(here, "") | {"nixl": "not installed"}, 0, {}))
    assert not [one for one in found if one.transport in ("local", "nixl")]
    assert any(line.startswith("local: ") for line in left_out)
    assert any(line.startswith("nixl, shared memory: ") for line in left_out)
    if not here["nixl"]:
        assert "nixl, TCP: at the peer: not installed" in left_out


def test_addresses_that_others_reach_need_keys_or_a_word():
    with pytest.raises(UsageError, match="neither encrypted"):
        Server("192.0.2.1:0", Place(), Stub, lambda: 0)
    with pytest.raises(UsageError, match="every interface"):
        Server("*:0", Place(insecure=True), Stub, lambda: 0)


def test_what_cannot_be_is_said_in_a_line(capsys):
    for args, said in (
        (["wire", "--peer", "127.0.0.1:1"], "bench wire has no --peer"),
        (["wire", "--serve", "127.0.0.1:0"], "bench wire has no --serve"),
        (["kv-transfer", "--serve", "127.0.0.1:0", "--peer", "127.0.0.1:1"], "--serve with --peer"),
        (["kv-transfer", "--insecure"], "without --peer"),
        (["kv-transfer", "--peer", "127.0.0.1:1", "--bind", "10.0.0.1:9"], "names one port"),
        (["kv-transfer", "--peer", "127.0.0.1:1", "--bind", "*:0"], "every interface"),
        (["kv-transfer", "--peer", "127.0.0.1:1", "--bind", "192.0.2.1:0"], "neither encrypted"),
        (["kv-transfer", "--peer", "127.0.0.1:1"], "cannot be reached"),
    ):
        assert cli.main(["bench", *args]) == 2
        assert said in capsys.readouterr().err


@contextlib.contextmanager
def serving(*args: str, bind: str = "127.0.0.1:0", within: tuple[str, ...] = ()) -> Iterator[str]:
    """The address of `pdstage bench kv-transfer --serve` in a process of its own."""
    command = [*within, sys.executable, "-m", "pdstage.cli", "bench", "kv-transfer", "--serve", bind, *args]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


@pytest.mark.full
@needs_nixl
def test_two_processes_with_keys(monkeypatch, tmp_path):
    key = tmp_path / "key"
    Keys.make(key)
    monkeypatch.setattr(kv_transfer, "cases", lambda scale, quick: [next(small())])
    with serving("--keys", str(key)) as endpoint:
        with pytest.raises(UsageError, match="is encrypted"):
            run_named("kv-transfer", quick=True, peer=(endpoint, HERE))
        given = endpoint.rpartition("@")[2], Place("", keys=str(key))
        report = run_named("kv-transfer", quick=True, transport="nixl", peer=given)
    check(report, "staged, nixl: ", "direct, nixl, TCP: ", "NIXL's own lists, nixl: ")
    assert report["machine"]["decode"]["cores"] and any("local: " in line for line in report["left_out"])


@pytest.mark.full
@needs_nixl
def test_two_hosts(tmp_path):
    """Namespaces stand for hosts: requests cross by every fabric that both have, each byte compared.

    TCP crosses the cable. UCX sees one machine, so that "nixl" goes through its shared memory here.
    """
    key, out = tmp_path / "key", tmp_path / "out.json"
    Keys.make(key)
    with hosts(1) as spaces:
        here, there = (("ip", "netns", "exec", space) for space in spaces)
        with serving("--keys", str(key), bind="10.77.0.2:0", within=there) as endpoint:
            command = [*here, sys.executable, "-c", SMALL, "bench", "kv-transfer", "--quick", "--peer", endpoint]
            command += ["--keys", str(key), "--json", str(out)]
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=200, cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            report = json.loads(out.read_text())
            check(report, "staged, nixl: ", "direct, nixl: ", "staged, nixl, TCP: ", "direct, nixl, TCP: ")
            assert not [row for row in report["rows"] if "shared memory" in row["name"]]
