"""Every argument of every public call, with values that no caller means: one typed error, before anything has changed.

Beside each call a room is in flight, and it must arrive. What is accepted may fail its own room, and no other.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from pdstage import (
    Column,
    Config,
    DecodeNode,
    Items,
    MetadataBuffers,
    PdstageError,
    PrefillNode,
    Topology,
)
from pdstage.control.bootstrap import BootstrapClient, BootstrapServer
from pdstage.manager.options import DEFAULTS
from tests.manager.engine import Rank

TOKENS = 12


class RaisingEvent:
    def query(self) -> bool:
        raise RuntimeError("the event is broken")


class OddEvent:
    def query(self) -> object:
        return np.ones(3)


class Surprise:
    """Whatever is asked of it raises."""

    def __getattr__(self, name: str) -> object:
        raise OSError(name)

    def __len__(self) -> int:
        raise OSError("len")

    def __iter__(self) -> Iterator[object]:
        raise OSError("iter")

    def __array__(self, *_: object, **__: object) -> object:
        raise OSError("array")

    def __index__(self) -> int:
        raise OSError("index")

    def __bool__(self) -> bool:
        raise OSError("bool")

    def __eq__(self, other: object) -> bool:
        raise OSError("eq")

    __hash__ = None  # type: ignore[assignment]


HOSTILE: dict[str, Any] = {
    "None": None, "true": True, "0": 0, "-1": -1, "3": 3, "2**31": 1 << 31, "2**64": 1 << 64, "10**400": 10**400,
    "0.5": 0.5, "nan": math.nan, "inf": math.inf, "1e308": 1e308, "fraction": Fraction(1, 3),
    "np.int32": np.int32(4), "np.uint64": np.uint64(2**64 - 1), "np.bool": np.True_, "np 0-d": np.array(4),
    "np empty": np.array([]), "np ints": np.arange(3), "np uint64": np.array([2**64 - 1, 0, 1], np.uint64),
    "np float": np.ones(3), "np bool": np.ones(3, bool), "np object": np.array([None, 1, "x"], object),
    "np 2-d": np.ones((2, 3), int), "empty": "", "text": "x", "long": "x" * 100_000, "nul": "a\0b",
    "surrogate": "\udc80", "no bytes": b"", "memoryview": memoryview(b"xyz"), "nested": [[0], [1, 2]],
    "list of floats": [0.5, 1.0, 2.0], "huge list": [1 << 70], "reversed": (9, 3), "one": (1,),
    "huge layers": (0, 1 << 40), "negative": (-4, 4), "numpy pair": (np.int64(0), np.int64(4)),
    "none pair": (None, None), "strange dict": {"x": 1}, "kv dict": {"kv": None}, "int key": {1: [0]}, "set": {1, 2},
    "items": Items(None), "items float": Items([0, 1], first_token=0.5), "items huge": Items([0], first_token=1 << 80),
    "lambda": lambda: None, "raising event": RaisingEvent(), "odd event": OddEvent(), "surprise": Surprise(),
    "generator": (n for n in range(3)),
}  # fmt: skip
"""By a name for people; each is given in the place of each parameter of each call."""


class Table:
    """Two nodes with a room in flight, and the calls that are tried beside it."""

    def __init__(self, site) -> None:
        self.pair, self.n_rooms = site.pair(), 0
        self.p, self.d = self.pair.nodes
        self.begin()

    def begin(self) -> None:
        """Opens a room and hands over a part of it."""
        self.n_rooms += 1
        self.room = self.pair.open(f"good-{self.n_rooms}", TOKENS)
        self.room.sender.chunk(self.room.pages, (0, 4))

    def end(self) -> None:
        """Finishes it, and sees that it arrived."""
        sender, receiver, pages, into = self.room
        sender.chunk(pages, (4, TOKENS))
        sender.finish(aux=b"aux")
        self.pair.arrives(self.room, TOKENS)
        assert receiver.aux == b"aux"
        self.pair.src.free(pages)
        self.pair.dst.free(into)

    def receiver(self, n: int):
        return self.pair.receive(f"tried-{n}", deadline_s=0.5)

    def sender(self, n: int):
        return self.p.send(f"tried-{n}")


WAITS = ("None", "true", "3", "2**31", "2**64", "1e308", "inf", "np.int32", "np.uint64", "np 0-d")
"""A wait that takes one of these waits, as it should."""

CALLS: dict[str, tuple[Callable[[Table, int], Callable[..., object]], dict[str, Any]]] = {
    "receive": (lambda t, _: t.d.receive, {"room": "tried", "directory": "127.0.0.1:9", "deadline_s": 0.2}),
    "bind": (lambda t, n: t.receiver(n).bind, {"items": [0, 1], "tokens": 8}),
    "Receiver.abort": (lambda t, n: t.receiver(n).abort, {}),
    "Receiver.wait": (lambda t, n: t.receiver(n).wait, {"timeout_s": 0.01}),
    "Receiver.wait_released": (lambda t, n: t.receiver(n).wait_released, {"timeout_s": 0.01}),
    "send": (lambda t, _: t.p.send, {"room": "tried"}),
    "chunk": (lambda t, n: t.sender(n).chunk, {"items": [0, 1], "tokens": 8}),
    "finish": (lambda t, n: t.sender(n).finish, {}),
    "Sender.abort": (lambda t, n: t.sender(n).abort, {}),
    "prefix_tokens_of": (lambda t, n: t.sender(n).prefix_tokens_of, {"component": "kv"}),
    "turn": (lambda t, _: t.d.turn, {"wait_s": 0.0}),
    "poll_many": (lambda t, _: t.d.poll_many, {"handles": []}),
    "oldest_rooms": (lambda t, _: t.p.oldest_rooms, {"n": 1}),
    "fence": (lambda t, _: t.d.fence, {"endpoint": "tcp://127.0.0.1:9"}),
}


@pytest.mark.parametrize("call", CALLS)
def test_no_argument_harms_another_room(site, call: str) -> None:
    table = Table(site)
    make, good = CALLS[call]
    wrong: list[str] = []
    n = 0
    for name in inspect.signature(make(table, 0)).parameters:
        for label, value in HOSTILE.items():
            if name == "timeout_s" and label in WAITS:
                continue
            n += 1
            given = good | {name: value}
            if "room" in given and name != "room":
                given["room"] = f"tried-{n}"
            if problem := attempt(make(table, n), given, site.nodes):
                wrong.append(f"{call}({name}={label}): {problem}")
            if n % 20 == 0:
                table.end()
                table.begin()
    table.end()
    assert not wrong, "\n".join(wrong)


def attempt(call: Callable[..., object], given: dict[str, Any], nodes: Sequence = ()) -> str:
    """What is wrong with how a call took what it was given, in words."""
    try:
        call(**given)
    except PdstageError as error:
        if not error.what or not error.remedy:
            return f"an error that does not help: {error}"
    except Exception as error:  # noqa: BLE001  (whatever it is, it is wrong)
        if "timeout_s" not in given or not isinstance(error, TimeoutError):
            return f"{type(error).__name__}: {str(error)[:80]}"
    for node in nodes:
        node.turn(0.0)  # what is left of it must not break its node
    return ""


MADE: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "PrefillNode": (PrefillNode, {"topology": Topology(), "transport": "local", "staging_nbytes": 1 << 20}),
    "DecodeNode": (DecodeNode, {"topology": Topology(), "transport": "local", "staging_nbytes": 1 << 20}),
    "Config": (Config, {}),
    "Topology": (Topology, {}),
    "Column": (Column, {"name": "x", "dtype": "int32", "shape": (1,)}),
    "MetadataBuffers": (MetadataBuffers, {"columns": (Column("x", "int32", (1,)),), "n_rows": 2}),
    "BootstrapServer": (BootstrapServer, {}),
    "BootstrapClient": (BootstrapClient, {"address": "127.0.0.1:9"}),
}


@pytest.mark.parametrize("kind", MADE)
def test_nothing_is_made_of_what_is_no_argument(kind: str) -> None:
    """Made with each argument replaced by each value: it works, or it raises one typed error."""
    make, good = MADE[kind]
    wrong = []
    names = [name for name in inspect.signature(make).parameters if name != "options"]
    for name in [*names, *(DEFAULTS if "pool" in names else ())]:
        for label, value in HOSTILE.items():
            if (name, label) == ("staging_nbytes", "2**31"):
                continue  # this machine may have as much
            given = good | ({"pool": Rank().pool} if "pool" in names else {})
            if problem := attempt(lambda **of: getattr(make(**of), "close", int)(), given | {name: value}):
                wrong.append(f"{kind}({name}={label}): {problem}")
    assert not wrong, "\n".join(wrong)


def test_a_wait_without_an_end_and_one_that_is_over(site) -> None:
    """As Python's own: infinity waits for ever, and what an engine has left of its time may be below 0."""
    table = Table(site)
    receiver = table.receiver(0)
    for over in (-1.0, 0, np.float64(-3.0)):
        with pytest.raises(TimeoutError, match="did not get there"):
            receiver.wait(over)
    receiver.abort()
    with pytest.raises(PdstageError, match="aborted"):
        receiver.wait(np.float64("inf"))
    assert table.d.close(math.inf)
