"""SGLang's own queue of requests in transfer at decode: when it gives a failed request's pages back.

Its timer is an hour here: what comes back does so because pdstage says that nobody writes to it any more.
"""

from __future__ import annotations

import pytest

from tests.engines.sglang.fleet import FAILED, SUCCESS, TOKENS, eventually, shared_fleet

LOOKS = 50
OVER = [["answered", "pages freed", "drained"]]


fleet = shared_fleet(1, 1)


def begin(fleet, room, restore="ready"):
    fleet.open(room)
    fleet.decode.each("enqueue", room, restore)


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_the_client_is_answered_at_once_and_pages_come_back_when_writes_are_over(fleet, who):
    room = 1 + (who == "decode")
    fleet.prefill.each("hold_writes")
    begin(fleet, room)
    fleet.compute(room, 0, TOKENS - 36, False)
    getattr(fleet, who).each("abort", room)
    eventually(lambda: fleet.decode.each("step"), lambda told: told != [[]])
    assert [fleet.decode.each("step") for _ in range(LOOKS)] == [[["answered"]]] * LOOKS
    fleet.prefill.each("let_go")
    eventually(lambda: fleet.decode.each("step"), lambda told: told == OVER)
    fleet.fails_at_prefill(room)


def test_a_prefix_that_hicache_cannot_load_fails_the_request_and_its_pages_come_back(fleet):
    """All that prefill sent has arrived, or is on its way: either side's writes are over first."""
    begin(fleet, 3, "failed")
    fleet.compute(3)
    eventually(lambda: fleet.decode.each("step"), lambda told: told == OVER)
    assert fleet.prefill.until(3, SUCCESS, FAILED) == SUCCESS
    fleet.prefill.each("clear", 3)
