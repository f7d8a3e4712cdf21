"""What a rank is started with, and its process's entry: apart from `ranks`, so that a test does not import SGLang."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from tests.engines import stubs

KIND, _, index = stubs.DEVICE.partition(":")
GPU = int(index or 0)


class Setup(NamedTuple):
    """One rank's place and pool. A pool of a stage holds that stage's layers."""

    mode: str
    tp_size: int
    tp_rank: int
    port: int
    pool: str = "mha"
    page_size: int = 16
    n_pages: int = 64
    node: str = ""  # PDSTAGE_NODE
    environ: tuple[tuple[str, str], ...] = ()
    pp_size: int = 1
    pp_rank: int = 0
    options: tuple[str, ...] = ()  # more of SGLang's arguments
    meeting: str = ""  # a path, the start of those of files through which ranks of one engine find each other


def serve(*args):
    """`ranks.serve`, in a process that has SGLang already."""
    stubs.install()
    import_module("tests.engines.sglang.ranks").serve(*args)
