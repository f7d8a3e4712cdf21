"""Calls that a worker's step hands on: made in order, by one thread, and what one of them raises is told."""

from __future__ import annotations

import os
import threading

import pytest

from pdstage.integrations.task_thread import TaskThread


@pytest.fixture
def tasks():
    made = TaskThread("test")
    yield made
    made.close()


def test_calls_are_made_in_order_by_one_other_thread(tasks: TaskThread) -> None:
    seen: list[tuple[int, int]] = []
    for number in range(1000):
        tasks.put(lambda number=number: seen.append((number, threading.get_ident())))
    tasks.close()
    assert [number for number, _ in seen] == list(range(1000))
    assert len({thread for _, thread in seen} | {threading.get_ident()}) == 2


def test_put_does_not_wait_for_a_call(tasks: TaskThread) -> None:
    going, done = threading.Event(), threading.Event()
    tasks.put(lambda: going.wait(60.0))
    tasks.put(done.set)
    assert not done.is_set()
    going.set()
    assert done.wait(60.0)


def test_what_a_call_raises_is_raised_by_check_and_no_later_call_is_made(tasks: TaskThread, caplog) -> None:
    later: list[int] = []

    def broken() -> None:
        raise AssertionError("a mistake")

    tasks.check()
    tasks.put(broken)
    tasks.put(lambda: later.append(1))
    tasks.close()
    for _ in range(2):
        with pytest.raises(AssertionError, match="a mistake"):
            tasks.check()
    assert not later
    assert "a mistake" in caplog.text


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux only")
def test_its_waking_takes_no_processor_from_the_worker(tasks: TaskThread) -> None:
    """Where the system lets a thread say so."""
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        pytest.skip("the tests run under a policy of their own")
    policies: list[int] = []
    tasks.put(lambda: policies.append(os.sched_getscheduler(0)))
    tasks.close()
    assert policies == [os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER, "only that thread's"
