"""Every metric: its name, labels and meaning, and where a node's status or its `Timings` have its value.

Names and units follow https://prometheus.io/docs/practices/naming/: base units, `_total` for counters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pdstage.manager.status import Status
    from pdstage.watch.timings import Histogram, NodeTimings

Series: TypeAlias = "Iterable[tuple[tuple[str, ...], float | Histogram]]"
"""Values by the values of a metric's own labels."""

NODE_LABELS = ("role", "rank")
"""On every metric, before those given to `register`: which node of the process it belongs to."""
_TIMES = "timings."


class Metric(NamedTuple):
    """`labels` are its own, beside `NODE_LABELS`; `role` is the one that has it, "" both.

    `of` is where its value is: an attribute of `Status`, or a key of one of its dictionaries as "counters.aux_rows";
    several of those by the value of its one label; a dictionary of `NodeTimings` as "timings.rooms"; or a function.
    Without the key there is no series.
    """

    name: str
    text: str
    of: str | dict[str, str] | Callable[[Status], Series]
    labels: tuple[str, ...] = ()
    role: str = ""
    scale: float = 1.0

    @property
    def kind(self) -> str:
        if self.name.endswith("_total"):
            return "counter"
        if self.name.endswith("_info"):
            return "info"
        return "histogram" if isinstance(self.of, str) and self.of.startswith(_TIMES) else "gauge"

    @property
    def unit(self) -> str:
        stem = self.name.removesuffix("_total")
        return next((unit for unit in ("bytes", "seconds") if stem.endswith(f"_{unit}")), "")

    def read(self, status: Status, timings: NodeTimings | None) -> Series:
        of = self.of
        if callable(of):
            return of(status)
        if isinstance(of, str) and of.startswith(_TIMES):
            return list(getattr(timings, of.removeprefix(_TIMES)).items()) if timings is not None else ()
        fields = {of: ""} if isinstance(of, str) else of
        found = ((label, _value(status, path)) for path, label in fields.items())
        return [((label,) if label else (), value * self.scale) for label, value in found if value is not None]


def _value(status: Status, path: str) -> float | None:
    name, _, key = path.partition(".")
    held = getattr(status, name)
    found: float | None = held.get(key) if key else held
    return found


def _lanes(**fields: str) -> Callable[[Status], Series]:
    """Fields of every lane, by the lane's number and, of several, by state."""

    def read(status: Status) -> Series:
        for number, lane in enumerate(status.lanes):
            for state, field in fields.items():
                yield (str(number), *([state] if len(fields) > 1 else [])), getattr(lane, field)

    return read


