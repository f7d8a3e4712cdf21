"""Nodes that an engine's adapter makes write their journals where PDSTAGE_NODE says, as the servers of tests/e2e do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from pdstage.tools.judge import judge
from tests.e2e.servers import with_journal

ROOT = Path(__file__).resolve().parents[2]
ENGINE = """
import os, signal
from pdstage import DecodeNode, PrefillNode, State
from pdstage.integrations.options import node_options
from tests.manager.engine import Rank, drive

src, dst = Rank(), Rank(hnd=True)
prefill, decode = (
    kind(rank.pool, rank.topology, **node_options(kind, {}, where="", deadlines={}))
    for kind, rank in ((PrefillNode, src), (DecodeNode, dst))
)
receiver, sender = decode.receive("request", prefill.bootstrap_address), prefill.send("request")
receiver.bind(dst.allocate(50), 50)
sender.chunk(src.allocate(50), (0, 50))
sender.finish()
drive([prefill, decode], lambda: receiver.released and sender.released)
os.kill(os.getpid(), signal.SIGKILL)  # as a server ends whose workers are not asked
"""


def test_an_engines_nodes_are_judged(tmp_path):
    env = with_journal({"PDSTAGE_NODE": '{"transport": "local", "path": "staged"}'}, tmp_path)
    program = [sys.executable, "-c", ENGINE]
    done = subprocess.run(program, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    verdict = judge([tmp_path])
    assert not verdict.wrong, "\n".join(verdict.wrong)
    assert verdict.counts["nodes"] == 2
    assert verdict.counts["writes seen at both ends"] > 0
    assert verdict.counts["leases"] > 0, "the path is that of the operator"
    assert verdict.rooms == {"SUCCESS": 2}
