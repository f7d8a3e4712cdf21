"""Through SGLang's own router, which asks both engines at once and makes the rooms' numbers."""

from __future__ import annotations

import pytest

from tests.e2e import compare, load
from tests.e2e.sglang.engines import FOUND, check_free, router


@pytest.mark.full
def test_answers_through_the_router(fleet):
    """The router knows prompts as text."""
    asked = load.prompts(100, seed=301, longest=300)
    prefill, decode, _ = fleet.up(*FOUND.engines)
    right = fleet.right(FOUND.reference, asked, as_text=True)
    front = router(prefill, decode, fleet.place).start()
    try:
        front.wait()
        with fleet.timed(f"router: {len(asked)} prompts, 16 at a time"):
            answers = load.ask_all(load.to(front.url, as_text=True), asked, 16)
        fleet.note(f"router: {compare.summary(answers, right)}")
        compare.check(answers, right)
        check_free(prefill, decode)
    finally:
        front.stop()
