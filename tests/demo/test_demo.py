"""`pdstage demo`: each model's cache is cut, moved between real processes, put together again and gone on with."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from xml.etree import ElementTree

import numpy as np
import pytest

from pdstage.errors import PdstageError, UsageError
from pdstage.tools.demo.families import FAMILIES
from pdstage.tools.demo.options import MODELS, Options
from tests import cuda_double
from tests.processes import python
from tests.rows import rows, usable

torch = pytest.importorskip("torch")
if find_spec("transformers") is None:
    pytest.skip("needs transformers", allow_module_level=True)

from pdstage.tools.demo import run as demo  # noqa: E402
from pdstage.tools.demo.engine import Model, cut, put_together, read, spoilt  # noqa: E402
from pdstage.tools.demo.ranks import Memory  # noqa: E402

PROMPT = [(7 * i * i + 3 * i + 11) % 512 for i in range(75)]
RUNS = {
    "gemma3": {"prefill_tp": 2, "decode_tp": 1},
    "qwen3-next": {"prefill_tp": 2, "prefill_pp": 2, "decode_tp": 1},
    "mamba2": {"prefill_tp": 1, "decode_tp": 2, "path": "direct"},
    "deepseek-v3": {"prefill_tp": 4, "decode_tp": 2, "path": "staged"},
    "deepseek-v32": {"prefill_tp": 2, "decode_tp": 4},
    "gpt-oss": {"prefill_tp": 1, "decode_tp": 2, "decode_pp": 2, "prefill_layout": "hnd", "decode_layout": "nhd"},
    # Half of the prefill ranks have nothing for a decode rank: each side has two stages.
    "llama": {"prefill_tp": 2, "prefill_pp": 2, "decode_tp": 1, "decode_pp": 2},
}
QUICK = {"gemma3", "mamba2"}  # a window and a state


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_ranks_share_makes_the_whole_again(name):
    """Chunk by chunk into the pools of any number of ranks, without processes; a copy that differs is an error."""
    options, n = Options(model=name, prefill_page=16), len(PROMPT)
    family, model = options.family, Model(options)
    cache = model.new_cache()
    chunks = list(model.prefill(PROMPT, cache, 24))
    whole = read(cache, family, {component: family.span(component, n) for component in family.components})
    for tp, pp, layout in ((1, 1, "hnd"), (2, 1, "nhd"), (3, 2, "hnd"), (4, 2, "nhd"), (8, 1, "nhd")):
        side = replace(options.prefill, tp=tp, pp=pp, layout=layout)
        held = []
        for place in side.places():
            memory = Memory(options, side, place, [40, n], seed=place.group_rank)
            for states, spans, _ in chunks:
                memory.store(1, cut(states, family, place), spans)
            held.append(memory.load(1))
            assert all(np.isnan(state).all() for state in memory.load(0).values()), "nothing else was touched"
        again = put_together(family, side.places(), held)
        assert again.keys() == whole.keys()
        assert all(np.array_equal(again[key], whole[key]) for key in whole)
    if tp > options.family.layers[0][0].sections[0].heads:  # two ranks have the same heads
        next(iter(held[1].values()))[5] += 1
        with pytest.raises(PdstageError, match="different copies"):
            put_together(family, side.places(), held)
    _, _, token = chunks[-1]
    truth = model.go_on(cache, token, 12)
    assert model.go_on_from(again, n, token, 12) == truth
    for component in family.components:
        noisy = spoilt(again, family, component, options)
        touched = {key.component for key in again if not np.array_equal(noisy[key], again[key])}
        assert touched == {component}
        assert model.go_on_from(noisy, n, token, 12) != truth


@pytest.mark.parametrize("model", rows(MODELS, full=set(MODELS) - QUICK))
def test_each_model_goes_on_token_for_token(model, capsys):
    """Over other sizes, stages, pages and orders on either side."""
    (transport, *_) = usable("nixl", "local")
    given = {"prefill_page": 16, "decode_page": 64, "requests": 2, "new_tokens": 16, "aux": "rdma"} | RUNS[model]
    told = demo.run(Options(model=model, transport=transport, **given))
    assert demo.is_good(told), capsys.readouterr().out
    assert told["new_tokens"] == 2 * 17
    assert (told["transport"], told["requests"]) == (transport, 2)
    decode_ranks = given["decode_tp"] * given.get("decode_pp", 1)
    assert (told["aux_rows"], told["aux_fallbacks"]) == (2 * decode_ranks, 0), "each decode rank gets each row once"
    if "path" in given:
        assert told["path"] == given["path"]
    else:
        assert [move["path"] for move in told["moves"]] == ["direct", "staged"] * 3
        assert len({move["bytes_moved"] for move in told["moves"]}) == 1
        assert told["moves"][0]["descriptors"] > told["moves"][1]["descriptors"]
        assert "times as fast as direct" in capsys.readouterr().out


@pytest.mark.skipif(
    cuda_double.missing() or torch.cuda.is_available(), reason="the double cannot be built, or a GPU is here"
)
def test_caches_on_the_second_device(tmp_path):
    """Over the double of CUDA's driver, whose work is late."""
    sizes = ("--prefill-tp", "2", "--decode-tp", "1", "--requests", "1", "--device", "cuda:1")
    env = cuda_double.everywhere(tmp_path)
    done = python("-m", "pdstage", "demo", "--transport", "local", *sizes, check=True, env=env)
    assert "on cuda:1" in done.stdout


def test_what_is_not_the_same_is_said(capsys):
    room = demo.Room([1] * 60, truth=[5, 6], tokens=[5, 7], began_at=1.0, handed_at=1.5, came_at=2.0)
    room.moved.update(bytes_written=2_064_384, descriptors=18, chunks_staged=3)
    report = {"transport": "nixl", "path": "staged", "model": "llama", "bytes_moved": 2_064_384, "descriptors": 18,
              "seconds": 1.0, "new_tokens": 2, "tokens_identical": False, "rows_identical": True, "aux_rows": 0,
              "aux_fallbacks": 0, "negative_control_caught": True, "moves": []}  # fmt: skip
    demo.show(Options(), report, [room])
    said = capsys.readouterr().out
    (line,) = (line.split() for line in said.splitlines() if line.split()[:1] == ["0"])
    assert line == ["0", "60", "staged", "2,064,384", "18", "500.0", "different"]
    assert "not moved: NO" in said and "both sides: yes" in said
    assert not demo.is_good(report)
    assert demo.is_good(report | {"tokens_identical": True})
    assert not demo.is_good(report | {"tokens_identical": True, "negative_control_caught": False})


def test_the_picture_has_a_bar_for_each_path():
    moves = [
        {"path": path, "descriptors": n, "seconds": n / 1e3, "bytes_moved": 1}
        for path, n in (
            ("direct", 400),
            ("staged", 100),
            ("direct", 200),
            ("staged", 90),
            ("direct", 300),
            ("staged", 80),
        )
    ]
    drawn = ElementTree.fromstring(demo.picture(moves))
    bars = [float(one.get("width")) for one in drawn if one.tag.endswith("rect")]
    assert bars == [400.0, 120.0] * 2


def test_a_transformers_without_the_model_is_named(monkeypatch):
    monkeypatch.setitem(FAMILIES, "gpt-oss", replace(FAMILIES["gpt-oss"], kind="gpt_oss_9"))
    with pytest.raises(UsageError, match=r"transformers [0-9.]+ has no gpt-oss"):
        Model(Options(model="gpt-oss"))
