"""An operator's options for the nodes that an adapter creates: from the engine's own option, and from PDSTAGE_NODE."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pdstage import Config, environment
from pdstage.control.address import Address
from pdstage.errors import UsageError
from pdstage.manager import DecodeNode, PrefillNode
from pdstage.manager.options import DEFAULTS

_OURS = {
    "bootstrap", "instance", "publish", "progress", "metadata", "aux", "observers", "staging", "bind",
}  # fmt: skip
"""Arguments that the adapter sets itself."""
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


def node_options(
    kind: type[PrefillNode | DecodeNode], given: Mapping[str, Any], *, where: str, deadlines: Mapping[str, float]
) -> dict[str, Any]:
    """Arguments for a node of that kind: those of `given`, which the operator wrote at `where`, over PDSTAGE_NODE's.

    `deadlines` are fields of `Config` that apply unless the operator sets them. Raises `UsageError` for an argument
    that neither kind of node has, that operators may not set, or whose type differs from its default's.
    """
    defaults = {name: default for each in (PrefillNode, DecodeNode) for name, default in _arguments(each).items()}
    known = set(defaults) - _OURS
    merged: dict[str, Any] = {}
    config: dict[str, Any] = dict(deadlines)
    from_environment = dict(environment.NODE.read() or {})
    from_environment.pop("trust_layout", None)  # the adapter's, see below
    for source, options in ((environment.NODE.name, from_environment), (where, given)):
        own = options.get("config", {})
        unknown = [*(set(options) - known), *(set(own) - {field.name for field in fields(Config)})]
        if unknown:
            raise UsageError(
                f"{source} has {', '.join(sorted(unknown))}",
                remedy=f"known are {', '.join(sorted(known))}, and config with the fields of pdstage.Config",
            )
        for name, value in options.items():
            if name != "transport" or not isinstance(value, Mapping):  # a transport checks its own options
                _check_kind(f"{name} of {source}", value, defaults[name])
        for field in fields(Config):
            _check_kind(f"config's {field.name} of {source}", own.get(field.name, field.default), field.default)
        merged |= options
        config |= own
    return {name: merged[name] for name in _arguments(kind) if name in merged} | {"config": Config(**config)}


def trusts_layout(given: Mapping[str, Any] | None = None, *, where: str = "") -> bool:
    """Whether the operator vouches for pages whose layout nothing proves: `trust_layout` of `given`, written at
    `where`, else of PDSTAGE_NODE.
    """
    trusts = False
    for source, options in ((environment.NODE.name, environment.NODE.read()), (where, given)):
        trusts = (options or {}).get("trust_layout", trusts)
        _check_kind(f"trust_layout of {source}", trusts, default=False)
    return trusts


def check_exposure(bind: str, options: Mapping[str, Any]) -> None:
    """Refuses an address that other machines can reach without keys, as a node bound to `bind` would.

    Raises `UsageError` with the operator's remedy: PDSTAGE_NODE, not an argument of the node.
    """
    try:
        address = Address.parse(bind, "tcp", listening=True)
        address.check_exposure(bool(options.get("insecure")), options.get("keys"))
    except UsageError as error:
        keyed, trusted = (
            f"{environment.NODE.name}='{{{said}}}'" for said in ('"keys": "cluster.key"', '"insecure": true')
        )
        raise UsageError(
            error.what,
            remedy="make a key file with `pdstage keys cluster.key`, put it on every host, and start each engine with "
            f"{keyed}; if the network itself is trusted, with {trusted}",
            **error.fields,
        ) from None


def _arguments(kind: type[PrefillNode | DecodeNode]) -> dict[str, object]:
    own = inspect.signature(kind).parameters.values()
    return {one.name: one.default for one in own if one.kind is one.KEYWORD_ONLY} | DEFAULTS


def _check_kind(what: str, value: object, default: object) -> None:
    """Checks the type: a string instead of a switch would switch it on, whatever it contains."""
    kind = type(default)
    if kind in _KINDS and type(value) is not kind and (kind, type(value)) != (float, int):
        raise UsageError(f"{what} is {value!r}", remedy=f"give {_KINDS[kind]}")
