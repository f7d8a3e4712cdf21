"""Rooms end to end between two processes on a GPU: gathered, written and scattered, by each available transport.

Prefill holds tokens before heads in pages of 16, decode heads before tokens in pages of 32. The bytes of the first
rooms are compared. On the CPU it runs with small sizes.

`pdstage bench rooms --device D` takes "cuda:0", "cuda:0,cuda:1" (prefill on the first), "cpu", or, in a checkout,
"double": a GPU's driver over host memory with the costs of an H200 (`COSTS`), for the host's part of the path. There
large copies take their time and move nothing; the bytes of smaller rooms are compared first, by the same kernels.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pdstage.errors import UsageError

from . import shapes
from .bed import Bed
from .harness import Measured, Row, Spread, rate, seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TRANSPORTS = ("local", "nixl")
PROGRESS = ("thread", "inline")
ROOM_NBYTES = 64 << 20
_LARGE_NBYTES = 512 << 20
_STAGING_NBYTES = 256 << 20
_CHECKED_NBYTES = 2 << 20
LAYERS, HEADS, WIDTH = 16, 8, 256
TOKEN_NBYTES = 2 * LAYERS * HEADS * WIDTH
AT_ONCE, PREFILL_PAGE, DECODE_PAGE = 8, 16, 32
DOUBLE = "double"
COSTS = {
    "timed": 1, "moves": 64 << 10, "copy_us": 10, "copy_gbps": 283, "us:cuLaunchKernel": 25, "us:cuMemcpyAsync": 25,
    "us:cuEventQuery": 2,
}  # fmt: skip
"""Of the double's settings: a kernel of 8 multiprocessors, as an H200's."""


class Case(NamedTuple):
    """Rooms of `nbytes` each, over `transport` between nodes that make progress so. `decode` is the device of the other
    rank, "" the bed's. Not `moves`: the device moves no bytes that could be compared.
    """

    transport: str
    progress: str = PROGRESS[0]
    nbytes: int = ROOM_NBYTES
    decode: str = ""
    moves: bool = True

    def __str__(self) -> str:
        return f"rooms, {self.transport}, {self.progress}"


def run(quick: bool, device: str) -> Measured:
    """`rows` on any device. Raises `UsageError` where there is no double of one."""
    if device != DOUBLE:
        prefill, _, decode = device.partition(",")
        bed = Bed(prefill)
        return Measured(list(rows(bed, quick, decode=decode)), {}, bed.left_out, [])
    root = Path(__file__).resolve().parents[1]
    if not (root / "tests/cuda_double").is_dir():
        raise UsageError("no double of a device here", remedy="run it in a checkout", field="device")
    sys.path.append(str(root))
    cuda_double = importlib.import_module("tests.cuda_double")
    if why := cuda_double.missing():
        raise UsageError(f"no double of a device here: {why}", remedy="see CONTRIBUTING.md", field="device")
    with ExitStack() as held:
        os.environ |= cuda_double.everywhere(Path(held.enter_context(tempfile.TemporaryDirectory())))
        device_double = cuda_double.install()
        importlib.import_module("tests.cuda_double.torch_cuda").install()
        bed = Bed("cuda:0")
        for transport in [
            one for one, missing in bed.transports_missing().items() if one in TRANSPORTS and not missing
        ]:
            with _rooms(bed, Case(transport, nbytes=_CHECKED_NBYTES)) as seconds_of:
                seconds_of(1, check=True)
        os.environ["CUDA_DOUBLE"] = ",".join(f"{name}={value}" for name, value in COSTS.items())
        for name, value in COSTS.items():
            device_double[name] = value
        return Measured(list(rows(bed, quick, moves=False)), {"double": dict(COSTS)}, bed.left_out, [])


def rows(bed: Bed, quick: bool, **of_all: Any) -> Iterator[Row]:  # noqa: ANN401
    """By transport and by who does the work: GB/s of one room, and of several at once, beside a copy; the time of one
    page; and how long the first rooms of two nodes take. `of_all` cases: fields of `Case`.
    """
    for package in ("msgspec", "zmq"):
        if importlib.util.find_spec(package) is None:
            bed.left_out.append(f"rooms: {package} is not installed")
            return
    failed = []
    for case in [case._replace(**of_all) for case in _cases(bed, quick)]:
        try:
            yield from of(bed, case, 3 if quick else 9)
        except (RuntimeError, TimeoutError) as error:  # go on with the others' numbers
            failed.append(f"{case}: {error}")
    if failed:
        raise RuntimeError("; ".join(failed))


def _cases(bed: Bed, quick: bool) -> list[Case]:
    """Small rooms by everybody, large ones by a thread."""
    missing = bed.transports_missing()
    bed.left_out += [f"rooms, {transport}: {missing[transport]}" for transport in TRANSPORTS if missing[transport]]
    small, *large = sorted({bed.sized(ROOM_NBYTES), bed.sized(_LARGE_NBYTES)})
    here = [transport for transport in TRANSPORTS if not missing[transport]]
    cases = [Case(transport, progress, small) for transport in here for progress in PROGRESS]
    return cases + [Case(transport, nbytes=nbytes) for nbytes in large for transport in here if not quick]


def of(bed: Bed, case: Case, repeats: int) -> Iterator[Row]:
    """The rows of one case. Raises `RuntimeError` where other bytes arrive than were sent."""
    with _rooms(bed, case) as seconds:
        first = [seconds(1, check=case.moves) for _ in range(3)]
        took = Spread.of([seconds(1) for _ in range(repeats)])
        yield _first_row(case, case.nbytes, first, took)
        yield _rate_row(bed, case, "a room", case.nbytes, took)
        if case.nbytes <= ROOM_NBYTES:
            several = [seconds(AT_ONCE) for _ in range(repeats + 1)][1:]
            yield _rate_row(bed, case, f"{AT_ONCE} rooms at once", AT_ONCE * case.nbytes, Spread.of(several))
            page = min(DECODE_PAGE, case.nbytes // TOKEN_NBYTES)
            pages = [seconds(1, page) for _ in range(4 * repeats + 1)][1:]
            yield _latency_row(bed, case, page * TOKEN_NBYTES, Spread.of(pages))


@contextlib.contextmanager
def _rooms(bed: Bed, case: Case) -> Iterator[Callable[..., float]]:
    """Both processes: seconds of so many rooms at once, from the ask to the last Success."""
    from . import kv_transfer as kv  # noqa: PLC0415  (what nodes need)
    from .sides import Fabric  # noqa: PLC0415

    model = shapes.Model("rooms", shapes.kv(range(LAYERS), HEADS, WIDTH), PREFILL_PAGE)
    sizes = (AT_ONCE,) if case.nbytes <= ROOM_NBYTES else (1,)
    burst = kv.Case(
        model, case.nbytes // TOKEN_NBYTES, kv.Kept(1, PREFILL_PAGE), kv.Kept(1, DECODE_PAGE, heads_first=True), sizes
    )
    options = {"progress": case.progress, "staging_nbytes": _STAGING_NBYTES}
    fabric = Fabric(case.transport, case.transport, {})
    with kv.Bed(burst, fabric, bed.device, far=case.decode, options=options) as both:
        yield lambda n, tokens=0, check=False: both.seconds("staged", n, tokens, check=check, asked=True)


def _first_row(case: Case, nbytes: int, first: list[float], later: Spread) -> Row:
    return Row(
        name=f"{case}: the first room of {nbytes / 2**20:.0f} MiB",
        value=first[0] * 1e6,
        baseline=later.median * 1e6,
        unit="us",
        better="lower",
        detail=f"second {first[1] * 1e6:.0f}, third {first[2] * 1e6:.0f} us; baseline: later ones",
        point={**_point(case, "first", nbytes), "us": [round(one * 1e6) for one in first]},
    )


def _rate_row(bed: Bed, case: Case, what: str, nbytes: int, took: Spread) -> Row:
    return rate(
        f"{case}: {what} of {nbytes / 2**20:.0f} MiB in all", nbytes, took, _copied(bed, nbytes),
        "from the ask to Success, between two processes on one GPU; baseline: one copy of as many bytes",
        point=_point(case, what, nbytes),
    )  # fmt: skip


def _latency_row(bed: Bed, case: Case, nbytes: int, took: Spread) -> Row:
    copied = _copied(bed, nbytes)
    return Row(
        name=f"{case}: a room of one page",
        value=took.median * 1e6,
        baseline=copied.median * 1e6,
        unit="us",
        better="lower",
        detail=f"{nbytes / 2**20:.1f} MiB, from the ask to Success; p99 {took.p99 * 1e6:.0f} us; baseline: one copy",
        point=_point(case, "one page", nbytes),
        quartiles=(took.quartiles[0] * 1e6, took.quartiles[1] * 1e6),
    )


def _point(case: Case, what: str, nbytes: int) -> dict[str, object]:
    of_case = {"transport": case.transport, "progress": case.progress}
    return {"table": "rooms", **of_case, "what": what, "nbytes": nbytes}


def _copied(bed: Bed, nbytes: int) -> Spread:
    """One copy of as many bytes, as who waits for it sees it."""
    source, target = bed.memory(nbytes), bed.memory(nbytes)

    def copy() -> None:
        target.copy_(source)
        bed.wait()

    copy()
    return Spread.of([seconds(copy) for _ in range(5)])
