"""Every deadline and limit of the protocol.

None is infinite; all are in seconds unless named otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from pdstage import arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Deadlines and limits of one node; both roles read their own.

    `retry_s`: every repeated question; a greeting's, and a farewell's, doubles with each try up to 20 times, less up
    to half of it at random. Decode: `open_s` until Opened, `wait_s` until the first chunk, `transfer_s`
    without new coverage, `recall_after_s`, `stuck_after_s`, `drain_s`. Prefill: `open_wait_s` from send to the last
    Open, begun anew by each of decode's heartbeats while the room is announced there, up to `max_deadline_s`;
    `send_wait_s` from an Open to its room's send, `write_s` for one post, `fall_back_after_s` until a chunk that
    gets no staging memory goes direct, where it may. Both: `max_silence_s` is what this node promises its peers: it
    never stays silent longer; a session that no room needs on either side ends in order once it was idle for `idle_s`
    of one of them, and the next room greets anew.
    """

    retry_s: float = 0.25
    hello_s: float = 60.0
    open_s: float = 30.0
    wait_s: float = 300.0
    transfer_s: float = 60.0
    recall_after_s: float = 2.0
    stuck_after_s: float = 1.0
    drain_s: float = 30.0
    open_wait_s: float = 300.0
    send_wait_s: float = 300.0
    write_s: float = 60.0
    fall_back_after_s: float = 5.0
    max_silence_s: float = 10.0
    idle_s: float = 300.0
    max_deadline_s: float = 3600.0
    """Prefill ends a room after this long, however long its destination wants to wait."""
    max_peers: int = 4_096
    """Beyond it a new peer is refused, until idle sessions have ended by `idle_s`."""
    max_aux_nbytes: int = 4 << 20
    chunk_nbytes: int = 64 << 20
    """The longest chunk. Prefill splits what it is given into such ones, or into shorter ones where by the transport's
    costs they overlap better: gather of one, write of the next and scatter of a third.
    """
    checksums: bool = False
    """Chunks carry a checksum, made while gathering and verified while scattering, if both sides say so; all are staged
    then.
    """

    convert: bool = False
    """Formats that differ are converted in flight, as docs/convert.md says, if both sides say so; else refused."""

    def __post_init__(self) -> None:
        for field in fields(self):
            what, value = f"Config.{field.name}", getattr(self, field.name)
            if isinstance(field.default, bool):
                read: object = arguments.flag(what, value)
            elif isinstance(field.default, int):
                read = arguments.integer(what, value, 1)
            else:
                read = arguments.number(what, value, above=0.0)
            object.__setattr__(self, field.name, read)
        arguments.integer("Config.max_aux_nbytes", self.max_aux_nbytes, high=8 << 20)  # a control message has them
