"""Every metric: its name, type, labels and meaning, and the source of its value.

Names and units follow https://prometheus.io/docs/practices/naming/: base units, `_total` for counters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pdstage.manager.status import Status
    from pdstage.tools.watch.timings import Histogram, NodeTimings

Kind: TypeAlias = Literal["counter", "gauge", "histogram", "info"]
Series: TypeAlias = "Iterable[tuple[tuple[str, ...], float]]"
"""Values by the values of a metric's own labels."""

NODE_LABELS = ("role", "rank")
"""On every metric, before those given to `register`: which node of the process it belongs to."""


def _nothing(_: object) -> Series:
    return ()


class Metric(NamedTuple):
    """`labels` are its own, beside `NODE_LABELS`; `read` takes its values from a node's status."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...]
    read: Callable[[Status], Series] = _nothing
    timed: Callable[[NodeTimings], Iterable[tuple[tuple[str, ...], float | Histogram]]] = _nothing
    """The same from the node's `Timings`, if it has that observer."""
    role: str = ""
    """The role that has it; "" means both."""

    @property
    def unit(self) -> str:
        stem = self.name.removesuffix("_total")
        return next((unit for unit in ("bytes", "seconds") if stem.endswith(f"_{unit}")), "")


def _count(name: str, text: str, field: str, role: str = "", scale: float = 1.0) -> Metric:
    """One field of `Counters`, a total."""
    return Metric(name, "counter", text, (), lambda status: [((), status.counters[field] * scale)], role=role)


def _counts(name: str, text: str, label: str, fields: dict[str, str], role: str = "") -> Metric:
    """Several fields of `Counters` under one name, distinguished by `label`: its value by field."""
    return Metric(
        name,
        "counter",
        text,
        (label,),
        lambda status: [((value,), status.counters[field]) for field, value in fields.items()],
        role=role,
    )


def _control(name: str, text: str, label: str, fields: tuple[str, ...]) -> Metric:
    return Metric(name, "counter", text, (label,), lambda status: [((name,), status.control[name]) for name in fields])


def _directory(name: str, kind: Kind, text: str, field: str, role: str) -> Metric:
    """One number of `Status.directory`; no series while it is not there."""

    def read(status: Status) -> Series:
        return [((), value)] if (value := status.directory.get(field)) is not None else ()

    return Metric(name, kind, text, (), read, role=role)


def _directories(name: str, text: str, fields: dict[str, str], role: str) -> Metric:
    """Several counters of `Status.directory` under one name, distinguished by their outcome."""
    return Metric(
        name,
        "counter",
        text,
        ("outcome",),
        lambda status: [((value,), status.directory[field]) for field, value in fields.items()],
        role=role,
    )


def _gauge(name: str, text: str, field: str, role: str = "") -> Metric:
    return Metric(name, "gauge", text, (), lambda status: [((), getattr(status, field))], role=role)


def _of_lanes(name: str, text: str, field: str) -> Metric:
    def read(status: Status) -> Iterator[tuple[tuple[str, ...], float]]:
        return (((str(number),), getattr(lane, field)) for number, lane in enumerate(status.lanes))

    return Metric(name, "gauge", text, ("lane",), read, role="decode")


def _timed(name: str, kind: Kind, text: str, *, label: str, field: str, role: str = "") -> Metric:
    """One dictionary of `NodeTimings`."""
    return Metric(name, kind, text, (label,), timed=lambda timings: getattr(timings, field).items(), role=role)


def _buffers(status: Status) -> Series:
    free, total = status.n_buffers_free, status.n_buffers
    return [(("free",), free), (("used",), total - free)]


def _leases(status: Status) -> Iterator[tuple[tuple[str, ...], float]]:
    for number, lane in enumerate(status.lanes):
        yield (str(number), "granted"), lane.granted_nbytes
        yield (str(number), "ahead"), lane.ahead_nbytes
        yield (str(number), "landed"), lane.landed_nbytes


ROOMS = (
    Metric(
        "pdstage_rooms",
        "gauge",
        "Rooms that hold something here; ended ones until their memory is released.",
        ("state",),
        lambda status: [((state,), n) for state, n in status.rooms.items()],
    ),
    _count("pdstage_rooms_opened_total", "Rooms begun by the engine.", "rooms_opened"),
    _counts(
        "pdstage_rooms_ended_total",
        "Rooms ended, by outcome.",
        "outcome",
        {"rooms_succeeded": "success", "rooms_failed": "failed"},
    ),
)

