"""Every state of small worlds of the real cores, breadth first: `python -m tests.sim.explore`.

What is covered. The real `PrefillCore` and `DecodeCore`, frames and tags in their binary forms, in worlds of one or
two writers, one or two rooms of one or two chunks a writer, and a lane for about two leases. All orders of: frames
(those of one process to another keep theirs), ends of gathers, scatters and disconnects, tags, completions, the
engines' steps, and data that comes late. At any moment, as often as a configuration's `Faults` say: a frame is lost,
a room is aborted on either side, a process crashes and another takes its address, a tag is told twice, a question is
repeated early, a deadline passes early (a peer is called silent that is not), a post's outcome is unknown. A
disconnect is a fence, or (`fences`) only the end of the other process is. A write may land at any moment until its
tag or completion is told, also after its room's abort and its writer's end. Once nothing is under way time passes:
any question may be repeated, in any order; deadlines pass only for what something failed for, so that whatever waits
for a deadline though nothing failed is found.

What is checked. I1, I4, I6 and I7 of every input to a process (`nodes`), I3, I8, I13, I15 and I16 of every state of
one (`facts`), I2, I5, I8 and I11 of the whole (`steps`, `network`), and I14 at the ends. A state without a next step
must be a good end: every room ended and released, nothing left of any. From every state some way without a further
fault leads to a good end; and rooms to which nothing happened but loss, or the abort of another, succeed.

What is not. Bytes do not move: what may be written is judged by the ledgers instead. Frames never come twice or out
of order within one link, as seq is for that, and the cores judge it elsewhere. Time has no lengths: any early timer
stands for any slow network, and where a timer's handler looks at how long something waited, either none has waited
long enough or all have. Heartbeats are not sent except to a peer that forgot the session. Worlds are small.

How states are cut down. Two states are one when all that may ever differ in their futures is equal (`frozen`), and
what lay in memory that was given back is forgotten (`Steps.settled`). Where two writers have a room each, a state and
the one with writers and rooms exchanged are one; each step is held against its image, so this is found, not assumed
(`mirror`). Writers that share their rooms are not exchanged. Steps of a writer that has a frame to hear are not
interleaved with others' where they commute with all of those (`Network._apart`); not while a process may still crash.
That keeps all ends, and all ways to them: a fault of the writer that may come after others' may come before, as what is
left of faults only falls; and each such step takes a frame away, so nobody is put off for ever. A frame is lost only
when it would be heard, as nobody can tell when it was.

How they are kept. A state is a word of part numbers (`sides`, `columns`): exact, not a hash. What a part answers to an
input is worked out once, by the real core. `plain` does the same one whole state after another, in every order.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from multiprocessing import get_context

from tests.sim.facts import Shape, Violation
from tests.sim.search import Search
from tests.sim.steps import Configuration, Faults

QUICK = [
    Configuration(name="one room", shape=Shape(late=1), faults=Faults(loss=2, abort=1, twice=1)),
    Configuration(
        name="from the start", shape=Shape(chunks=1), faults=Faults(loss=2, abort=1), connected=False, begun=False
    ),
    Configuration(
        name="a lane for one",
        shape=Shape(rooms=2, chunks=1, late=1, lane_nbytes=256),
        faults=Faults(early=2),
    ),
    Configuration(
        name="padding", shape=Shape(rooms=2, chunks=1, tokens=32, lane_nbytes=768), faults=Faults(loss=1, abort=1)
    ),
    Configuration(
        name="lent in advance", shape=Shape(chunks=1, late=1, advance=True), faults=Faults(loss=2, abort=1, early=2)
    ),
    Configuration(
        name="lent in advance, too little", shape=Shape(advance=True, lane_nbytes=1024), faults=Faults(loss=2, abort=1)
    ),
    Configuration(
        name="lent in advance, in another's way",
        shape=Shape(rooms=2, chunks=1, late=1, lane_nbytes=512, advance=True),
        faults=Faults(loss=1, early=2),
    ),
    Configuration(name="a crash, then again", shape=Shape(chunks=1), faults=Faults(loss=1, crash=1), again=1),
    Configuration(name="straight into pages", shape=Shape(path="direct"), faults=Faults(loss=1, abort=1, twice=1)),
    Configuration(
        name="a row in place", shape=Shape(chunks=1, rows=True), faults=Faults(loss=1, abort=1, twice=1, crash=1)
    ),
    Configuration(name="a row that fails", shape=Shape(chunks=1, rows=True), faults=Faults(late=1, broken=1)),
    Configuration(name="a false alarm", shape=Shape(), faults=Faults(late=1, broken=1)),
    Configuration(
        name="two writers of a room", shape=Shape(writers=2, instances=False, chunks=1), faults=Faults(crash=1)
    ),
    Configuration(name="tags are said", shape=Shape(notifies=False), faults=Faults(loss=2, abort=1, early=1)),
    Configuration(
        name="tags are said, of pages", shape=Shape(path="direct", notifies=False), faults=Faults(loss=2, abort=1)
    ),
    Configuration(name="tags are said, a crash", shape=Shape(chunks=1, notifies=False), faults=Faults(loss=1, crash=1)),
]
"""Complete within seconds."""

PAIR = {"writers": 2, "instances": False, "chunks": 1}
"""Two writers that each hold half of the heads of every room."""

LARGE = [
    Configuration(
        name="all at once, a chunk each",
        shape=Shape(writers=2, rooms=2, chunks=1),
        faults=Faults(loss=2, abort=1, crash=1),
    ),
    Configuration(name="two rooms", shape=Shape(rooms=2, late=1), faults=Faults(loss=1, abort=1)),
    Configuration(name="two writers, two rooms", shape=Shape(writers=2, rooms=2), faults=Faults(abort=1)),
    Configuration(name="two writers of a room, lossy", shape=Shape(**PAIR), faults=Faults(loss=2, abort=1)),
    Configuration(name="two writers of a room, alarmed", shape=Shape(**PAIR), faults=Faults(late=1)),
    Configuration(
        name="lent in advance, and aborted",
        shape=Shape(rooms=2, chunks=1, late=1, advance=True),
        faults=Faults(loss=1, abort=1, crash=1),
    ),
    Configuration(name="impatient", shape=Shape(rooms=2, late=1), faults=Faults(early=2)),
    Configuration(
        name="two lanes",
        shape=Shape(writers=2, rooms=2, chunks=1, late=1, lane_nbytes=256, n_lanes=2),
        faults=Faults(abort=1, early=1),
    ),
    Configuration(
        name="staged or direct",
        shape=Shape(rooms=2, chunks=1, late=1, lane_nbytes=256, path="auto"),
        faults=Faults(abort=1, early=1),
    ),
    Configuration(name="nothing fences", shape=Shape(chunks=1), faults=Faults(crash=1, late=1), fences=False, again=1),
]
"""Complete within minutes, together."""

ALL = Configuration(name="all at once", shape=Shape(writers=2, rooms=2), faults=Faults(loss=2, abort=1, crash=1))
"""Four leases of two writers in a lane for two, and all faults. 26 million states; half an hour and 6 GB."""

HUGE = [
    Configuration(
        name="all at once, then again",
        shape=Shape(writers=2, rooms=2, late=1),
        faults=Faults(loss=2, abort=1, crash=1),
        again=1,
    ),
    Configuration(
        name="two rooms of two writers",
        shape=Shape(**PAIR, rooms=2),
        faults=Faults(loss=2, abort=1, crash=1),
    ),
    Configuration(name="two rooms, two lost", shape=Shape(rooms=2, late=1), faults=Faults(loss=2, abort=1, twice=1)),
    Configuration(name="two writers of a room, again", shape=Shape(**PAIR), faults=Faults(crash=1, abort=1), again=1),
]
"""For those with hours and memory, each cut off by --most-s or --most-states; by name only."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="configurations; those that end within minutes if none is named")
    parser.add_argument("--all", action="store_true", help=f"{ALL.name!r} too: half an hour, 6 GB")
    parser.add_argument("--most-s", type=float, default=1e9)
    parser.add_argument("--most-states", type=int, default=1 << 32)
    parser.add_argument("--workers", type=int, default=2, help="processes; default %(default)s")
    options = parser.parse_args(arguments)
    by_name = {configuration.name: configuration for configuration in [*LARGE, *QUICK, ALL, *HUGE]}
    chosen = [by_name[name] for name in options.names] if options.names else [*LARGE, *QUICK]
    chosen = [*chosen, ALL] if options.all else chosen
    one = partial(_explore, options.most_s, options.most_states)
    failed = False
    with get_context("spawn").Pool(min(options.workers, len(chosen)), maxtasksperchild=1) as pool:
        for said, good in pool.imap(one, chosen, chunksize=1):
            print(said, flush=True)
            failed = failed or not good
    return int(failed)


def _explore(most_s: float, most_states: int, configuration: Configuration) -> tuple[str, bool]:
    """What there is to say of one world, and whether nothing is wrong in it."""
    search = Search(configuration, most_s=most_s, most_states=most_states)
    try:
        search.run()
    except Violation as violation:
        return f"{violation}\n{search.report}", False
    return str(search.report), True


if __name__ == "__main__":
    sys.exit(main())
