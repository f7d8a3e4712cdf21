"""A post's descriptors, built or picked from prepared lists, for `pytest bench/micro/test_nixl.py --benchmark-only`.

For exploration: equal blocks at random places of one region, as the direct path writes fragmented pages.
docs/transports.md has the results and the consequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("msgspec")
pytest.importorskip("nixl._api", exc_type=ImportError)

from pdstage.layout import Region
from pdstage.plan.spans import Spans
from pdstage.transport import nixl
from pdstage.transport._nixl_agent import descriptors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NBYTES = 64 << 20
BLOCKS = (256, 1024)
COUNTS = (1, 4, 16, 64, 256, 1024, 4096)


class Bed:
    """Two transports of this process, and the block size prepared on both sides."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.a, self.b = nixl.NixlTransport(), nixl.NixlTransport()
        self.memory = [np.zeros(NBYTES, np.uint8) for _ in range(2)]
        self.here, self.there = (Region(memory.ctypes.data, NBYTES) for memory in self.memory)
        self.a.register([self.here])
        self.b.register([self.there])
        self.a.connect("b", self.b.describe())
        self.a.prepare("b", [self.there])
        self.agent: Any = self.a._agent
        self.name = self.a.links["b"].description.agent
        self.lists = [self._prepared("NIXL_INIT_AGENT", self.here), self._prepared(self.name, self.there)]

    def _prepared(self, side: str, region: Region) -> Any:  # noqa: ANN401  (NIXL's classes have no types)
        rows = np.array([[region.base, self.block, 0, self.block, NBYTES // self.block]], np.uint64)
        return self.agent.prep_xfer_dlist(side, rows, "DRAM")

    def spans(self, n: int, *, regular: bool) -> Spans:
        rng = np.random.default_rng(n)
        every_other = np.arange(NBYTES // self.block // 2)  # no two are neighbours
        chosen = [every_other[:n] if regular else rng.permutation(every_other)[:n] for _ in range(2)]
        src, dst = (blocks.astype(np.int64) * 2 * self.block for blocks in chosen)
        return Spans(src + self.here.base, dst + self.there.base, np.full(n, self.block, np.int64))

    def built(self, spans: Spans) -> Any:  # noqa: ANN401
        local = descriptors(spans.src, spans.nbytes, self.a.own.find(spans.src, spans.nbytes))
        remote = descriptors(spans.dst, spans.nbytes, self.a.links["b"].prepared.find(spans.dst, spans.nbytes))
        return self.agent.initialize_xfer("WRITE", local, remote, self.name, b"")

    def picked(self, spans: Spans) -> Any:  # noqa: ANN401
        """As `built`, checked against the regions too; the check that all are blocks of the list comes on top."""
        self.a.own.find(spans.src, spans.nbytes)
        self.a.links["b"].prepared.find(spans.dst, spans.nbytes)
        assert int(spans.nbytes.min()) == int(spans.nbytes.max())
        indices = []
        for at, region in ((spans.src, self.here), (spans.dst, self.there)):
            index, rest = np.divmod(at - region.base, self.block)
            assert not rest.any()
            indices.append(index.astype(np.int32))
        return self.agent.make_prepped_xfer("WRITE", self.lists[0], indices[0], self.lists[1], indices[1], b"")

    def strided(self, spans: Spans) -> Any:  # noqa: ANN401
        """For spans of one stride: a list of one row for each side, prepared for this post alone."""
        n = len(spans.nbytes)
        lists = []
        for at, side in ((spans.src, "NIXL_INIT_AGENT"), (spans.dst, self.name)):
            steps = np.diff(at)
            stride = int(steps[0]) if n > 1 else self.block
            assert (steps == stride).all()
            row = np.array([[at[0], self.block, 0, stride, n]], np.uint64)
            lists.append(self.agent.prep_xfer_dlist(side, row, "DRAM"))
        every = np.arange(n, dtype=np.int32)
        handle = self.agent.make_prepped_xfer("WRITE", lists[0], every, lists[1], every, b"")
        for prepared in lists:
            prepared.release()
        return handle

    def write(self, handle: Any) -> None:  # noqa: ANN401
        state = self.agent.transfer(handle)
        while state == "PROC":
            self.b.poll()
            state = self.agent.check_xfer_state(handle)
        assert state == "DONE"
        handle.release()

    def close(self) -> None:
        for prepared in self.lists:
            prepared.release()
        self.lists.clear()
        self.agent = None  # an agent that outlives the interpreter's end takes it down
        self.a.close()
        self.b.close()


@pytest.fixture(scope="module", params=BLOCKS, ids="{}B".format)
def bed(request: Any) -> Iterator[Bed]:  # noqa: ANN401
    bed = Bed(request.param)
    yield bed
    bed.close()


def measure(
    benchmark: Any,  # noqa: ANN401  (pytest-benchmark's fixture)
    bed: Bed,
    n: int,
    way: str,
    work: Callable[[Any], None],
    *,
    regular: bool = False,
) -> None:
    spans, make = bed.spans(n, regular=regular), getattr(bed, way)
    bed.write(make(spans))
    benchmark.group = f"{n} {'regular' if regular else 'scattered'} blocks of {bed.block} B"
    benchmark(lambda: work(make(spans)))


@pytest.mark.parametrize("way", ["built", "picked"])
@pytest.mark.parametrize("n", COUNTS)
def test_descriptors(benchmark: Any, bed: Bed, n: int, way: str) -> None:  # noqa: ANN401
    measure(benchmark, bed, n, way, lambda handle: handle.release())


@pytest.mark.parametrize("way", ["built", "picked"])
@pytest.mark.parametrize("n", COUNTS)
def test_whole_post(benchmark: Any, bed: Bed, n: int, way: str) -> None:  # noqa: ANN401
    measure(benchmark, bed, n, way, bed.write)


@pytest.mark.parametrize("way", ["built", "strided"])
@pytest.mark.parametrize("n", COUNTS)
def test_descriptors_of_one_stride(benchmark: Any, bed: Bed, n: int, way: str) -> None:  # noqa: ANN401
    measure(benchmark, bed, n, way, lambda handle: handle.release(), regular=True)
