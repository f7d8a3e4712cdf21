"""Staged or direct: what each path would cost, as seconds.

Layer 1, pure. Must not know transports by name: their numbers are given. A calibration may replace the defaults.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """A post of n descriptors and b bytes costs `post_s + n*descriptor_s + b/bytes_per_s`; staging adds two copies.

    `copy_bytes_per_s` and `copy_run_s` describe gather and scatter (bytes, and seconds a run); `lease_s` is the round
    trip for a lease.
    """

    bytes_per_s: float
    descriptor_s: float
    post_s: float
    copy_bytes_per_s: float = 4e9
    copy_run_s: float = 15e-9
    lease_s: float = 200e-6

    def direct_s(self, nbytes: int, n_descriptors: int) -> float:
        return self.post_s + n_descriptors * self.descriptor_s + nbytes / self.bytes_per_s

    def staged_s(self, nbytes: int, n_runs: int) -> float:
        """`n_runs` are the contiguous pieces that gather and scatter copy, of both together."""
        copies = 2 * nbytes / self.copy_bytes_per_s + n_runs * self.copy_run_s
        return self.lease_s + self.post_s + self.descriptor_s + nbytes / self.bytes_per_s + copies

    def prefers_direct(self, nbytes: int, n_descriptors: int) -> bool:
        return self.direct_s(nbytes, n_descriptors) <= self.staged_s(nbytes, 2 * n_descriptors)
