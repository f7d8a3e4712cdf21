"""The file that `pdstage calibrate` writes and prefill nodes read: what each transport costs between two hosts.

JSON with a version; a file that holds anything else is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from pdstage import arguments, environment
from pdstage.errors import UsageError
from pdstage.plan.cost import CostModel  # noqa: TC001  (msgspec resolves the annotation at run time)

VERSION = 1


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`transports` by name; `made_at` (ISO 8601, UTC) and the host names are for the reader."""

    version: Annotated[int, Meta(ge=VERSION, le=VERSION)]
    made_at: str
    prefill_host: str
    decode_host: str
    transports: dict[str, CostModel]


_files = msgspec.json.Decoder(Calibration)


def read(path: arguments.GivenPath) -> Calibration:
    """Raises `UsageError` that names the file, and the field where one is wrong."""
    try:
        held = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot read calibration file {path} ({error.strerror})", remedy="make one with pdstage calibrate"
        ) from error
    try:
        return _files.decode(held)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"calibration file {path}: {error}",
            remedy=f"make it again with this version's pdstage calibrate (version {VERSION})",
        ) from error


def costs(given: arguments.GivenPath | None) -> dict[str, CostModel]:
    """What transports cost, by name, by the file `given`, or by the environment's; nothing where there is neither."""
    path = environment.CALIBRATION.read() if given is None else arguments.path("calibration", given)
    return dict(read(path).transports) if path else {}
