"""Skips what this machine cannot run, and watches for what a test leaves behind."""

from __future__ import annotations

import gc
import importlib.util
import resource
import signal
import threading

import pytest

from pdstage.protocol import state
from tests import descriptors, rows

_MAY_OUTLIVE = "pdstage-mooncake"
"""A question to a peer that does not answer, which nothing ends."""
_ENDS_S = 240.0
LONG = (
    "any_layout/test_any_layout.py", "sim/test_mutants.py", "transport/test_contract.py", "kernels/test_triton.py",
    "judge/test_judge.py", "demo/test_demo.py", "fuzz/test_corpus.py", "manager/test_convert.py",
    "doctor/test_transports.py", "control/test_etcd.py", "manager/test_on_gpus.py", "kernels/test_pool.py",
    "docs/test_python.py", "docs/test_commands.py", "manager/test_failures.py", "doctor/test_peer.py",
    "sim/test_seeds.py", "doctor/test_checks.py", "bench/test_gpu.py", "kernels/test_cuda_on_cpu.py",
    "manager/test_ctrl_c.py", "watch/test_incidents.py", "bench/test_prove.py", "tests/test_packaging.py",
)  # fmt: skip
"""Files that take long, with FULL=1 some of them: among the others they would come last."""


def _n_cuda_devices() -> int:
    if not importlib.util.find_spec("torch"):
        return 0
    import torch  # noqa: PLC0415  (most tests need no torch, and it costs seconds to import)

    return torch.cuda.device_count()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="everything, not only what .ci/run has time for")


def pytest_configure(config: pytest.Config) -> None:
    """Moves that no state table has are errors; SIGINT is heard again; and files are as many as the system allows.

    A shell that starts tests in the background has them ignore SIGINT, and with them the programs they end by it.
    Device memory of the double of CUDA, most of which lives as long as its process, is a file each.
    """
    state.strict = True
    _be_patient()
    rows.everything = config.getoption("--full")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _be_patient() -> None:
    """No drawn example is too slow beside other work. What hypothesis itself does in CI stays: examples that do not
    change.
    """
    try:
        from hypothesis import HealthCheck, settings  # noqa: PLC0415
    except ImportError:  # a borrowed machine does not have it, and runs none of the tests that need it
        return
    suppressed = [HealthCheck.too_slow]
    settings.register_profile("busy machine", settings.default, deadline=None, suppress_health_check=suppressed)
    settings.load_profile("busy machine")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what needs more time or more CUDA devices than there are, and says so; and begins with what takes long.

    A file is one worker's, and at the end none shall wait for another's.
    """
    items.sort(key=lambda item: not str(item.path).endswith(LONG))
    for item in items:
        if item.get_closest_marker("full") and not config.getoption("--full"):
            item.add_marker(pytest.mark.skip(reason="FULL=1 runs it"))
    _skip_without_devices(items)


def pytest_collection_finish() -> None:
    """What was imported and collected stays: the garbage collector, which many tests call, need not walk it again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Extensions tell of what is left of them at the very end."""
    gc.unfreeze()


def _skip_without_devices(items: list[pytest.Item]) -> None:
    needs = {"gpu": 1, "multigpu": 2}
    marked = [(item, n) for item in items for mark, n in needs.items() if item.get_closest_marker(mark)]
    if not marked:
        return
    held = _n_cuda_devices()
    for item, n in marked:
        if n > held:
            item.add_marker(pytest.mark.skip(reason=f"needs {n} CUDA devices, this machine has {held}"))


@pytest.fixture(autouse=True, scope="module")
def _no_threads_of_nodes() -> object:
    """Fails the last test of a file that leaves a node, a directory or a look-up: the next file may count threads."""
    before = set(threading.enumerate())
    yield
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("pdstage-")]
    left = [thread for thread in ours if thread not in before and thread.name != _MAY_OUTLIVE]
    for thread in left:
        thread.join(_ENDS_S)
    names = [thread.name for thread in left if thread.is_alive()]
    assert not names, f"threads left behind by this file: {names}"


@pytest.fixture
def no_leaks() -> object:
    """Fails the test if it leaves threads or open file descriptors behind."""
    threads, before = set(threading.enumerate()), descriptors.kinds()
    yield
    left = [thread.name for thread in set(threading.enumerate()) - threads if thread.is_alive()]
    assert not left, f"threads left behind: {left}"
    assert not descriptors.left(before), "file descriptors left behind"
