"""An operator's options for the nodes that an adapter creates: from the engine's own option, and from PDSTAGE_NODE."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pdstage import Config, DecodeNode, PrefillNode, UsageError, environment
from pdstage.arguments import flag
from pdstage.integrations.model import overridden
from pdstage.manager.options import DEFAULTS

_OURS = {
    "publish", "progress", "metadata", "aux", "observers", "bind",
}  # fmt: skip
"""Arguments that the adapter sets itself."""
_ADAPTERS = {
    "trust_layout": False,
    "metrics_port": None,
    "metrics_host": "127.0.0.1",
    "directory": None,
    "instance": None,
}
"""Options of the adapter, not of its nodes, and what they are unless given."""


def node_options(
    kind: type[PrefillNode | DecodeNode],
    given: Mapping[str, Any],
    *,
    where: str,
    deadlines: Mapping[str, float],
    model: Mapping[str, str],
) -> dict[str, Any]:
    """Arguments for a node of that kind: those of `given`, which the operator wrote at `where`, over PDSTAGE_NODE's.

    `deadlines` are fields of `Config`, and `model` the engine's facts, that apply unless the operator sets them. Raises
    `UsageError` for an argument that neither kind of node has or that operators may not set; the node itself checks
    the values.
    """
    known = defaults().keys()
    merged: dict[str, Any] = {}
    config: dict[str, Any] = dict(deadlines)
    for source, options in ((environment.NODE.name, environment.NODE.read() or {}), (where, given)):
        fields_set = options.get("config", {})
        unknown = [*(set(options) - known), *(set(fields_set) - {field.name for field in fields(Config)})]
        if unknown:
            raise UsageError(
                f"{source} has {', '.join(sorted(unknown))}",
                remedy=f"known are {', '.join(sorted(known))}, and config with the fields of pdstage.Config",
            )
        merged |= options
        config |= fields_set
    own = {name: value for name, value in merged.items() if name in _arguments(kind).keys() - _ADAPTERS.keys()}
    return own | {"config": Config(**config), "model": overridden(model, merged.get("model"), where=where)}


def trusts_layout(given: Mapping[str, Any], *, where: str) -> bool:
    """Whether the operator vouches for pages whose layout nothing proves: `trust_layout` of `given`, written at
    `where`, else of PDSTAGE_NODE.
    """
    if "trust_layout" not in given:
        given, where = environment.NODE.read() or {}, environment.NODE.name
    return flag(f"trust_layout of {where}", given.get("trust_layout", False))


def defaults() -> dict[str, Any]:
    """What an operator may set, and what it is unless he does."""
    every = _arguments(PrefillNode) | _arguments(DecodeNode) | _ADAPTERS
    return {name: default for name, default in every.items() if name not in _OURS}


def _arguments(kind: type[PrefillNode | DecodeNode]) -> dict[str, Any]:
    named = inspect.signature(kind).parameters.values()
    return {one.name: one.default for one in named if one.kind is one.KEYWORD_ONLY} | dict(DEFAULTS)
