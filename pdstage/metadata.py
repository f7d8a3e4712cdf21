"""Metadata buffers: rows of named columns in registered memory, one row per request.

They hold memory, and record which rows belong to which rooms.

The transfer path of rows decides where they are. The usual columns are those of SGLang's MetadataBuffers
(disaggregation/utils.py, 0.5): the first output token, cached-token counts, log probabilities, data for speculative
decoding, and the room's id, by which an engine can check that a row is the room's.
"""

from __future__ import annotations

import math
import mmap
from collections import deque
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np

from pdstage import arguments
from pdstage.closing import Closing
from pdstage.columns import ITEMSIZES, Column, Columns, Placed, Shared
from pdstage.errors import PdstageError, UsageError
from pdstage.layout import Region

Held: TypeAlias = Any
"""A numpy array or a torch tensor."""

_NUMPY = frozenset(name for name in ITEMSIZES if name != "bfloat16" and not name.startswith("float8"))

WAYS = ("tcp", "rdma", "nvlink")
"""How a row is sent: in a control message; by the data transport, from memory to memory; the same, on the device."""


class RowsExhausted(PdstageError):
    """Every row is allocated."""


class RowInUse(UsageError):
    """A row was freed or given to a room while a peer may still write it, or a write still reads it."""


class RowNotAllocated(UsageError):
    """A row was freed twice, or belongs to other buffers."""


def usual_columns(
    hidden_size: int = 0, hidden_dtype: str = "bfloat16", top_logprobs: int = 128, speculative: bool = False
) -> tuple[Column, ...]:
    """The columns that most engines need: the first token, cached tokens (total, device, host, storage), its log
    probability and the `top_logprobs` largest; a draft model's start state if `speculative`; hidden states if
    `hidden_size`.
    """
    columns = [
        Column("output_ids", "int32", (16,), required=True),
        Column("cached_tokens", "int32", (16,)),
        Column("output_token_logprobs_val", "float32", (16,)),
        Column("output_token_logprobs_idx", "int32", (16,)),
        Column("bootstrap_room", "uint64", (8,)),
    ]
    if top_logprobs:
        columns += [
            Column("output_top_logprobs_val", "float32", (top_logprobs,)),
            Column("output_top_logprobs_idx", "int32", (top_logprobs,)),
        ]
    if speculative:
        columns += [Column("output_topk_p", "float32", (16,)), Column("output_topk_index", "int64", (16,))]
    if hidden_size:
        columns.append(Column("output_hidden_states", hidden_dtype, (hidden_size,)))
    return tuple(columns)


class AuxRow:
    """One request's row. `row[name]` is a view of a column, shaped; `row[name] = value` fills its first elements.

    Views are numpy arrays in host memory and tensors on a device; `tensor(name)` is a tensor in both. A received row
    has only the columns in `names`, which both sides have.
    """

    __slots__ = ("_at", "memory", "names", "number")

    def __init__(self, columns: Iterable[Placed], memory: Held, number: int = -1) -> None:
        self._at = {column.name: column for column in columns}
        self.memory = memory
        self.names = tuple(self._at)
        self.number = number

    def __contains__(self, name: str) -> bool:
        return name in self._at

    def __getitem__(self, name: str) -> Held:
        column = self._column(name)
        if not isinstance(self.memory, np.ndarray):
            return self.tensor(name)
        if column.dtype not in _NUMPY:
            raise UsageError(f"column {name!r} is {column.dtype}, which numpy lacks", remedy=f"use tensor({name!r})")
        return self._bytes(column).view(column.dtype).reshape(column.shape)

    def __setitem__(self, name: str, value: Held) -> None:
        """`value`: a number, a sequence, an array or a tensor, cast to the column's type, of at most its elements."""
        column, is_tensor = self._column(name), hasattr(value, "data_ptr")
        flat = value.reshape(-1) if is_tensor else np.asarray(value).reshape(-1)
        if len(flat) > (most := math.prod(column.shape)):
            raise UsageError(f"{len(flat)} values for column {name!r}", remedy=f"it has room for {most}")
        if isinstance(self.memory, np.ndarray) and column.dtype in _NUMPY and not is_tensor:
            self[name].reshape(-1)[: len(flat)] = flat
        else:
            import torch  # noqa: PLC0415

            self.tensor(name).view(-1)[: len(flat)].copy_(flat if is_tensor else torch.as_tensor(flat))

    def tensor(self, name: str) -> Held:
        """A column as a tensor over the same memory."""
        import torch  # noqa: PLC0415

        column = self._column(name)
        held = self._bytes(column)
        flat = torch.from_numpy(held) if isinstance(held, np.ndarray) else held
        return flat.view(getattr(torch, column.dtype)).view(column.shape)

    def read(self) -> memoryview:
        """The row's bytes in host memory, copied there from a device."""
        here: Held = self.memory if isinstance(self.memory, np.ndarray) else self.memory.cpu().numpy()
        return memoryview(here).cast("B")

    def take(self, packed: bytes, shared: Shared) -> None:
        """Fills the common columns from a message."""
        for column, data in shared.unpack(packed):
            array = np.frombuffer(data, np.uint8)
            if isinstance(self.memory, np.ndarray):
                self._bytes(column)[:] = array
            else:
                import torch  # noqa: PLC0415

                self._bytes(column).copy_(torch.from_numpy(array.copy()))

    def of(self, columns: Iterable[Placed]) -> AuxRow:
        """The same row, with only these columns."""
        return AuxRow(columns, self.memory, self.number)

    def _column(self, name: str) -> Placed:
        if name not in self._at:
            raise UsageError(f"this row has no column {name!r}", remedy=f"it has {', '.join(self.names)}")
        return self._at[name]

    def _bytes(self, column: Placed) -> Held:
        return self.memory[column.offset : column.offset + column.nbytes]


