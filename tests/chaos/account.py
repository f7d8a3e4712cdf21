"""What a node and its process still hold: nothing once the faults are over, but for what lost sessions may write."""

from __future__ import annotations

import threading

from pdstage import DecodeNode, PrefillNode

STRANDED = ("stranded rooms", "stranded leases")
"""Kept for lost sessions that no transport has fenced yet. Counted, and allowed while the writer may be alive."""


def of(node: DecodeNode | PrefillNode) -> dict[str, int]:
    """What is held, by name; all of it must be 0 at rest. Those of `STRANDED` are explained by lost sessions."""
    with node.driver.use():
        held = _of_decode(node) if isinstance(node, DecodeNode) else _of_prefill(node)
        core = node.core
        # A lost session is asked for until somebody answers at its address: nobody does if its rank moved to another.
        asking = len(core._stranded) if isinstance(node, DecodeNode) else 0
        # And a beat and a silence of each session; "recalls".
        held["timers"] = max(0, len(core.endpoint.timers) - asking - 2 * len(core.sessions) - 1)
        held["handles"] = max(0, len(node.handles()) - held.get("stranded rooms", 0))
        return held


def _of_decode(node: DecodeNode) -> dict[str, int]:
    core = node.core
    lost = {
        room for room in core.by_epoch.values() if any(p.session.id not in core.sessions for p in room.writers.values())
    }
    leases = core.leases.live()
    stranded = [one for one in leases if one.phase == "quarantined" and one.session.id not in core.sessions]
    return {
        "rooms": len(core.by_epoch) - len(lost),
        "rooms under way": len(core.by_key),
        "stranded rooms": len(lost),
        "leases": len(leases) - len(stranded),
        "stranded leases": len(stranded),
        "leases waited for": int(core.leases.contended),
        "blocked lanes": sum(lane.head != lane.watermark for lane in core.leases.lanes),
        "scatters": len(core.chunks.flights),
        "bindings": len(node._waiting) + len(node._answers),
    }


def _of_prefill(node: PrefillNode) -> dict[str, int]:
    core = node.core
    return {
        "rooms under way": len(core.by_key),
        "destinations": len(core.destinations),
        "writes": len(core.chunks.flights),
        "posts": len(node.data_path.posts._writes),
        "send buffers": len(node.parts) - len(core.chunks.free),
        "parked rooms": len(core.pending),
    }


def threads() -> list[str]:
    """Python's threads by name."""
    return sorted(thread.name for thread in threading.enumerate())
