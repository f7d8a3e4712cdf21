"""The plugin that vLLM loads in each of its processes (entry point group `vllm.general_plugins`).

It makes the connector's name known, so that `kv_connector_module_path` may be left out. In a worker of NVIDIA Dynamo it
also says how `kv_transfer_params` go from prefill to decode, which Dynamo looks up by the connector's name, in a table
of its own (`dynamo.vllm.kv_connector_protocols`): as they do for vLLM's NixlConnector, prefill's answer unread.
"""

from __future__ import annotations

import contextlib
import sys

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

NAME = "PdStageConnector"


def register() -> None:
    """May be called again."""
    with contextlib.suppress(ValueError):  # registered already
        KVConnectorFactory.register_connector(NAME, "pdstage.integrations.vllm", NAME)
    dynamo = sys.modules.get("dynamo.vllm.kv_connector_protocols")
    if dynamo is not None:
        dynamo.KV_CONNECTOR_PROTOCOLS.setdefault(NAME, dynamo.NixlConnectorProtocol)
