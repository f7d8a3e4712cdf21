"""A pair of SGLang servers in an operator's hands."""

from __future__ import annotations

from tests.e2e import operated
from tests.e2e.sglang.engines import FOUND, check_free, handed_over


def test_an_operator_has_what_he_has_of_bare_nodes(fleet, tmp_path):
    """All that prefill has begun when it is drained."""
    prefill, decode, _ = fleet.up(*FOUND.engines)
    with operated.listed(tmp_path, 3) as adverts:
        operated.check(fleet, FOUND, adverts, handed_over(prefill, decode), prefill, tmp_path, n=16, begun=16)
    check_free(decode)
