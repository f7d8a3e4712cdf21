"""The command: its arguments, its exit codes, and errors of one line."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdstage import cli
from pdstage.control import operate
from tests.processes import python


def failed(capsys, *argv: str) -> tuple[int, str]:
    """The exit code and what was said, of a command that must not print a traceback or a second line."""
    try:
        code = cli.main(argv)
    except SystemExit as left:
        code = left.code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    return code, said.err


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ((), "COMMAND"),
        (("fly",), "fly"),
        (("demo", "--prefill-tp", "33"), "--prefill-tp is 33; give a number from 1 to 32"),
        (("demo", "--prefill-tp", "16", "--prefill-pp", "4"), "make 64 ranks"),
        (("bench", "plan", "--transport", "local"), "bench plan has no --transport"),
        (("calibrate", "--transport", "pigeon"), "no transport 'pigeon'"),
        (("doctor", "--transport", "pigeon"), "'pigeon'"),
        (("doctor", "--only", "host", "--device", "cuda:9"), "--device cuda:9 is not looked at"),
        (("bench", "plan", "--trace", "x.json"), "moves no rooms"),
        (("plot", __file__), "is not a trace"),
        (("bootstrap", "--bind", "0.0.0.0:0"), "pass --keys FILE, bind to loopback, or say --insecure if"),
        (("bootstrap", "--allow", __file__), "--allow without --keys"),
        (("keys", "--public", "/no/such/file"), "/no/such/file"),
        (("drain", "nowhere"), "'nowhere'"),
        (("drain", "tcp://h:1", "--allow", __file__), "--allow without --keys"),
        (("top",), "endpoint"),
        (("top", "nowhere"), "not a metrics endpoint"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(capsys, argv, names):
    code, said = failed(capsys, *argv)
    assert code == 2
    assert names in said
    assert said.startswith("pdstage")


_NUMBERS = ("x", "-1", "1.5", "", "9" * 30)
_ADDRESSES = ("nowhere", "h:99999", "a b:1", "h:1:2", "ftp://h:1", "")
BAD = {
    cli.whole: _NUMBERS,
    cli.count: (*_NUMBERS, "0"),
    cli.seconds: ("x", "-1", "0", "nan", "inf", ""),
    cli.endpoint: (*_ADDRESSES, "h:0", "0.0.0.0:1", "http://h:1"),
    cli.listener: _ADDRESSES,
    cli.http_listener: (*_ADDRESSES, "127.0.0.1"),
    cli.directory: (*_ADDRESSES, "h:0", "etcd://", "etcd://h:1", "etcd://h:1/p?x=y"),
    cli.device: ("gpu", "cuda:", "cuda:x", "double", ""),
    cli.devices: ("gpu", "cuda:", "cpu,double", ""),
    cli.areas: ("x", "host,", ""),
    cli.readable: ("/no/such/file", "/", ""),
    cli.writable: ("/no/such/folder/x.json", "/", ""),
}
"""What each type of an argument refuses."""
FREE = {"--room", "--transport", "--advertise", "where", "endpoints", "file"}
"""Any text may be right. What is none of a transport, or an address, is refused once it is looked up."""
GOOD = {
    "name": "plan", "endpoints": "127.0.0.1:1", "traces": __file__, "directory": "127.0.0.1:1", "where": "x",
    "file": "x",
}  # fmt: skip


def cases():
    for command, (_, _, options) in cli.COMMANDS.items():
        needed = [name for name, how in options if not name.startswith("-") and how.get("nargs") != "*"]
        for name, how in options:
            kind = how.get("type")
            if "action" in how or name in FREE:
                assert how.get("action") != "append" or name in FREE
                continue
            for value in ("nosuch", "") if "choices" in how else BAD[kind]:
                others = [GOOD[one] for one in needed if one != name]
                if name.startswith("-"):
                    yield command, *others, f"{name}={value}"
                else:
                    yield command, *(value if one == name else GOOD[one] for one in needed)


@pytest.mark.parametrize("argv", list(cases()), ids=" ".join)
def test_what_an_argument_cannot_be_is_refused_before_anything_is_done(capsys, monkeypatch, argv):
    """Of every command, every option but the flags, with every value that its type refuses."""
    monkeypatch.setattr(cli, "_run", lambda given: pytest.fail(f"it ran, with {given}"))
    code, said = failed(capsys, *argv)
    assert code == 2
    assert "argument" in said


@pytest.mark.parametrize("kind", BAD, ids=lambda kind: kind.__name__)
@given(text=st.text())
def test_no_text_breaks_a_type(kind, text):
    with contextlib.suppress(argparse.ArgumentTypeError):
        kind(text)


def test_a_result_needs_python_alone():
    """On a machine with a borrowed GPU nothing is installed; and JSON has no NaN."""
    code = (
        "import sys; sys.modules['msgspec'] = None; from pdstage.tools.results import as_json; print(as_json([1e999]))"
    )
    assert json.loads(python("-c", code, check=True).stdout) == [None]


def test_a_reader_that_has_read_enough_is_no_fault():
    command = f"{sys.executable} -m pdstage doctor --only host | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.count("\n") == 1
    assert not done.stderr


def test_a_wait_ends_when_it_was_told_to(capsys):
    began_at = time.monotonic()
    assert cli.main(["drain", "127.0.0.1:1", "--wait", "0.1"]) == 1
    assert time.monotonic() - began_at < operate._SILENT_S
    assert "has not answered for 0.1 s; check the endpoint" in capsys.readouterr().err


def test_a_missing_extra_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pdstage.tools.demo.run", None)
    code, said = failed(capsys, "demo")
    assert code == 2
    assert "pip install 'pdstage[demo]'" in said


def test_an_unusable_transport_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "nixl.py").write_text("raise ImportError('no fabric here')\n")
    command = [sys.executable, "-m", "pdstage", "demo", "--transport", "nixl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "transport 'nixl' does not import here" in done.stderr


def test_a_gpu_that_is_not_here_is_named(capsys):
    torch = pytest.importorskip("torch")
    n_devices = torch.cuda.device_count()
    code, said = failed(capsys, "demo", "--device", f"cuda:{n_devices}")
    assert code == 2
    assert f"--device cuda:{n_devices}: torch finds {n_devices} CUDA devices here; leave it out" in said


def test_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"pdstage {version('pdstage')}\n"


def test_help_needs_nothing_heavy():
    code = (
        "import sys\n"
        "from pdstage.cli import parser\n"
        "parser().format_help()\n"
        "print(sorted({'torch', 'transformers', 'rich', 'zmq', 'nixl'} & set(sys.modules)))"
    )
    assert python("-c", code, check=True).stdout == "[]\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes namespaces of processes")
def test_a_command_ends_when_asked_to_as_a_container_s_first_process_too() -> None:
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-m", "pdstage.cli", "bootstrap"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert "directory at" in process.stdout.readline()
            (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(first), signal.SIGTERM)
            assert process.wait(240) == 128 + signal.SIGTERM
        finally:
            process.kill()


def test_keys_are_made_shown_and_used(tmp_path, capsys):
    """The operator's way: make a key file, start the directory with it, look into it."""
    path = str(tmp_path / "cluster.key")
    assert cli.main(["keys", path]) == 0
    public = capsys.readouterr().out.strip()
    assert cli.main(["keys", "--public", path]) == 0
    assert capsys.readouterr().out.strip() == public
    assert cli.main(["keys", path]) == 2
    assert "exists already" in capsys.readouterr().err
    command = [sys.executable, "-m", "pdstage.cli", "bootstrap", "--bind", "127.0.0.1:0", "--keys", path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = process.stdout.readline().removeprefix("directory at ").strip()
            assert address.startswith(f"{public}@127.0.0.1:")
            assert cli.main(["instances", address, "--keys", path, "--json"]) == 0
            said = capsys.readouterr()
            assert (json.loads(said.out), said.err) == ([], f"no node is in the directory at {address}\n")
            assert cli.main(["instances", address]) == 2
            assert "pass --keys" in capsys.readouterr().err
        finally:
            process.terminate()
