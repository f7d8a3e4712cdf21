"""What the library logs: nothing where all is well, and each documented warning once."""

from __future__ import annotations

import ast
import logging
import re

import pytest
import zmq

from pdstage import Keys
from tests.manager.engine import Rank, drive
from tests.processes import python
from tests.test_architecture import ROOT, sources

TOKENS = 30
PAGE = (ROOT / "docs" / "environment.md").read_text()
HANDS_ON = "pdstage.integrations.vllm.connector"  # it says nothing: it hands what others say to vLLM's logger
PRINTS = ("top.py", "terminal.py")  # of watch
DOCUMENTED = set(re.findall(r"^\| `(pdstage[.\w]*)` \| `(.*?)` \|", PAGE, re.MULTILINE))


def modules():
    """The library's own modules: commands, demo and benchmarks may print."""
    for name, path in sources():
        if not name.startswith(("pdstage.bench", "pdstage.cli", "pdstage.tools.demo")) and path.name not in PRINTS:
            yield name, ast.parse(path.read_text())


def calls(tree: ast.Module):
    return [(ast.unparse(node.func), node.args) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_each_module_has_its_own_logger_and_none_prints() -> None:
    for name, tree in modules():
        for called, args in calls(tree):
            assert called not in ("print", "sys.stdout.write", "sys.stderr.write"), name
            assert called != "warnings.warn" or ast.unparse(args[1]) == "DeprecationWarning", name
            if called.endswith("getLogger") and name != HANDS_ON:
                assert ast.unparse(args[0]) in ("__name__", "'nixl'"), name


def test_every_warning_is_documented() -> None:
    said = {
        (name, args[0].value)
        for name, tree in modules()
        for called, args in calls(tree)
        if called in ("log.warning", "log.error", "log.exception", "log.critical")
    }
    assert said == DOCUMENTED


@pytest.mark.parametrize("transport", ["local", "nixl", "auto"])
@pytest.mark.parametrize("keys", [False, True], ids=["plain", "keys"])
def test_a_transfer_that_goes_well_warns_of_nothing(site, transport, keys, caplog, tmp_path):
    """From the nodes' making to their closing; and nothing that is said holds a secret."""
    if transport == "nixl":
        pytest.importorskip("nixl")
    held = Keys.make(tmp_path / "key") if keys else None
    with caplog.at_level(logging.DEBUG, "pdstage"):
        pair = site.pair(keys=held, transport=transport, prefill={"directory": None})
        for room in (1, 2):
            pair.move(room)
        pair.d.close()
        pair.p.close()
    ours = [record for record in caplog.records if record.name.startswith("pdstage")]
    assert ours, "that over which transport the peer is reached is said, if asked for"
    assert [record.getMessage() for record in ours if record.levelno >= logging.WARNING] == []
    if held is not None:
        text = "\n".join(record.getMessage() for record in ours)
        assert held.secret.hex() not in text
        assert zmq.utils.z85.encode(held.secret).decode() not in text


def test_by_default_nothing_is_shown():
    """An application that has not asked for logs gets none, also of a warning."""
    code = (
        "import logging, pdstage.environment\n"
        "pdstage.environment.COMMIT.read()\n"
        "print(logging.getLogger('pdstage').handlers, logging.getLogger('pdstage').level)"
    )
    env = {"PYTHONPATH": str(ROOT), "PDSTAGE_MISSPELT": "1"}
    done = python("-c", code, env=env, check=True)
    assert done.stdout.strip() == "[<NullHandler (NOTSET)>] 0"
    assert done.stderr == ""


def warnings(caplog, logger: str) -> list[str]:
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert {record.name for record in said} <= {logger}
    return [record.getMessage() for record in said]


def test_a_peer_that_is_refused_again_and_again_is_named_once(site, caplog):
    """Its greetings are repeated for as long as rooms ask for it."""
    pair = site.pair(dst=Rank(layers=4))
    p = pair.p
    for room in range(3):
        receiver = pair.receive(room)
        drive(pair.nodes, lambda receiver=receiver: receiver.released)
        assert "3 layers at prefill and 4 at decode: no prefill rank has layer 3" in str(receiver.error)
    assert not p.core.sessions
    said = warnings(caplog, "pdstage.manager.sessions")
    assert len(said) == 2, "once on each side"
    assert sum(p.socket.endpoint in text for text in said) == 1, "the one it asked is named by its address"
    assert p.stats()["sessions_refused"] >= 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_node_whose_thread_ends_says_why_once(site, caplog, monkeypatch):
    d = site.decode(Rank(), progress="thread")

    def broken(*_: object) -> None:
        raise OSError("the socket is gone")

    monkeypatch.setattr(d.driver, "_feed", broken)
    d.socket.wake()
    d.driver._thread.join(20)
    (said,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert (said.name, said.getMessage()) == ("pdstage.manager.driver", "the node's thread ended")
    assert "the socket is gone" in caplog.text


def test_a_transport_that_gives_nothing_back_says_so(caplog):
    agent = pytest.importorskip("pdstage.transport._nixl_agent")

    def release() -> None:
        raise next(iter(agent.Errors))("busy")

    agent.attempt(release)
    assert warnings(caplog, "pdstage.transport._nixl_agent") == ["NIXL refused release()"]


@pytest.mark.parametrize(("theirs", "here"), [("staged", "staged (here it is auto, but"), ("auto", "auto")])
def test_each_side_says_once_a_session_over_what_its_peer_is_reached(site, caplog, theirs, here):
    """Not a room; and who reads one engine's log learns which rank the peer is."""
    with caplog.at_level(logging.INFO, "pdstage"):
        pair = site.pair(decode={"path": theirs})
        for room in (1, 2, 3):
            pair.move(room)
    p = pair.p
    said = [record.getMessage() for record in caplog.records if record.name == "pdstage.manager.sessions"]
    at_decode, at_prefill = sorted(said, key=lambda text: "with decode rank" in text)
    seen = "staged" if theirs == "staged" else "as prefill chooses"
    assert at_decode == f"session with prefill rank tp 0 of 1 at {p.socket.endpoint}: transport local, path {seen}"
    assert at_prefill.startswith("session with decode rank tp 0 of 1 at ")
    assert f": transport local, path {here}" in at_prefill
