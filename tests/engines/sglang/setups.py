"""What a rank is started with, and its process's entry: apart from `ranks`, so that a test does not import SGLang."""

from __future__ import annotations

from typing import NamedTuple


class Setup(NamedTuple):
    """One rank's place and pool."""

    mode: str
    tp_size: int
    tp_rank: int
    port: int
    pool: str = "mha"
    page_size: int = 16
    n_pages: int = 64
    node: str = ""  # PDSTAGE_NODE


def serve(*args: object) -> None:
    """`ranks.serve`, in a process that has SGLang already."""
    import tests.engines.sglang.stubs  # noqa: F401, PLC0415
    from tests.engines.sglang import ranks  # noqa: PLC0415

    ranks.serve(*args)
