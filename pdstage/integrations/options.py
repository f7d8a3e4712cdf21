"""What an operator says of the nodes that an adapter makes: in the engine's own option, if any, and PDSTAGE_NODE.

Layer 6. Must not know any engine.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from pdstage import environment
from pdstage.errors import UsageError
from pdstage.manager import DecodeNode, PrefillNode
from pdstage.protocol.config import Config

if TYPE_CHECKING:
    from collections.abc import Mapping

_OURS = {
    "pool", "topology", "bootstrap", "instance", "publish", "progress", "metadata", "aux", "observers", "staging",
    "bind",
}  # fmt: skip
"""Arguments that are the adapter's to give."""


def node_options(
    kind: type[PrefillNode | DecodeNode], given: Mapping[str, Any], *, where: str, deadlines: Mapping[str, float]
) -> dict[str, Any]:
    """Arguments of a node of that kind: those of `given`, as the operator wrote them at `where`, over PDSTAGE_NODE's.

    `deadlines` are fields of `Config` that hold unless the operator says otherwise. Raises `UsageError` for an argument
    that neither kind of node has, or that is not the operator's.
    """
    known = {name for each in (PrefillNode, DecodeNode) for name in _arguments(each)} - _OURS
    told: dict[str, Any] = {}
    config: dict[str, Any] = dict(deadlines)
    for source, options in ((environment.NODE.name, environment.NODE.read() or {}), (where, given)):
        own = options.get("config", {})
        unknown = [*(set(options) - known), *(set(own) - {field.name for field in fields(Config)})]
        if unknown:
            raise UsageError(
                f"{source} has {', '.join(sorted(unknown))}",
                remedy=f"known are {', '.join(sorted(known))}, and config with the fields of pdstage.Config",
            )
        told |= options
        config |= own
    return {name: told[name] for name in _arguments(kind) if name in told} | {"config": Config(**config)}


def _arguments(kind: type[PrefillNode | DecodeNode]) -> list[str]:
    return list(inspect.signature(kind).parameters)
