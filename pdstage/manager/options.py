"""What a node is made with, and which of it goes together: asked before memory is allocated or an address is bound.

A transport's traits say what it can do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdstage.errors import UsageError
from pdstage.metadata import WAYS
from pdstage.protocol.config import Config
from pdstage.transport import Transport, open_from_config, supporting

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from pdstage.control.keys import Keys
    from pdstage.kernels import Pool
    from pdstage.manager.observer import Observer
    from pdstage.metadata import MetadataBuffers

PATHS = ("auto", "direct", "staged")


DEFAULT_SWITCH_S = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What both kinds of node take; `PrefillNode` says what each means."""

    transport: str | Mapping[str, object] | Transport
    path: str
    staging_nbytes: int
    staging: object
    n_parts: int
    """Send buffers at prefill, lanes at decode."""
    bind: str
    config: Config | None
    progress: str
    switch_interval_s: float | None
    copy_thread: bool | None
    insecure: bool
    keys: Keys | str | os.PathLike[str] | None
    aux: str
    metadata: MetadataBuffers | None
    observers: Sequence[Observer]

    def check(self) -> Config:
        """Its `config`, or the default. Raises `UsageError` that names the culprit where rows of `metadata` cannot
        travel as `aux` says.
        """
        config, metadata = self.config or Config(), self.metadata
        if self.aux not in WAYS:
            raise UsageError(f"aux {self.aux!r}", remedy=f"choose one of {', '.join(WAYS)}")
        if self.aux != "tcp" and metadata is None:
            raise UsageError(f"aux {self.aux!r} without aux rows", remedy="give the node its `metadata`")
        if metadata is not None and metadata.row_nbytes > config.max_aux_nbytes:  # any row may have to go by message
            what = f"aux rows of {metadata.row_nbytes} bytes, the limit is {config.max_aux_nbytes}"
            raise UsageError(what, remedy="raise Config.max_aux_nbytes on both sides, or leave columns out")
        return config

    def open_transport(self, pool: Pool, config: Config, *, writes: bool) -> Transport:
        """The node's transport, open, once it is clear that it serves these options; `writes` at prefill.

        Raises `UsageError` that names the culprit and what would do; an open transport that was given is closed then.
        """
        given = self.transport
        try:
            check_path(self.path, config, writes=writes)
            if config.convert:
                pool.check_converts(checksum=config.checksums)
            opened = given if isinstance(given, Transport) else open_from_config(given, pool.device)
        except UsageError:
            if isinstance(given, Transport):
                given.close()
            raise
        try:
            _check_memory(pool, opened)
        except UsageError:
            opened.close()
            raise
        return opened


def check_path(path: str, config: Config, *, writes: bool) -> None:
    """Raises `UsageError` for a path that is none, or that goes with no checksums."""
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
