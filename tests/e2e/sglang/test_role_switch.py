"""Two servers change roles while they run, as an operator has them do when the load shifts, and change back."""

from __future__ import annotations

import json
import urllib.request

import pytest

from tests.e2e import load
from tests.e2e.sglang import right
from tests.e2e.sglang.engines import SglangServer, check_free, handed_over, pair

SWITCH = ("--enable-pd-role-switch",)
BACKUP = ("--disaggregation-decode-retraction-backup", "cpu_tensor")  # of one that will decode
PAIR = pair({"tp": 2, "options": (*SWITCH, *BACKUP)}, {"options": SWITCH})


def switch(server: SglangServer, role: str) -> None:
    """A POST to an idle server's /pd_role_switch; there are no CUDA graphs to find memory for."""
    told = json.dumps({"new_role": role, "decode_cuda_graph_memory_gb": 0}).encode()
    asked = urllib.request.Request(server.url + "/pd_role_switch", told, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=120) as answer:
        said = json.load(answer)
    assert said["success"], said


@pytest.mark.full
def test_two_servers_change_roles_and_change_back(fleet):
    asked = load.prompts(24, seed=401)
    prefill, decode, _ = fleet.up(PAIR.prefill, PAIR.decode, PAIR.reference)
    answered = right.tokens(fleet, PAIR.reference, asked)
    for turn in ("as started", "the other way", "as started again"):
        with fleet.timed(f"role switch: {len(asked)} prompts {turn}"):
            answers = load.ask_all(handed_over(prefill, decode), asked, 8)
        fleet.note(f"role switch, {turn}: {right.summary(answers, answered)}")
        right.check(answers, answered)
        check_free(prefill, decode)
        switch(prefill, "decode")
        switch(decode, "prefill")
        prefill, decode = decode, prefill
