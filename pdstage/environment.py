"""The environment variables of this project: one table, and the only code that reads them.

`docs/environment.md` shows the table. An unknown variable with our prefix is logged once.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pdstage.errors import UsageError

log = logging.getLogger(__name__)

PREFIX = "PDSTAGE_"

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Variable(Generic[T_co]):
    """One variable. `parse` converts the text, or raises `ValueError` with the reason.

    `values` says what it may be, `unset` the default, `read_by` what reads it, and when.
    """

    name: str
    parse: Callable[[str], T_co]
    values: str
    unset: str
    meaning: str
    read_by: str

    def read(self) -> T_co | None:
        """Its current value; None if it is unset or empty. Raises `UsageError` for an invalid value."""
        _warn_of_unknown()
        text = os.environ.get(self.name, "")
        if not text:
            return None
        try:
            return self.parse(text)
        except ValueError as error:
            raise UsageError(
                f"{self.name}={text!r}: {error}", remedy=f"set it to {self.values}, or unset it", variable=self.name
            ) from error


def _one_of(*values: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in values:
            raise ValueError(f"it is not {' or '.join(values)}")
        return text

    return parse


def _path(may_be: Callable[[Path], bool], why_not: str) -> Callable[[str], Path]:
    def parse(text: str) -> Path:
        if not may_be(path := Path(text)):
            raise ValueError(why_not)
        return path

    return parse


def _options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    if not (isinstance(options, dict) and isinstance(options.get("config", {}), dict)):
        raise ValueError("it is not an object, or its config is not")  # noqa: TRY004  (as `Variable.read` expects)
    return options


NATIVE = Variable(
    "PDSTAGE_NATIVE", _one_of("yes", "no"), "`yes` or `no`", "uses numpy if there is no extension",
    "Whether the C++ extension is built and used: `yes` makes its absence an error, `no` leaves it out.",
    "`setup.py`, and the first import of `pdstage.native`",
)  # fmt: skip
CALIBRATION = Variable(
    "PDSTAGE_CALIBRATION", _path(Path.is_file, "there is no such file"),
    "a file that `pdstage calibrate --output` wrote", "the transports' own estimates",
    "The measured cost of each transport here, by which `path=\"auto\"` chooses.",
    "`PrefillNode(calibration=None)`, when it is created",
)  # fmt: skip
CACHE_DIR = Variable(
    "PDSTAGE_CACHE_DIR", _path(lambda path: path.is_dir() or not path.exists(), "it is not a folder"),
    "a folder, created if missing",
    "`pdstage` in `XDG_CACHE_HOME`, by default `~/.cache`",
    "Where compiled CUDA kernels are kept.",
    "the first copy by the CUDA kernels",
)  # fmt: skip
COMMIT = Variable(
    "PDSTAGE_COMMIT", str, "a commit", "the checkout's own; unknown where the tree is a copy of one",
    "The commit that benchmark results name.",
    "`pdstage bench`, `make gpu`",
)  # fmt: skip
POD = Variable(
    "PDSTAGE_POD", str, "the pod's name (`metadata.name`)", "no pod",
    "By which a container that Kubernetes started again takes the place of the one before in a directory at once; and "
    "an engine's name there.",
    "a node, when it is created",
)  # fmt: skip
ETCD_PASSWORD = Variable(
    "PDSTAGE_ETCD_PASSWORD", str, "a password", "empty",
    "The password of the user in an address `etcd://USER@...`.",
    "a node with such an address, `pdstage instances`, `pdstage fence`",
)  # fmt: skip
DEVICE_MEMORY = Variable(
    "PDSTAGE_DEVICE_MEMORY", _one_of("cudaMalloc", "cuMemCreate"), "`cudaMalloc` or `cuMemCreate`", "`cudaMalloc`",
    "How a node allocates memory on an NVIDIA GPU, its staging memory above all. NVLink between hosts (IMEX) needs "
    "memory with fabric handles: `cuMemCreate`.",
    "a node with a pool on a GPU, when it is created",
)  # fmt: skip
COPY_BATCHES = Variable(
    "PDSTAGE_COPY_BATCHES", _one_of("yes", "no"), "`yes` or `no`", "`yes`",
    "Whether one call of an NVIDIA driver enqueues up to 512 copies (cuMemcpyBatchAsync). On some drivers it hangs "
    "(vllm#49276), which the log says; `no` enqueues copies one by one.",
    "the transport `local`, when it first copies device memory",
)  # fmt: skip
NODE = Variable(
    "PDSTAGE_NODE", _options,
    "a JSON object of arguments of `PrefillNode` and `DecodeNode`, `config` as an object inside, and the adapters' "
    "`trust_layout`, `metrics_port`, `metrics_host`, `directory` and `instance`",
    "their defaults",
    "An operator's options for the nodes that an engine's adapter creates, if the engine has no option for them: "
    '`{"transport": "nixl", "keys": "cluster.key", "config": {"drain_s": 10}}`.',
    "the adapters of engines, when a rank's node is created",
)  # fmt: skip
TEST_TRANSPORTS = Variable(
    "PDSTAGE_TEST_TRANSPORTS", str.split, "names with spaces between", "the project's own only",
    "Further transports for the contract suite.",
    "`pytest tests/transport`",
)  # fmt: skip
GPU_TESTS = Variable(
    "PDSTAGE_GPU_TESTS", _one_of("few"), "`few`", "all cases",
    "Draws few cases per test, as many as a sanitizer has time for.",
    "`pytest tests/gpu`",
)  # fmt: skip


USERS = (NATIVE, CALIBRATION, CACHE_DIR, POD, ETCD_PASSWORD, NODE, DEVICE_MEMORY, COPY_BATCHES)
DEVELOPERS = (COMMIT, TEST_TRANSPORTS, GPU_TESTS)
VARIABLES: tuple[Variable[object], ...] = USERS + DEVELOPERS

_warned_of: set[str] = set()


def _warn_of_unknown() -> None:
    """Logs unknown names: most are misspelt."""
    known = {variable.name for variable in VARIABLES}
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        if name not in known and name not in _warned_of:
            _warned_of.add(name)
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            log.warning("nothing reads the environment variable %s; the nearest known one is %s", name, near)
