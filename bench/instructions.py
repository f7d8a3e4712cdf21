"""The cost of the CUDA copies before any of them runs: instructions and modelled cycles per tile, from machine code.

    python -m pdstage.bench.instructions            each variant beside its budget, and what it would reach
    python -m pdstage.bench.instructions --write    the budgets, where counts fell

Needs NVRTC and the toolkit's disassembler, and no GPU. A *tile* is 2 KiB of payload moved by a warp. The count is the
longest path once around the loop that moves payload. It includes called subroutines; an inner loop counts once per
piece of a tile that it moves, or else once. Blocks under a line that says `// seldom` are left out. Kernels are those
of sm_90; of sm_100 only what it adds: accesses of 32 bytes.

Cycles are those of one warp alone on its scheduler, in order. The stalls of an instruction and what it waits for are
facts of the machine code; memory latencies are assumed (`LATENCIES`). Speed by multiprocessors follows from issue slots
or from these cycles, whichever is more, with the clock of an H200; for sm_100 it is left out. It is a model, optimistic
if warps interfere with each other, and not a measurement.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pdstage.kernels import cuda_copy, nvrtc
from pdstage.kernels.cuda_runtime import CudaRuntime
from pdstage.kernels.cuda_tables import UNIT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

BUDGETS = Path(__file__).parent / "budgets" / "instructions.json"
TILE_NBYTES, LANES, SCHEDULERS = 2048, 32, 4
CLOCK_HZ, SM_BYTES_A_CYCLE = 1.98e9, 64
# Runs that the bulk copies are modelled with: the shortest they are used for.
RUN_NBYTES = 2048
MEMORY = 1584
"""Cycles until payload arrives from memory: 0.8 us. Assumed, like these, keyed by the prefix of an instruction's name.
"""
LATENCIES = {
    "LDG.E.NA": MEMORY, "LDG.E.U": MEMORY, "LDG.E.CONSTANT": 270, "LDG.E.64.CONSTANT": 270, "LD": 40, "LDS": 30,
    "LDC": 40, "ULDC": 20, "S2": 30, "SHFL": 25, "I2F": 20, "F2I": 20, "MUFU": 20, "R2UR": 12, "SYNCS": 30,
}  # fmt: skip
OTHER_LATENCY = 15
WAYS = {"gather": cuda_copy.TO_STAGING, "scatter": cuda_copy.FROM_STAGING, "copy": cuda_copy.TO_PEER}
SHAPES = {"flat": (1, 0), "token-major": (0, 0), "head-major": (0, 1)}
_STORES = {"U8": 1, "U16": 2, "64": 8, "128": 16, "256": 32}
_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([\w.]+)\s*(.*?)\s*;\s+/\* (0x[0-9a-f]+) \*/")
_HIGH = re.compile(r"\s+/\* (0x[0-9a-f]+) \*/")
_FROM = re.compile(r'"([^"]+)", line (\d+)')
_N_BARRIERS = 6
_BEHIND = 2
"""Stages of a bulk copy's ring that are being written out: BEHIND in bulk.cu."""
_ISSUE_LOOP = 20
"""Maximal instructions of the loop in which a warp's lanes issue their bulk copies one after the other."""


