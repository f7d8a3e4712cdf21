"""`make fuzz ARGS="--target messages --runs 1000000"`: one target for long.

A finding is written to tests/fuzz/findings and the run ends; once it is mended, move it to tests/fuzz/corpus.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import signal
import time

from tests.fuzz.targets import HERE, TARGETS, inputs

_LONGEST_S = 20


def _hung(*_: object) -> None:
    raise TimeoutError(f"an input took over {_LONGEST_S} s")


def main() -> None:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="messages", choices=TARGETS)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _hung)
    begun_at = time.monotonic()
    for data in inputs(asked.target, asked.runs, asked.seed):
        signal.alarm(_LONGEST_S)
        try:
            TARGETS[asked.target].run(data)
        except BaseException:
            path = HERE / "findings" / f"{asked.target}.{hashlib.sha256(data).hexdigest()[:12]}"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            print(f"finding: {path}")
            raise
    signal.alarm(0)
    print(f"{asked.target}: {asked.runs} inputs in {time.monotonic() - begun_at:.1f} s, no finding")


if __name__ == "__main__":
    main()
