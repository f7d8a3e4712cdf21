"""A model's cache, cut for every rank of a side, put together again and gone on with: no transport, no processes."""

from __future__ import annotations

import sys
from copy import deepcopy
from importlib.util import find_spec

import pytest

torch = pytest.importorskip("torch")
if find_spec("transformers") is None:
    pytest.skip("needs transformers", allow_module_level=True)

from pdstage import Key  # noqa: E402
from pdstage.errors import UsageError  # noqa: E402
from pdstage.tools.demo import cache as caches  # noqa: E402
from pdstage.tools.demo.families import FAMILIES, SLOT  # noqa: E402
from pdstage.tools.demo.holding import Holding, put_together  # noqa: E402
from pdstage.tools.demo.options import LAYOUTS, Options, Side  # noqa: E402
from pdstage.tools.demo.reference import build_model, continue_greedily, continue_transplanted  # noqa: E402
from pdstage.tools.demo.transfer import pool_of  # noqa: E402

PROMPT = [(7 * i * i + 3 * i + 11) % 512 for i in range(75)]
CHUNK = 24


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def computed():
    """By model: itself, its cache after the prompt, and what its next tokens are."""
    built = {}

    def get(name):
        if name not in built:
            torch.set_num_threads(1)
            model = build_model(Options(model=name))
            cache = model.new_cache()
            logits = model.forward(PROMPT, cache)
            built[name] = model, cache, logits
        return built[name]

    return get


def holdings(name, side, n_tokens=0):
    options = Options(model=name)
    return [
        Holding(
            FAMILIES[name], options.heads, place, order=side.layout, page_size=side.page,
            lengths=[n_tokens or len(PROMPT)], seed=place.group_rank,
        )
        for place in side.places()
    ]  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pp", [1, 2])
def test_every_ranks_share_makes_the_whole_again(computed, name, layout, pp):
    model, cache, _ = computed(name)
    heads, family, n = Options(model=name).heads, FAMILIES[name], len(PROMPT)
    for tp in (1, 2, 3, 4, 8):
        ranks = holdings(name, Side(tp, pp, 16, layout))
        spans = ranks[0].fresh(0, n, n)
        states = caches.read(cache, family, heads, spans)
        held = []
        for rank in ranks:
            room = rank.admit(n)
            rank.keep(room, states, spans)
            held.append(rank.parts(room))
            pool_of(rank.pools, rank.place)  # pdstage takes the rank's tensors as they are
        whole, differing = put_together(family, heads, [rank.place for rank in ranks], held)
        assert not differing
        assert whole.keys() == states.keys()
        assert all(torch.equal(whole[key], states[key]) for key in states)
    copy = model.new_cache()
    caches.write(copy, whole, n)
    cache = deepcopy(cache)
    for token in (3, 141, 59):
        assert torch.equal(model.forward([token], copy), model.forward([token], cache))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rank_holds_its_share_and_no_more(computed, name):
    """What all ranks of TP 2 x PP 2 hold together: each sharded part once, each replicated one on both of a stage."""
    _, cache, _ = computed(name)
    heads, family, n = Options(model=name).heads, FAMILIES[name], len(PROMPT)
    ranks = holdings(name, Side(2, 2, 16, "nhd"))
    spans = ranks[0].fresh(0, n, n)
    states = caches.read(cache, family, heads, spans)
    fields = {(f.component, f.role): f for named in family.components(heads).values() for f in named}
    for key, state in states.items():
        field = fields[key.component, key.role]
        holders = [
            rank for rank in ranks if key.component in rank.pools and key.layer in rank.pools[key.component].layers
        ]
        assert [rank.place.pp_rank for rank in holders] == [key.layer // 2] * 2
        replicated = sum(s.unit() for s in field.sections if s.replicated)
        axis = 0 if field.kept == SLOT else 1
        assert sum(field.n_parts((2, rank.place.tp_rank)) for rank in holders) == state.shape[axis] + replicated


@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_fill_the_pools_as_one_prompt_would(computed, name):
    """What `fresh` says after each chunk adds up to all tokens once, a window's and a state at the end only."""
    model, _, _ = computed(name)
    (rank,) = holdings(name, Side(1, 1, 16, "hnd"))
    family, n = FAMILIES[name], len(PROMPT)
    room, cache = rank.admit(n), model.new_cache()
    seen = {component: [] for component in room}
    for start in range(0, n, CHUNK):
        part = PROMPT[start : start + CHUNK]
        model.forward(part, cache)
        spans = rank.fresh(start, start + len(part), n)
        rank.keep(room, caches.read(cache, family, rank.kv_heads, spans), spans)
        for component, span in spans.items():
            seen[component] += range(*span)
    wanted = {"kv": range(n), "dsa": range(n), "swa": range(n - family.window + 1, n), "mamba": range(1)}
    assert seen == {component: list(wanted[component]) for component in room}
    states = caches.read(cache, family, rank.kv_heads, {name: (t.start, t.stop) for name, t in room.items()})
    held = rank.parts(room)
    assert held.keys() == states.keys()
    assert all(torch.equal(held[key], states[key]) for key in states)


def test_a_window_begins_at_a_whole_page_of_its_own_pool():
    (rank,) = holdings("gemma3", Side(1, 1, 64, "nhd"), 300)
    table = rank.admit(300)["swa"]
    assert (table.first_token, table.start, table.stop) == (256, 261, 300)
    assert len(table.items) == 1
    assert len(rank.admit(300)["kv"].items) == 5


def test_copies_that_differ_are_named_and_the_first_ranks_is_taken(computed):
    _, cache, _ = computed("deepseek-v3")
    family, n = FAMILIES["deepseek-v3"], len(PROMPT)
    ranks = holdings("deepseek-v3", Side(3, 1, 16, "nhd"))
    spans = ranks[0].fresh(0, n, n)
    states = caches.read(cache, family, 4, spans)
    rooms = [rank.admit(n) for rank in ranks]
    for rank, room in zip(ranks[:2], rooms, strict=False):
        rank.keep(room, states, spans)  # the third received nothing: NaN is not what the others have
    places = [rank.place for rank in ranks]
    held = [rank.parts(room) for rank, room in zip(ranks, rooms, strict=True)]
    whole, differing = put_together(family, 4, places, held)
    assert differing == set(states)
    assert all(torch.equal(whole[key], states[key]) for key in states)
    held[0][Key("kv", "latent", 2)][5] += 1
    whole, _ = put_together(family, 4, places, held)
    assert not torch.equal(whole[Key("kv", "latent", 2)], states[Key("kv", "latent", 2)])


def test_a_transformers_without_the_model_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, FAMILIES["gpt-oss"].modules[0], None)
    with pytest.raises(UsageError, match=r"transformers [0-9.]+ has no gpt-oss"):
        build_model(Options(model="gpt-oss"))


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v32"])
def test_going_on_from_a_copy_is_going_on(computed, name):
    """The judge of a model that leaves ties: that its cache is a copy changes nothing, only how a prompt is cut may."""
    model, _, _ = computed(name)
    options = Options(model=name)
    at_once = continue_greedily(model, PROMPT, 9)
    moved = continue_transplanted(
        model, PROMPT, 9, family=FAMILIES[name], kv_heads=options.heads, chunk_tokens=len(PROMPT)
    )
    assert moved.tokens == at_once.tokens
