"""An engine's aux rows: filled anew whenever one is free, so that whoever writes or reads a free one is found out."""

from __future__ import annotations

import random

import numpy as np

from pdstage import AuxRow, Column, MetadataBuffers
from pdstage.metadata import RowInUse
from tests.chaos import truth

N_ROWS = 32


def make_rows() -> MetadataBuffers:
    return MetadataBuffers([Column("aux", "uint8", (truth.AUX_NBYTES,))], N_ROWS)


class Rows:
    def __init__(self, held: MetadataBuffers, rng: random.Random) -> None:
        self._held, self._rng = held, rng
        self._free: dict[int, tuple[np.ndarray, int]] = {}
        """By number: the memory of rows that were given back, and the byte they must hold."""

    def take(self) -> AuxRow | None:
        """A row for every other room, while there are any; the others' aux is bytes."""
        if not self._held.n_free or self._rng.random() < 0.5:
            return None
        row = self._held.allocate()
        self._free.pop(row.number, None)
        return row

    def give_back(self, row: AuxRow) -> list[str]:
        try:
            self._held.free(row)
        except RowInUse as error:
            return [f"a room is released, and not its row: {error}"]
        byte = self._rng.randrange(256)
        row.memory[:] = byte
        self._free[row.number] = (row.memory, byte)
        return []

    def sweep(self) -> list[str]:
        bad = [number for number, (memory, byte) in self._free.items() if not (memory == byte).all()]
        return [f"aux row {number} was written while it was free" for number in bad]


def read(aux: bytes | AuxRow | None) -> bytes | None:
    return aux["aux"].tobytes() if isinstance(aux, AuxRow) else aux
