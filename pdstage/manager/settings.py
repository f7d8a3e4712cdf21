"""Which of a node's settings go together: asked at its start, before memory is allocated or an address is bound.

A transport's traits say what it can do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdstage.errors import UsageError
from pdstage.metadata import WAYS
from pdstage.transport import Transport, open_from_config, supporting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdstage.kernels import Pool
    from pdstage.metadata import MetadataBuffers
    from pdstage.protocol.config import Config

PATHS = ("auto", "direct", "staged")


def check_aux(aux: str, metadata: MetadataBuffers | None, config: Config) -> None:
    """Whether rows of `metadata` can travel as `aux` says; raises `UsageError` that names the culprit."""
    if aux not in WAYS:
        raise UsageError(f"aux {aux!r}", remedy=f"choose one of {', '.join(WAYS)}")
    if aux != "tcp" and metadata is None:
        raise UsageError(f"aux {aux!r} without aux rows", remedy="give the node its `metadata`")
    if metadata is not None and metadata.row_nbytes > config.max_aux_nbytes:  # any row may have to go by message
        what = f"aux rows of {metadata.row_nbytes} bytes, the limit is {config.max_aux_nbytes}"
        raise UsageError(what, remedy="raise Config.max_aux_nbytes on both sides, or leave columns out")


def open_checked(
    pool: Pool, path: str, config: Config, transport: str | Mapping[str, object] | Transport, *, writes: bool
) -> Transport:
    """The node's transport, open, once it is clear that it serves these settings; `writes` at prefill.

    Raises `UsageError` that names the culprit and what would do; an open transport that was given is closed then.
    """
    try:
        _check_path(path, config, writes=writes)
        if config.convert:
            pool.check_converts(checksum=config.checksums)
        opened = transport if isinstance(transport, Transport) else open_from_config(transport, pool.device)
    except UsageError:
        if isinstance(transport, Transport):
            transport.close()
        raise
    try:
        _check_memory(pool, opened)
    except UsageError:
        opened.close()
        raise
    return opened


def _check_path(path: str, config: Config, *, writes: bool) -> None:
    if path not in PATHS:
        raise UsageError(f"path {path!r}", remedy=f"choose one of {', '.join(PATHS)}")
    if writes and path == "direct" and config.checksums and not config.convert:  # what converts is staged all the same
        raise UsageError(
            'Config.checksums with path="direct": only what is staged carries a checksum',
            remedy='choose path="staged" or "auto", or do without checksums',
            path=path,
        )


def _check_memory(pool: Pool, transport: Transport) -> None:
    """A pool lies on one device, and its staging memory with it: one kind is moved on every path."""
    kind, traits = pool.device.partition(":")[0], transport.traits
    if kind in traits.kinds:
        return
    able = ", ".join(supporting([kind]))
    raise UsageError(
        f"transport {traits.name!r} moves {' and '.join(sorted(traits.kinds))} memory only, "
        f"and this pool and its staging memory are on {pool.device}",
        remedy=f"choose a transport that moves it: {able}" if able else "install one that moves it: none is here",
        transport=traits.name,
        device=pool.device,
    )
