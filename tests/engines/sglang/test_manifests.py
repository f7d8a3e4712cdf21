"""docs/kubernetes starts SGLang with arguments that SGLang's own parser and the adapter's own options take."""

from __future__ import annotations

import argparse

import pytest
from sglang.srt.server_args import ServerArgs

from pdstage import DecodeNode, PrefillNode, environment
from pdstage.integrations.options import node_options
from pdstage.integrations.sglang.plugin import register
from tests.docs.test_kubernetes import PODS, container, options


@pytest.mark.parametrize(("role", "kind", "tp"), [("prefill", PrefillNode, 4), ("decode", DecodeNode, 2)])
def test_arguments_and_environment_are_known(role, kind, tp):
    register()
    one = container(PODS["sglang"][role])
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = parser.parse_args(one["args"])
    assert (given.tp_size, given.disaggregation_mode, given.disaggregation_transfer_backend) == (tp, role, "pdstage")
    names = {variable["name"] for variable in one["env"]}
    own = {variable.name for variable in environment.VARIABLES}
    assert {name for name in names if name.startswith("PDSTAGE_")} <= own, "else each process warns of it"
    assert node_options(kind, options(one), where="the manifest", deadlines={}, model={})["transport"] == "nixl"
