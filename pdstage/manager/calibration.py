"""The file that `pdstage calibrate` writes and prefill nodes read: what each transport costs between two hosts.

Layer 5. Must not know how anything was measured. JSON with a version; a file that holds anything else is refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from pdstage import environment
from pdstage.cost import CostModel  # noqa: TC001  (msgspec reads the annotation)
from pdstage.errors import UsageError

if TYPE_CHECKING:
    import os

VERSION = 1


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`transports` by name; `made_at` (ISO 8601, UTC) and the host names are for the reader."""

    version: Annotated[int, Meta(ge=VERSION, le=VERSION)]
    made_at: str
    prefill_host: str
    decode_host: str
    transports: dict[str, CostModel]

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    def write(self, path: Path) -> None:
        """Raises `UsageError` where the file cannot be written."""
        try:
            path.write_text(self.to_json() + "\n")
        except OSError as error:
            raise UsageError(f"cannot write {path} ({error.strerror})", remedy="name another file") from error


_files = msgspec.json.Decoder(Calibration)


def read(path: str | os.PathLike[str]) -> Calibration:
    """Raises `UsageError` that names the file, and the field where one is wrong."""
    try:
        held = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot read calibration file {path} ({error.strerror})", remedy="make one with pdstage calibrate"
        ) from error
    try:
        return _files.decode(held)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        found = re.search(r"`\$\.?(.*)`$|field `(\w+)`|^(\w+) is", str(error))
        raise UsageError(
            f"calibration file {path}: {error}",
            remedy=f"make it again with this version's pdstage calibrate (version {VERSION})",
            file=str(path),
            field=next((name for name in found.groups() if name), "") if found else "",
        ) from error


def costs(given: str | os.PathLike[str] | None) -> dict[str, CostModel]:
    """What transports cost, by name, by the file `given`, or by the environment's; nothing where there is neither."""
    path = given or environment.CALIBRATION.read()
    return dict(read(path).transports) if path else {}
