"""The sharded, paged Llama against transformers: same logits, same tokens, same KV, at any TP and PP."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if find_spec("transformers") is None:
    pytest.skip("needs transformers", allow_module_level=True)

from pdstage import Topology  # noqa: E402
from pdstage.errors import UsageError  # noqa: E402
from pdstage.layout.topology import shard_range  # noqa: E402
from pdstage.tools.demo import reference  # noqa: E402
from pdstage.tools.demo.engine import COMPONENT, Context, LlamaEngine  # noqa: E402
from pdstage.tools.demo.families import stage_layers  # noqa: E402
from pdstage.tools.demo.llama import Segment, ShardedLlama, head_share, slice_weights  # noqa: E402
from pdstage.tools.demo.options import ModelShape, Options, Side  # noqa: E402
from pdstage.tools.demo.pools import HND, NHD, PagedPool, PagedShape  # noqa: E402
from pdstage.tools.demo.reference import Model, build_llama, continue_greedily  # noqa: E402

N_NEW = 12
CHUNK = 24
PROMPT = [(7 * i * i + 3 * i + 11) % 512 for i in range(61)]
SIZES = [(1, 1, 4), (2, 1, 4), (4, 1, 4), (3, 1, 6), (8, 1, 4), (3, 1, 2), (5, 1, 1), (1, 2, 4), (2, 2, 4), (8, 2, 4)]
ALONE = Topology()


class ThreadGroup:
    """`Group` among threads: every rank adds up the same parts in the same order."""

    def __init__(self, n: int) -> None:
        self._parts: list[torch.Tensor | None] = [None] * n
        self._barrier = threading.Barrier(n, timeout=60)

    def exchange(self, rank: int, part: torch.Tensor) -> list[torch.Tensor]:
        self._parts[rank] = part.clone()
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        return parts

    def abort(self) -> None:
        self._barrier.abort()


class RankGroup:
    """`stage`: the ranks of one pipeline stage; `side`: all of them."""

    def __init__(self, place: Topology, stage: ThreadGroup, side: ThreadGroup) -> None:
        self.rank, self._place, self._stage, self._side = place.group_rank, place, stage, side

    def sum(self, partial: torch.Tensor) -> None:
        partial.copy_(torch.stack(self._stage.exchange(self._place.tp_rank, partial)).sum(0))

    def hand_on(self, hidden: torch.Tensor, stage: int) -> None:
        hidden.copy_(self._side.exchange(self.rank, hidden)[stage * self._place.tp_size])

    def agree(self, values: list[int]) -> list[int]:
        return self._side.exchange(self.rank, torch.tensor(values))[0].tolist()


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def shape_of(kv_heads: int) -> ModelShape:
    return replace(ModelShape(kv_heads=kv_heads), layers=2)


@pytest.fixture(scope="module")
def models():
    built = {}

    def get(kv_heads: int):
        if kv_heads not in built:
            built[kv_heads] = build_llama(shape_of(kv_heads), seed=3)
        return built[kv_heads]

    return get


def on_ranks(tp, work, pp=1):
    """`work(place, group)` on every rank at once."""
    places = Side(tp, pp, 1, NHD).places()
    side, stages = ThreadGroup(len(places)), [ThreadGroup(tp) for _ in range(pp)]

    def run(place):
        try:
            return work(place, RankGroup(place, stages[place.pp_rank], side))
        except BaseException:
            for group in (side, *stages):
                group.abort()
            raise

    with ThreadPoolExecutor(len(places)) as pool:
        return list(zip(places, pool.map(run, places), strict=True))


def engine_of(model, shape, place, group, order, page_size) -> LlamaEngine:
    share = head_share(shape, place.tp_size, place.tp_rank)
    paged = PagedShape(
        order=order,
        n_pages=40,
        page_size=page_size,
        layers=stage_layers(shape.layers, place),
        heads=share.kv_stop - share.kv_start,
        total_heads=shape.kv_heads,
        widths={"k": shape.head_dim, "v": shape.head_dim},
    )
    weights = slice_weights(model.state_dict(), shape, place)
    return LlamaEngine(ShardedLlama(shape, weights, place, group), PagedPool(paged, seed=place.group_rank), group)


@pytest.mark.parametrize(("tp", "pp", "kv_heads"), SIZES)
@pytest.mark.parametrize(("order", "page_size"), [(NHD, 16), (HND, 8)])
def test_tokens_and_kv_are_transformers_own(models, tp, pp, kv_heads, order, page_size):
    model, shape = models(kv_heads), shape_of(kv_heads)
    truth = continue_greedily(Model(model), PROMPT, N_NEW + 1)
    cache = reference.DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.tensor([PROMPT]), past_key_values=cache, use_cache=True)

    def work(place, group):
        engine = engine_of(model, shape, place, group, order, page_size)
        room = engine.admit(len(PROMPT), N_NEW)
        *_, (_, stop, first, spans) = engine.prefill(PROMPT, room, CHUNK)
        assert spans == {COMPONENT: (len(PROMPT) // CHUNK * CHUNK, stop)}
        stored = {layer: engine.kv.load(layer, room[COMPONENT], 0, stop) for layer in engine.kv.layers}
        return stored, engine.decode([Context(room, stop, first)], N_NEW)[0]

    for place, (stored, tokens) in on_ranks(tp, work, pp):
        assert tokens == truth.tokens
        assert len(stored) == shape.layers // pp
        heads = slice(*shard_range(kv_heads, tp, place.tp_rank))
        for layer, pair in stored.items():
            for held, name in zip(pair, ("keys", "values"), strict=True):
                wanted = getattr(cache.layers[layer], name)[0, heads].transpose(0, 1)
                torch.testing.assert_close(held, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("order", "page_size"), [(NHD, 4), (HND, 32)])
def test_rooms_decoded_together_are_as_if_alone(models, order, page_size):
    model, shape = models(4), shape_of(4)
    prompts = [PROMPT[:n] for n in (5, 33, 48)]

    def work(place, group):
        engine = engine_of(model, shape, place, group, order, page_size)
        contexts = []
        for prompt in prompts:
            room = engine.admit(len(prompt), N_NEW)
            *_, (_, stop, first, _) = engine.prefill(prompt, room, 7)
            contexts.append(Context(room, stop, first))
        steps: list[None] = []
        return engine.decode(contexts, N_NEW, lambda: steps.append(None)), len(steps)

    ((_, (tokens, n_steps)),) = on_ranks(1, work)
    assert tokens == [continue_greedily(Model(model), prompt, N_NEW + 1).tokens for prompt in prompts]
    assert n_steps == N_NEW


@pytest.mark.parametrize("seed", range(4))
def test_one_spoiled_page_of_one_head_changes_the_tokens(seed):
    """The negative control's premise: with these weights every page matters; with the usual 0.02 it often does not."""
    shape = replace(ModelShape(kv_heads=8), layers=4)
    model = build_llama(shape, seed)

    def work(place, group):
        engine = engine_of(model, shape, place, group, HND, 32)
        room = engine.admit(len(PROMPT), N_NEW)
        *_, (_, stop, first, _) = engine.prefill(PROMPT, room, CHUNK)
        context = Context(room, stop, first)
        good = engine.decode([context], N_NEW)
        put_back = engine.kv.spoil(room[COMPONENT], seed) if place.tp_rank == seed else lambda: None
        spoiled = engine.decode([context], N_NEW)
        put_back()
        return good, spoiled, engine.decode([context], N_NEW)

    for _, (good, spoiled, after) in on_ranks(8, work):
        assert good != spoiled
        assert good == after


