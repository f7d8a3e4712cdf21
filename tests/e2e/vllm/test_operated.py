"""A pair of vLLM servers in an operator's hands."""

from __future__ import annotations

from tests.e2e import operated
from tests.e2e.vllm.engines import FOUND, check_free, handed_over


def test_an_operator_has_what_he_has_of_bare_nodes(fleet, tmp_path):
    """What comes to a drained prefill is decode's to compute."""
    prefill, decode, _ = fleet.fresh(*FOUND.engines)
    with operated.listed(tmp_path, 2) as adverts:
        ask = handed_over(prefill, decode, again=True)
        operated.check(fleet, FOUND, adverts, ask, prefill, tmp_path, n=40, begun=4)
    check_free(decode)
