"""Clocks, temperature and power of a GPU, by NVIDIA's management library through ctypes: no package, no CUDA context.

It reads only. The names are those of nvml.h.
"""

from __future__ import annotations

import ctypes
import statistics
from typing import Any

_SM, _MEMORY = 1, 2  # NVML_CLOCK_SM, NVML_CLOCK_MEM
_ON_GPU = 0  # NVML_TEMPERATURE_GPU
# nvmlClocksThrottleReason*: what keeps the clocks down, but for an idle GPU and settings.
_REASONS = {0x4: "power cap", 0x8: "slowdown", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}


class Clocks:
    """Samples of one device, or `missing`: why there are none."""

    def __init__(self, device: int = 0) -> None:
        self.missing = ""
        self._samples: list[dict[str, float]] = []
        self._reasons: set[str] = set()
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            self.missing = f"no clocks: {error}"
            return
        self._handle = ctypes.c_void_p()
        failed = self._nvml.nvmlInit_v2() or self._nvml.nvmlDeviceGetHandleByIndex_v2(
            device, ctypes.byref(self._handle)
        )
        if failed:
            self.missing = f"no clocks: NVML gives error {failed}"

    def sample(self) -> None:
        if self.missing:
            return
        found = {
            "sm_mhz": self._ask("nvmlDeviceGetClockInfo", _SM),
            "memory_mhz": self._ask("nvmlDeviceGetClockInfo", _MEMORY),
            "celsius": self._ask("nvmlDeviceGetTemperature", _ON_GPU),
            "milliwatts": self._ask("nvmlDeviceGetPowerUsage"),
        }
        self._samples.append({name: value for name, value in found.items() if value is not None})
        held = ctypes.c_ulonglong()
        ask = getattr(self._nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None)
        if ask is not None and not ask(self._handle, ctypes.byref(held)):
            self._reasons |= {name for bit, name in _REASONS.items() if held.value & bit}

    def take(self) -> dict[str, Any]:
        """Least, median and most of each since it was last asked, and what kept the clocks down meanwhile."""
        if self.missing:
            return {"missing": self.missing}
        samples, self._samples = self._samples, []
        reasons, self._reasons = self._reasons, set()
        columns = {name: [one[name] for one in samples if name in one] for name in (samples[0] if samples else ())}
        return {
            "n": len(samples),
            "kept_down_by": sorted(reasons),
            **{name: [min(v), statistics.median(v), max(v)] for name, v in columns.items()},
        }

    def _ask(self, function: str, *which: int) -> int | None:
        value = ctypes.c_uint()
        failed = getattr(self._nvml, function)(self._handle, *which, ctypes.byref(value))
        return None if failed else value.value
