"""What pdstage logs is in vLLM's log, as vLLM itself configures it; each test in a process of its own."""

from __future__ import annotations

import io
import logging
import os
import re
from contextlib import redirect_stderr, redirect_stdout

import pytest
from vllm.config import DeviceConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.logger import configure_logging
from vllm.v1.kv_cache_interface import KVCacheConfig

from pdstage.integrations.vllm import PdStageConnector
from tests.processes import child


def engine(pipe, early, operator, environment):
    """A process of one, which sends the lines of its output that are about what pdstage said; `early`: vLLM configures
    logging as the first thing there.
    """
    os.environ.update(environment)
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        made = VllmConfig(
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector="PdStageConnector",
                kv_connector_module_path="pdstage.integrations.vllm",
                kv_role="kv_consumer",
            ),
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


BOTH = [" INFO .*session with decode rank tp 0 of 1", " WARNING .*peer 10.0.0.1:5000: was silent"]


@pytest.mark.parametrize(
    ("early", "operator", "environment", "wanted"),
    [
        (True, False, {}, BOTH),
        (False, False, {}, BOTH),
        (True, False, {"VLLM_LOGGING_LEVEL": "WARNING"}, BOTH[1:]),
        (True, True, {}, ["^operator peer 10.0.0.1:5000: was silent$"]),
    ],
    ids=["vLLM first", "pdstage first", "vLLM's level is pdstage's", "what an operator configured is left alone"],
)
def test_what_is_in_vllm_s_log(early, operator, environment, wanted):
    _, pipe = child(engine, early, operator, environment)
    for line, pattern in zip(pipe.recv(), wanted, strict=True):
        assert re.search(pattern, line)
