"""What SGLang's schedulers use of a backend's classes, and what it still calls of them: both by its own source."""

from __future__ import annotations

import inspect
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from sglang.srt.disaggregation.common import conn

from pdstage.integrations.sglang.bootstrap import PdStageKVBootstrapServer
from pdstage.integrations.sglang.manager import PdStageKVManager
from pdstage.integrations.sglang.receiver import PdStageKVReceiver
from pdstage.integrations.sglang.sender import PdStageKVSender
from tests.engines.sglang.fleet import Fleet

CLASSES = {
    PdStageKVManager: conn.CommonKVManager,
    PdStageKVSender: conn.CommonKVSender,
    PdStageKVReceiver: conn.CommonKVReceiver,
    PdStageKVBootstrapServer: conn.CommonKVBootstrapServer,
}
MANAGER, SENDER, RECEIVER = "kv_manager|kv_mgr|km", "disagg_kv_sender|sender", "kv_receiver"
NEVER = {
    "_prefetch_staging_reqs",  # of SGLang's own staging, which is refused
    "set_kv_buffer_tensors",  # the same
    "supports_host_tensor_indices",  # pages that are still on their way from the device
}
"""What SGLang asks for before it uses it, and this backend has not."""


def used(names):
    """The attributes that SGLang's queues and schedulers use of what has one of these names."""
    (root,) = find_spec("sglang").submodule_search_locations
    srt = Path(root, "srt")
    pattern = re.compile(rf'\b(?:{names})\.(\w+)|attr\(\s*[\w.]*\b(?:{names}),\s*"(\w+)"')
    sources = (*(srt / "disaggregation").glob("*.py"), *(srt / "managers").rglob("*.py"))
    return sorted({name for path in sources for pair in pattern.findall(path.read_text()) for name in pair if name})


def test_the_classes_have_all_that_sglang_uses():
    with Fleet(1, 1) as fleet:
        fleet.announce(1)
        lacking = set()
        of_manager = used(MANAGER)
        missing = []
        for engine, names in ((fleet.prefill, SENDER), (fleet.decode, RECEIVER)):
            ((managers, rooms),) = engine.each("lacks", 1, of_manager, used(names))
            missing.append(set(managers))
            lacking |= set(rooms)
        lacking |= set.intersection(*missing)  # the others are of one role
        assert lacking == NEVER
        fleet.bind(1)
        fleet.begin(1)
        fleet.rest(1)


@pytest.mark.parametrize("ours", CLASSES, ids=lambda one: one.__name__)
def test_each_method_takes_what_sglangs_takes(ours):
    """And nothing is abstract."""
    theirs = CLASSES[ours]
    assert not ours.__abstractmethods__
    for name, method in vars(ours).items():
        if name == "__init__" or not callable(method) or not hasattr(theirs, name):
            continue
        mine, other = (inspect.signature(getattr(one, name)).parameters for one in (ours, theirs))
        assert [*mine] == [*other], name