BYTES = (
    _count("pdstage_written_bytes_total", "Bytes of chunks written to peers.", "bytes_written", "prefill"),
    _counts(
        "pdstage_chunks_written_total",
        "Chunks written to peers, by path.",
        "path",
        {"chunks_staged": "staged", "chunks_direct": "direct"},
        "prefill",
    ),
    _count(
        "pdstage_chunk_fallbacks_total",
        "Chunks that began as staged and went direct: no staging memory came in time.",
        "chunks_fallen_back",
        "prefill",
    ),
    _count(
        "pdstage_chunks_altered_total",
        "Staged chunks whose checksum at decode differed from prefill's.",
        "chunks_altered",
        "decode",
    ),
    _count("pdstage_descriptors_total", "Contiguous spans posted to the transport.", "descriptors", "prefill"),
    _count(
        "pdstage_aux_rows_total",
        "Aux rows written directly into decode's rows by the data transport.",
        "aux_rows",
        "prefill",
    ),
    _count(
        "pdstage_aux_fallbacks_total",
        "Aux rows sent by message although the data transport was configured.",
        "aux_fallbacks",
    ),
    _count(
        "pdstage_slots_trimmed_total",
        "Components of rooms that had fewer slots on one side: the longer was trimmed.",
        "slots_trimmed",
    ),
    _gauge("pdstage_copies_in_flight", "Gathers, writes and scatters under way.", "n_copies"),
    _gauge("pdstage_aux_rows_lent", "Aux rows that a room holds.", "n_rows_lent"),
)

STAGING = (
    _of_lanes("pdstage_lane_capacity_bytes", "Size of a staging lane.", "capacity_nbytes"),
    Metric(
        "pdstage_lane_leased_bytes",
        "gauge",
        "Leased bytes of a lane: granted, and not written yet; ahead, and not writable before the "
        "watermark moves; landed, and being scattered.",
        ("lane", "state"),
        _leases,
        role="decode",
    ),
    _of_lanes(
        "pdstage_lane_quarantined_bytes",
        "Bytes of a lane that a failed room's writer may still write: unused until the writer is proved quiet.",
        "quarantined_nbytes",
    ),
    _of_lanes(
        "pdstage_lane_watermark_lag_bytes",
        "How far a lane's watermark is behind its head; up to twice its capacity, as leases may run one lap ahead.",
        "lag_nbytes",
    ),
    _gauge("pdstage_lease_requests_waiting", "Chunks of peers that wait for a lease.", "n_waiting", "decode"),
    _counts(
        "pdstage_leases_total",
        "Leases, by what became of them: most that were granted are simply used.",
        "event",
        {
            "leases_granted": "granted",
            "leases_recalled": "recalled",
            "leases_returned": "returned",
            "leases_quarantined": "quarantined",
        },
    ),
    Metric("pdstage_send_buffers", "gauge", "Send buffers.", ("state",), _buffers, role="prefill"),
    _gauge("pdstage_send_buffer_bytes", "Size of one send buffer.", "buffer_nbytes", "prefill"),
)

PEERS = (
    _gauge("pdstage_sessions", "Sessions with peers that are alive.", "n_sessions"),
    _gauge(
        "pdstage_sessions_unfenced",
        "Lost sessions whose peers may still touch memory of this node: see docs/reliability.md.",
        "n_unfenced",
    ),
    _count("pdstage_sessions_opened_total", "Sessions begun.", "sessions_opened"),
    _counts(
        "pdstage_sessions_closed_total",
        "Sessions that ended in order, or were lost.",
        "reason",
        {"sessions_ended": "ended", "sessions_lost": "lost"},
    ),
    _count(
        "pdstage_sessions_fenced_total",
        "Lost sessions whose peers were proved quiet or dead, by the transport, the kernel or an operator's word.",
        "sessions_fenced",
    ),
    _count("pdstage_sessions_idle_total", "Of those ended: neither side needed it.", "sessions_idle"),
    _count("pdstage_sessions_refused_total", "Handshakes refused, here or by the peer.", "sessions_refused"),
    Metric(
        "pdstage_sessions_by_transport_total",
        "counter",
        "Sessions begun, by transport; at decode by those its writer may choose from, as a+b.",
        ("transport",),
        lambda status: [((name,), n) for name, n in status.sessions_over.items()],
    ),
    _count("pdstage_peers_crowded_total", "New peers that arrived at `Config.max_peers`.", "peers_crowded"),
    _count("pdstage_peers_refused_total", "Connections that failed because the keys did not match.", "peers_refused"),
)

DIRECTORY = (
    _directory(
        "pdstage_directory_lease_seconds",
        "gauge",
        "Until this rank is found no more, unless its lease is renewed, which is every 5 s; 0: it is not registered. "
        "No series where the node publishes nothing.",
        "lease_s",
        "prefill",
    ),
    _directories(
        "pdstage_directory_publications_total",
        "Registrations of this rank and renewals of its lease.",
        {"publications": "success", "publications_failed": "failed"},
        "prefill",
    ),
    _directories(
        "pdstage_directory_lookups_total",
        "Look-ups of prefill that a room waited for; not those answered at once by what was found before.",
        {"lookups_answered": "success", "lookups_failed": "failed"},
        "decode",
    ),
    _directory(
        "pdstage_directory_watch_age_seconds",
        "gauge",
        "Since etcd last answered this node's watch, which is every 5 s where nothing changes; 0: it watches none.",
        "watch_age_s",
        "decode",
    ),
    _directory(
        "pdstage_directory_watch_restarts_total",
        "counter",
        "Watches of etcd that ended and were taken up again.",
        "watches_restarted",
        "decode",
    ),
)

