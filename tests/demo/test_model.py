"""The sharded, paged model against transformers: same logits, same tokens, same KV, at any tensor-parallel size."""

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

from pdstage.demo import reference  # noqa: E402
from pdstage.demo.engine import Engine  # noqa: E402
from pdstage.demo.model import Segment, ShardedLlama, head_share, slice_weights  # noqa: E402
from pdstage.demo.options import ModelShape, Options  # noqa: E402
from pdstage.demo.paged import HND, NHD, PagedKV, PagedShape  # noqa: E402
from pdstage.demo.reference import build_model, continue_greedily  # noqa: E402
from pdstage.errors import UsageError  # noqa: E402
from pdstage.topology import shard_range  # noqa: E402

N_NEW = 12
CHUNK = 24
PROMPT = [(7 * i * i + 3 * i + 11) % 512 for i in range(61)]
SIZES = [(1, 4), (2, 4), (4, 4), (3, 6), (8, 4), (3, 2), (5, 1)]


class ThreadGroup:
    """`Group` among threads: every rank adds up the same parts in the same order."""

    def __init__(self, tp: int) -> None:
        self._parts: list[torch.Tensor | None] = [None] * tp
        self._barrier = threading.Barrier(tp, timeout=60)

    def of(self, rank: int) -> RankGroup:
        return RankGroup(self, rank)

    def exchange(self, rank: int, part: torch.Tensor) -> list[torch.Tensor]:
        self._parts[rank] = part.clone()
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        return parts

    def abort(self) -> None:
        self._barrier.abort()


class RankGroup:
    def __init__(self, whole: ThreadGroup, rank: int) -> None:
        self._whole, self._rank = whole, rank

    def sum(self, partial: torch.Tensor) -> None:
        partial.copy_(torch.stack(self._whole.exchange(self._rank, partial)).sum(0))

    def agree(self, values: list[int]) -> list[int]:
        return self._whole.exchange(self._rank, torch.tensor(values))[0].tolist()


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
            built[kv_heads] = build_model(shape_of(kv_heads), seed=3)
        return built[kv_heads]

    return get


def on_ranks(tp, work):
    """`work(rank, group)` on every rank at once."""
    group = ThreadGroup(tp)

    def run(rank):
        try:
            return work(rank, group.of(rank))
        except BaseException:
            group.abort()
            raise

    with ThreadPoolExecutor(tp) as pool:
        return list(pool.map(run, range(tp)))


def engine_of(model, shape, tp, rank, group, order, page_size) -> Engine:
    share = head_share(shape, tp, rank)
    paged = PagedShape(
        order=order,
        n_pages=40,
        page_size=page_size,
        layers=shape.layers,
        heads=share.kv_stop - share.kv_start,
        head_dim=shape.head_dim,
    )
    weights = slice_weights(model.state_dict(), shape, tp, rank)
    return Engine(ShardedLlama(shape, weights, tp, rank, group.sum), PagedKV(paged, seed=rank), group)


@pytest.mark.parametrize(("tp", "kv_heads"), SIZES)
@pytest.mark.parametrize(("order", "page_size"), [(NHD, 16), (HND, 8)])
def test_tokens_and_kv_are_transformers_own(models, tp, kv_heads, order, page_size):
    model, shape = models(kv_heads), shape_of(kv_heads)
    truth = continue_greedily(model, PROMPT, N_NEW + 1)
    cache = reference.DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.tensor([PROMPT]), past_key_values=cache, use_cache=True)

    def work(rank, group):
        engine = engine_of(model, shape, tp, rank, group, order, page_size)
        pages = engine.kv.allocate(len(PROMPT) + N_NEW)
        *_, (_, stop, first) = engine.prefill(PROMPT, pages, CHUNK)
        stored = [engine.kv.load(layer, pages, stop) for layer in range(shape.layers)]
        return stored, engine.decode([(pages, stop, first)], N_NEW)[0]

    for rank, (stored, tokens) in enumerate(on_ranks(tp, work)):
        assert tokens == truth.tokens
        heads = slice(*shard_range(kv_heads, tp, rank))
        for layer, pair in enumerate(stored):
            for held, name in zip(pair, ("keys", "values"), strict=True):
                wanted = getattr(cache.layers[layer], name)[0, heads].transpose(0, 1)
                torch.testing.assert_close(held, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("order", "page_size"), [(NHD, 4), (HND, 32)])
def test_rooms_decoded_together_are_as_if_alone(models, order, page_size):
    model, shape = models(4), shape_of(4)
    prompts = [PROMPT[:n] for n in (5, 33, 48)]

    def work(rank, group):
        engine = engine_of(model, shape, 1, rank, group, order, page_size)
        contexts = []
        for prompt in prompts:
            pages = engine.kv.allocate(len(prompt) + N_NEW)
            *_, (_, stop, first) = engine.prefill(prompt, pages, 7)
            contexts.append((pages, stop, first))
        steps: list[None] = []
        return engine.decode(contexts, N_NEW, lambda: steps.append(None)), len(steps)

    ((tokens, n_steps),) = on_ranks(1, work)
    assert tokens == [continue_greedily(model, prompt, N_NEW + 1).tokens for prompt in prompts]
    assert n_steps == N_NEW


@pytest.mark.parametrize("seed", range(4))
def test_one_spoiled_page_of_one_head_changes_the_tokens(seed):
    """The negative control's premise: with these weights every page matters; with the usual 0.02 it often does not."""
    shape = replace(ModelShape(kv_heads=8), layers=4)
    model = build_model(shape, seed)

    def work(rank, group):
        engine = engine_of(model, shape, 8, rank, group, HND, 32)
        pages = engine.kv.allocate(len(PROMPT) + N_NEW)
        *_, (_, stop, first) = engine.prefill(PROMPT, pages, CHUNK)
        good = engine.decode([(pages, stop, first)], N_NEW)
        if rank == seed:
            engine.kv.corrupt(int(pages[0]), seed)
        return good, engine.decode([(pages, stop, first)], N_NEW)

    for good, spoiled in on_ranks(8, work):
        assert good != spoiled


def test_a_token_that_never_came_spoils_its_room(models):
    model, shape = models(4), shape_of(4)

    def work(rank, group):
        engine = engine_of(model, shape, 1, rank, group, NHD, 16)
        pages = engine.kv.allocate(40)
        for _ in engine.prefill(PROMPT[:20], pages, 20):
            pass
        return engine.model.forward([1], [Segment(pages, 21, 1)], engine.kv)  # token 20 was never stored

    (logits,) = on_ranks(1, work)
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
    slices = [slice_weights(full, shape, tp, rank) for rank in range(tp)]
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


def test_the_folder_kernels_is_not_taken_for_another_package():
    """Started in the checkout, `import kernels` finds this project's folder; transformers must not."""
    code = "import pdstage.demo.reference as r; print(r.LlamaForCausalLM.__name__)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "LlamaForCausalLM\n"), done.stderr


def test_tokens_and_positions_must_agree(models):
    shape = shape_of(4)
    model = ShardedLlama(shape, slice_weights(models(4).state_dict(), shape, 1, 0), 1, 0, lambda _: None)
    with pytest.raises(UsageError, match="2 tokens for 3 positions"):
        model.forward([1, 2], [Segment(torch.zeros(1).int().numpy(), 0, 3)], None)
