"""`pdstage serve`: what is wrong is one line that names it, before anything is started."""

from __future__ import annotations

import sys

import pytest

from pdstage import cli


def failed(capsys, *argv: str) -> tuple[int, str]:
    try:
        code = cli.main(["serve", *argv])
    except SystemExit as left:
        code = left.code
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return code, said


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ((), "ROLE"),
        (("everything",), "'everything'"),
        (("prefill", "--model", "gpt-9"), "--model"),
        (("prefill", "--tp", "99"), "--tp is 99"),
        (("decode", "--pool-tokens", "64"), "--pool-tokens is 64"),
        (("decode", "--max-running", "0"), "--max-running is 0"),
        (("router",), "without prefill servers"),
        (("router", "--prefill", "http://a", "--decode", "b"), "--decode 'b' is no URL"),
        (("all", "--prefill-servers", "0"), "--prefill-servers is 0"),
        (("all", "--decode-tp", "99"), "--tp is 99"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(capsys, argv, names):
    code, said = failed(capsys, *argv)
    assert code == 2
    assert names in said


@pytest.mark.parametrize("argv", [("prefill",), ("router", "--prefill", "http://a", "--decode", "http://b")])
def test_a_missing_extra_is_named(capsys, monkeypatch, argv):
    for name in ("server", "router"):
        monkeypatch.setitem(sys.modules, f"pdstage.demo.serve.{name}", None)
    code, said = failed(capsys, *argv)
    assert code == 2
    assert "pip install 'pdstage[serve,nixl]'" in said
