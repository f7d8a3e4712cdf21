"""What a driver carries out: the effects of both cores, and gathers that are done together."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pdstage.protocol.decode import DecodeEffect
from pdstage.protocol.prefill import PrefillEffect

if TYPE_CHECKING:
    from pdstage.protocol.prefill_chunks import Gather


class Gathers(NamedTuple):
    """Gathers of one turn that read the same bytes: done as one; each is answered by its own ticket."""

    members: tuple[Gather, ...]


Effect: TypeAlias = PrefillEffect | DecodeEffect
Carried: TypeAlias = Effect | Gathers
