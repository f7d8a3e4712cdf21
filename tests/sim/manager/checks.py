"""What must hold: of each handle at each change, of sleeping nodes whenever nobody can go on, and of all at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np

from pdstage.manager.decode import Receiver
from pdstage.manager.handle import Handle
from pdstage.metadata import AuxRow
from pdstage.protocol.state import State
from tests.sim.manager.scheduler import Process
from tests.sim.seeds import Violation

if TYPE_CHECKING:
    from pdstage.manager.node import Node
    from tests.sim.manager.scenario import Room
    from tests.sim.manager.world import Host, World

ENDED = (State.SUCCESS, State.FAILED)
REUSED = 0xA5
"""What an engine writes into memory that was given back to it."""
_IN_USE = 0x3C
_ASLEEP = ("its socket", "a queue", "its event loop", "an event", "a condition", "a directory", "an engine's time")
_SLACK_S = 1e-3
_OF_THE_LOCK = ("receive", "tick", "take_effects", "send", "send_loose")
"""What an endpoint may be asked only by who has its driver's lock, and but for its effects has told it the time."""


@dataclass(eq=False)
class Seen:
    """A handle's room: where its data belongs, and who begins something just as the handle changes."""

    host: Host
    room: Room
    number: int
    pages: np.ndarray
    row: AuxRow | None
    n_changes: int = 0
    reused: bool = False


