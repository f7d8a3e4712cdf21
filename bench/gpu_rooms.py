"""Rooms end to end between two processes on a GPU: gathered, written and scattered, by each available transport.

Prefill holds tokens before heads in pages of 16, decode heads before tokens in pages of 32. The bytes of the first room
are compared. On the CPU it runs with small sizes.

`pdstage bench rooms --device D` takes "cuda:0", "cuda:0,cuda:1" (prefill on the first), "cpu", or, in a checkout,
"double": a GPU's driver over host memory with the costs of an H200 (`COSTS`), for the host's part of the path. There
large copies take their time and move nothing; the bytes of smaller rooms are compared first, by the same kernels.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from pdstage.errors import UsageError

from .bed import Bed, Spread
from .harness import Measured, Row, seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .ranks import Rank

TRANSPORTS = ("local", "nixl")
PROGRESS = ("thread", "inline")
ROOM_NBYTES = 64 << 20
_LARGE_NBYTES = 512 << 20
_STAGING_NBYTES = 256 << 20
_HOST_PIECE_NBYTES = 16 << 20
_CHECKED_NBYTES = 2 << 20
DOUBLE = "double"
COSTS = {
    "timed": 1, "moves": 64 << 10, "copy_us": 10, "copy_gbps": 283, "us:cuLaunchKernel": 25, "us:cuMemcpyAsync": 25,
    "us:cuEventQuery": 2,
}  # fmt: skip
"""Of the double's settings: a kernel of 8 multiprocessors, as an H200's."""


class Case(NamedTuple):
    """Rooms of `nbytes` each. `prefill` are more options of its node, `decode` the device of the other, "" the bed's.
    Not `moves`: the device moves no bytes that could be compared.
    """

    transport: str
    progress: str = PROGRESS[0]
    nbytes: int = ROOM_NBYTES
    prefill: Mapping[str, object] = MappingProxyType({})
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
            check(bed, Case(transport, nbytes=_CHECKED_NBYTES))
        os.environ["CUDA_DOUBLE"] = ",".join(f"{name}={value}" for name, value in COSTS.items())
        for name, value in COSTS.items():
            device_double[name] = value
        return Measured(list(rows(bed, quick, moves=False)), {"double": dict(COSTS)}, bed.left_out, [])


def rows(bed: Bed, quick: bool, **of_all: Any) -> Iterator[Row]:  # noqa: ANN401
    """By transport and by who does the work: GB/s of one room, and of several at once, beside a copy; the time of one
    page; and how long the first rooms of two nodes take. `of_all` cases: fields of `Case`.
    """
    if bed.lacks("rooms", ("msgspec", "zmq")):
        return
    failed = []
    for case in [case._replace(**of_all) for case in _cases(bed, quick)]:
        try:
            yield from of(bed, case, 3 if quick else 9)
        except (RuntimeError, TimeoutError) as error:  # go on with the others' numbers
            failed.append(f"{case}: {error}")
    if failed:
        raise RuntimeError("; ".join(failed))


def pieces(bed: Bed, quick: bool) -> Iterator[Row]:
    """Rooms in pieces by the rate of the GPU's copies, beside rooms in pieces by the host's, of 16 MiB at most."""
    if bed.lacks("pieces", ("msgspec", "zmq")):
        return
    with tempfile.TemporaryDirectory() as folder:
        for case in _cases(bed, quick):
            if case.progress != PROGRESS[0]:
                continue
            by_host = case._replace(prefill=_by_host(case.transport, Path(folder, case.transport)))
            both = [list(of(bed, one, 2 if quick else 4)) for one in (by_host, case)]
            for base, row in zip(*both, strict=True):
                yield replace(
                    row, name=f"pieces, {row.name}", baseline=base.value, baseline_quartiles=base.quartiles,
                    detail="by the rate of the GPU's copies; baseline: by the host's",
                    point={**row.point, "table": "pieces"},
                )  # fmt: skip


def _cases(bed: Bed, quick: bool) -> list[Case]:
    """Small rooms by everybody, large ones by a thread."""
    missing = bed.transports_missing()
    bed.left_out += [f"rooms, {transport}: {missing[transport]}" for transport in TRANSPORTS if missing[transport]]
    small, *large = sorted({bed.sized(ROOM_NBYTES), bed.sized(_LARGE_NBYTES)})
    here = [transport for transport in TRANSPORTS if not missing[transport]]
    cases = [Case(transport, progress, small) for transport in here for progress in PROGRESS]
    return cases + [Case(transport, nbytes=nbytes) for nbytes in large for transport in here if not quick]


def _by_host(transport: str, file: Path) -> dict[str, object]:
    """Options by which a device's copies cost what the host's do."""
    from pdstage.manager.calibration import Calibration  # noqa: PLC0415  (what nodes need)
    from pdstage.plan.cost import CostModel  # noqa: PLC0415
    from pdstage.protocol.config import Config  # noqa: PLC0415
    from pdstage.transport import open_transport  # noqa: PLC0415

    with open_transport(transport) as opened:
        traits = opened.traits
    cost = CostModel.linear(traits.bytes_per_s, traits.descriptor_s, traits.post_s)
    where = {"made_at": "", "prefill_host": "", "decode_host": ""}
    Calibration(version=1, **where, transports={traits.name: cost}).write(file)
    return {"calibration": str(file), "config": Config(chunk_nbytes=_HOST_PIECE_NBYTES)}


def of(bed: Bed, case: Case, repeats: int) -> Iterator[Row]:
    """The rows of one case. Raises `RuntimeError` where other bytes arrive than were sent."""
    from .gpu_room_ranks import AT_ONCE, DECODE_PAGE, TOKEN_NBYTES  # noqa: PLC0415  (what nodes need)

    tokens = case.nbytes // TOKEN_NBYTES
    page_tokens = min(DECODE_PAGE, tokens)
    with _ranks(bed, case) as (prefill, decode):
        first = [_first(prefill, decode, tokens, case.moves)]
        first += [_run(prefill, decode, (name,), tokens)[0] for name in ("second", "third")]
        took = [_run(prefill, decode, range(1), tokens)[0] for _ in range(repeats)]
        yield _first_row(case, tokens * TOKEN_NBYTES, first, Spread.of(took))
        yield _rate_row(bed, case, "a room", tokens * TOKEN_NBYTES, Spread.of(took))
        took = [_run(prefill, decode, range(AT_ONCE), tokens)[0] for _ in range(repeats + 1)][1:]
        yield _rate_row(bed, case, f"{AT_ONCE} rooms at once", AT_ONCE * tokens * TOKEN_NBYTES, Spread.of(took))
        if case.nbytes <= ROOM_NBYTES:
            took = [_run(prefill, decode, range(1), page_tokens)[0] for _ in range(4 * repeats + 1)][1:]
            yield _latency_row(bed, case, page_tokens * TOKEN_NBYTES, Spread.of(took))


def check(bed: Bed, case: Case) -> None:
    """One room of the case. Raises `RuntimeError` where other bytes arrive than were sent."""
    from .gpu_room_ranks import TOKEN_NBYTES  # noqa: PLC0415  (what nodes need)

    with _ranks(bed, case) as (prefill, decode):
        _first(prefill, decode, case.nbytes // TOKEN_NBYTES)


@contextlib.contextmanager
def _ranks(bed: Bed, case: Case) -> Iterator[tuple[Rank, Rank]]:
    """Prefill's and decode's processes."""
    from pdstage.control.bootstrap import BootstrapServer  # noqa: PLC0415

    from .gpu_room_ranks import TOKEN_NBYTES, Decode, Prefill  # noqa: PLC0415  (what nodes need)
    from .ranks import Rank  # noqa: PLC0415

    tokens = case.nbytes // TOKEN_NBYTES
    both = {
        "transport": case.transport, "progress": case.progress, "staging_nbytes": _STAGING_NBYTES, "path": "staged"
    }  # fmt: skip
    with BootstrapServer() as server:
        prefill = Rank(Prefill, server.address, bed.device, tokens, {**both, **case.prefill})
        decode = Rank(Decode, server.address, case.decode or bed.device, tokens, both)
        try:
            yield prefill.ready(), decode.ready()
        finally:
            decode.close()
            prefill.close()


def _first(prefill: Rank, decode: Rank, tokens: int, moves: bool = True) -> float:
    """Seconds of the first room of two nodes. `moves`: the device moves its bytes, so that they are compared."""
    took_s, is_right = _run(prefill, decode, ("first",), tokens)
    if moves and not is_right:
        raise RuntimeError("a room arrived with other bytes than were sent")
    return took_s


def _run(prefill: Any, decode: Any, names: Any, tokens: int) -> tuple[float, bool]:  # noqa: ANN401
    """Seconds from requesting all rooms to the last one's Success, and whether the first arrived unchanged."""
    names = [f"{name} {time.monotonic_ns()}" for name in names]
    prefill.begin("give", names, tokens)
    found: tuple[float, bool] = decode.call("take", names, tokens)
    prefill.result()
    return found


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
    copied = _copied(bed, nbytes)
    return Row(
        name=f"{case}: {what} of {nbytes / 2**20:.0f} MiB in all",
        value=nbytes / took.median / 1e9,
        baseline=nbytes / copied.median / 1e9,
        unit="GB/s",
        detail="from the ask to Success, between two processes on one GPU; baseline: one copy of as many bytes",
        point=_point(case, what, nbytes),
        quartiles=took.rates(nbytes),
        baseline_quartiles=copied.rates(nbytes),
    )


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
