"""What the adapters say of an engine's model."""

from __future__ import annotations

import os
import random
import shutil
from types import SimpleNamespace

import pytest

from pdstage.errors import UsageError
from pdstage.integrations.model import digest, facts, overridden

MIB = 1 << 20
SAID = {"name": "llama", "dtype": "bfloat16"}


@pytest.fixture
def weights(tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    for number in range(2):
        (folder / f"model-{number}.safetensors").write_bytes(random.Random(number).randbytes(MIB + 5))
    (folder / "config.json").write_text("{}")
    return folder


def test_weights_are_the_same_wherever_they_lie(weights, tmp_path):
    copy = shutil.copytree(weights, tmp_path / "another name")
    (copy / "README.md").write_text("not of the weights")
    assert digest(copy) == digest(weights) is not None


CHANGES = {
    "head": lambda held: bytes(16384) + held[16384:],
    "middle": lambda held: held[: MIB // 2] + bytes(16384) + held[MIB // 2 + 16384 :],
    "end": lambda held: held[:-16384] + bytes(16384),
    "length": lambda held: held[:-1],
}
"""A fine-tune changes nearly every byte; here 16 KiB, more than lies between two samples."""


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_other_weights_are_others(weights, tmp_path, change):
    tuned = shutil.copytree(weights, tmp_path / "tuned")
    path = tuned / "model-1.safetensors"
    path.write_bytes(change(path.read_bytes()))
    assert digest(tuned) != digest(weights)


def test_a_folder_without_weights_says_nothing(tmp_path):
    assert digest(tmp_path) is None
    assert digest(tmp_path / "nowhere") is None
    (tmp_path / "model.safetensors").touch()
    os.utime(tmp_path, ns=(1, 1))
    assert digest(tmp_path) is not None, "an empty file has a name"


def config(rope=None, **given):
    """An engine's ModelConfig, as far as it is read."""
    usual = {"revision": None, "dtype": "x", "quantization": None, "hf_config": None}
    return SimpleNamespace(**usual | given, hf_text_config=SimpleNamespace(rope_parameters=rope))


def test_what_an_engine_does_not_know_is_left_out(weights):
    told = facts(config(rope={"b": 1, "a": [2]}, dtype="torch.bfloat16"), str(weights))
    assert told == {
        "name": str(weights), "dtype": "bfloat16", "quantization": "none", "rope": '{"a": [2], "b": 1}',
        "weights": digest(weights),
    }  # fmt: skip
    made_up = facts(config(revision="1", quantization="fp8"), str(weights), dummy=True)
    assert made_up == {"name": str(weights), "revision": "1", "dtype": "x", "quantization": "fp8"}


def test_scales_are_told_where_an_engine_has_them():
    told = [facts(config(), "no such model", kv_scales=scales).get("kv_scales") for scales in (None, {}, {0: 0.5})]
    assert told == [None, "none", '{"0": 0.5}']


def test_a_long_text_is_told_by_its_digest():
    one, other = (facts(config(rope={"factors": [n] * 100}), "no such model")["rope"] for n in (1, 2))
    assert len(one) == len(other) == 32 and one != other


def test_the_operator_has_the_last_word():
    assert overridden(SAID, None, where="here") == SAID
    assert overridden(SAID, {"name": None, "revision": "1"}, where="here") == {"dtype": "bfloat16", "revision": "1"}
    with pytest.raises(UsageError, match="model of here is 'llama'"):
        overridden(SAID, "llama", where="here")
