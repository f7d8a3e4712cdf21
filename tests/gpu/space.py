"""Pools of every shape from a seed, on the CPU and in equal bytes on a device, and what a call on them must do.

tests/pools.py draws smaller ones for the CPU, and shrinks what fails; this one needs numpy and torch only, and runs at
sizes that fill a device. A case is its seed: the same everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pdstage.bench.variants import plan_of
from pdstage.kernels import Index, Pool
from pdstage.kernels.checksum import checksum
from pdstage.layout import Key, Layout, Region, RowLevel, View
from pdstage.layout.topology import Axis
from pdstage.plan import HEAD_MAJOR, TOKEN_MAJOR, Select, Staging
from pdstage.plan.tables import Table

DIMS = ("item", "block", "row", "role", "shard", "seg")
NHD = ("role", "item", "block", "row", "shard", "seg")
HND = ("role", "item", "shard", "block", "row", "seg")
FUSED = ("item", "block", "row", "shard", "role", "seg")
GUARD = 64
POISON = 0xA5
WIDTHS = (1, 2, 3, 5, 8, 12, 16, 24, 40, 64, 100, 128, 256, 512, 1152, 2048, 4096, 16384)
POOL_NBYTES, MOVED_NBYTES = 4 << 20, 1 << 20


@dataclass(frozen=True)
class What:
    """What both sides of a transfer agree on, of one component."""

    name: str
    layers: int
    roles: int
    shards: int
    segs: int
    width: int
    tokens_per_row: int

    @property
    def row_nbytes(self):
        return self.layers * self.roles * self.shards * self.segs * self.width


@dataclass(frozen=True)
class How:
    """How one side stores a `What`: sizes of its pages, the order in which dimensions nest, padding, and a skew."""

    of: What
    n_items: int
    rows: int
    block: int
    order: tuple[str, ...]
    pads: dict[str, int]
    skew: int

    @property
    def tokens_per_item(self):
        return self.rows * self.of.tokens_per_row

    @property
    def n_tokens(self):
        return self.n_items * self.tokens_per_item


def pick(rng, *values):
    return values[int(rng.integers(len(values)))]


def a_what(rng, name):
    while True:
        found = What(
            name,
            pick(rng, 1, 1, 2, 5, 16),
            pick(rng, 1, 2, 2, 3),
            pick(rng, 1, 2, 3, 4, 8, 16),
            pick(rng, 1, 1, 1, 2, 3),
            pick(rng, *WIDTHS),
            pick(rng, 1, 1, 1, 2, 4),
        )
        if found.row_nbytes * 8 <= POOL_NBYTES:
            return found


def a_how(rng, of):
    most_rows = max(1, POOL_NBYTES // of.row_nbytes)
    rows = min(pick(rng, 1, 2, 3, 8, 16, 64, 128), most_rows)
    order = pick(rng, NHD, NHD, HND, FUSED, tuple(rng.permutation(DIMS)))
    pads = {str(rng.choice(DIMS)): pick(rng, 1, 8, 16, 64, 128) for _ in range(pick(rng, 0, 0, 1, 2))}
    n_items = max(2, min(most_rows // rows, 300))
    return How(of, n_items, rows, pick(rng, 0, 0, 1, 2, 4), order, pads, pick(rng, 0, 0, 0, 1, 16, 40))


class Held:
    """Pools of some `How`s in CPU memory, `numpy` its bytes: one region a component and layer, between guards."""

    def __init__(self, rng, hows):
        self.hows = hows
        self.numpy, self._views = [], []
        for how in hows:
            for layer in range(how.of.layers):
                extent = self._add(how, layer, len(self.numpy))
                self.numpy.append(rng.integers(0, 256, extent + 2 * GUARD, dtype=np.uint8))

    def _add(self, how, layer, region):
        of = how.of
        block = how.block or how.rows
        sizes = {
            "item": how.n_items,
            "block": -(-how.rows // block),
            "row": block,
            "role": of.roles,
            "shard": of.shards,
            "seg": of.segs,
        }
        strides, extent = {}, of.width
        for dim in reversed(how.order):
            strides[dim] = extent
            extent = extent * sizes[dim] + how.pads.get(dim, 0)
        levels = (RowLevel(of.tokens_per_row, strides["row"]),)
        if how.block:
            levels = (RowLevel(block * of.tokens_per_row, strides["block"]), *levels)
        for role in range(of.roles):
            self._views.append(
                View(
                    key=Key(of.name, f"r{role}", layer),
                    region=region,
                    offset=how.skew + role * strides["role"],
                    n_items=how.n_items,
                    item_stride=strides["item"],
                    tokens_per_item=how.tokens_per_item,
                    rows=levels,
                    shards=of.shards,
                    shard_stride=strides["shard"],
                    segs=of.segs,
                    seg_stride=strides["seg"],
                    width=of.width,
                    axis=Axis("head", of.shards, 0, of.shards),
                    format="bytes",
                )
            )
        return how.skew + extent

    def on(self, device):
        """A copy of the memory on `device`, and a pool over it."""
        memory = [torch.from_numpy(whole.copy()).to(device) for whole in self.numpy]
        kind = device.partition(":")[0]
        regions = [Region(m.data_ptr() + GUARD, m.numel() - 2 * GUARD, kind) for m in memory]
        return memory, Pool.of(Layout.of(regions, self._views), device, keep=memory)

    @property
    def layout(self):
        return Layout.of([Region(0, whole.size - 2 * GUARD) for whole in self.numpy], self._views)


def a_select(rng, layout):
    """Some of the views, at least one, and some shards of each."""
    views = [view for view in layout.views() if rng.random() < 0.7] or [next(iter(layout.views()))]
    found = []
    for view in views:
        start = int(rng.integers(view.shards))
        found.append(Select(view.key, start, int(rng.integers(1, view.shards - start + 1))))
    return found


def a_range(rng, *hows):
    """Tokens, now and then none, that fit every side's pool and the time a test has."""
    of = hows[0].of
    most = min(MOVED_NBYTES // of.row_nbytes * of.tokens_per_row, *(how.n_tokens - how.tokens_per_item for how in hows))
    start = int(rng.integers(0, 3 * of.tokens_per_row + 1))
    return (start, start) if most < 1 or rng.random() < 0.05 else (start, start + int(rng.integers(1, most + 1)))


@dataclass
class List:
    """One component's items in CPU memory."""

    items: np.ndarray
    first_token: int

    def on(self, device):
        if device == "cpu":
            return Index.of(self.items, self.first_token)
        held = torch.from_numpy(self.items).to(device)
        return Index(held.data_ptr(), self.items.itemsize * 8, self.items.size, self.first_token, held, device)


def a_list(rng, how, tokens, *, repeat):
    start, stop = tokens
    first = int(rng.integers(0, start // how.of.tokens_per_row + 1)) * how.of.tokens_per_row
    n = -(-(stop - first) // how.tokens_per_item) if stop > start else 0
    items = rng.integers(0, how.n_items, n) if repeat else rng.permutation(how.n_items)[:n]
    return List(items.astype(pick(rng, np.int32, np.int64)), first)


class Case:
    """A pool of one or two components, a selection, token ranges and lists."""

    def __init__(self, seed, *, repeat):
        rng = self.rng = np.random.default_rng([seed, repeat])
        hows = [a_how(rng, a_what(rng, name)) for name in ("kv", "swa")[: pick(rng, 1, 1, 2)]]
        self.held = Held(rng, hows)
        self.select = a_select(rng, self.held.layout)
        self.wire = pick(rng, TOKEN_MAJOR, TOKEN_MAJOR, HEAD_MAJOR)
        self.tokens = {how.of.name: a_range(rng, how) for how in hows}
        self.lists = {how.of.name: a_list(rng, how, self.tokens[how.of.name], repeat=repeat) for how in hows}
        self.max_sms = pick(rng, None, None, 1, 3)
        self.lists_on_device = bool(rng.random() < 0.5)

    def indexes(self, device):
        place = device if self.lists_on_device else "cpu"
        return {name: one.on(place) for name, one in self.lists.items()}

    def on_cpu(self):
        return {name: one.on("cpu") for name, one in self.lists.items()}


def equal(got, expected, what):
    """Raises, naming the first byte that differs."""
    got = got.cpu().numpy()
    if not np.array_equal(got, expected):
        at = int(np.flatnonzero(got != expected)[0])
        n = int((got != expected).sum())
        raise AssertionError(f"{what}: byte {at} of {got.size} is {got[at]}, not {expected[at]}; {n} differ")


def reference_gather(case, wire=None):
    """Staged bytes by the definition of correct, padding poisoned."""
    _, pool = case.held.on("cpu")
    plan = pool.plan(case.select, wire or case.wire, "reference")
    staged = np.full(plan.nbytes(case.tokens), POISON, np.uint8)
    plan.gather(staged.ctypes.data, staged.size, case.on_cpu(), case.tokens)
    return staged


def check_gather(case, variant, device):
    expected = reference_gather(case)
    memory, pool = case.held.on(device)
    plan = plan_of(pool, case.select, case.wire, variant)
    whole = torch.full((expected.size + 512,), POISON, dtype=torch.uint8, device=device)
    at = -whole.data_ptr() % 128 + pick(case.rng, 0, 0, 16, 64)
    plan.gather(whole.data_ptr() + at, expected.size, case.indexes(device), case.tokens, max_sms=case.max_sms)
    framed = np.full(whole.numel(), POISON, np.uint8)
    framed[at : at + expected.size] = expected
    equal(whole, framed, "staging")
    for number, (got, before) in enumerate(zip(memory, case.held.numpy, strict=True)):
        equal(got, before, f"region {number}, which a gather only reads")


def check_scatter(case, variant, device):
    want, cpu_pool = case.held.on("cpu")
    plan = cpu_pool.plan(case.select, case.wire, "reference")
    staged = case.rng.integers(0, 256, plan.nbytes(case.tokens), dtype=np.uint8)
    plan.scatter(staged.ctypes.data, staged.size, case.on_cpu(), case.tokens)
    memory, pool = case.held.on(device)
    src = torch.from_numpy(staged).to(device)
    plan_of(pool, case.select, case.wire, variant).scatter(
        src.data_ptr(), src.numel(), case.indexes(device), case.tokens, max_sms=case.max_sms
    )
    for number, (got, expected) in enumerate(zip(memory, want, strict=True)):
        equal(got, expected.numpy(), f"region {number}")


def check_copy_to(seed, variant, device):
    """From one pool to another that stores the same differently: as a gather here and a scatter there."""
    rng = np.random.default_rng([seed, 7])
    of = a_what(rng, "kv")
    src, dst = a_how(rng, of), a_how(rng, of)
    here, there = Held(rng, [src]), Held(rng, [dst])
    select = a_select(rng, here.layout)
    tokens = {"kv": a_range(rng, src, dst)}
    lists = a_list(rng, src, tokens["kv"], repeat=True), a_list(rng, dst, tokens["kv"], repeat=False)
    (_, src_cpu), (want, dst_cpu) = here.on("cpu"), there.on("cpu")
    plans = [pool.plan(select, TOKEN_MAJOR, "reference") for pool in (src_cpu, dst_cpu)]
    staged = np.full(plans[0].nbytes(tokens), POISON, np.uint8)
    at = staged.ctypes.data, staged.size
    plans[0].gather(*at, {"kv": lists[0].on("cpu")}, tokens)
    plans[1].scatter(*at, {"kv": lists[1].on("cpu")}, tokens)
    (src_memory, src_pool), (memory, dst_pool) = here.on(device), there.on(device)
    src_plan, dst_plan = (plan_of(pool, select, TOKEN_MAJOR, variant) for pool in (src_pool, dst_pool))
    places = [pick(rng, device, "cpu") for _ in lists]
    indexes = [{"kv": one.on(place)} for one, place in zip(lists, places, strict=True)]
    src_plan.copy_to(dst_plan, *indexes, tokens, max_sms=pick(rng, None, 2))
    for number, (got, expected) in enumerate(zip(memory, want, strict=True)):
        equal(got, expected.numpy(), f"region {number} of the destination")
    for number, (got, before) in enumerate(zip(src_memory, here.numpy, strict=True)):
        equal(got, before, f"region {number} of the source")


def expected_sum(case):
    """The checksum's definition over what the reference stages."""
    staged = reference_gather(case, TOKEN_MAJOR)
    staging = Staging(case.held.layout, case.select)
    table = Table.of(case.held.layout, case.select)
    total = 0
    for row, at in zip(table.rows, staging.offsets(case.tokens), strict=True):
        start, stop = case.tokens[table.names[row.component]]
        if start == stop:
            continue
        per = row.tokens_per_row
        tokens = np.arange(start // per * per, stop, per, dtype=np.int64)
        shape = (tokens.size, row.shards, row.segs, row.width)
        cells = staged[at : at + int(np.prod(shape))].reshape(shape)
        total += checksum(row.seed, tokens, row.first_shard, cells)
    return total % 2**64


def check_checksum(case, variant, device):
    """Gathering and scattering both add the defined sum to what the word held."""
    expected = expected_sum(case)
    _, pool = case.held.on(device)
    plan = plan_of(pool, case.select, case.wire, variant, checksum=True)
    staged = torch.full((plan.nbytes(case.tokens),), POISON, dtype=torch.uint8, device=device)
    at = staged.data_ptr(), staged.numel()
    for held, call in ((5, plan.gather), (2**63 - 1, plan.scatter)):
        total = torch.tensor([held], dtype=torch.int64, device=device)
        call(*at, case.indexes(device), case.tokens, sum_ptr=total.data_ptr(), max_sms=case.max_sms)
        assert int(total.item()) % 2**64 == (held + expected) % 2**64
