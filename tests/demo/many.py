"""Runs of the demo one after the other in one process, which imports and preloads once: `python -m demo.many FILE`.

FILE has a JSON list of options. After each run a line `{"report": {...}, "said": "..."}` or `{"error": "..."}` is
printed.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import asdict
from pathlib import Path

from pdstage.errors import PdstageError
from pdstage.tools.demo.options import Options
from pdstage.tools.demo.run import run


def main(path: str) -> None:
    for given in json.loads(Path(path).read_text()):
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                told = {"report": asdict(run(Options(**given)))}
            told["said"] = said.getvalue()
        except PdstageError as error:
            told = {"error": f"{error}\n{said.getvalue()}"}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
