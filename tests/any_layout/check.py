"""One case through the library's planner, staging, kernels and direct path, and every byte compared with the oracle."""

from __future__ import annotations

import random
from pprint import pformat
from types import SimpleNamespace

import numpy as np
from rigs import host_code

from pdstage import Key, Layout, Region, RowLevel, TokenShard, View, plan
from pdstage.kernels import Index, Pool
from pdstage.layout.topology import REPLICATED, Axis, Topology
from pdstage.plan import Rect, Stagings, selects, spans
from pdstage.plan.ownership import Common
from pdstage.plan.token_slices import DirectPlans, Pair
from pdstage.protocol import destinations
from pdstage.stager import Copied, Move, Stager
from tests.any_layout.describe import Case
from tests.any_layout.draw import Draws, draw
from tests.any_layout.held import Held, Rank, cells_in, chunk_nbytes, write

Rects = tuple[Rect, ...]


class Wrong(AssertionError):
    """Something is not as the description says."""


def layout_of(held: Held, rank: Rank) -> Layout:
    """The rank's memory as an engine would declare it."""
    base = held.memory.ctypes.data
    regions, views = [], []
    for one in rank.parts:
        regions.append(Region(base + one.start, one.nbytes))
    if held.side.one_region and regions:
        last = regions[-1]
        regions = [Region(regions[0].base, last.base + last.nbytes - regions[0].base)]
    for number, one in enumerate(rank.parts):
        region = 0 if held.side.one_region else number
        begin = base + one.start - regions[region].base
        for role, place, (first, count) in zip(one.of.roles, one.places, one.owned, strict=True):
            layer_stride, item_stride, block_stride, row_stride, shard_stride, seg_stride, _ = place.strides
            levels = (RowLevel(role.tokens_per_row, row_stride),)
            if one.how.block:
                levels = (RowLevel(one.how.block, block_stride), *levels)
            axis = Axis(role.axis, role.total, first, count) if role.axis else REPLICATED
            for at, layer in enumerate(one.of.layers[one.low : one.high]):
                views.append(
                    View(
                        key=Key(one.of.name, role.name, layer),
                        region=region,
                        offset=begin + place.offset + at * layer_stride,
                        n_items=place.shape[1],
                        item_stride=item_stride,
                        tokens_per_item=one.how.page,
                        rows=levels,
                        shards=count,
                        shard_stride=shard_stride,
                        segs=role.segs,
                        seg_stride=seg_stride,
                        width=role.width,
                        axis=axis,
                        format=one.of.name,
                    )
                )
    slots = [one.of.name for one in rank.parts if not one.of.positional]
    owned = {one.of.name: TokenShard(*one.owner) for one in rank.parts if one.owner[0] > 1}
    return Layout.of(regions, views, slots=slots, owned=owned)


class Node:
    """One rank as the manager has it: pool, stager, plans of sizes, and its items as indices."""

    def __init__(self, held: Held, rank: Rank, rng: random.Random) -> None:
        side = held.side
        self.rank = rank
        self.layout = layout_of(held, rank)
        self.pool = Pool.of(self.layout, keep=held.memory)
        self.stager = Stager(self.pool)
        self.stagings = Stagings(self.layout)
        self.topology = Topology(
            tp_size=side.tp, tp_rank=rank.tp_rank, pp_size=side.pp, pp_rank=rank.stage,
            cp_size=side.cp, cp_rank=rank.cp_rank,
        )  # fmt: skip
        self.items = {
            one.of.name: Index.of(np.array(one.items, (np.int32, np.int64)[rng.random() < 0.3]), one.how.first_token)
            for one in rank.parts
        }


