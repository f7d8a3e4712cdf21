"""`python -m tests.any_layout --seed N` replays one case; `--cases N` tries N from the first seed on, on every core."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as pytest does: tests find rigs.py by name

from tests.any_layout import check, many
from tests.any_layout.describe import show


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.any_layout", description=__doc__)
    parser.add_argument("--seed", type=int, help="the one case to replay")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    asked = parser.parse_args()
    if asked.seed is not None:
        try:
            print(show(check.run(asked.seed)))
        except check.Wrong as wrong:
            print(wrong)
            return 1
        return 0
    report = many.run(range(asked.first, asked.first + asked.cases))
    print(report)
    return bool(report.wrong)


if __name__ == "__main__":
    sys.exit(main())
