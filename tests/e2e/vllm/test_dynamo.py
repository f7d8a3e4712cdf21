"""Through NVIDIA Dynamo: its frontend in front of its own vLLM workers, whose connector is known by its name alone."""

from __future__ import annotations

import contextlib

import pytest

from tests.e2e import compare, load, servers
from tests.e2e.servers import wait_until
from tests.e2e.vllm import dynamo
from tests.e2e.vllm.engines import pair
from tests.watch.samples import Samples, get

PAIR = pair((2, 128), (1, 128))


@pytest.mark.full
def test_answers_through_dynamo(fleet):
    """All handed over."""
    dynamo.install()
    asked = load.prompts(40, seed=501)
    right = fleet.right(PAIR.reference, asked)
    folder = fleet.folder(PAIR.prefill.model)
    workers = [dynamo.worker(one, folder, fleet.place) for one in (PAIR.prefill, PAIR.decode)]
    front = dynamo.frontend(fleet.place)
    with contextlib.ExitStack() as ends:
        for one in (front, *workers):
            ends.callback(one.start().stop)
        front.wait()
        models = lambda: get(f"127.0.0.1:{front.port}", "/v1/models")  # noqa: E731
        known = lambda: "tiny" in models() or not all(one.runs for one in workers)  # noqa: E731
        assert wait_until(known, servers.UP_S) and "tiny" in models(), "".join(one.tail() for one in (front, *workers))
        answers = load.ask_all(load.to(front.url, return_token_ids=None), asked, 8)
        told = Samples(get(f"127.0.0.1:{workers[1].port}"))
        assert told("pdstage_rooms_ended_total", role="decode", outcome="success") == len(asked)
    fleet.note(f"dynamo: {compare.summary(answers, right)}")
    compare.check(answers, right)
