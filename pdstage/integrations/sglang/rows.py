"""A request's row of SGLang's metadata buffers, as the aux of a room, with the adapter of the request's KV.

SGLang keeps each field in a separate buffer on the CPU, with one row per request. The two sides' buffers are paired by
their order; buffers that only one side has are left out.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import msgspec

from pdstage import PeerError

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.conn import KVArgs


class Row(msgspec.Struct, array_like=True, frozen=True):
    """`adapter` is the result of `manager.adapter_of`."""

    fields: list[bytes]
    adapter: str | None


_rows = msgspec.msgpack.Decoder(Row)


def read_row(args: KVArgs, index: int, adapter: str | None) -> bytes:
    """The row, packed."""
    rows = zip(args.aux_data_ptrs, args.aux_item_lens, strict=True)
    fields = [ctypes.string_at(ptr + index * nbytes, nbytes) for ptr, nbytes in rows]
    return msgspec.msgpack.encode(Row(fields, adapter))


def write_row(args: KVArgs, index: int, packed: bytes, adapter: str | None) -> None:
    """Fills the row of a request that uses that adapter.

    Raises `PeerError` for fields of another length, and for KV of another adapter, before it writes anything.
    """
    try:
        row = _rows.decode(packed)
    except msgspec.MsgspecError as error:
        raise PeerError(f"prefill's metadata does not decode ({error})", remedy="run one release on both") from error
    if None not in (adapter, row.adapter) and adapter != row.adapter:
        raise PeerError(
            f"the request has adapter {adapter!r} here and {row.adapter!r} at prefill",
            remedy="load the same weights under that name on both engines",
        )
    rows = list(zip(args.aux_data_ptrs, args.aux_item_lens, row.fields, strict=False))
    for number, (_, nbytes, field) in enumerate(rows):
        if len(field) != nbytes:
            raise PeerError(
                f"metadata buffer {number} has rows of {len(field)} bytes at prefill, {nbytes} here",
                remedy="enable the same optional metadata (checksums, sampling masks) on both engines",
            )
    for ptr, nbytes, field in rows:
        ctypes.memmove(ptr + index * nbytes, field, nbytes)
