"""An operator's options for the nodes that an adapter creates: from the engine's own option, and from PDSTAGE_NODE."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from pdstage import Config, environment
from pdstage.arguments import flag
from pdstage.errors import UsageError
from pdstage.manager import DecodeNode, PrefillNode
from pdstage.manager.options import DEFAULTS

if TYPE_CHECKING:
    from collections.abc import Mapping

_OURS = {
    "bootstrap", "instance", "publish", "progress", "metadata", "aux", "observers", "bind",
}  # fmt: skip
"""Arguments that the adapter sets itself."""


def node_options(
    kind: type[PrefillNode | DecodeNode], given: Mapping[str, Any], *, where: str, deadlines: Mapping[str, float]
) -> dict[str, Any]:
    """Arguments for a node of that kind: those of `given`, which the operator wrote at `where`, over PDSTAGE_NODE's.

    `deadlines` are fields of `Config` that apply unless the operator sets them. Raises `UsageError` for an argument
    that neither kind of node has or that operators may not set; the node itself checks the values.
    """
    known = (_arguments(PrefillNode) | _arguments(DecodeNode)) - _OURS
    merged: dict[str, Any] = {}
    config: dict[str, Any] = dict(deadlines)
    from_environment = dict(environment.NODE.read() or {})
    from_environment.pop("trust_layout", None)  # the adapter's, see below
    for source, options in ((environment.NODE.name, from_environment), (where, given)):
        fields_set = options.get("config", {})
        unknown = [*(set(options) - known), *(set(fields_set) - {field.name for field in fields(Config)})]
        if unknown:
            raise UsageError(
                f"{source} has {', '.join(sorted(unknown))}",
                remedy=f"known are {', '.join(sorted(known))}, and config with the fields of pdstage.Config",
            )
        merged |= options
        config |= fields_set
    own = {name: value for name, value in merged.items() if name in _arguments(kind)}
    return own | {"config": Config(**config)}


def trusts_layout(given: Mapping[str, Any] | None = None, *, where: str = "") -> bool:
    """Whether the operator vouches for pages whose layout nothing proves: `trust_layout` of `given`, written at
    `where`, else of PDSTAGE_NODE.
    """
    trusts = False
    for source, options in ((environment.NODE.name, environment.NODE.read()), (where, given)):
        trusts = flag(f"trust_layout of {source}", (options or {}).get("trust_layout", trusts))
    return trusts


def _arguments(kind: type[PrefillNode | DecodeNode]) -> set[str]:
    named = inspect.signature(kind).parameters.values()
    return {one.name for one in named if one.kind is one.KEYWORD_ONLY} | set(DEFAULTS)
