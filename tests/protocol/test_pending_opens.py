"""Opens of rooms that are not submitted yet: what they may hold in all, and that it comes back (I14)."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from pdstage.protocol.pending_opens import _OPEN_NBYTES, PendingOpens


class Named(SimpleNamespace):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


def waiting(session: Named, room: bytes, nbytes: int) -> Named:
    opening = SimpleNamespace(room=room, items=[SimpleNamespace(data=bytes(nbytes))])
    return Named(open=opening, session=session, epoch=1)


@given(sizes=st.lists(st.integers(0, 500), min_size=1, max_size=20), data=st.data())
def test_what_leaves_makes_room_for_as_much(sizes: list[int], data: st.DataObject) -> None:
    """Again and again: a total that does not fall refuses everybody in the end."""
    session = Named()
    most = sum(sizes) + len(sizes) * _OPEN_NBYTES
    pending = PendingOpens(len(sizes), most)
    for n in range(3):
        held = [waiting(session, b"%d" % i, nbytes) for i, nbytes in enumerate(sizes)]
        for one in held:
            assert pending.add(one) == (True, []), f"round {n}"  # type: ignore[arg-type]
        assert len(pending) == len(sizes)
        for i in data.draw(st.permutations(range(len(held)))):
            if i % 2:
                assert pending.take(b"%d" % i) == [held[i]]
            else:
                pending.remove(held[i])  # type: ignore[arg-type]
        assert len(pending) == 0
