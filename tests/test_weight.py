"""The lid on the code's weight holds in a repository of its own."""

from __future__ import annotations

import pytest

from tests import weight

MORE = "def more(a, b):\n    return a + b\n"


@pytest.fixture
def commit(tmp_path, monkeypatch):
    """Writes files, commits them, and says what is wrong then."""
    monkeypatch.chdir(tmp_path)
    weight.git("init", "-q")
    weight.git("config", "user.name", "one")
    weight.git("config", "user.email", "one@localhost")

    def commit(lid=None, said="", **texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.py").write_text(text)
        with (tmp_path / "CHANGELOG.md").open("a") as file:
            file.write(f"{said}\n")
        if lid is not None:
            (tmp_path / "weight.toml").write_text(f'"." = {lid}\n')
        weight.git("add", "-A")
        weight.git("commit", "-q", "--allow-empty", "-m", "one")
        return weight.check()

    return commit


def test_tokens_are_counted_without_words(commit):
    assert not commit(lid=0)
    assert commit(one='"""Of a module."""\n# of a line\n\nx = 1\n')[0] == ".: 3 tokens, 3 above weight.toml"


def test_a_function_more_is_seen(commit):
    assert not commit(one=MORE, lid=13)
    assert "above" in commit(two=MORE)[0]
    assert not commit(one="")


def test_a_number_goes_up_with_a_word_alone(commit):
    assert not commit(one=MORE, lid=13)
    (raised, remedy) = commit(two=MORE, lid=26)
    assert "raises it" in raised
    assert "make weight" in remedy
    assert commit(said="- Weight: what for") == [raised, remedy], "it was not that commit that said so"


def test_a_number_goes_up_with_a_word(commit):
    assert not commit(one=MORE, lid=13)
    assert not commit(two=MORE, lid=26, said="- Weight: what for")
