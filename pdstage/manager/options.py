"""What a node is made with, and which of it goes together: asked before memory is allocated or an address is bound.

A transport's traits say what it can do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from pdstage import arguments
from pdstage.control.address import Address
from pdstage.errors import UsageError
from pdstage.metadata import WAYS, MetadataBuffers
from pdstage.protocol.config import Config
from pdstage.protocol.messages import MAX_FACTS, MAX_WORD, Fact
from pdstage.stager import DEFAULT_MAX_SMS
from pdstage.transport import Traits, Transport, open_from_config, supporting

if TYPE_CHECKING:
    from pdstage.control.keys import GivenKeys
    from pdstage.kernels import Pool
    from pdstage.manager.observer import Observer

PATHS = ("auto", "direct", "staged")

MAX_PARTS = 1 << 17
"""As many lanes as a Hello may name."""


class NodeOptions(TypedDict, total=False):
    """What both kinds of node take; `PrefillNode` says what each means, `DEFAULTS` what it is unless given."""

    transport: str | Mapping[str, object] | Transport
    path: str
    staging_nbytes: int
    staging_on: str
    bind: str
    config: Config | None
    progress: str
    max_sms: int | None
    insecure: bool
    keys: GivenKeys
    aux: str
    metadata: MetadataBuffers | None
    observers: Sequence[Observer]
    model: Mapping[str, str] | None


DEFAULTS: NodeOptions = {
    "transport": "auto", "path": "auto", "staging_nbytes": 256 << 20, "staging_on": "pool",
    "bind": "tcp://127.0.0.1:0", "config": None, "progress": "inline", "max_sms": DEFAULT_MAX_SMS, "insecure": False,
    "keys": None, "aux": "tcp", "metadata": None, "observers": (), "model": None,
}  # fmt: skip


def checked(given: NodeOptions) -> tuple[NodeOptions, Config]:
    """All of a node's options, and its `config`. Numpy's integers become Python's, which do not overflow.

    Raises `UsageError` that names the culprit, also where rows of `metadata` cannot travel as `aux` says.
    """
    unknown = sorted(given.keys() - DEFAULTS.keys())
    if unknown:
        raise UsageError(f"a node has no option {', '.join(unknown)}", remedy=f"there are {', '.join(DEFAULTS)}")
    options: NodeOptions = {**DEFAULTS, **given}
    options["staging_nbytes"] = arguments.integer("staging_nbytes", options["staging_nbytes"], low=1)
    if options["max_sms"] is not None:
        options["max_sms"] = arguments.integer("max_sms", options["max_sms"], low=1)
    config = Config() if options["config"] is None else arguments.instance("config", options["config"], Config)
    metadata = options["metadata"]
    if metadata is not None:
        arguments.instance("metadata", metadata, MetadataBuffers)
    arguments.choice("staging_on", options["staging_on"], ("pool", "host"))
    arguments.text("bind", options["bind"])
    arguments.choice("progress", options["progress"], ("inline", "thread"))
    arguments.flag("insecure", options["insecure"])
    arguments.choice("aux", options["aux"], WAYS)
    check_observers(options["observers"])
    facts_of(options["model"])
    if options["aux"] != "tcp" and metadata is None:
        raise UsageError(f"aux {options['aux']!r} without aux rows", remedy="give the node its `metadata`")
    if metadata is not None and metadata.row_nbytes > config.max_aux_nbytes:  # any row may have to go by message
        raise UsageError(
            f"aux rows of {metadata.row_nbytes} bytes, the limit is {config.max_aux_nbytes}",
            remedy="raise Config.max_aux_nbytes on both sides, or leave columns out",
        )
    return options, config


def facts_of(model: Mapping[str, str] | None) -> tuple[Fact, ...]:
    """What `model` says, as a greeting carries it. Raises `UsageError` for what none can."""
    if model is None:
        return ()
    if not isinstance(model, Mapping):
        raise UsageError(f"model is {arguments.shown(model)}", remedy="give a mapping of names to texts")
    facts = []
    for name, value in dict(model).items():
        fact = Fact(arguments.text("a name in `model`", name), arguments.text(f"model's {name}", value))
        if max(map(len, fact)) > MAX_WORD:
            raise UsageError(
                f"model's {arguments.shown(name)} of {len(fact.value)} characters",
                remedy=f"give at most {MAX_WORD}, such as a digest",
            )
        facts.append(fact)
    if len(facts) > MAX_FACTS:
        raise UsageError(f"a model of {len(facts)} facts", remedy=f"give at most {MAX_FACTS}")
    return tuple(sorted(facts))


def transport_of(options: NodeOptions, config: Config, pool: Pool, *, writes: bool) -> Transport:
    """The node's transport, open, once it is clear that path and formats can be served; `writes` at prefill."""
    check_path(options["path"], config, writes=writes)
    if config.convert:
        pool.check_converts()
    given = options["transport"]
    if isinstance(given, Transport):
        return given
    return open_from_config(given, pool.device, Address.parse(options["bind"], "tcp", listening=True).ip)


def check_memory(options: NodeOptions, pool: Pool, traits: Traits) -> None:
    """Raises `UsageError` where staging memory and pool are of a kind that the transport does not move."""
    path, where = options["path"], "cpu" if options["staging_on"] == "host" else pool.device
    on_device, staged = pool.device.partition(":")[0], where.partition(":")[0]
    if path != "staged" and (pool.on_host or staged == "cpu" != on_device):
        what = "pages in host memory" if pool.on_host else f"staging memory on {where}"
        raise UsageError(
            f"path {path!r} of a pool on {pool.device} with {what}",
            remedy=f'choose path="staged"{"" if pool.on_host else ", or have staging memory where the pool is"}',
            path=path,
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
