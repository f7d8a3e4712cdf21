"""A plugin of the pytest that runs vLLM's own tests: where they ask for `NixlConnector`, they get `PdStageConnector`.

It notes in each test's report how many steps ours was in. Those tests are written for vLLM's CPU platform, which this
wheel would not choose; for a scheduler without workers: here its connector is told of one, as `EngineCore` does; and
for what NIXL's prefill answers: here with the room's name, as ours does.
"""

# ruff: noqa: E402  (stand-ins come before what imports them)

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

N_STEPS = "steps of a pdstage connector"


def _module(name: str, path: Path) -> types.ModuleType:
    """`tests` is another package here."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_module("pdstage_stubs", Path(__file__).parents[1] / "stubs.py").install()
ray = types.ModuleType("ray")  # imported by a test that is skipped
ray.__spec__ = importlib.machinery.ModuleSpec("ray", None)
sys.modules.setdefault("ray", ray)

import msgspec
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.model_executor.models.registry import ModelRegistry

from pdstage import Topology
from pdstage.control.directory import Advert
from pdstage.integrations.vllm import PdStageConnector
from pdstage.integrations.vllm.metadata import PdStageHandshake, PdStageMetadata

made: list[Swapped] = []


class Swapped(PdStageConnector):
    """Its steps are counted, and it is told of one worker."""

    n_steps = 0

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        made.append(self)
        if self.scheduler_side is not None:
            engine = self._kv_transfer_config.engine_id
            advert = Advert(
                instance=engine, topology=Topology(), endpoint="tcp://127.0.0.1:1", incarnation=1, layout="none"
            )
            told = {(0, 0): PdStageHandshake((msgspec.json.encode(advert),))}
            self.set_xfer_handshake_metadata_pp_aware(told)

    def on_new_request(self, request: Request) -> None:
        params = request.kv_transfer_params
        if params and params.get("remote_request_id"):
            params.setdefault("remote_room", params["remote_request_id"])
        super().on_new_request(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PdStageMetadata:
        self.n_steps += 1
        return super().build_connector_meta(scheduler_output)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cpu_test: vLLM's")
    KVConnectorFactory._registry["NixlConnector"] = lambda: Swapped
    opt = "OPTForCausalLM"  # vLLM would look at the class in a process without our stubs
    ModelRegistry.register_model(opt, ModelRegistry.models[opt].load_model_cls())


def pytest_runtest_teardown(item: pytest.Item) -> None:
    item.user_properties.append((N_STEPS, sum(one.n_steps for one in made)))
    for one in made:
        one.shutdown()
    made.clear()