class Checks:
    def __init__(self, world: World) -> None:
        self._world = world
        self.seen: dict[Handle, Seen] = {}
        self.intruders: list[tuple[Host, Handle]] = []
        """Rooms that were begun while their node was closed."""
        world.scheduler.at_rest.append(self.at_rest)

    # Each use of a core.

    def hold_to_the_lock(self, node: Node) -> None:
        """From here on whoever touches the node's core must have the lock, and have set its time since."""
        scheduler, lock = self._world.scheduler, node.driver.lock

        def locked(verb: Callable) -> Callable:
            def call(*given: object, **named: object) -> object:
                if lock.owner is not scheduler.current and not scheduler.over:  # type: ignore[attr-defined]
                    scheduler.violate(f"{scheduler.current.name} calls {verb.__name__} of a core without its lock")
                if verb.__name__ != "take_effects" and node.core.endpoint.now < lock.since:  # type: ignore[attr-defined]
                    scheduler.violate(f"{scheduler.current.name} calls {verb.__name__} of a core at an old time")
                return verb(*given, **named)

            return call

        for part, names in ((node.core.endpoint, _OF_THE_LOCK), (node.core, ("lose", "fenced"))):
            for name in names:
                setattr(part, name, locked(getattr(part, name)))

    # Each change of a handle.

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, whoever reads or writes a handle's status gives way here, and what is written is looked at."""
        slot, scheduler = Handle.status, self._world.scheduler

        def read(handle: Handle) -> int:
            status: int = slot.__get__(handle)  # type: ignore[attr-defined]
            scheduler.glance("a status was read")
            return status

        def write(handle: Handle, status: int) -> None:
            if hasattr(handle, "began_at"):  # else it is being made
                self._may_follow(handle, slot.__get__(handle), status)  # type: ignore[attr-defined]
            if handle in self.seen:
                self.seen[handle].n_changes += 1
            scheduler.glance("a status is written")
            slot.__set__(handle, status)  # type: ignore[attr-defined]
            scheduler.glance("a status was written")

        with mock.patch.object(Handle, "status", property(read, write)):
            yield

    def follows(self, handle: Handle, before: int, after: int) -> tuple[State, State, str]:
        """Both states, and in words what happens: which may, as far as its end goes."""
        was, now = State(before & 0x7F), State(after & 0x7F)
        what = f"room {handle.id!r} goes from {was.name} {before >> 7} to {now.name} {after >> 7}"
        self.must(was not in ENDED or now is was, f"{what}: an end is final")
        self.must(before < 0x80 or after >= 0x80, f"{what}: what is released stays so")
        self.must(now is State.FAILED or now >= was, f"{what}: backwards")
        return was, now, what

    def _may_follow(self, handle: Handle, before: int, after: int) -> None:
        was, now, what = self.follows(handle, before, after)
        self.must(after < 0x80 or now in ENDED, f"{what}: released before its end")
        self.must(now is not State.FAILED or handle.error is not None, f"{what}, without an error")
        if now is State.SUCCESS and was is not State.SUCCESS and isinstance(handle, Receiver):
            self._is_whole(handle)

    def _is_whole(self, receiver: Receiver) -> None:
        seen = self.seen.get(receiver)
        if seen is None or self._world.liar in (
            seen.host.name,
            *self._world.scenario.names[: self._world.scenario.n_prefill],
        ):
            return
        whole = seen.host.rank.holds(seen.number, seen.room.tokens, seen.pages)
        self.must(whole, f"room {receiver.id!r} succeeds at {seen.host.name}, and its bytes are not all there")
        said = receiver.aux or None
        if isinstance(said, AuxRow):
            said = said["said"].tobytes().rstrip(b"\0") or None
        self.must(said == seen.room.aux, f"room {receiver.id!r} has aux {said!r}, not {seen.room.aux!r}")

    def must(self, holds: bool, what: str) -> None:
        if not holds:
            self._world.scheduler.violate(what)

    # Memory that was given back.

    def compute(self, seen: Seen) -> None:
        """Prefill's data is there from now on, where nobody has its pages for something else by now."""
        if not seen.reused and not seen.host.gave_back:
            seen.host.rank.write(seen.number, seen.room.tokens, seen.pages)

    def use(self, seen: Seen) -> None:
        """Decode's engine still uses the pages that it binds."""
        if not seen.host.gave_back:
            for tensor in seen.host.rank.tensors:
                tensor[seen.pages] = _IN_USE

    def stop_using(self, seen: Seen) -> None:
        """It is done with them, and nobody has written them before."""
        tensors = seen.host.rank.tensors
        if not seen.reused and not seen.host.gave_back and not all((t[seen.pages] == _IN_USE).all() for t in tensors):
            self._world.scheduler.fail(Violation(f"pages at {seen.host.name} were written before `after`"))

    def reuse(self, seen: Seen) -> None:
        """Its engine does something else with the pages."""
        seen.reused = True
        if seen.row is not None and seen.host.metadata is not None:
            seen.row["said"] = [REUSED] * 16
            seen.host.metadata.free(seen.row)
        for tensor in seen.host.rank.tensors:
            tensor[seen.pages] = REUSED

    def reuse_all(self, host: Host) -> None:
        """The node was closed, and says that nothing uses its memory any more."""
        for tensor in (*host.rank.tensors, host.staging):
            tensor[:] = REUSED

    def _are_left_alone(self) -> None:
        for handle, seen in self.seen.items():
            if seen.host.name == self._world.liar:
                continue
            if seen.reused and seen.row is not None and not (seen.row["said"] == REUSED).all():
                raise Violation(f"the row of room {handle.id!r} at {seen.host.name} was written after released")
            if seen.reused and not all((tensor[seen.pages] == REUSED).all() for tensor in seen.host.rank.tensors):
                raise Violation(f"the pages of room {handle.id!r} at {seen.host.name} were written after released")
        for host in self._world.hosts:
            if (
                host.gave_back
                and host.name != self._world.liar
                and not all((tensor == REUSED).all() for tensor in (*host.rank.tensors, host.staging))
            ):
                raise Violation(f"memory of {host.name} was written after its close gave it back")

    # When nobody can go on.

    def at_rest(self) -> None:
        """What all wait for is yet to come: nothing was left undone, and nobody was forgotten."""
        for host in self._world.hosts:
            if host.node is None or host.closed or not host.process.runs:
                continue
            tasks = [task for task in self._world.scheduler.tasks if task.process is host.process and not task.done]
            if any(task.waits_for not in _ASLEEP for task in tasks):
                continue  # in the middle of something
            self._nobody_is_forgotten(host, host.node)
            self._no_lookup_is_forgotten(host, host.node)
            for task in tasks:
                if task.name == "pdstage-node" and task.waits_for == "its socket":
                    self._sleeps_over_nothing(host, host.node)

    def _nobody_is_forgotten(self, host: Host, node: Node) -> None:
        for done, _ in node.roster._waiters:
            if done():
                what = f"somebody at {host.name} waits for what is there already, and nobody wakes him"
                raise Violation(f"{what}\n{self._world.scheduler.stacks()}")

    def _no_lookup_is_forgotten(self, host: Host, node: Node) -> None:
        if any(one.kind == "jump" for one in self._world.scenario.disturbances):
            return  # its waits are durations
        now = self._world.scheduler.now + host.process.ahead_s
        for address, asker in node.directory._askers.items():
            task = asker.thread.task
            if task is not None and task.waits_for == "a condition" and asker.waiting:
                ask_at = min(look.ask_at for look in asker.waiting)
                late_s = now + (task.until - self._world.scheduler.now) - ask_at
                if late_s > _SLACK_S:
                    raise Violation(f"{host.name} sleeps {late_s:.3f} s beyond the time to ask {address}")

    def _sleeps_over_nothing(self, host: Host, node: Node) -> None:
        driver, core = node.driver, node.core
        left = {
            "effects": driver._kept or core.endpoint.effects,
            "frames": driver._outgoing or driver._unread,
            "copies": driver._copies or node.stager._done,
            "answers": getattr(node, "_answers", ()),
            "changes": node.roster._due,
            "events": driver._early,
        }
        for what, held in left.items():
            if held:
                raise Violation(f"the driver of {host.name} sleeps over {what}: {list(held)[:3]}")
        next_at, now = core.endpoint.timers.next_at(), self._world.scheduler.now + host.process.ahead_s
        late_s = driver._until_at - max(next_at, now) if next_at is not None else 0.0
        if late_s > _SLACK_S:
            raise Violation(f"the driver of {host.name} sleeps {late_s:.3f} s beyond its next deadline")

    # At the end.

    def at_end(self) -> None:
        """Every node that lives is closed, and what was under way has had its time to land."""
        self._are_left_alone()
        for handle, seen in self.seen.items():
            host = seen.host
            if host.ended:
                continue
            if handle.state not in ENDED:
                raise Violation(f"room {handle.id!r} at {host.name} has not ended, and its node is closed")
            (state,), (released,) = host.node.roster.statuses([handle])
            if (state, released) != (handle.state, handle.released):
                raise Violation(f"poll_many says {state} {released} of room {handle.id!r}, which is {handle.state}")
            if host.gave_back and not handle.released:
                raise Violation(f"room {handle.id!r} at {host.name} is not released, and its node gave all back")
            if self._world.calm and handle.state is not State.SUCCESS:
                raise Violation(f"room {handle.id!r} at {host.name} failed, and nothing went wrong: {handle.error}")
        for host, handle in self.intruders:
            if not host.ended and handle.state not in ENDED:
                raise Violation(f"room {handle.id!r} began at {host.name} as it was closed, and has not ended")
        for host in self._world.hosts:
            if host.ended or host.node is None:
                continue
            if host.node.driver.failure is not None:
                raise Violation(f"the driver of {host.name} failed") from host.node.driver.failure
            self._ends_its_threads(host)
            if host.gave_back and (host.node.roster.by_room or (host.metadata and host.metadata._lent)):
                raise Violation(f"{host.name} gave all back, and holds rooms or rows")
            if self._world.calm and not host.gave_back:
                raise Violation(f"{host.name} kept its memory, and nothing went wrong")
        self._complain_of_nothing_else()

    def _ends_its_threads(self, host: Host) -> None:
        process: Process = host.process
        for task in self._world.scheduler.tasks:
            if task.process is process and task.name.startswith("pdstage-") and not task.done:
                raise Violation(f"{task.name} of {host.name} outlives its node: it waits for {task.waits_for}")

    def _complain_of_nothing_else(self) -> None:
        world = self._world
        expected = {
            "closed while": not world.calm,
            "a lookup at": world.n_broken_lookups > 0,
            "the lease at": world.n_broken_lookups > 0,
            "a copy failed": world.n_bad_copies > 0,
        }
        for record in world.errors:
            if not any(record.getMessage().startswith(begin) and may for begin, may in expected.items()):
                error = record.exc_info[1] if record.exc_info else None
                raise Violation(f"an error was logged: {record.getMessage()}: {error!r}") from error
