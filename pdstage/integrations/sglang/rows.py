"""A request's row of SGLang's metadata buffers, as the aux of a room.

SGLang keeps each field in a buffer of its own on the CPU, with a row a request; the two sides' buffers pair up by their
order, and those that only one side has are left out.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import msgspec

from pdstage.errors import PeerError

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.conn import KVArgs

_fields = msgspec.msgpack.Decoder(list[bytes])


def read_row(args: KVArgs, index: int) -> bytes:
    """The row's fields, packed."""
    rows = zip(args.aux_data_ptrs, args.aux_item_lens, strict=True)
    return msgspec.msgpack.encode([ctypes.string_at(ptr + index * nbytes, nbytes) for ptr, nbytes in rows])


def write_row(args: KVArgs, index: int, packed: bytes) -> None:
    """Fills the row. Raises `PeerError` for fields of another length, before anything is written."""
    try:
        fields = _fields.decode(packed)
    except msgspec.MsgspecError as error:
        raise PeerError(f"prefill's metadata does not decode ({error})", remedy="run one release on both") from error
    rows = list(zip(args.aux_data_ptrs, args.aux_item_lens, fields, strict=False))
    for number, (_, nbytes, field) in enumerate(rows):
        if len(field) != nbytes:
            raise PeerError(
                f"metadata buffer {number} has rows of {len(field)} bytes at prefill, {nbytes} here",
                remedy="enable the same optional metadata (checksums, sampling masks) on both engines",
            )
    for ptr, nbytes, field in rows:
        ctypes.memmove(ptr + index * nbytes, field, nbytes)
