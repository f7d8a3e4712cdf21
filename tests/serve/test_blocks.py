"""Pages: shared by prompts that begin alike, kept when nobody holds them, evicted for others, never given twice."""

from __future__ import annotations

import random

import pytest

from pdstage.demo.families import PAGES, SLOT, WINDOW_PAGES
from pdstage.demo.serve.blocks import Kind, Ledger

PAGE = 4


def ledger(n_pages: int = 8, *, shares: bool = True) -> Ledger:
    return Ledger({"kv": Kind(PAGES, PAGE, n_pages)}, 0, shares=shares)


def items(room) -> list[int]:
    return room["kv"].items.tolist()


def test_a_prompt_finds_the_pages_of_one_that_began_alike():
    held = ledger()
    first, cached = held.admit(range(10))
    assert (len(items(first)), cached) == (3, 0)
    held.learn(first, range(10), 6)
    second, cached = held.admit([0, 1, 2, 3, 4, 5, 6, 7, 8])
    assert cached == 4, "the second page is not computed yet"
    assert items(second)[0] == items(first)[0]
    assert not set(items(second)[1:]) & set(items(first))
    third, cached = held.admit([0, 1, 2, 9, 9])
    assert cached == 0, "a page is found only if it is the same to its end"
    held.free(third)


def test_at_least_one_token_is_left_to_compute():
    held = ledger()
    first, _ = held.admit(range(8))
    held.learn(first, range(8), 8)
    held.free(first)
    _, cached = held.admit(range(8))
    assert cached == 4


def test_kept_pages_are_evicted_in_the_order_of_their_use_ends_first():
    held = ledger(n_pages=4)
    for start in (0, 100):
        room, _ = held.admit(range(start, start + 8))
        held.learn(room, range(start, start + 8), 8)
        held.free(room)
    blocks = held.blocks["kv"]
    assert (blocks.n_kept, blocks.available, blocks.evicted) == (4, 4, 0)
    held.free(held.admit([7])[0])
    assert blocks.evicted == 1
    assert held.admit(range(9))[1] == 4, "the older prompt's end went first, its beginning is there"


def test_what_has_no_place_holds_nothing():
    held = ledger(n_pages=3)
    room, _ = held.admit(range(8))
    held.learn(room, range(8), 8)
    assert held.admit(range(16)) is None, "it would share two pages, and two more are not there"
    held.free(room)
    assert held.blocks["kv"].available == 3
    assert held.admit(range(50, 62))[1] == 0


def test_windows_and_slots_take_what_they_need():
    kinds = {"kv": Kind(PAGES, PAGE, 99), "swa": Kind(WINDOW_PAGES, PAGE, 99, 6), "mamba": Kind(SLOT, 1, 2)}
    held = Ledger(kinds, 0, shares=True)
    room, cached = held.admit(range(21), room_for=4)
    assert cached == 0
    assert held.needs(21, 4) == {name: len(table.items) for name, table in room.items()}
    assert [(t.first_token, t.start, t.stop) for t in room.values()] == [(0, 0, 21), (16, 16, 21), (0, 0, 1)]
    assert held.admit(range(21)) is not None
    assert held.admit(range(21)) is None, "there are two slots"


@pytest.mark.parametrize("seed", range(20))
def test_no_page_has_two_owners_and_none_is_lost(seed):
    """Random lives: pages of different rooms are the same only where their prompts are, up to the page's end."""
    draw = random.Random(seed)
    held, rooms = ledger(n_pages=16), []
    for _ in range(300):
        if rooms and draw.random() < 0.5:
            held.free(rooms.pop(draw.randrange(len(rooms)))[0])
            continue
        prompt = [draw.randrange(2) for _ in range(draw.randint(1, 20))]
        admitted = held.admit(prompt)
        if admitted is not None:
            room, cached = admitted
            rooms.append((room, prompt))
            held.learn(room, prompt, draw.randint(cached, len(prompt)))
        owners: dict[int, list[int]] = {}
        for room, of in rooms:
            for at, page in enumerate(items(room)):
                upto = of[: (at + 1) * PAGE]
                assert owners.setdefault(page, upto) == upto
        assert held.blocks["kv"].available == 16 - len(owners)
    for room, _ in rooms:
        held.free(room)
    assert held.blocks["kv"].available == 16
