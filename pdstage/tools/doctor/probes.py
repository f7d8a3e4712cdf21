"""The child's half of `child`: runs one probe and reports as it goes.

`python -m pdstage.tools.doctor.probes FD NAME JSON`. A probe is a function of a module below, called with a `Say` and
the JSON's arguments. Errors other than this project's end the process with a traceback, as a broken library would.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from pdstage.errors import PdstageError

if TYPE_CHECKING:
    from types import TracebackType

PROBES = {
    "caller": "pdstage.tools.doctor.caller",
    "device_copy": "pdstage.tools.doctor.try_kernels",
    "driver": "pdstage.tools.doctor.cuda_driver",
    "host_copy": "pdstage.tools.doctor.try_kernels",
    "ipc": "pdstage.tools.doctor.cuda_driver",
    "nvrtc": "pdstage.tools.doctor.try_kernels",
    "pair": "pdstage.tools.doctor.pair",
    "plugins": "pdstage.tools.doctor.nixl_plugins",
    "reach": "pdstage.tools.doctor.reach",
    "torch": "pdstage.tools.doctor.try_kernels",
    "triton": "pdstage.tools.doctor.try_kernels",
    "ucx_choice": "pdstage.tools.doctor.rails",
}
"""The module of each probe, by the probe's name."""


class Say:
    """Reports from a probe to its parent."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def step(self, name: str) -> None:
        """The next step: it is named if the process gets no further."""
        self._write({"step": name})

    def found(self, **facts: object) -> None:
        self._write({"facts": facts})

    def end(self, how: str, why: str = "", remedy: str = "") -> None:
        self._write({"end": how, "why": why, "remedy": remedy})

    def _write(self, line: dict[str, object]) -> None:
        data = json.dumps(line).encode() + b"\n"
        while data:
            data = data[os.write(self._fd, data) :]


def main(fd: int, name: str, given: str) -> None:
    say = Say(fd)

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        say.end("crashed", f"{kind.__name__}: {error}")
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = tell
    try:
        getattr(import_module(PROBES[name]), name)(say, **json.loads(given))
    except PdstageError as error:
        say.end("failed", error.what, error.remedy)
    else:
        say.end("done")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
