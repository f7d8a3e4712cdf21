"""The contract suite over a GPU's memory, within a process and to another: `local`, which maps by CUDA IPC, and `nixl`;
and rooms of nodes over NIXL.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from gpu.endpoint import GpuEndpoint
from transport.conftest import Pair, Variant
from transport.endpoint import Remote
from transport.test_contract import (  # noqa: F401  (what has this file's names collects them)
    test_bad_descriptions_are_refused_and_leave_the_connection_alone,
    test_both_ways_at_once,
    test_close_is_final_and_may_be_repeated,
    test_empty_tag_says_nothing_at_the_peer,
    test_every_ticket_ends_once_though_its_peer_was_disconnected,
    test_many_spans_unsorted_and_adjacent,
    test_nothing_of_a_writer_that_is_proved_dead_lands_any_more,
    test_peer_registers_more,
    test_peer_restarted_under_its_label,
    test_peer_that_closed_its_transport_is_not_written,
    test_posts_to_a_killed_peer_fail,
    test_posts_to_a_peer_that_does_not_poll_neither_block_nor_lose_a_tag,
    test_prepare_replaces_and_narrows,
    test_registration_again_overlap_and_kind,
    test_span_outside_registered_or_prepared_memory_is_refused,
    test_tag_comes_after_all_of_its_bytes,
    test_tags_are_any_bytes,
    test_two_labels_for_one_peer,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["local", "nixl"])
def transport(request):
    pytest.importorskip({"local": "cupy", "nixl": "nixl"}[request.param])
    return f"{request.param}+gpu:0"


@pytest.fixture(scope="module")
def kept(transport):
    """One process for all tests that do not kill it: a new one makes a context, which takes seconds."""
    remotes = []

    def remote():
        if remotes:
            remotes[0].renew()
        else:
            remotes.append(Remote(transport))
        return remotes[0]

    yield remote
    for one in remotes:
        one.shut()


@pytest.fixture(params=["same", "two"])
def pair(request, transport, kept):
    a = GpuEndpoint(transport)
    b = GpuEndpoint(transport) if request.param == "same" else kept()
    yield Pair(Variant(transport, request.param), a, b)
    a.close()
    b.close()


@pytest.fixture
def linked(pair):
    return pair.connect()


@pytest.fixture
def mortal(transport):
    a, b = GpuEndpoint(transport), Remote(transport)
    yield Pair(Variant(transport, "two"), a, b).connect()
    b.kill()
    a.close()


def test_rooms_between_two_processes():
    """Staged by this side's kernels, written by NIXL into the other process's device memory."""
    pytest.importorskip("zmq")
    pytest.importorskip("nixl")
    from gpu import ranks  # noqa: PLC0415  (what nodes need)

    assert ranks.between_processes("cuda:0", "nixl")["sessions_over_nixl"] == 1