class Variant(NamedTuple):
    """A kernel in the form that plans compile."""

    name: str
    source: str
    macros: dict[str, int]
    architecture: str = "sm_90"

    @property
    def bulk(self) -> bool:
        return self.source == cuda_copy.BULK_SOURCE

    @property
    def turn_nbytes(self) -> int:
        """Payload that a warp moves in one turn of its loop."""
        return self.macros["PDSTAGE_STAGE_NBYTES"] if self.bulk else LANES * 16 * self.macros["PDSTAGE_UNITS"]

    @property
    def pieces(self) -> int:
        return max(1, self.turn_nbytes // RUN_NBYTES)


def variants() -> Iterator[Variant]:
    for (way, number), (shape, (flat, head_major)) in product(WAYS.items(), SHAPES.items()):
        base = {
            "PDSTAGE_WAY": number, "PDSTAGE_FLAT": flat, "PDSTAGE_HEAD_MAJOR": head_major, "PDSTAGE_LISTED": 0,
            "PDSTAGE_MANY": 0,
        }  # fmt: skip
        yield from _copies(f"{way} {shape}", base, narrow=(0, 1))
        if way == "gather":  # several destinations: stores are a loop, counted once
            yield from _copies(f"{way} {shape} many", base | {"PDSTAGE_MANY": 1}, narrow=(0,))


def _copies(name: str, base: dict[str, int], narrow: tuple[int, ...]) -> Iterator[Variant]:
    for one in narrow:
        yield from _plain(name + " narrow" * one, base | {"PDSTAGE_NARROW": one})
    wide = base | {"PDSTAGE_NARROW": 0}
    macros = wide | {"PDSTAGE_SUM": 0} | cuda_copy.bulk_macros(CudaRuntime)
    yield Variant(f"{name} bulk", cuda_copy.BULK_SOURCE, macros)
    yield from _plain(f"{name} 32 bytes", wide, 32, "sm_100")


def _plain(name: str, base: dict[str, int], access: int = UNIT, architecture: str = "sm_90") -> Iterator[Variant]:
    for summed in (False, True):
        macros = cuda_copy.plain_macros(CudaRuntime, base["PDSTAGE_WAY"], summed=summed, access=access)
        macros |= base | {"PDSTAGE_SUM": int(summed)}
        yield Variant(name + " sum" * summed, cuda_copy.SOURCE, macros, architecture)


class Instruction(NamedTuple):
    address: int
    guarded: bool
    name: str
    targets: tuple[int, ...]
    stall: int
    sets: tuple[int, int]
    """The barriers that it opens after writing its result, and after reading its operands."""
    waits: int
    seldom: bool

    @property
    def latency(self) -> int:
        fits = [key for key in LATENCIES if self.name.startswith(key)]
        return LATENCIES[max(fits, key=len)] if fits else OTHER_LATENCY


class Block(NamedTuple):
    code: list[Instruction]
    next: tuple[int, ...]
    """The addresses at which it may continue."""


class Code:
    """The machine code of one kernel: blocks by address; loops as their blocks' addresses, by the first."""

    def __init__(self, code: list[Instruction], variant: Variant) -> None:
        self._code = code
        self.variant = variant
        self.blocks = _blocks(code)
        self.loops = _loops(self.blocks)

    @classmethod
    def of(cls, variant: Variant, sources: Path = nvrtc.SOURCES) -> Code:
        options = ("--generate-line-info",)
        image = nvrtc.compile_kernel(variant.source, variant.macros, variant.architecture, sources, options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(image)
            file.flush()
            command = [str(tool("nvdisasm")), "-c", "-hex", "-gi", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return cls(list(_parsed(text, sources)), variant)

    def turn(self) -> list[Instruction]:
        """The longest path once around the loop that moves payload, as instructions in order."""
        return self._around(max(self.loops, key=lambda at: len(self.loops[at])))

    def _around(self, header: int) -> list[Instruction]:
        body = self.loops[header]
        inside = {at: held for at, held in self.loops.items() if held < body}
        inner = {at: held for at, held in inside.items() if not any(held < other for other in inside.values())}
        home = {block: at for at, held in inner.items() for block in held}

        @cache
        def way(at: int) -> list[Instruction] | None:
            """The longest path from a block, or from the inner loop that begins there, to the end of a turn."""
            own = self._repeated(self._around(at)) if at in inner else self._straight(at)
            leaves = {to for one in inner.get(at, {at}) for to in self.blocks[one].next} - inner.get(at, set())
            ways = [way(home.get(to, to)) for to in leaves & body - {header}]
            rest = max((one for one in ways if one is not None), key=len, default=None)
            ends = header in leaves or not leaves <= body
            return None if own is None or (rest is None and not ends) else own + (rest or [])

        return way(header) or []

    def _straight(self, at: int) -> list[Instruction] | None:
        """A block with the subroutines that it calls; None for a block that runs seldom.

        A block is seldom if its end and more than half of its lines are: the compiler moves single instructions to idle
        slots.
        """
        code = self.blocks[at].code
        if 2 * sum(one.seldom for one in code) > len(code) and code[-1].seldom:
            return None
        called = [one.targets[0] for one in code if one.name.startswith("CALL")]
        return code + [one for to in called for one in self._subroutine(to)]

    def _subroutine(self, at: int) -> list[Instruction]:
        code = [one for one in self._code if one.address >= at]
        return code[: 1 + next(i for i, one in enumerate(code) if one.name.startswith("RET"))]

    def _repeated(self, code: list[Instruction]) -> list[Instruction]:
        if sum(one.name == "BRA.U.ANY" for one in code) == 1 and len(code) < _ISSUE_LOOP:
            return code * self.variant.pieces  # lane by lane
        nbytes = stored_nbytes(code)
        return code * (self.variant.turn_nbytes // nbytes if nbytes else 1)


def stored_nbytes(code: Iterable[Instruction]) -> int:
    """Payload that a warp stores through its registers."""
    stores = [one.name for one in code if one.name.startswith("STG")]
    return LANES * sum(_STORES.get(name.rpartition(".")[2], 4) for name in stores)


def _parsed(text: str, sources: Path) -> Iterator[Instruction]:
    """Parses the output of nvdisasm -c -hex -gi for a kernel of these sources."""
    labels: dict[str, int] = {}
    found: list[tuple[re.Match[str], int, bool]] = []
    waiting: list[str] = []
    tagged: dict[str, frozenset[int]] = {}
    seldom, listing_lines = False, False
    half: re.Match[str] | None = None
    for line in text.splitlines():
        if line.lstrip().startswith("//## File"):
            for path, number in _FROM.findall(line):
                source = Path(path).name
                if source not in tagged:
                    tagged[source] = _seldom(sources / source)
                seldom = (listing_lines and seldom) or int(number) in tagged[source]
                listing_lines = True
            continue
        listing_lines = False
        if label := re.match(r"([.$\w]+):", line):
            waiting.append(label[1])
        elif half is not None and (high := _HIGH.match(line)):
            found.append((half, int(high[1], 16), seldom))
            half = None
        elif one := _LINE.match(line):
            half = one
            labels.update(dict.fromkeys(waiting, int(one[1], 16)))
            waiting.clear()
    for one, high_bits, rarely in found:
        address, guard, name, operands = int(one[1], 16), one[2], one[3], one[4]
        targets = re.findall(r"[.$][.$\w]+", operands) if name.startswith(("BR", "CALL")) else []
        yield Instruction(
            address, bool(guard), name, tuple(labels[label] for label in targets if label in labels),
            high_bits >> 41 & 15, (high_bits >> 46 & 7, high_bits >> 49 & 7), high_bits >> 52 & 63, rarely,
        )  # fmt: skip


def _seldom(path: Path) -> frozenset[int]:
    """The line numbers of a source in blocks whose first line says `// seldom`."""
    found: set[int] = set()
    end = ""
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
        if line.endswith("// seldom"):
            end = line[: len(line) - len(line.lstrip())] + "}"
        if end and line.startswith(end):
            end = ""
        elif end:
            found.add(number)
    return frozenset(found)


def _blocks(code: list[Instruction]) -> dict[int, Block]:
    """The kernel's own blocks; subroutines have none."""
    addresses = [one.address for one in code]
    after = dict(pairwise(addresses))
    branches = [one for one in code if one.name.startswith("BR") and one.targets]
    ends = {one.address for one in branches} | {one.address for one in code if one.name.startswith(("EXIT", "RET"))}
    starts = {addresses[0], *(to for one in branches for to in one.targets), *(after[at] for at in ends if at in after)}
    cuts = [at for at, address in enumerate(addresses) if address in starts]
    blocks: dict[int, Block] = {}
    for first, last in zip(cuts, [*cuts[1:], len(code)], strict=True):
        held = code[first:last]
        end = held[-1]
        goes_on = end.guarded or end.name == "BRA.U.ANY" or not end.name.startswith(("BR", "EXIT", "RET"))
        following = [after[end.address]] if goes_on and end.address in after else []
        blocks[held[0].address] = Block(held, (*(end.targets if end.name.startswith("BR") else ()), *following))
    return blocks


def _loops(blocks: Mapping[int, Block]) -> dict[int, set[int]]:
    """Natural loops: a branch back to a block that every way to the branch passes, and what lies between."""
    first = min(blocks)
    dominators = {at: set(blocks) for at in blocks}
    dominators[first] = {first}
    before: dict[int, list[int]] = {at: [] for at in blocks}
    reached, todo = {first}, [first]
    while todo:
        at = todo.pop()
        for to in blocks[at].next:
            before[to].append(at)
            if to not in reached:
                reached.add(to)
                todo.append(to)
    changed = True
    while changed:
        changed = False
        for at in reached - {first}:
            held = {at} | set.intersection(*(dominators[one] for one in before[at]))
            changed |= held != dominators[at]
            dominators[at] = held
    loops: dict[int, set[int]] = {}
    for at in reached:
        for header in (to for to in blocks[at].next if to in dominators[at]):
            held, todo = loops.setdefault(header, {header}), [at]
            while todo:
                one = todo.pop()
                if one not in held:
                    held.add(one)
                    todo.extend(before[one])
    return loops


def cycles(code: list[Instruction]) -> int:
    """Of one turn of a warp that has its scheduler to itself, once the turns follow each other."""
    now, ready, ends = 0, [0] * _N_BARRIERS, [0]
    for _ in range(3):
        for one in code:
            now = max([now, *(at for barrier, at in enumerate(ready) if one.waits >> barrier & 1)])
            for barrier, latency in zip(one.sets, (one.latency, min(one.latency, OTHER_LATENCY)), strict=True):
                if barrier < _N_BARRIERS:
                    ready[barrier] = max(ready[barrier], now + latency)
            now += max(one.stall, 1)
        ends.append(now)
    return ends[-1] - ends[-2]


class Cost(NamedTuple):
    """Of a tile."""

    instructions: int
    cycles: int

    @classmethod
    def of(cls, code: Code) -> Cost:
        turn, nbytes = code.turn(), code.variant.turn_nbytes
        return cls(*(-(-n * TILE_NBYTES // nbytes) for n in (len(turn), cycles(turn))))


def modelled_gbps(variant: Variant, cost: Cost) -> float:
    """GB/s of payload by one multiprocessor of a call that is held to few: by the CTA that it runs there."""
    warps = variant.macros["PDSTAGE_THREADS"] // LANES
    by_scheduler = -(-warps // SCHEDULERS)
    tile = max(cost.cycles / by_scheduler, cost.instructions)  # from one to the next
    if variant.bulk:  # a warp waits for nothing, as long as what it holds is enough
        held = (variant.macros["PDSTAGE_STAGES"] - _BEHIND) * variant.turn_nbytes
        tile = max(tile, MEMORY * TILE_NBYTES / held / by_scheduler)
    return min(min(warps, SCHEDULERS) * TILE_NBYTES / tile, SM_BYTES_A_CYCLE) * CLOCK_HZ / 1e9


def tool(name: str) -> str | None:
    """A disassembler of the CUDA toolkit: from the PATH, or the one that Triton brings."""
    found = importlib.util.find_spec("triton")
    beside = Path(found.origin).parent / "backends/nvidia/bin" / name if found and found.origin else None
    return shutil.which(name) or (str(beside) if beside and beside.exists() else None)


def costs() -> dict[str, Cost]:
    return {one.name: Cost.of(Code.of(one)) for one in variants()}


def compiler() -> str:
    """The release of NVRTC, on which machine code depends."""
    release = nvrtc.version()
    return f"{release // 1000}.{release % 1000 // 10}"


def budgets() -> tuple[str, dict[str, Cost]]:
    """The release that the budgets are for, and each variant's."""
    held = json.loads(BUDGETS.read_text())
    release = held.pop("nvrtc")
    return release, {name: Cost(*cost) for of_one in held.values() for name, cost in of_one.items()}


def over(found: Mapping[str, Cost], allowed: Mapping[str, Cost]) -> list[str]:
    """What costs more than its budget, or has none, in words."""
    return [
        f"{name}: {cost.instructions} instructions and {cost.cycles} cycles a tile, "
        f"allowed are {allowed[name].instructions} and {allowed[name].cycles}"
        if name in allowed
        else f"{name} has no budget"
        for name, cost in found.items()
        if name not in allowed or any(is_ > may for is_, may in zip(cost, allowed[name], strict=True))
    ]


def write(found: Mapping[str, Cost]) -> None:
    """Budgets as low as what was found; one that is new begins there, and none rises."""
    release, allowed = budgets() if BUDGETS.exists() else ("", {})
    if release == compiler():
        found = {name: Cost(*map(min, cost, allowed.get(name, cost))) for name, cost in found.items()}
    architectures = {one.name: one.architecture for one in variants()}
    parts = [f'  "nvrtc": "{compiler()}"']
    for architecture in sorted(set(architectures.values()), key=len):
        mine = {name: cost for name, cost in found.items() if architectures.get(name, "sm_90") == architecture}
        lines = ",\n".join(f'    "{name}": [{cost.instructions}, {cost.cycles}]' for name, cost in mine.items())
        parts.append(f'  "{architecture}": {{\n{lines}\n  }}')
    BUDGETS.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Instructions and modelled cycles of the CUDA copies, by tile of 2 KiB."
    )
    parser.add_argument("--write", action="store_true", help="lower the budgets to what is found")
    given = parser.parse_args(arguments)
    found = costs()
    _, allowed = budgets() if BUDGETS.exists() else ("", {})
    print(f"{'variant':38} {'instr.':>7} {'budget':>7} {'cycles':>7} {'budget':>7} {'GB/s an SM, modelled':>22}")
    for one in variants():
        cost, budget = found[one.name], allowed.get(one.name, Cost(0, 0))
        gbps = f"{modelled_gbps(one, cost):23.1f}" if one.architecture == "sm_90" else ""
        print(f"{one.name:38} {cost[0]:7} {budget[0]:7} {cost[1]:7} {budget[1]:7}{gbps}")
    if given.write:
        write(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
