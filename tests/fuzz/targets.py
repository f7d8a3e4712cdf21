"""Every target by name: its seeds, how an input is altered, and what runs one. A finding is any exception of `run`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tests.fuzz import attach, nodes, plane, sessions, wire
from tests.fuzz.draw import Draw, altered_bytes


class Target(NamedTuple):
    seeds: Callable[[], list[bytes]]
    run: Callable[[bytes], None]
    alter: Callable[[bytes, Draw], bytes] = altered_bytes
    max_nbytes: int = 4096


TARGETS = {
    "messages": Target(wire.frame_seeds, wire.run_frame, wire.alter_frame),
    "tags": Target(wire.tag_seeds, wire.run_tag),
    "descriptions": Target(wire.description_seeds, wire.run_description),
    "datagrams": Target(wire.datagram_seeds, wire.run_datagram),
    "requests": Target(plane.request_seeds, plane.run_request),
    "answers": Target(plane.answer_seeds, plane.run_answer),
    "frames": Target(plane.message_seeds, plane.run_message, max_nbytes=256),
    "prefill-peer": Target(partial(sessions.seeds, "prefill"), partial(sessions.run, role="prefill"), max_nbytes=1024),
    "decode-peer": Target(partial(sessions.seeds, "decode"), partial(sessions.run, role="decode"), max_nbytes=1024),
    "nodes": Target(nodes.seeds, nodes.run, max_nbytes=512),
    "attach": Target(attach.seeds, attach.run, max_nbytes=64),
}
