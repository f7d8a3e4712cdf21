"""Every target by name: its seeds, how an input is altered, and what runs one. A finding is any exception of `run`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.fuzz import attach, nodes, plane, wire
from tests.fuzz.draw import Draw, altered_bytes

HERE = Path(__file__).parent


class Target(NamedTuple):
    seeds: Callable[[], list[bytes]]
    run: Callable[[bytes], None]
    n_tests: int
    """New inputs in `make test`."""
    alter: Callable[[bytes, Draw], bytes] = altered_bytes
    max_nbytes: int = 4096


TARGETS = {
    "messages": Target(wire.frame_seeds, wire.run_frame, 20_000, wire.alter_frame),
    "tags": Target(wire.tag_seeds, wire.run_tag, 20_000),
    "descriptions": Target(wire.description_seeds, wire.run_description, 10_000),
    "requests": Target(plane.request_seeds, plane.run_request, 8_000),
    "answers": Target(plane.answer_seeds, plane.run_answer, 10_000),
    "nodes": Target(nodes.seeds, nodes.run, 12, max_nbytes=512),
    "attach": Target(attach.seeds, attach.run, 300, max_nbytes=64),
}


def corpus_of(name: str) -> list[bytes]:
    """The committed inputs of a target."""
    return [path.read_bytes() for path in sorted(HERE.glob(f"corpus/{name}.*"))]


def inputs(name: str, n_runs: int, seed: int) -> Iterator[bytes]:
    """Seeds and corpus as they are, then altered, again and again; the same for the same seed."""
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
