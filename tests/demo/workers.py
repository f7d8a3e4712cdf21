"""What the tests' processes do; a module of its own because they import it by name."""

from __future__ import annotations

import os
from pathlib import Path

from pdstage.errors import UsageError


def echo(job, pipe):
    pipe.send(("pid", os.getpid()))
    pipe.send((job, pipe.recv()))


def refuse(job, pipe):
    raise UsageError(f"{job} is no good", remedy="give another", field="job")


def die(job, pipe):
    pipe.send("alive")
    os._exit(7)


def hang(job, pipe):
    pipe.send(os.getpid())
    pipe.recv()


def meet(job, pipe):
    """One rank of a group: an agreement, a minimum, a gathering."""
    import numpy as np  # noqa: PLC0415  (the other workers need no torch, whose import takes a second)

    from pdstage.tools.demo.group import Group  # noqa: PLC0415

    folder, place = job
    rank = place.group_rank
    group = Group(place, Path(folder) / "group", 60.0)
    states = np.array([4, rank, 4 - rank], dtype=np.int8)
    pipe.send({
        "agreed": group.agree([rank, 10 + rank]), "lowest": group.lowest(states).tolist(),
        "own": states.tolist(), "gathered": group.gather(("part", rank)),
    })  # fmt: skip
    group.close()
