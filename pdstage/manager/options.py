"""What a node is made with, and which of it goes together: asked before memory is allocated or an address is bound.

A transport's traits say what it can do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdstage import arguments
from pdstage.control.address import Address
from pdstage.errors import UsageError
from pdstage.metadata import WAYS, MetadataBuffers
from pdstage.protocol.config import Config
from pdstage.protocol.messages import MAX_FACTS, MAX_WORD, Fact
from pdstage.stager import place_of
from pdstage.transport import Transport, open_from_config, supporting

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from pdstage.control.keys import Keys
    from pdstage.kernels import Pool
    from pdstage.kernels.index_ring import Runtime
    from pdstage.manager.observer import Observer

PATHS = ("auto", "direct", "staged")
STAGING_ON = ("pool", "host")


DEFAULT_SWITCH_S = 1e-4
_MAX_PARTS = 1 << 17
"""As many lanes as a Hello may name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What both kinds of node take; `PrefillNode` says what each means."""

    transport: str | Mapping[str, object] | Transport
    path: str
    staging_nbytes: int
    staging: object
    staging_on: str
    n_parts: int
    """Send buffers at prefill, lanes at decode."""
    bind: str
    config: Config | None
    progress: str
    switch_interval_s: float | None
    copy_thread: bool | None
    max_sms: int | None
    insecure: bool
    keys: Keys | str | os.PathLike[str] | None
    aux: str
    metadata: MetadataBuffers | None
    observers: Sequence[Observer]
    model: Mapping[str, str] | None

    def __post_init__(self) -> None:
        """Numpy's integers become Python's, which do not overflow."""
        nbytes = arguments.integer("staging_nbytes", self.staging_nbytes, low=1)
        n_parts = arguments.integer("the number of send buffers or lanes", self.n_parts, low=1, high=_MAX_PARTS)
        if self.max_sms is not None:
            object.__setattr__(self, "max_sms", arguments.integer("max_sms", self.max_sms, low=1))
        object.__setattr__(self, "staging_nbytes", nbytes)
        object.__setattr__(self, "n_parts", n_parts)

    def check(self) -> Config:
        """Its `config`, or the default. Raises `UsageError` that names the culprit where rows of `metadata` cannot
        travel as `aux` says.
        """
        config = Config() if self.config is None else arguments.instance("config", self.config, Config)
        metadata = self.metadata
        if metadata is not None:
            arguments.instance("metadata", metadata, MetadataBuffers)
        arguments.choice("staging_on", self.staging_on, STAGING_ON)
        arguments.text("bind", self.bind)
        arguments.choice("progress", self.progress, ("inline", "thread"))
        if self.switch_interval_s is not None:
            arguments.number("switch_interval_s", self.switch_interval_s, above=0.0)
        if self.copy_thread is not None:
            arguments.flag("copy_thread", self.copy_thread)
        arguments.flag("insecure", self.insecure)
        arguments.choice("aux", self.aux, WAYS)
        check_observers(self.observers)
        self.facts()
        if self.aux != "tcp" and metadata is None:
            raise UsageError(f"aux {self.aux!r} without aux rows", remedy="give the node its `metadata`")
        if metadata is not None and metadata.row_nbytes > config.max_aux_nbytes:  # any row may have to go by message
            what = f"aux rows of {metadata.row_nbytes} bytes, the limit is {config.max_aux_nbytes}"
            raise UsageError(what, remedy="raise Config.max_aux_nbytes on both sides, or leave columns out")
        return config

    def facts(self) -> tuple[Fact, ...]:
        """What `model` says, as a greeting carries it. Raises `UsageError` for what none can."""
        if self.model is None:
            return ()
        if not isinstance(self.model, Mapping):
            raise UsageError(f"model is {arguments.shown(self.model)}", remedy="give a mapping of names to texts")
        facts = []
        for name, value in dict(self.model).items():
            fact = Fact(arguments.text("a name in `model`", name), arguments.text(f"model's {name}", value))
            if max(map(len, fact)) > MAX_WORD:
                what = f"model's {arguments.shown(name)} of {len(fact.value)} characters"
                raise UsageError(what, remedy=f"give at most {MAX_WORD}, such as a digest")
            facts.append(fact)
        if len(facts) > MAX_FACTS:
            raise UsageError(f"a model of {len(facts)} facts", remedy=f"give at most {MAX_FACTS}")
        return tuple(sorted(facts))

    def open_device(self, pool: Pool) -> Runtime | None:
        """The runtime of the pool's device, before a transport looks at it; None for host memory.

        Raises `UsageError` where no backend copies memory there; an open transport that was given is closed then.
        """
        try:
            return pool.runtime()
        except UsageError:
            if isinstance(self.transport, Transport):
                self.transport.close()
            raise

    def open_transport(self, pool: Pool, config: Config, *, writes: bool) -> Transport:
        """The node's transport, open, once it is clear that it serves these options; `writes` at prefill.

        Raises `UsageError` that names the culprit and what would do; an open transport that was given is closed then.
        """
        given = self.transport
        try:
            check_path(self.path, config, writes=writes)
            if config.convert:
                pool.check_converts()
            if isinstance(given, Transport):
                opened = given
            else:
                host = Address.parse(self.bind, "tcp", listening=True).ip
                opened = open_from_config(given, pool.device, host)
        except UsageError:
            if isinstance(given, Transport):
                given.close()
            raise
        try:
            self._check_memory(pool, opened)
        except UsageError:
            opened.close()
            raise
        return opened

    def _check_memory(self, pool: Pool, transport: Transport) -> None:
        """Raises `UsageError` where staging memory and pool are of a kind that the transport does not move."""
        where, traits = place_of(self.staging, pool.device, self.staging_on), transport.traits
        on_device, staged = pool.device.partition(":")[0], where.partition(":")[0]
        if self.path != "staged" and (pool.on_host or staged == "cpu" != on_device):
            what = "pages in host memory" if pool.on_host else f"staging memory on {where}"
            raise UsageError(
                f"path {self.path!r} of a pool on {pool.device} with {what}",
                remedy=f'choose path="staged"{"" if pool.on_host else ", or have staging memory where the pool is"}',
                path=self.path,
            )
        if staged in traits.kinds:
            return
        able, mine = ", ".join(supporting([staged])), "this pool and its" if staged == on_device else "this pool's"
        raise UsageError(
            f"transport {traits.name!r} moves {' and '.join(sorted(traits.kinds))} memory only, "
            f"and {mine} staging memory {'are' if staged == on_device else 'is'} on {where}",
            remedy=f"choose a transport that moves it: {able}" if able else "install one that moves it: none is here",
            transport=traits.name,
            device=where,
        )


def check_observers(observers: object) -> None:
    """Raises `UsageError` for what is no sequence of observers."""
    try:
        usable = isinstance(observers, tuple | list) and all(callable(one.observe) for one in observers)
    except Exception:  # noqa: BLE001  (its own method's)
        usable = False
    if not usable:
        raise UsageError(
            f"observers are {arguments.shown(observers)}", remedy="give a list of objects that have observe()"
        )


def check_path(path: str, config: Config, *, writes: bool) -> None:
    """Raises `UsageError` for a path that is none, or that goes with no checksums."""
    arguments.choice("path", path, PATHS)
    if writes and path == "direct" and config.checksums and not config.convert:  # what converts is staged anyway
        raise UsageError(
            'Config.checksums with path="direct": only what is staged carries a checksum',
            remedy='choose path="staged" or "auto", or do without checksums',
            path=path,
        )
