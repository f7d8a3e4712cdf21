"""The command: its arguments, its exit codes, and errors of one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from pdstage import cli
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
        (("demo", "--transport", "pigeon"), "--transport"),
        (("demo", "--prefill-tp", "four"), "--prefill-tp"),
        (("demo", "--prefill-tp", "0"), "--prefill-tp is 0; give a number from 1 to 32"),
        (("demo", "--seed", "-4"), "--seed is -4"),
        (("demo", "--prefill-page", "0"), "--prefill-page is 0"),
        (("demo", "--prefill-tp", "16", "--prefill-pp", "4"), "make 64 ranks"),
        (("demo", "--json", "/no/such/folder/x.json"), "/no/such/folder"),
        (("demo", "--trace", "/no/such/folder/x.json"), "/no/such/folder"),
        (("demo", "--device", "gpu"), "--device is 'gpu'"),
        (("bench", "everything"), "'everything'"),
        (("bench", "plan", "--trace", "x.json"), "moves no rooms"),
        (("plot", "/no/such/trace.json"), "/no/such/trace.json"),
        (("bootstrap", "--bind", "0.0.0.0:0"), "insecure"),
        (("bootstrap", "--keys", "/no/such/file"), "/no/such/file"),
        (("bootstrap", "--allow", "/no/such/file"), "--allow without --keys"),
        (("keys", "--public", "/no/such/file"), "/no/such/file"),
        (("instances", "nowhere"), "'nowhere'"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(capsys, argv, names):
    code, said = failed(capsys, *argv)
    assert code == 2
    assert names in said
    assert said.startswith("pdstage")


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
            assert cli.main(["instances", address, "--keys", path]) == 0
            assert capsys.readouterr().out == "{}\n"
            assert cli.main(["instances", address]) == 2
            assert "pass keys= (--keys)" in capsys.readouterr().err
        finally:
            process.terminate()
