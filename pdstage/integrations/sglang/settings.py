"""What an operator may say of a rank's node, and what follows from SGLang's own settings.

Layer 6. SGLang has no option for a backend's own settings, so they come in one environment variable, PDSTAGE_NODE.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from sglang.srt.environ import envs

from pdstage import environment
from pdstage.errors import UsageError
from pdstage.protocol.config import Config

if TYPE_CHECKING:
    from pdstage.manager import DecodeNode, PrefillNode

_OURS = {"pool", "topology", "bootstrap", "instance", "progress", "metadata", "aux", "observers", "staging"}
"""Arguments that are the adapter's to give."""


def node_options(kind: type[PrefillNode | DecodeNode], host: str) -> dict[str, Any]:
    """Arguments of a node of that kind, of those that both kinds take and the operator named.

    Without a word of the operator's, deadlines are SGLang's: its bootstrap timeout at prefill, its waiting timeout at
    decode. Raises `UsageError` for an argument that neither kind has, or that is not the operator's.
    """
    from pdstage.manager import DecodeNode, PrefillNode  # noqa: PLC0415

    told = dict(environment.NODE.read() or {})
    config = told.pop("config", {})
    known = (_arguments(PrefillNode) | _arguments(DecodeNode)) - _OURS
    unknown = [*(set(told) - known), *(set(config) - {field.name for field in fields(Config)})]
    if unknown:
        raise UsageError(
            f"{environment.NODE.name} has {', '.join(unknown)}",
            remedy=f"known are {', '.join(sorted(known))}, and config with the fields of pdstage.Config",
        )
    deadlines = {
        "open_wait_s": float(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get()),
        "wait_s": float(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get()),
    }
    own = {name: value for name, value in told.items() if name in _arguments(kind)}
    return {"bind": f"tcp://{host}:0", "progress": "thread", "config": Config(**(deadlines | config)), **own}


def _arguments(kind: type[PrefillNode | DecodeNode]) -> set[str]:
    return set(inspect.signature(kind).parameters)