class Meeting:
    """A writer and a destination: what of the destination's claim is the writer's, and how their memories meet."""

    def __init__(self, src: Node, dst: Node, owned: tuple[plan.Share, ...], asked: dict[str, tuple[int, int]]) -> None:
        self.src, self.dst, self.shares, self.asked = src, dst, owned, asked
        self.common = Common.of(src.layout, dst.layout)
        self.session = SimpleNamespace(common=self.common, stagings=src.stagings)
        self.pair = Pair(src.layout, dst.layout, self.common)

    def selects(self, rects: Rects) -> list[tuple[plan.Select, ...]]:
        return [selects(node.layout, self.shares, rects) for node in (self.src, self.dst)]

    def payload(self, rects: Rects) -> int:
        """Bytes that a chunk's selection takes of the writer, by the description's sizes."""
        roles = {(one.of.name, role.name): role for one in self.src.rank.parts for role in one.of.roles}
        tokens, n = self.common.tokens(rects), 0
        for key, _, count in self.src.stagings.of(self.shares, rects).select:
            role = roles[key.component, key.role]
            start, stop = tokens[key.component]
            rows = -(-stop // role.tokens_per_row) - start // role.tokens_per_row
            n += rows * count * role.segs * role.width
        return n


class Transfer:
    """All writers and destinations of one case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        rng = random.Random(case.order)
        self.src, self.dst = Held(case, case.src, rng), Held(case, case.dst, rng)
        for rank in self.src.ranks:
            for one in rank.parts:
                write(one, one.cells, one.how.first_token, max(one.how.first_token, case.asked[one.of.name][1]))
        self.source = self.src.memory.copy()
        self.expected = self.dst.memory.copy()
        for rank in self.dst.ranks:
            for one in rank.parts:
                write(one, cells_in(self.expected, one), *case.asked[one.of.name])
        self.writers, self.destinations = (
            [Node(held, rank, rng) for rank in held.ranks] for held in (self.src, self.dst)
        )
        self.rng = rng
        self.staging = np.empty(0, np.uint8)

    def run(self) -> None:
        writers = {writer.topology.unique_rank: writer for writer in self.writers}
        layouts = {number: writer.layout for number, writer in writers.items()}
        for destination in self.destinations:
            place = destination.topology
            dealt = plan.shares(layouts, destination.layout, (place.tp_size, place.tp_rank))
            self._room(destination, [(writers[number], owned) for number, owned in dealt.items() if owned])
        self._compare()

    def _room(self, destination: Node, dealt: list[tuple[Node, tuple[plan.Share, ...]]]) -> None:
        case = self.case
        asked = {one.of.name: case.asked[one.of.name] for one in destination.rank.parts}
        parcels = []
        sent = [0] * len(case.chunks)
        for writer, owned in dealt:
            meeting = Meeting(writer, destination, owned, asked)
            for number, chunk in enumerate(case.chunks):
                held = {one.of.name for one in writer.rank.parts}
                given = tuple(sorted(Rect(*span) for span in chunk if span.component in held))
                mine = destinations.clip(given, meeting)
                for rects, nbytes in destinations.split(mine, meeting, case.limit):
                    self._fits(meeting, rects, nbytes)
                    parcels.append((meeting, rects))
                    sent[number] += meeting.payload(rects)
        due = [
            sum(chunk_nbytes(one, chunk, asked[one.of.name]) for one in destination.rank.parts) for chunk in case.chunks
        ]
        if sent != due:
            raise Wrong(f"rank {place_of(destination.rank)} is sent {sent} bytes of its chunks, not {due}")
        self.rng.shuffle(parcels)
        for meeting, rects in parcels:
            path = self.rng.choice(("staged", "direct")) if case.path == "mixed" else case.path
            if path == "copy" and (meeting.pair.src.key or meeting.pair.dst.key):
                path = "staged"  # pages that are cut are not copied from pool to pool
            getattr(self, f"_{path}")(meeting, rects)

    def _fits(self, meeting: Meeting, rects: Rects, nbytes: int) -> None:
        """Staged in so many bytes, which are no more than the limit, but where a row of one layer is."""
        staging, (rect, *more) = meeting.src.stagings.of(meeting.shares, rects), rects
        if nbytes != staging.nbytes(meeting.common.tokens(rects)):
            raise Wrong(f"{rects} is not of {nbytes} bytes")
        (per,) = [of.tokens_per_row for of in self.case.logical if of.name == rect.component]
        one = not more and rect.layer_stop - rect.layer_start == 1 and staging.nbytes({rect.component: (0, per)})
        if nbytes > self.case.limit >= one:
            raise Wrong(f"{rects} is of {nbytes} bytes, more than {self.case.limit}")

    def _staged(self, meeting: Meeting, rects: Rects) -> None:
        tokens, writer, destination = meeting.common.tokens(rects), meeting.src, meeting.dst
        nbytes = [node.stagings.of(meeting.shares, rects).nbytes(tokens) for node in (writer, destination)]
        if nbytes[0] != nbytes[1]:
            raise Wrong(f"prefill stages {nbytes[0]} bytes of {rects}, decode {nbytes[1]}")
        if self.staging.size < nbytes[0] + 128:
            self.staging = np.zeros(nbytes[0] + 4096, np.uint8)
        base = self.staging.ctypes.data
        region = Region(base + -base % 128, nbytes[0])
        what, summed = (meeting.shares, rects, tokens, meeting.pair.order), self.case.checksum
        writer.stager.gather(1, Move(*what, writer.items, summed, meeting.pair.src), region)
        destination.stager.scatter(2, Move(*what, destination.items, summed, meeting.pair.dst), region)
        sums = [ended(node.stager.poll()) for node in (writer, destination)]
        if self.case.checksum and sums[0] != sums[1]:
            raise Wrong(f"checksums {sums} of {rects}")

    def _direct(self, meeting: Meeting, rects: Rects) -> None:
        ours, theirs = meeting.selects(rects)
        direct = DirectPlans(meeting.pair.src, ours, meeting.pair.dst, theirs)
        found = direct.spans(meeting.common.tokens(rects), meeting.src.items, meeting.dst.items)
        most = self.case.order % 40 + 1 if self.case.order % 16 == 0 else max(1, found.nbytes.size)
        for batch in spans.split(found, most):
            carry_out(batch, self.src.memory, self.dst.memory)

    def _copy(self, meeting: Meeting, rects: Rects) -> None:
        """Pool to pool in one pass, as between devices that map each other's memory."""
        chosen = zip((meeting.src, meeting.dst), meeting.selects(rects), strict=True)
        plans = [node.pool.plan(select) for node, select in chosen]
        plans[0].copy_to(plans[1], meeting.src.items, meeting.dst.items, meeting.common.tokens(rects))

    def _compare(self) -> None:
        for what, held, must in (("decode", self.dst, self.expected), ("prefill", self.src, self.source)):
            wrong = np.flatnonzero(held.memory != must)
            if not len(wrong):
                continue
            where = [
                f"{one.of.name!r} of {place_of(rank)}"
                for rank in held.ranks
                for one in rank.parts
                if not np.array_equal(held.memory[one.start :][: one.nbytes], must[one.start :][: one.nbytes])
            ]
            raise Wrong(f"{len(wrong)} bytes of {what}'s memory are wrong, from byte {wrong[0]} of it on, in {where}")


def place_of(rank: Rank) -> str:
    return f"tp {rank.tp_rank} cp {rank.cp_rank} stage {rank.stage}"


def ended(done: list[Copied]) -> int:
    (copied,) = done
    if copied.error is not None:
        raise copied.error
    return copied.checksum


def carry_out(found: spans.Spans, src: np.ndarray, dst: np.ndarray) -> None:
    """Writes each descriptor, an index a byte; one that leaves its arena raises."""
    nbytes = found.nbytes
    within = np.arange(nbytes.sum()) - np.repeat(np.cumsum(nbytes) - nbytes, nbytes)
    at = [np.repeat(a - arena.ctypes.data, nbytes) + within for a, arena in ((found.src, src), (found.dst, dst))]
    if any(side.size and side.min() < 0 for side in at):
        raise Wrong("a descriptor begins before its pool")
    dst[at[1]] = src[at[0]]


def check(case: Case) -> None:
    """Raises `Wrong`, or what the library raised, where the case does not come out as described."""
    with host_code(case.code):
        Transfer(case).run()


def run(seed: int, **given) -> Case:
    """The case of a seed, checked; `given` is of what there is a choice."""
    case = draw(Draws(seed), **given)
    try:
        check(case)
    except Exception as error:
        error.add_note(f"seed {seed}, {given}:\n{pformat(case, width=120)}")
        raise
    return case
