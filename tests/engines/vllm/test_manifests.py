"""docs/kubernetes starts vLLM with arguments that vLLM's own parser and the adapter's own settings take."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from vllm.config import ParallelConfig
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from pdstage import DecodeNode, PrefillNode, environment
from pdstage.integrations.vllm.settings import Settings
from tests.docs.test_kubernetes import PODS, container


@pytest.mark.parametrize(("name", "kind", "tp"), [("prefill", PrefillNode, 4), ("decode", DecodeNode, 2)])
def test_arguments_and_environment_are_known(name, kind, tp, monkeypatch):
    monkeypatch.setattr(current_platform, "device_type", "cpu")
    one = container(PODS["vllm"][name])
    variables = {each["name"]: each.get("value", "10.0.0.1") for each in one["env"]}
    args = [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], each) for each in one["args"]]
    assert one["command"][:2] == ["vllm", "serve"]
    given = make_arg_parser(FlexibleArgumentParser()).parse_args(args)
    assert given.tensor_parallel_size == tp
    own = {one.name for one in environment.VARIABLES}
    assert {one for one in variables if one.startswith("PDSTAGE_")} <= own, "else each process warns of it"
    made = SimpleNamespace(kv_transfer_config=given.kv_transfer_config, parallel_config=ParallelConfig())
    assert Settings(made).node(kind)["transport"] == "nixl"
