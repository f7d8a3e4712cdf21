"""Where Triton's kernels run: on a GPU through torch, or in host memory through Triton's interpreter.

Imports torch and triton only when one of the two is created.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from .arena import Table
from .device import ordinal
from .index_ring import IndexRing
from .torch_runtime import TorchRuntime

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ..plan.tables import Int64s
    from .index_ring import Slot

# The largest block; with that many threads ptxas limits itself to 64 registers.
THREADS = 1024
_INT32 = frozenset({
    "n_groups", "bits", "start", "stop", "peer_bits", "peer_start", "n_views", "rows_per_item", "outer_rows",
    "shards", "segs", "n_values", "tokens_per_row",
})  # fmt: skip


class Variant(NamedTuple):
    """The constants that a kernel is compiled for: those of `triton_kernels.copy_kernel`, by name."""

    WAY: int
    HEAD_MAJOR: bool
    ACCESS: int
    SEGS: bool
    SHARDS: bool
    LEVELS: bool
    PEER_LEVELS: bool
    CHECKSUM: bool
    UNIT: int
    UNITS: int


class ConvertVariant(NamedTuple):
    """The constants of `triton_convert_kernels.convert_kernel`, by name."""

    WAY: int
    KIND: int
    HOLDS: int
    BLOCK: int
    CELLS: int
    ALIGNED: bool


class SumVariant(NamedTuple):
    """The constants of `triton_sum_kernels.sum_kernel`, by name."""

    ACCESS: int
    UNIT: int
    UNITS: int


AnyVariant: TypeAlias = Variant | ConvertVariant | SumVariant


def _kernel_of(variant: AnyVariant) -> Any:  # noqa: ANN401  (triton's, which has no types)
    if isinstance(variant, SumVariant):
        from .triton_sum_kernels import sum_kernel  # noqa: PLC0415

        return sum_kernel
    if isinstance(variant, ConvertVariant):
        from .triton_convert_kernels import convert_kernel  # noqa: PLC0415

        return convert_kernel
    from .triton_kernels import copy_kernel  # noqa: PLC0415

    return copy_kernel


def build(variant: AnyVariant, target: Any) -> Any:  # noqa: ANN401  (triton's, which has no types)
    """The kernel compiled for `target`, a `GPUTarget`; no GPU is needed.

    Only `variant` and the types of the arguments decide what is compiled. `triton.jit` by itself would look at each
    argument's value (1, a multiple of 16), and compile again on the hot path when one differs.
    """
    import triton  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    kernel, constants = _kernel_of(variant), variant._asdict()
    types = {name: "i32" if name in _INT32 else "i64" for name in kernel.arg_names}
    source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constants, {})
    options = {"num_warps": THREADS // target.warp_size, "num_stages": 1, "enable_fp_fusion": False}
    return triton.compile(source, target=target, options=options)


class Gpu:
    """One GPU of this process; its kernels and its ring of lists are shared by all plans on it.

    `n_programs` of `threads` threads fill it; `name` is the device name of a list on it.
    """

    threads = THREADS

    def __init__(self, name: str) -> None:
        import torch  # noqa: PLC0415
        import triton  # noqa: PLC0415

        ordinal(name, torch.cuda.device_count())
        self.name = name
        self.runtime = TorchRuntime(name)
        self._ring = IndexRing(self.runtime)
        with self.runtime.current():
            self._target = triton.runtime.driver.active.get_current_target()
        self._kernels: dict[AnyVariant, Any] = {}
        self.n_programs = torch.cuda.get_device_properties(self.runtime.device).multi_processor_count

    def put(self, table: Int64s) -> Table:
        """A copy of `table` on the device, which lives as long as the returned object."""
        return self.runtime.tables.put(np.ascontiguousarray(table).reshape(-1).view(np.uint8))

    def prepare(self, variant: AnyVariant) -> None:
        """Compiles a kernel, so that no launch waits for a compiler."""
        if variant not in self._kernels:
            kernel = build(variant, self._target)
            with self.runtime.current():
                kernel.run  # noqa: B018  (loads the module, which the first launch would otherwise do)
            self._kernels[variant] = kernel

    def stream(self, stream: object) -> int:
        """The handle of a caller's stream."""
        return self.runtime.stream(stream)

    @contextmanager
    def call(self, tables: Iterable[Held], lists: Sequence[NDArray[Any]], stream: int) -> Iterator[list[int]]:
        """Around a call's launches, which read `tables`. Yields the addresses of copies of `lists`, valid inside."""
        held = [table for table in dict.fromkeys(tables) if isinstance(table, Table)]
        with self.runtime.current():
            for table in held:
                table.before(stream)
            slot, placed = self._upload(lists, stream)
            try:
                yield placed
            finally:  # a launch may be in flight even if a later one failed
                for table in held:
                    table.after(stream)
                if slot is not None:
                    self._ring.give(slot, stream)

    def _upload(self, lists: Sequence[NDArray[Any]], stream: int) -> tuple[Slot | None, list[int]]:
        if not lists:
            return None, []
        return self._ring.put([(one.__array_interface__["data"][0], one.nbytes) for one in lists], stream)

    def launch(self, variant: AnyVariant, programs: int, arguments: tuple[int, ...], stream: int) -> None:
        """Called inside `call`."""
        self.prepare(variant)
        self._kernels[variant][programs, 1, 1](*arguments, *variant, stream=stream)


class HostTable:
    """A table in host memory."""

    def __init__(self, array: Int64s) -> None:
        self._array = array
        self.ptr: int = array.__array_interface__["data"][0]


class Interpreter:
    """Host memory, one program after another; about a millisecond each."""

    name = "interpreter"
    runtime = None
    n_programs = 3
    threads = 128

    def put(self, table: Int64s) -> HostTable:
        return HostTable(np.ascontiguousarray(table))

    def prepare(self, variant: AnyVariant) -> None:
        pass

    def stream(self, stream: object) -> int:
        return 0

    @contextmanager
    def call(self, tables: Iterable[Held], lists: Sequence[NDArray[Any]], stream: int) -> Iterator[list[int]]:
        copies = [items.copy() for items in lists]
        yield [copy.__array_interface__["data"][0] for copy in copies]

    def launch(self, variant: AnyVariant, programs: int, arguments: tuple[int, ...], stream: int) -> None:
        _kernel_of(variant)[programs, 1, 1](*arguments, *variant)


Held: TypeAlias = Table | HostTable
Device: TypeAlias = Gpu | Interpreter


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which must be enabled before triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def device_of(name: str) -> Device:
    """The device of this name ("cuda:1"); "cpu" is the interpreter."""
    return Interpreter() if name == "cpu" else Gpu(name)
