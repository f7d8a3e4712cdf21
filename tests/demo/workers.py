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
    """One rank of a group: a sum over its stage, an agreement, a minimum, a gathering, a hand-over."""
    import numpy as np  # noqa: PLC0415  (the other workers need no torch, whose import takes a second)
    import torch  # noqa: PLC0415

    from pdstage.tools.demo.group import Group  # noqa: PLC0415

    folder, place = job
    rank = place.group_rank
    group = Group(place, Path(folder) / "group", 60.0)
    partial = torch.full((3,), float(rank + 1), dtype=torch.float64)
    group.sum(partial)
    states = np.array([4, rank, 4 - rank], dtype=np.int8)
    hidden = torch.tensor([rank])
    group.hand_on(hidden, place.pp_size - 1)
    pipe.send({
        "sum": partial.tolist(), "agreed": group.agree([rank, 10 + rank]), "lowest": group.lowest(states).tolist(),
        "own": states.tolist(), "gathered": group.gather(("part", rank)), "hidden": hidden.tolist(),
    })  # fmt: skip
    group.close()
