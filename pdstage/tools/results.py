"""Results of commands as JSON: what `--json` prints and `--output` writes. Nodes read calibrations."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import msgspec

from pdstage.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


def as_json(result: object) -> str:
    return msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"


def save(result: object, path: Path) -> None:
    """Puts a new file of JSON in the old one's place, whole, for nodes that start meanwhile; the last of two writers
    wins. Raises `UsageError` where it cannot be written, and leaves what there was.
    """
    place, text = path.resolve(), as_json(result)
    try:
        if place.exists() and not place.is_file():  # a pipe or a device
            place.write_text(text)
            return
        fresh = place.with_name(f"{place.name}.{secrets.token_hex(4)}")
        try:
            fresh.write_text(text)
            fresh.replace(place)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {path} ({error.strerror})", remedy="name another file") from error