class MetadataBuffers(Closing):
    """`n_rows` rows of `columns` in one piece of memory on `device` ("cpu", "cuda:0").

    The engine *allocates* a row. It is *lent* while a room has it: from `bind` or `finish` until that room is
    `released`. After that the engine frees it. One thread uses the buffers at a time, apart from the nodes' own
    accesses. A context manager; the node goes inside it.
    """

    def __init__(self, columns: Iterable[Column], n_rows: int, device: str = "cpu") -> None:
        """Raises `UsageError` for columns or a number of rows that cannot be."""
        self.columns = Columns(columns)
        n_rows = arguments.integer("n_rows", n_rows, low=1, high=1 << 30)
        kind, _, number = arguments.text("device", device).partition(":")
        if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
            raise UsageError(f"device {device!r:.64} of aux rows", remedy='give "cpu" or "cuda:0"')
        self.n_rows, self.row_nbytes, self.device = n_rows, self.columns.row_nbytes, device
        nbytes = n_rows * self.row_nbytes
        if kind == "cpu":
            self._memory: Held = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
            base = self._memory.ctypes.data
        else:
            import torch  # noqa: PLC0415

            self._memory = torch.zeros(nbytes, dtype=torch.uint8, device=f"{kind}:{number or 0}")
            base = self._memory.data_ptr()
        self.region = Region(base, nbytes, kind, int(number or 0))
        self._free = deque(range(n_rows))
        self._allocated: dict[int, Held] = {}
        self._lent: set[int] = set()
        self._closed = False

    def close(self) -> None:
        """Gives out no more rows. The memory is freed with the last row that is held, or that a room has.

        Close the node first. May be repeated.
        """
        self._free.clear()
        self._closed = True
        if not self._lent:  # else a room's peer may still write a row
            self._memory = None

    @property
    def n_free(self) -> int:
        """Rows that `allocate` can still give."""
        return len(self._free)

    def allocate(self) -> AuxRow:
        """A row for one request, with its previous content. Raises `RowsExhausted`."""
        if self._closed:
            raise UsageError("these metadata buffers are closed", remedy="make new ones")
        if not self._free:
            raise RowsExhausted(f"all {self.n_rows} aux rows are allocated", remedy="free rows of rooms released")
        number = self._free.popleft()
        start = number * self.row_nbytes
        memory = self._allocated[number] = self._memory[start : start + self.row_nbytes]
        return AuxRow(self.columns.placed, memory, number)

    def free(self, row: AuxRow) -> None:
        """Raises `RowNotAllocated` for one that is free, `RowInUse` for one whose room is not released."""
        self._check(row)
        if row.number in self._lent:
            raise RowInUse(f"aux row {row.number} is in use by a room", remedy="free it once the room is released")
        del self._allocated[row.number]
        if not self._closed:
            self._free.append(row.number)

    def lend(self, row: AuxRow) -> None:
        """A room has the row from now on. Raises the same as `free`."""
        self._check(row)
        if row.number in self._lent:
            raise RowInUse(f"aux row {row.number} is in use by a room", remedy="give each room a row of its own")
        self._lent.add(row.number)

    def give_back(self, row: AuxRow) -> None:
        """The room that had the row is released."""
        self._lent.discard(row.number)

    def address(self, row: AuxRow) -> int:
        """The row's address, in the memory of `region`."""
        return self.region.base + row.number * self.row_nbytes

    def _check(self, row: AuxRow) -> None:
        if row.memory is not self._allocated.get(row.number):  # its number may be another row's by now
            raise RowNotAllocated(f"aux row {row.number} is not allocated", remedy="allocate a row, and free it once")
