"""Staged or direct: the cost of each path in seconds.

The numbers come from a transport's traits or from a calibration.
"""

from __future__ import annotations

import math
from bisect import bisect_left

from msgspec import Struct

from pdstage.errors import UsageError


class CostModel(Struct, frozen=True, forbid_unknown_fields=True):
    """The cost of bytes between two hosts: seconds, and bytes per second.

    A write takes `post_s` plus the time of its descriptors. `descriptors` gives the time of one descriptor by its
    length, as (bytes, seconds) with rising bytes. Between two points it is linear; below the first it is constant;
    beyond the last it is proportional. One line does not fit them all, since fabrics change their protocol with the
    length: NIXL over TCP takes longer for 64 KiB than for twice 32 KiB. A single descriptor from a send buffer that was
    just filled moves `bulk_bytes_per_s` (None: by `descriptors`). `gather_*` and `scatter_*` are the copies' bytes per
    second and seconds per run. `lease_s` is the constant extra time of a staged transfer; `chunk_s` is what each of its
    chunks adds, its post included. `overlap`, from 0 to 1, is the share of the shorter stages that is hidden behind the
    longest one, of other chunks and rooms. It is 1 if gather, write and scatter each have their own processor or card,
    and 0 if they take turns.

    All of it assumes several rooms in flight: the choice hardly matters to an idle node.

    Raises `UsageError`, naming the number, for an impossible number.
    """

    descriptors: tuple[tuple[int, float], ...]
    post_s: float
    bulk_bytes_per_s: float | None = None
    gather_bytes_per_s: float = 4e9
    gather_run_s: float = 15e-9
    scatter_bytes_per_s: float = 4e9
    scatter_run_s: float = 15e-9
    lease_s: float = 200e-6
    chunk_s: float = 120e-6
    overlap: float = 0.5

    @classmethod
    def linear(cls, bytes_per_s: float, descriptor_s: float, post_s: float) -> CostModel:
        """For a transport that was not measured: a descriptor of b bytes takes `descriptor_s + b / bytes_per_s`."""
        far = 1 << 40
        return cls(((0, descriptor_s), (far, descriptor_s + far / bytes_per_s)), post_s)

    def __post_init__(self) -> None:
        lengths = [nbytes for nbytes, _ in self.descriptors]
        if not lengths or lengths != sorted(set(lengths)) or lengths[0] < 0 or lengths[-1] < 1:
            raise UsageError(
                f"descriptors are of {lengths} bytes",
                remedy="give (bytes, seconds) with rising bytes, at least one",
                field="descriptors",
            )
        numbers = {name: getattr(self, name) for name in self.__struct_fields__[1:]}
        numbers |= {f"of descriptors one of {nbytes} bytes": seconds for nbytes, seconds in self.descriptors}
        for name, value in numbers.items():
            most, rate = 1.0 if name == "overlap" else math.inf, name.endswith("bytes_per_s")
            if value is not None and not (0 <= value <= most and value < math.inf and (value > 0 or not rate)):
                raise UsageError(
                    f"{name} is {value}",
                    remedy="times are at least 0, rates more, all finite, and overlap at most 1",
                    field=name.split()[1] if " " in name else name,
                )

    def direct_s(self, nbytes: int, n_descriptors: int, n_chunks: int = 1) -> float:
        return n_chunks * self.post_s + n_descriptors * self.descriptor_s(nbytes / max(n_descriptors, 1))

    def descriptor_s(self, nbytes: float) -> float:
        """The time of one descriptor of that many bytes."""
        points = self.descriptors
        at = bisect_left(points, nbytes, key=lambda point: point[0])
        if at == 0:
            return points[0][1]
        if at == len(points):
            last, seconds = points[-1]
            return seconds * nbytes / last
        (before, less), (after, more) = points[at - 1], points[at]
        return less + (more - less) * (nbytes - before) / (after - before)

    def staged_s(self, nbytes: int, n_runs: int, n_chunks: int = 1) -> float:
        """A pipeline of three stages that other rooms keep filled. `n_runs` are copied on either side."""
        stages_s = self._stages_s(nbytes, n_runs)
        hidden_s = self.overlap * (sum(stages_s) - max(stages_s))
        return self.lease_s + n_chunks * self.chunk_s + sum(stages_s) - hidden_s

    def _stages_s(self, nbytes: int, n_runs: int) -> tuple[float, float, float]:
        return (
            n_runs * self.gather_run_s + nbytes / self.gather_bytes_per_s,
            nbytes / self.bulk_bytes_per_s if self.bulk_bytes_per_s else self.descriptor_s(nbytes),
            n_runs * self.scatter_run_s + nbytes / self.scatter_bytes_per_s,
        )

    def piece_nbytes(self, nbytes: int) -> int:
        """The best length of the pieces of `nbytes` that are all there, of which gather, write and scatter overlap.

        The slowest stage hides the other two but for one piece of each, so n pieces leave 1 / n of those two; but each
        adds `chunk_s`. The sum is minimal at the square root of their quotient.
        """
        stages_s = self._stages_s(nbytes, 0)
        n = ((sum(stages_s) - max(stages_s)) / self.chunk_s) ** 0.5 if self.chunk_s else nbytes
        return math.ceil(nbytes / max(1.0, n))

    def pieces(self, nbytes: int) -> int:
        """The best number of pieces for bytes that are computed one after the other, such as a prefill step's layers.

        When the last piece is ready the others have gone, so nbytes / n is left; but each piece adds `chunk_s`. The sum
        is minimal at the square root of their quotient.
        """
        moved_s = self.staged_s(nbytes, 0) - self.lease_s - self.chunk_s
        return max(1, int((moved_s / self.chunk_s) ** 0.5)) if self.chunk_s else 1

    def prefers_direct(self, nbytes: int, n_descriptors: int, n_chunks: int = 1) -> bool:
        """Whether `nbytes` in `n_descriptors` runs, sent in `n_chunks` chunks, should go direct."""
        return self.direct_s(nbytes, n_descriptors, n_chunks) <= self.staged_s(nbytes, n_descriptors, n_chunks)
