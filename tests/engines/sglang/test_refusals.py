"""Settings that a rank is not started with: one error each, which says what is wrong and what to do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode

from pdstage.errors import UsageError
from pdstage.integrations.sglang import manager
from tests.engines.sglang import setups
from tests.engines.sglang.fleet import Child

PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE
USUAL = {
    "attn_dcp_size": 1, "attn_cp_size": 1, "enable_kv_cache_sharding": False, "enable_dsa_cache_layer_split": False,
    "enable_cp_tp_group_sharing": False, "enable_pd_role_switch": False, "enable_hisparse": False, "kv_canary": "none",
}  # fmt: skip


def check(monkeypatch, mode, **told):
    """The check that a manager begins with, under SGLang's usual settings but for those told."""
    settings = SimpleNamespace(**USUAL | {name: told[name] for name in told if name in USUAL})
    for name in ("get_parallel", "get_disagg", "get_memory", "get_observability"):
        monkeypatch.setattr(manager, name, lambda: settings)
    for name in told.keys() - USUAL:
        monkeypatch.setenv(name, str(told[name]))
    manager._refuse_what_is_not_supported(mode)


@pytest.mark.parametrize(
    ("setting", "value", "culprit"),
    [
        ("attn_dcp_size", 2, "--dcp-size"),
        ("enable_kv_cache_sharding", True, "--enable-kv-cache-sharding"),
        ("enable_dsa_cache_layer_split", True, "--enable-dsa-cache-layer-split"),
        ("enable_cp_tp_group_sharing", True, "group sharing"),
        ("kv_canary", "log", "--kv-canary"),
        ("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", 0, "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=0"),
        ("SGLANG_RUST_SERVER", 1, "SGLANG_RUST_SERVER"),
        ("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "INTRA_NODE_NVLINK", "SGLANG_MOONCAKE_CUSTOM_MEM_POOL=INTRA_NODE_NVLINK"),
    ],
)
@pytest.mark.parametrize("mode", [PREFILL, DECODE])
def test_a_setting_of_sglang(monkeypatch, mode, setting, value, culprit):
    check(monkeypatch, mode)
    with pytest.raises(UsageError, match=f"pdstage does not support .*{culprit}") as refused:
        check(monkeypatch, mode, **{setting: value})
    assert refused.value.remedy == "unset it"


CP, HISPARSE, SWITCH = {"attn_cp_size": 2}, {"enable_hisparse": True}, {"enable_pd_role_switch": True}


@pytest.mark.parametrize(
    ("mode", "told", "culprit"),
    [
        (PREFILL, HISPARSE, "--enable-hisparse at prefill"),
        (DECODE, HISPARSE | SWITCH, "--enable-hisparse with --enable-pd-role-switch"),
        (DECODE, CP, "--attn-cp-size.* at decode"),  # SGLang's own assertion would end its scheduler at a request
        (PREFILL, CP | SWITCH, "--attn-cp-size.* at decode"),  # a switch that fails ends the engine
    ],
)
def test_what_one_role_has_alone(monkeypatch, mode, told, culprit):
    check(monkeypatch, DECODE, **HISPARSE)
    check(monkeypatch, PREFILL, **CP)
    with pytest.raises(UsageError, match=culprit):
        check(monkeypatch, mode, **told)


@pytest.fixture(scope="module")
def rank():
    """A rank of decode, whose node is made anew; it needs no bootstrap server for that."""
    child = Child("rank", setups.Setup("decode", 1, 0, 1))
    child.answer()
    yield child
    child.close()


@pytest.mark.parametrize(
    ("node", "culprit"),
    [
        ('{"speed": 9}', "PDSTAGE_NODE has speed"),
        ('{"config": {"drain": 3}}', "PDSTAGE_NODE has drain"),
        ('{"bootstrap": "tcp://elsewhere"}', "PDSTAGE_NODE has bootstrap"),
        ("{", "PDSTAGE_NODE"),
        ('{"transport": "pigeon"}', "pigeon"),
        ('{"transport": {"name": "nixl", "devices": {"cuda:7": []}}}', "not for cuda:1"),
        ('{"config": {"drain_s": "long"}}', "drain_s"),
    ],
)
def test_a_setting_of_the_node(rank, node, culprit):
    said = rank.call("refusal", node)
    assert said is not None, "it was taken"
    kind, what, remedy = said
    assert kind == "UsageError"
    assert culprit in what
    assert remedy


@pytest.mark.parametrize(
    ("host", "dist_init", "bind"),
    [
        ("127.0.0.1", None, "tcp://127.0.0.1:0"),
        ("localhost", None, "tcp://127.0.0.1:0"),
        ("::1", None, "tcp://[::1]:0"),
        ("127.0.0.1", "127.0.0.1:5000", "tcp://127.0.0.1:0"),
        ("127.0.0.1", "10.1.2.3:5000", "tcp://10.1.2.9:0"),
        ("0.0.0.0", None, "tcp://10.1.2.9:0"),
        ("10.1.2.9", None, "tcp://10.1.2.9:0"),
    ],
)
def test_prefill_listens_where_its_bootstrap_server_does(host, dist_init, bind):
    """What is on loopback only needs no keys."""
    told = SimpleNamespace(bootstrap_host=host, dist_init_addr=dist_init, local_ip="10.1.2.9")
    assert manager.PdStageKVManager._bind(told, reached=True) == bind
    assert manager.PdStageKVManager._bind(told, reached=False) == "tcp://127.0.0.1:0", "nobody connects to this decode"


@pytest.mark.parametrize(("options", "refused"), [((), False), (("--enable-pd-role-switch",), True)])
def test_a_decode_engine_that_may_become_prefill_wants_keys_at_once(options, refused):
    """A switch that fails ends the engine."""
    child = Child("rank", setups.Setup("decode", 1, 0, 1, options=options))
    child.answer()
    said = child.call("refusal", "{}", "10.1.2.9")
    child.close()
    assert (said is not None) == refused
    assert not refused or "10.1.2.9:0 can be reached from other machines" in said[1]


@pytest.mark.parametrize(
    ("cards", "gpu", "devices"),
    [("mlx5_0, mlx5_1", 3, ["mlx5_0", "mlx5_1"]), ('{"0": "mlx5_0", "3": "mlx5_6,mlx5_7"}', 3, ["mlx5_6", "mlx5_7"])],
)
def test_the_cards_that_sglang_gives_a_gpu(cards, gpu, devices):
    assert manager.over_devices("nixl", cards, gpu) == {"name": "nixl", "devices": devices}


@pytest.mark.parametrize("transport", ["auto", "mooncake", {"name": "nixl", "devices": ["mlx5_9"]}])
def test_cards_of_another_transport_are_left_aside_in_words(caplog, transport):
    assert manager.over_devices(transport, "mlx5_0", 0) == transport
    assert "--disaggregation-ib-device mlx5_0 is ignored" in caplog.text
