"""Which prefill ranks come and go at a directory, a line each, for `pdstage instances --watch`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pdstage.control.directory import Advert  # noqa: TC001  (msgspec resolves the annotation at run time)
from pdstage.errors import PdstageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdstage.control.bootstrap import DirectoryClient


class _Line(msgspec.Struct):
    advert: Advert


_instances = msgspec.json.Decoder(dict[str, list[_Line]])


class Rank(NamedTuple):
    """One rank's process."""

    endpoint: str
    incarnation: int


Ranks = dict[tuple[str, int], Rank]


def ranks_of(answer: bytes) -> Ranks:
    """The ranks in an answer of `DirectoryClient.instances`, by instance and unique rank."""
    adverts = [line.advert for lines in _instances.decode(answer).values() for line in lines]
    return {(one.instance, one.topology.unique_rank): Rank(one.endpoint, one.incarnation) for one in adverts}


def changes(before: Ranks, now: Ranks) -> Iterator[str]:
    """`+` a rank that came, `-` one that went, `*` one of which another process took the place."""
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if old == new:
            continue
        sign = "+" if old is None else "-" if new is None else "*"
        shown = new or old
        assert shown is not None
        yield f"{sign} {key[0]} rank {key[1]} {shown.endpoint} {shown.incarnation:016x}"


def watch(client: DirectoryClient, every_s: float) -> Iterator[str]:
    """What changes, looked at every `every_s` seconds, for ever; `!` where the directory does not answer, once."""
    ranks: Ranks = {}
    is_away = False
    while True:
        try:
            now = ranks_of(client.instances())
        except PdstageError as error:
            if not is_away:
                yield f"! {error}"
            is_away = True
        else:
            if is_away:
                yield "! it answers again"
            is_away = False
            yield from changes(ranks, now)
            ranks = now
        time.sleep(every_s)
