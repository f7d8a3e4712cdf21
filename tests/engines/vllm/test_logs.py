"""What pdstage logs is in vLLM's log, as vLLM itself configures it; each test in a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.processes import python
from tests.rows import rows

ROOT = Path(__file__).resolve().parents[3]
ENGINE = """
import logging
from tests.engines import stubs
stubs.install()
from vllm.config import DeviceConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.logger import configure_logging
from vllm.v1.kv_cache_interface import KVCacheConfig
from pdstage.integrations.vllm import PdStageConnector
made = VllmConfig(
    device_config=DeviceConfig("cpu"),
    kv_transfer_config=KVTransferConfig(
        kv_connector="PdStageConnector", kv_connector_module_path="pdstage.integrations.vllm", kv_role="kv_consumer",
    ),
)
one = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
if OPERATOR:
    logging.basicConfig(format="operator %(message)s")
if EARLY:
    configure_logging(made.logging_config)  # as the first thing of each process of an engine
PdStageConnector(made, KVConnectorRole.WORKER, one)
if not EARLY:
    configure_logging(made.logging_config)
log = logging.getLogger("pdstage.manager.sessions")
log.info("session with %s", "decode rank tp 0 of 1")
log.warning("peer %s: %s", "10.0.0.1:5000", "was silent")
"""


def said(*, early: bool = True, operator: bool = False, **environment: str) -> list[str]:
    """The lines of its output that are about what pdstage said."""
    code = f"EARLY, OPERATOR = {early}, {operator}\n{ENGINE}"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    done = python("-c", code, check=True, cwd=ROOT, env=env)
    lines = (done.stdout + done.stderr).splitlines()
    return [line for line in lines if "session with" in line or "was silent" in line]


@pytest.mark.parametrize("early", rows([True, False], full={False}))
def test_without_configuration_infos_and_warnings_are_in_vllm_s_log(early: bool) -> None:
    info, warning = said(early=early)
    assert " INFO " in info
    assert "session with decode rank tp 0 of 1" in info
    assert " WARNING " in warning
    assert "peer 10.0.0.1:5000: was silent" in warning
    (warning,) = said(VLLM_LOGGING_LEVEL="WARNING")
    assert "was silent" in warning, "vLLM's level is pdstage's"


def test_what_an_operator_configured_is_left_alone() -> None:
    assert said(operator=True) == ["operator peer 10.0.0.1:5000: was silent"]
