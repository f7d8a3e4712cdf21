"""Staged or direct: what each path would cost, as seconds.

Layer 1, pure. Must not know transports by name, nor where its numbers come from: a transport's traits give some, a
calibration all.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from pdstage.errors import UsageError


@dataclass(frozen=True, slots=True)
class CostModel:
    """What bytes cost between two hosts: seconds, and bytes per second.

    A write of n descriptors and b bytes takes `post_s + n * descriptor_s + b / bytes_per_s`; one of a single
    descriptor, out of a send buffer that was just filled, moves `bulk_bytes_per_s` (None: `bytes_per_s`). `gather_*`
    and `scatter_*` are the copies' bytes per second and seconds a run. `lease_s` is what a staged transfer takes longer
    however small it is, the round trip for its lease, and `chunk_s` what each of its chunks adds, its post included.
    `overlap`, from 0 to 1, is the share of the shorter stages that hides behind the longest, once several chunks are
    under way: 1 where each of gather, write and scatter has a processor or a card of its own, 0 where they take turns.

    Raises `UsageError` for a number that cannot be, naming it.
    """

    bytes_per_s: float
    descriptor_s: float
    post_s: float
    bulk_bytes_per_s: float | None = None
    gather_bytes_per_s: float = 4e9
    gather_run_s: float = 15e-9
    scatter_bytes_per_s: float = 4e9
    scatter_run_s: float = 15e-9
    lease_s: float = 200e-6
    chunk_s: float = 120e-6
    overlap: float = 0.5

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least, most = (0.0, 1.0 if field.name == "overlap" else float("inf"))
            rate = field.name.endswith("bytes_per_s")
            if value is not None and not (least <= value <= most and value < float("inf") and (value > 0 or not rate)):
                raise UsageError(
                    f"{field.name} is {value}",
                    remedy="times are at least 0, rates more, all finite, and overlap at most 1",
                    field=field.name,
                )

    def direct_s(self, nbytes: int, n_descriptors: int, n_chunks: int = 1) -> float:
        return n_chunks * self.post_s + n_descriptors * self.descriptor_s + nbytes / self.bytes_per_s

    def staged_s(self, nbytes: int, n_runs: int, n_chunks: int = 1) -> float:
        """A pipeline of three stages: the first chunk fills it and the last drains it, so nothing hides for those.

        `n_runs` are copied on either side.
        """
        stages_s = (
            n_runs * self.gather_run_s + nbytes / self.gather_bytes_per_s,
            nbytes / (self.bulk_bytes_per_s or self.bytes_per_s),
            n_runs * self.scatter_run_s + nbytes / self.scatter_bytes_per_s,
        )
        hidden_s = self.overlap * (sum(stages_s) - max(stages_s)) * (n_chunks - 1) / n_chunks
        return self.lease_s + n_chunks * self.chunk_s + sum(stages_s) - hidden_s

    def prefers_direct(self, nbytes: int, n_descriptors: int, n_chunks: int = 1) -> bool:
        """Whether `nbytes` that fall into `n_descriptors` runs, sent in `n_chunks` chunks, should skip the staging."""
        return self.direct_s(nbytes, n_descriptors, n_chunks) <= self.staged_s(nbytes, n_descriptors, n_chunks)
