"""Results of commands as JSON: what `--json` prints and `--output` writes. Nodes read calibrations."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

from pdstage.errors import UsageError


def as_json(result: object) -> str:
    """Its text. A number that JSON has not is null."""
    finite = json.loads(json.dumps(result, default=_plain), parse_constant=lambda _: None)
    return json.dumps(finite, indent=2) + "\n"


def _plain(part: object) -> Any:  # noqa: ANN401
    import msgspec  # noqa: PLC0415  (a GPU's bench has neither records nor their package)

    return msgspec.to_builtins(part)


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
