"""SGLang's own plugin loader finds the backend, and its own parser, enum and class look-up accept it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.processes import python

MODEL = str(Path(__file__).parent / "model")

LOAD = """
import json
import os
from tests.engines import stubs
stubs.install()
from sglang.srt.disaggregation import utils
from sglang.srt.managers import disagg_service  # has its own name for the enum by now
before = [one.name for one in utils.TransferBackend]
from sglang.srt.plugins import load_plugins
load_plugins()
"""


def test_the_backend_is_selectable_as_any_other():
    program = f"""{LOAD}
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import prepare_server_args
args = prepare_server_args(["--model-path", {MODEL!r}, "--device", "cpu", "--disaggregation-mode", "decode",
    "--disaggregation-transfer-backend", "pdstage", "--skip-tokenizer-init"])
backend = utils.TransferBackend(args.disaggregation_transfer_backend)
classes = {{kind.value: utils.get_kv_class(backend, kind) for kind in utils.KVClassType}}
print(json.dumps({{
    "before": before, "after": [one.name for one in utils.TransferBackend], "chosen": backend.name,
    "seen by others": disagg_service.TransferBackend is utils.TransferBackend,
    "classes": {{kind: f"{{one.__module__}}.{{one.__name__}}" for kind, one in classes.items()}},
    "nixl": utils.get_kv_class(utils.TransferBackend.NIXL, utils.KVClassType.SENDER).__name__,
    "patched": sorted(HookRegistry._patched),
}}))
"""
    done = python("-c", program, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert "PDSTAGE" not in found["before"]
    assert found["after"] == [*found["before"], "PDSTAGE"]
    assert found["chosen"] == "PDSTAGE"
    assert found["seen by others"]
    ours = "pdstage.integrations.sglang"
    assert found["classes"] == {
        "kvargs": "sglang.srt.disaggregation.base.conn.KVArgs",
        "manager": f"{ours}.manager.PdStageKVManager",
        "sender": f"{ours}.sender.PdStageKVSender",
        "receiver": f"{ours}.receiver.PdStageKVReceiver",
        "bootstrap_server": f"{ours}.bootstrap.PdStageKVBootstrapServer",
    }
    assert found["nixl"] == "NixlKVSender"
    assert found["patched"] == [
        "sglang.srt.disaggregation.utils.TransferBackend",
        "sglang.srt.disaggregation.utils.get_kv_class",
        "sglang.srt.disaggregation.utils.get_kv_transfer_buf_infos",
        "sglang.srt.disaggregation.utils.poll_and_all_reduce_attn_cp_tp_group",
        "sglang.srt.disaggregation.utils.setup_state_kv_args",
    ]


PARSES = """
import argparse, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print("chosen:", parser.parse_args(sys.argv[1:]).disaggregation_transfer_backend)
"""


def test_a_program_that_parses_before_plugins_are_loaded(tmp_path, monkeypatch):
    """As Dynamo's worker does: it knows the name where pdstage starts it."""
    (tmp_path / "parses.py").write_text(PARSES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    run, chosen = ("-m", "tests.e2e.sglang.run"), ("--disaggregation-transfer-backend", "pdstage", "--model-path", "m")
    assert "invalid choice: 'pdstage'" in python(*run, "parses", *chosen).stderr
    done = python(*run, "pdstage.integrations.sglang", "parses", *chosen, check=True)
    assert "chosen: pdstage" in done.stdout
