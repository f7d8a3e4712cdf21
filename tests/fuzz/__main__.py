"""`make fuzz ARGS="--target messages --runs 1000000"`: one target for long, guided by coverage if Atheris is there.

Without Atheris, inputs are altered seeds and altered corpus files, from a generator with a seed. A finding is written
to tests/fuzz/findings and the run ends; once it is mended, move it to tests/fuzz/corpus.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import logging
import random
import signal
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
_LONGEST_S = 20


def corpus_of(name: str) -> list[bytes]:
    """The committed inputs of a target."""
    return [path.read_bytes() for path in sorted(HERE.glob(f"corpus/{name}.*"))]


def plain_inputs(name: str, n_runs: int, seed: int) -> object:
    """Seeds and corpus as they are, then altered, again and again; the same for the same seed."""
    from tests.fuzz.draw import Draw  # noqa: PLC0415
    from tests.fuzz.targets import TARGETS  # noqa: PLC0415

    target, rng = TARGETS[name], random.Random(f"{name} {seed}")
    pool = target.seeds() + corpus_of(name)
    yield from pool
    for _ in range(n_runs - len(pool)):
        data = rng.choice(pool)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            data = target.alter(data, Draw(rng.randbytes(64)))[: target.max_nbytes]
        yield data
        if rng.random() < 0.02:
            pool[rng.randrange(len(pool))] = data


def _found(name: str, data: bytes) -> None:
    path = HERE / "findings" / f"{name}.{hashlib.sha256(data).hexdigest()[:12]}"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    print(f"finding: {path}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="messages")
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="without coverage, although Atheris is there")
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)
    guided = None
    if not asked.plain:
        try:
            import atheris as guided  # noqa: PLC0415
        except ImportError:
            print("Atheris is not installed: inputs are altered without coverage", file=sys.stderr)
    if guided is not None:
        with guided.instrument_imports(include=["pdstage"]):
            from tests.fuzz.targets import TARGETS  # noqa: PLC0415
    else:
        from tests.fuzz.targets import TARGETS  # noqa: PLC0415
    target = TARGETS[asked.target]
    faulthandler.register(signal.SIGUSR1)

    def run(data: bytes) -> None:
        signal.alarm(_LONGEST_S)  # an input that hangs ends the process with its stack
        try:
            target.run(data)
        except BaseException:
            _found(asked.target, data)
            raise
        finally:
            signal.alarm(0)

    def hung(*_: object) -> None:
        raise TimeoutError(f"an input took over {_LONGEST_S} s")

    signal.signal(signal.SIGALRM, hung)
    if guided is not None:
        _guided(guided, asked, target, run)
        return
    begun_at, n = time.monotonic(), 0
    for data in plain_inputs(asked.target, asked.runs, asked.seed):
        run(data)
        n += 1
    took_s = time.monotonic() - begun_at
    print(f"{asked.target}: {n} inputs in {took_s:.1f} s, {n / took_s:.0f} a second, no finding")


def _guided(atheris: object, asked: argparse.Namespace, target: object, run: object) -> None:
    from tests.fuzz.draw import Draw  # noqa: PLC0415

    def alter(data: bytes, max_nbytes: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.3:
            return atheris.Mutate(data, max_nbytes)
        return target.alter(data, Draw(rng.randbytes(64)))[:max_nbytes]

    held = HERE / "findings" / "corpus" / asked.target  # grows from run to run; not committed
    held.mkdir(parents=True, exist_ok=True)
    for data in target.seeds() + corpus_of(asked.target):
        (held / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    options = [f"-runs={asked.runs}", f"-seed={asked.seed}", f"-max_len={target.max_nbytes}", "-timeout=30"]
    atheris.Setup(
        ["fuzz", *options, "-rss_limit_mb=2048", "-print_final_stats=1", str(held)], run, custom_mutator=alter
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
