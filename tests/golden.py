"""What every message and tag looks like on the wire, one file a wire version, kept for ever.

    python -m tests.golden

writes the file of `wire.VERSION`: once, when that version begins. `tests/protocol/test_golden.py` pins each file's
digest; docs/wire.md has the rule.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec

from pdstage import Axis, Key, Layout, Region, RowLevel, TokenShard, Topology, View
from pdstage.columns import Placed
from pdstage.plan import Rect, Share
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.protocol.wire import OLDEST, VERSION

FOLDER = Path(__file__).parent / "protocol" / "golden"
SESSION = m.SessionId(0x0102030405060708, 0x1112131415161718)
SEQ = 3
COMPONENTS = ("kv", "mamba")

_KV = View(
    key=Key("kv", "k", 0), region=0, offset=0, n_items=4, item_stride=64, tokens_per_item=2, rows=(RowLevel(1, 32),),
    shards=2, shard_stride=16, width=16, axis=Axis("kv_head", 4, 2, 2), format="bf16",
)  # fmt: skip
_STATE = View(
    key=Key("mamba", "conv", 1), region=1, offset=16, n_items=3, item_stride=128, tokens_per_item=1,
    rows=(RowLevel(1, 0),), shards=4, shard_stride=16, segs=2,
    seg_stride=64, width=8, axis=Axis("conv_channel", 8, 0, 4), format="fp32",
)  # fmt: skip
_LAYOUT = Layout.of(
    [Region(0x1000, 256, "cuda", 3), Region(0x7000, 512)], [_KV, _STATE],
    slots=("mamba",), exact=("mamba",), owned={"kv": TokenShard(2, 1, 16)},
)  # fmt: skip
_TOPOLOGY = Topology(tp_size=2, tp_rank=1, pp_size=3, pp_rank=2, cp_size=2, cp_rank=1, dp_size=4, dp_rank=3)
_RECTS = (Rect("kv", 0, 8, 0, 2), Rect("mamba", 0, 1, 1, 2))
HELLO = m.Hello(
    _TOPOLOGY, _LAYOUT, "nixl", b"\x00agent", (m.LaneSpan(4096, 8192, "cuda", 3), m.LaneSpan(16384, 8192)), 10.0,
    (m.DIRECT_FEATURE, "checksum"),
)  # fmt: skip
FRAMES: dict[str, m.AnyMessage] = {
    "Hello": HELLO,
    "Hello, rows": m.Hello(
        _TOPOLOGY, _LAYOUT, "nixl", b"", (m.LaneSpan(4096, 8192),), 10.0, (),
        (Placed("output_ids", "int32", (16,), True, 0, 64), Placed("top", "bfloat16", (2, 4), False, 64, 16)),
        m.RowSpan(0x9000, 128, 16, "cuda", 3), (m.Offer("local", b"pid"),), (m.Fact("weights", "01ab"),),
    ),
    "Welcome, columns": m.Welcome(
        _TOPOLOGY, _LAYOUT, "nixl", b"", 10.0, (), (Placed("output_ids", "int32", (16,), True, 0, 64),)
    ),
    "Welcome": m.Welcome(
        _TOPOLOGY, _LAYOUT, "nixl", b"\xffagent", 10.0, ("checksum",), (), (m.Offer("local", b"pid"),)
    ),
    "Welcome, model": m.Welcome(
        _TOPOLOGY, _LAYOUT, "nixl", b"", 10.0, (), (), (), (m.Fact("dtype", "bfloat16"), m.Fact("revision", "4f0c"))
    ),
    "HelloRefused": m.HelloRefused("format bf16 at prefill, fp8_e4m3 at decode"),
    "Ask": m.Ask(7, b"i13"),
    "Asking": m.Asking(7, True),
    "Open": m.Open(
        7, b"sroom", (Share("kv", "k", (0, 2, 1), 2, 2),), (m.Asked("kv", 2, 8), m.Asked("mamba", 0, 1)), (), 1, 2,
        False, -5, 60.0,
    ),
    "Open, direct": m.Open(
        2**40, b"b\x00", (Share("kv", "k", (0, 8, 4), 0, 1),), (m.Asked("kv", 0, 8),),
        (m.Items("kv", 0, memoryview(b"\1\0\0\0\xff\xff\xff\x7f")),), 0, 1, True, 0, 0.5,
    ),
    "Open, row": m.Open(7, b"i13", (), (), (), 0, 1, True, 0, 60.0, 5),
    "Open, lent in advance": m.Open(
        7, b"i13", (Share("kv", "k", (0, 2, 1), 2, 2),), (m.Asked("kv", 2, 8),), (), 0, 1, True, 0, 60.0, None,
        (m.Advance(0, 1, 8192, 4096, 256),),
    ),
    "Opened, accepted": m.Opened(7, "accepted", ""),
    "Opened, refused": m.Opened(7, "refused", "the pool has no such room"),
    "Reserve": m.Reserve(7, 1, 2, 4096, _RECTS),
    "Lease": m.Lease(7, 1, 2, 0, 8192, 4096, 256),
    "Refused": m.Refused(7, 1, 2, "too_big", 2048),
    "Watermark": m.Watermark(0, 2**40),
    "Recall": m.Recall(7, 1, 2, 0, 8192, 256),
    "Returned": m.Returned(7, 1, 2, 0, 8192),
    "CloseOk": m.CloseOk(7, (m.Written(1, 0, 8192), m.Written(2, m.DIRECT, 0)), None),
    "CloseOk, aux": m.CloseOk(7, (), b"aux\x00\xff"),
    "CloseOk, slots": m.CloseOk(7, (m.Written(1, 0, 8192),), None, (m.Given("mamba", 2),)),
    "CloseOk, packed": m.CloseOk(7, (), b"\1\2\3\4", (), True),
    "CloseOk, row": m.CloseOk(7, (m.Written(1, m.AUX, 0),), None),
    "CloseFailed": m.CloseFailed(7, "the engine gave it up"),
    "Closed": m.Closed(7),
    "Abort": m.Abort(7, "nobody waits for it", True),
    "Abort, declined": m.Abort(7, "another number of layers", False, b"sroom"),
    "Drained": m.Drained(7),
    "Heartbeat": m.Heartbeat(),
    "Heartbeat, waiting": m.Heartbeat(m.IN_USE, (m.Wanted(7, b"i13"),), (b"i14", b"swait")),
    "Bye": m.Bye(),
    "NoSession": m.NoSession(2**64 - 1),
    "Tagged": m.Tagged(wire.encode_tag(wire.Tag(SESSION, 7, 1, 0, 8192, _RECTS, 5), COMPONENTS)),
}  # fmt: skip
TAGS = {
    "staged": wire.Tag(SESSION, 7, 1, 0, 8192, _RECTS, 2**64 - 1),
    "direct": wire.Tag(SESSION, 7, 2, m.DIRECT, 0, _RECTS[:1]),
    "row": wire.Tag(SESSION, 7, 3, m.AUX, 0, ()),
}


def readable(value: object) -> Any:
    """A value by its fields' names; bytes in hex."""
    match value:
        case msgspec.Struct():
            return {name: readable(getattr(value, name)) for name in value.__struct_fields__}
        case tuple() if hasattr(value, "_asdict"):
            return {name: readable(field) for name, field in value._asdict().items()}
        case tuple():
            return [readable(one) for one in value]
        case bytes() | memoryview():
            return bytes(value).hex()
        case _ if is_dataclass(value):
            return {field.name: readable(getattr(value, field.name)) for field in fields(value)}
    return value


def lines() -> str:
    """This version's file: a line of fields and a line of bytes for each message and tag."""
    frames = {name: _entry(message, wire.encode(SESSION, SEQ, message)) for name, message in FRAMES.items()}
    tags = {name: _entry(tag, wire.encode_tag(tag, COMPONENTS)) for name, tag in TAGS.items()}
    head = {"version": VERSION, "oldest": OLDEST, "session": list(SESSION), "seq": SEQ, "components": list(COMPONENTS)}
    text = [f'"{name}": {json.dumps(value)},' for name, value in head.items()]
    for part, entries in (("frames", frames), ("tags", tags)):
        body = ",\n".join(f"{json.dumps(name)}: {{\n{entry}\n}}" for name, entry in entries.items())
        text.append(f'"{part}": {{\n{body}\n}}{"," if part == "frames" else ""}')
    return "\n".join(["{", *text, "}", ""])


def _entry(value: m.AnyMessage | wire.Tag, data: bytes) -> str:
    kind = type(value).__name__
    return f'"kind": "{kind}", "fields": {json.dumps(readable(value))},\n"hex": "{data.hex()}"'


def path(version: int) -> Path:
    return FOLDER / f"v{version}.json"


if __name__ == "__main__":
    path(VERSION).write_text(lines())
