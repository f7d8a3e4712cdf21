"""What pdstage logs is in vLLM's log, as vLLM itself configures it; each test in a process of its own."""

from __future__ import annotations

import io
import logging
import os
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest
from vllm.config import DeviceConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.logger import configure_logging
from vllm.v1.kv_cache_interface import KVCacheConfig

from pdstage.integrations.vllm import PdStageConnector
from tests.processes import child


def engine(pipe: Any, early: bool, operator: bool, environment: dict[str, str]) -> None:
    """A process of one, which sends the lines of its output that are about what pdstage said; `early`: vLLM configures
    logging as the first thing there.
    """
    os.environ.update(environment)
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        ours = {"kv_connector": "PdStageConnector", "kv_connector_module_path": "pdstage.integrations.vllm"}
        made = VllmConfig(
            device_config=DeviceConfig("cpu"), kv_transfer_config=KVTransferConfig(**ours, kv_role="kv_consumer")
        )
        if operator:
            logging.basicConfig(format="operator %(message)s")
        if early:
            configure_logging(made.logging_config)
        PdStageConnector(made, KVConnectorRole.WORKER, KVCacheConfig(1, [], []))
        if not early:
            configure_logging(made.logging_config)
        log = logging.getLogger("pdstage.manager.sessions")
        log.info("session with %s", "decode rank tp 0 of 1")
        log.warning("peer %s: %s", "10.0.0.1:5000", "was silent")
    pipe.send([line for line in out.getvalue().splitlines() if "session with" in line or "was silent" in line])


def said(*, early: bool = True, operator: bool = False, **environment: str) -> Any:
    _, pipe = child(engine, early, operator, environment)
    return pipe.recv()


@pytest.mark.parametrize("early", [True, False])
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