SECTIONS = {
    "Nodes": (
        Metric(
            "pdstage_node_info", "Always 1; its labels describe the node.", lambda status: [(status.info, 1)],
            ("version", "transport", "path", "tp", "pp", "cp", "dp"),
        ),
        Metric("pdstage_node_failed", "1 once the node's driver broke: all its rooms have failed.", "failed"),
        Metric("pdstage_node_draining", "1 once the node takes no new rooms: it drains, or closes.", "draining"),
    ),
    "Rooms": (
        Metric(
            "pdstage_rooms", "Rooms that hold something here; ended ones until their memory is released.",
            lambda status: [((state,), n) for state, n in status.rooms.items()], ("state",),
        ),
        Metric("pdstage_rooms_opened_total", "Rooms begun by the engine.", "counters.rooms_opened"),
        Metric(
            "pdstage_rooms_ended_total", "Rooms ended, by outcome.",
            {
                "counters.rooms_succeeded": "success", "counters.rooms_failed": "failed",
                "counters.rooms_aborted": "aborted",
            },
            ("outcome",),
        ),
    ),
    "Times": (
        Metric(
            "pdstage_room_seconds", "A room, from the engine's call until it ended.", "timings.rooms", ("outcome",)
        ),
        Metric(
            "pdstage_room_transfer_seconds", "A room, from its first chunk's start until it ended.",
            "timings.transfers", ("outcome",),
        ),
        Metric(
            "pdstage_room_failures_total", "Rooms that failed, by the class of their error.", "timings.failures",
            ("error",),
        ),
        Metric(
            "pdstage_chunk_latency_seconds", "A chunk at prefill, from when its data exists until it is written.",
            "timings.chunks", ("path",), "prefill",
        ),
        Metric(
            "pdstage_stage_seconds",
            "One stage of a chunk: lease_wait, gather, write, direct or aux at prefill, scatter at decode.",
            "timings.stages", ("stage",),
        ),
        Metric(
            "pdstage_stage_bytes_total",
            "Bytes that a stage copied or wrote; a write whose gather went straight to the peer's memory counts none.",
            "timings.stage_nbytes", ("stage",),
        ),
        Metric("pdstage_stage_failures_total", "Stages that ended in an error.", "timings.stage_failures", ("stage",)),
    ),
    "Chunks and aux rows": (
        Metric(
            "pdstage_written_bytes_total", "Bytes of chunks written to peers.", "counters.bytes_written",
            role="prefill",
        ),
        Metric(
            "pdstage_chunks_written_total", "Chunks written to peers, by path.",
            {"counters.chunks_staged": "staged", "counters.chunks_direct": "direct"}, ("path",), "prefill",
        ),
        Metric(
            "pdstage_chunk_fallbacks_total",
            "Chunks that began as staged and went direct: no staging memory came in time.",
            "counters.chunks_fallen_back", role="prefill",
        ),
        Metric(
            "pdstage_chunks_altered_total", "Staged chunks whose checksum at decode differed from prefill's.",
            "counters.chunks_altered", role="decode",
        ),
        Metric(
            "pdstage_descriptors_total", "Contiguous spans posted to the transport.", "counters.descriptors",
            role="prefill",
        ),
        Metric(
            "pdstage_aux_rows_total", "Aux rows written directly into decode's rows by the data transport.",
            "counters.aux_rows", role="prefill",
        ),
        Metric(
            "pdstage_aux_fallbacks_total", "Aux rows sent by message although the data transport was configured.",
            "counters.aux_fallbacks",
        ),
        Metric(
            "pdstage_slots_trimmed_total",
            "Components of rooms that had fewer slots on one side: the longer was trimmed.", "counters.slots_trimmed",
        ),
        Metric("pdstage_copies_in_flight", "Gathers, writes and scatters under way.", "n_copies"),
        Metric("pdstage_aux_rows_lent", "Aux rows that a room holds.", "n_rows_lent"),
    ),
    "Staging memory": (
        Metric(
            "pdstage_lane_capacity_bytes", "Size of a staging lane.", _lanes(all="capacity_nbytes"), ("lane",), "decode"
        ),
        Metric(
            "pdstage_lane_leased_bytes",
            "Leased bytes of a lane: granted, and not written yet; ahead, and not writable before the "
            "watermark moves; landed, and being scattered.",
            _lanes(granted="granted_nbytes", ahead="ahead_nbytes", landed="landed_nbytes"), ("lane", "state"),
            "decode",
        ),
        Metric(
            "pdstage_lane_quarantined_bytes",
            "Bytes of a lane that a failed room's writer may still write: unused until the writer is proved quiet.",
            _lanes(all="quarantined_nbytes"), ("lane",), "decode",
        ),
        Metric(
            "pdstage_lane_watermark_lag_bytes",
            "How far a lane's watermark is behind its head; up to twice its capacity, as leases may run one lap ahead.",
            _lanes(all="lag_nbytes"), ("lane",), "decode",
        ),
        Metric(
            "pdstage_lease_requests_waiting", "Chunks of peers that wait for a lease.", "n_waiting", role="decode"
        ),
        Metric(
            "pdstage_leases_total", "Leases, by what became of them: most that were granted are simply used.",
            {f"counters.leases_{event}": event for event in ("granted", "recalled", "returned", "quarantined")},
            ("event",),
        ),
        Metric(
            "pdstage_send_buffers", "Send buffers.",
            lambda status: [(("free",), status.n_buffers_free), (("used",), status.n_buffers - status.n_buffers_free)],
            ("state",), "prefill",
        ),
        Metric("pdstage_send_buffer_bytes", "Size of one send buffer.", "buffer_nbytes", role="prefill"),
    ),
    "Peers and sessions": (
        Metric("pdstage_sessions", "Sessions with peers that are alive.", "n_sessions"),
        Metric(
            "pdstage_sessions_unfenced",
            "Lost sessions whose peers may still touch memory of this node: see docs/reliability.md.", "n_unfenced",
        ),
        Metric("pdstage_sessions_opened_total", "Sessions begun.", "counters.sessions_opened"),
        Metric(
            "pdstage_sessions_closed_total", "Sessions that ended in order, or were lost.",
            {"counters.sessions_ended": "ended", "counters.sessions_lost": "lost"}, ("reason",),
        ),
        Metric(
            "pdstage_sessions_fenced_total",
            "Lost sessions whose peers were proved quiet or dead, by the transport, the kernel or an operator's word.",
            "counters.sessions_fenced",
        ),
        Metric(
            "pdstage_sessions_idle_total", "Of those ended: neither side needed it.", "counters.sessions_idle"
        ),
        Metric(
            "pdstage_sessions_refused_total", "Handshakes refused, here or by the peer.", "counters.sessions_refused"
        ),
        Metric(
            "pdstage_sessions_by_transport_total",
            "Sessions begun, by transport; at decode by those its writer may choose from, as a+b.",
            lambda status: [((name,), n) for name, n in status.sessions_over.items()], ("transport",),
        ),
        Metric(
            "pdstage_peers_crowded_total", "New peers refused at `Config.max_peers`.", "counters.peers_crowded"
        ),
        Metric(
            "pdstage_peers_refused_total", "Connections that failed because the keys did not match.",
            "counters.peers_refused",
        ),
    ),
    "Directory": (
        Metric(
            "pdstage_directory_lease_seconds",
            "Until this rank is found no more, unless its lease is renewed, which is every 5 s; 0: it is not "
            "registered. No series where the node publishes nothing.",
            "directory.lease_s", role="prefill",
        ),
        Metric(
            "pdstage_directory_publications_total", "Registrations of this rank and renewals of its lease.",
            {"directory.publications": "success", "directory.publications_failed": "failed"}, ("outcome",), "prefill",
        ),
        Metric(
            "pdstage_directory_lookups_total",
            "Look-ups of prefill that a room waited for; not those answered at once by what was found before.",
            {"directory.lookups_answered": "success", "directory.lookups_failed": "failed"}, ("outcome",), "decode",
        ),
        Metric(
            "pdstage_directory_watch_age_seconds",
            "Since etcd last answered this node's watch, which asks every second; 0: it watches none.",
            "directory.watch_age_s", role="decode",
        ),
        Metric(
            "pdstage_directory_watch_restarts_total", "How often etcd stopped answering this node's watch.",
            "directory.watches_restarted", role="decode",
        ),
    ),
    "Messages": (
        Metric(
            "pdstage_frames_total", "Frames of the control protocol.",
            {"counters.frames_sent": "sent", "counters.frames_received": "received"}, ("direction",),
        ),
        Metric(
            "pdstage_frames_dropped_total", "Frames without effect: of another session, repeated, or malformed.",
            {"counters.frames_stale": "stale", "counters.frames_malformed": "malformed"}, ("reason",),
        ),
        Metric(
            "pdstage_tags_received_total", "Tags of chunks that arrived.", "counters.tags_received", role="decode"
        ),
        Metric(
            "pdstage_tags_dropped_total", "Tags without effect: of another session or epoch, or malformed.",
            {"counters.tags_stale": "stale", "counters.tags_malformed": "malformed"}, ("reason",), "decode",
        ),
        Metric(
            "pdstage_control_messages_total", "Messages of the control socket: one turn's frames to one peer.",
            {"control.sent": "sent", "control.received": "received"}, ("direction",),
        ),
        Metric(
            "pdstage_control_messages_dropped_total",
            "Messages lost at the control socket: no connection, a full queue, or malformed.",
            {f"control.{reason}": reason for reason in ("unroutable", "full", "malformed")}, ("reason",),
        ),
        Metric(
            "pdstage_control_connections_total",
            "Connections of the control socket: refused because the keys did not match.",
            {"control.refused": "refused"}, ("what",),
        ),
    ),
    "What the transport measured": (
        Metric(
            "pdstage_transport_posts_total", "Posts that the transport measured, if it does so.",
            "counters.posts_measured", role="prefill",
        ),
        Metric(
            "pdstage_transport_posted_bytes_total", "Bytes of the posts that were measured.",
            "counters.posts_measured_bytes", role="prefill",
        ),
        Metric(
            "pdstage_transport_post_seconds_total", "Time to start the measured posts.", "counters.posts_measured_us",
            role="prefill", scale=1e-6,
        ),
        Metric(
            "pdstage_transport_write_seconds_total", "Time from then until each was seen to be done.",
            "counters.writes_measured_us", role="prefill", scale=1e-6,
        ),
    ),
}  # fmt: skip

METRICS = tuple(metric for metrics in SECTIONS.values() for metric in metrics)
