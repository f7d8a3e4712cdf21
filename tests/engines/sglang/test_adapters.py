"""Requests of adapters (LoRA): decode goes on with KV that the same weights made, or with none."""

from __future__ import annotations

import pytest

from tests.engines.sglang.fleet import FAILED, SUCCESS, Fleet


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """Both engines have adapters "a" and "same", of the same weights in two folders, and "b", of others on each side;
    "gone", whose folder is not there, has a name on each side.
    """
    place = tmp_path_factory.mktemp("adapters")
    with Fleet(1, 1) as made:
        for engine, weights in ((made.prefill, b"one"), (made.decode, b"another")):
            for adapter, held in (("a", b"these"), ("same", b"these"), ("b", weights)):
                folder = place / f"{engine.ranks[0].process.pid}-{adapter}"
                folder.mkdir()
                (folder / "adapter_model.safetensors").write_bytes(held)
                engine.each("load_adapter", adapter, f"name of {adapter}", str(folder))
            engine.each("load_adapter", "gone", f"name of {weights.decode()}", str(place / "gone"))
        yield made


def serve(fleet, room, adapters):
    """What decode's scheduler is told."""
    fleet.open(room, adapters=adapters)
    fleet.compute(room)
    return fleet.decode.until(room, SUCCESS, FAILED)


@pytest.mark.parametrize("adapters", [("a", "a"), ("a", "same"), (None, None), ("not loaded", "b")])
def test_the_same_weights_whatever_they_are_called(fleet, adapters):
    """An adapter of which a side knows nothing is not judged."""
    assert serve(fleet, 1, adapters) == SUCCESS
    fleet.finish(1)
    fleet.forgets_all()


@pytest.mark.parametrize("adapters", [("b", "b"), ("a", None), (None, "a"), ("gone", "gone")])
def test_other_weights_fail_the_request_and_say_so(fleet, adapters):
    assert serve(fleet, 2, adapters) == FAILED
    (said,) = fleet.fails_at_decode(2)
    assert "adapter" in said
    assert "at prefill" in said
    assert fleet.prefill.until(2, SUCCESS, FAILED) == SUCCESS
    fleet.prefill.each("clear", 2)
    fleet.forgets_all()