def test_a_token_that_never_came_spoils_its_room(models):
    model, shape = models(4), shape_of(4)

    def work(place, group):
        engine = engine_of(model, shape, place, group, NHD, 16)
        room = engine.admit(20, 20)
        for _ in engine.prefill(PROMPT[:20], room, 20):
            pass
        return engine.model.forward([1], [Segment(room[COMPONENT], 21, 1)], engine.kv)  # token 20 was never stored

    ((_, logits),) = on_ranks(1, work)
    assert logits.isnan().all()


@pytest.mark.parametrize("tp", range(1, 17))
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("queries", [1, 2, 5])
def test_every_query_head_is_computed_once_beside_its_kv_head(tp, kv_heads, queries):
    shape = ModelShape(kv_heads=kv_heads, queries_per_kv_head=queries)
    shares = [head_share(shape, tp, rank) for rank in range(tp)]
    computed = [head for share in shares for head in range(share.q_start, share.q_stop)]
    assert sorted(computed) == list(range(shape.heads))
    for rank, share in enumerate(shares):
        assert (share.kv_start, share.kv_stop) == shard_range(kv_heads, tp, rank)
        for head in range(share.q_start, share.q_stop):
            assert share.kv_start <= head // queries < share.kv_stop


@pytest.mark.parametrize("decode_tp", range(1, 17))
@pytest.mark.parametrize("kv_heads", [1, 3, 4])
def test_in_a_run_every_rank_reads_what_it_receives(decode_tp, kv_heads):
    shape = Options(prefill_tp=1, decode_tp=decode_tp, kv_heads=kv_heads).shape
    for rank in range(decode_tp):
        share = head_share(shape, decode_tp, rank)
        read = {head // shape.queries_per_kv_head for head in range(share.q_start, share.q_stop)}
        assert read == set(range(share.kv_start, share.kv_stop))


@pytest.mark.parametrize(("tp", "kv_heads"), [(3, 6), (3, 4), (8, 4)])
def test_slices_put_together_are_the_whole_model(models, tp, kv_heads):
    full, shape = models(kv_heads).state_dict(), shape_of(kv_heads)
    slices = [slice_weights(full, shape, place) for place in Side(tp, 1, 1, NHD).places()]
    at = "model.layers.1."
    for name, axis in (("self_attn.q_proj", 0), ("self_attn.o_proj", 1), ("mlp.up_proj", 0), ("mlp.down_proj", 1)):
        whole = torch.cat([part[f"{at}{name}.weight"] for part in slices], dim=axis)
        assert torch.equal(whole, full[f"{at}{name}.weight"])
    for rank, part in enumerate(slices):
        start, stop = shard_range(kv_heads, tp, rank)
        for name in ("k_proj", "v_proj"):
            rows = slice(start * shape.head_dim, stop * shape.head_dim)
            assert torch.equal(part[f"{at}self_attn.{name}.weight"], full[f"{at}self_attn.{name}.weight"][rows])
        assert part.keys() == full.keys()
        assert torch.equal(part["lm_head.weight"], full["lm_head.weight"])


def test_a_stage_has_its_own_layers_only(models):
    full, shape = models(4).state_dict(), shape_of(4)
    stages = [slice_weights(full, shape, place) for place in Side(1, 2, 1, NHD).places()]
    layers = [{name.split(".")[2] for name in part if name.startswith("model.layers.")} for part in stages]
    assert layers == [{"0"}, {"1"}]
    assert stages[0].keys() | stages[1].keys() == full.keys()


@pytest.mark.full  # transformers takes seconds to import once more
def test_the_folder_kernels_is_not_taken_for_another_package():
    """Started in the checkout, `import kernels` finds this project's folder; transformers must not."""
    code = (
        "from pdstage.tools.demo.reference import build_llama\n"
        "from pdstage.tools.demo.options import ModelShape\n"
        "print(type(build_llama(ModelShape(), 0)).__name__)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "LlamaForCausalLM\n"), done.stderr


def test_tokens_and_positions_must_agree(models):
    shape = shape_of(4)
    model = ShardedLlama(shape, slice_weights(models(4).state_dict(), shape, ALONE), ALONE, None)
    with pytest.raises(UsageError, match="2 tokens for 3 positions"):
        model.forward([1, 2], [Segment(None, 0, 3)], None)
