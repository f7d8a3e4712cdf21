"""Lends an engine's Python all that this Python has: `python -m tests.engines.lend ENGINE_PYTHON`.

The engine's own packages come first, so that its pins hold. This environment's .pth files are read too: editable
installs work through them.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path


def main(python):
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    place = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True).stdout.strip()
    own = sysconfig.get_path("purelib")
    Path(place, "pdstage-venv.pth").write_text(f"import site; site.addsitedir({own!r})\n")


if __name__ == "__main__":
    main(sys.argv[1])