MESSAGES = (
    _counts(
        "pdstage_frames_total",
        "Frames of the control protocol.",
        "direction",
        {"frames_sent": "sent", "frames_received": "received"},
    ),
    _counts(
        "pdstage_frames_dropped_total",
        "Frames without effect: of another session, repeated, or malformed.",
        "reason",
        {"frames_stale": "stale", "frames_malformed": "malformed"},
    ),
    _count("pdstage_tags_received_total", "Tags of chunks that arrived.", "tags_received", "decode"),
    _counts(
        "pdstage_tags_dropped_total",
        "Tags without effect: of another session or epoch, or malformed.",
        "reason",
        {"tags_stale": "stale", "tags_malformed": "malformed"},
        "decode",
    ),
    _control(
        "pdstage_control_messages_total",
        "Messages of the control socket: one turn's frames to one peer.",
        "direction",
        ("sent", "received"),
    ),
    _control(
        "pdstage_control_messages_dropped_total",
        "Messages lost at the control socket: no connection, a full queue, or malformed.",
        "reason",
        ("unroutable", "full", "malformed"),
    ),
    _control(
        "pdstage_control_connections_total",
        "Connections of the control socket: ended because too much of their input had to be held.",
        "what",
        ("ended",),
    ),
)

TRANSPORT = (
    _count(
        "pdstage_transport_posts_total",
        "Posts that the transport measured, if it does so.",
        "posts_measured",
        "prefill",
    ),
    _count(
        "pdstage_transport_posted_bytes_total",
        "Bytes of the posts that were measured.",
        "posts_measured_bytes",
        "prefill",
    ),
    _count(
        "pdstage_transport_post_seconds_total",
        "Time to start the measured posts.",
        "posts_measured_us",
        "prefill",
        1e-6,
    ),
    _count(
        "pdstage_transport_write_seconds_total",
        "Time from then until each was seen to be done.",
        "writes_measured_us",
        "prefill",
        1e-6,
    ),
)

FAILED = _gauge("pdstage_node_failed", "1 once the node's driver broke: all its rooms have failed.", "failed")

DRAINING = _gauge("pdstage_node_draining", "1 once the node takes no new rooms: it drains, or closes.", "draining")

TIMINGS = (
    _timed(
        "pdstage_room_seconds",
        "histogram",
        "A room, from the engine's call until it ended.",
        label="outcome",
        field="rooms",
    ),
    _timed(
        "pdstage_room_transfer_seconds",
        "histogram",
        "A room, from its first chunk's start until it ended.",
        label="outcome",
        field="transfers",
    ),
    _timed(
        "pdstage_room_failures_total",
        "counter",
        "Rooms that failed, by the class of their error.",
        label="error",
        field="failures",
    ),
    _timed(
        "pdstage_chunk_latency_seconds",
        "histogram",
        "A chunk at prefill, from when its data exists until it is written.",
        label="path",
        field="chunks",
        role="prefill",
    ),
    _timed(
        "pdstage_stage_seconds",
        "histogram",
        "One stage of a chunk: lease_wait, gather, write, direct or aux at prefill, scatter at decode.",
        label="stage",
        field="stages",
    ),
    _timed(
        "pdstage_stage_bytes_total",
        "counter",
        "Bytes that a stage copied or wrote; a write whose gather went straight to the peer's memory counts none.",
        label="stage",
        field="stage_nbytes",
    ),
    _timed(
        "pdstage_stage_failures_total",
        "counter",
        "Stages that ended in an error.",
        label="stage",
        field="stage_failures",
    ),
)

INFO = Metric(
    "pdstage_node_info",
    "info",
    "Always 1; its labels describe the node.",
    ("version", "transport", "path", "tp", "pp", "cp", "dp"),
    lambda status: [(status.info, 1)],
)

SECTIONS = {
    "Nodes": (INFO, FAILED, DRAINING),
    "Rooms": ROOMS,
    "Times": TIMINGS,
    "Chunks and aux rows": BYTES,
    "Staging memory": STAGING,
    "Peers and sessions": PEERS,
    "Directory": DIRECTORY,
    "Messages": MESSAGES,
    "What the transport measured": TRANSPORT,
}
LEFT_OUT = {
    "refused": "the same connections as `peers_refused`, which the core counts",
}
"""Counters that are not metrics, and why."""

METRICS = tuple(metric for metrics in SECTIONS.values() for metric in metrics)
