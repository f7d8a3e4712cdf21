"""The directory's requests and answers, for any carrier: a method, a path and a body; a status and JSON.

    PUT  /v1/ask          {"type": "publish", "advert": {...}, "ttl_s": 15}, or of type withdraw or lookup
    GET  /v1/instances    everything live, for people
    GET  /query           the same as vLLM's routers ask Mooncake's bootstrap
    GET  /health

Refusals carry {"error": kind, "what": ..., "remedy": ..., "missing": [...]}; the client raises the same typed error.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias, assert_never, cast

import msgspec
from msgspec import Meta

from pdstage.control.directory import Advert, Conflict, Directory, Incomplete
from pdstage.errors import PdstageError, PeerError, UsageError

MAX_BODY_NBYTES = 64 << 10
MAX_ANSWER_NBYTES = 64 << 20

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding untrusted JSON may raise: for text that is not UTF-8, for endless nesting, for anything else."""


class Publish(msgspec.Struct, frozen=True, tag="publish"):
    advert: Advert
    ttl_s: float
    after: int = 0


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    advert: Advert


class Lookup(msgspec.Struct, frozen=True, tag="lookup"):
    """Both may be left out where there is one choice."""

    dp_rank: int | None = None
    instance: str | None = None


Asked: TypeAlias = Publish | Withdraw | Lookup


class Adverts(msgspec.Struct, frozen=True):
    adverts: list[Advert]


class Refusal(msgspec.Struct, frozen=True, omit_defaults=True):
    error: str
    what: Annotated[str, Meta(min_length=1, max_length=4096)]
    remedy: Annotated[str, Meta(max_length=4096)] = ""
    missing: Annotated[tuple[int, ...], Meta(max_length=1 << 20)] = ()
    holder: Advert | None = None


# Kind on the wire, HTTP status and class; the first class that an error is an instance of counts.
KINDS: tuple[tuple[str, int, type[PdstageError]], ...] = (
    ("incomplete", 404, Incomplete),
    ("conflict", 409, Conflict),
    ("usage", 400, UsageError),
    ("peer", 503, PeerError),
)


# Made before any thread decodes: two threads that decode a type for the first time at once end the process (msgspec
# 0.22, a null pointer).
_asks: msgspec.json.Decoder[Asked] = msgspec.json.Decoder(Asked)
adverts_of = msgspec.json.Decoder(Adverts)
refusal_of = msgspec.json.Decoder(Refusal)


def answer(directory: Directory, method: str, target: str, body: bytes) -> tuple[int, bytes]:
    """Status and body. Never raises, whatever the request."""
    try:
        return 200, msgspec.json.encode(_answer(directory, method, target, body))
    except PdstageError as error:
        return refusal(error)


def refusal(error: PdstageError) -> tuple[int, bytes]:
    kind, status = next((k, s) for k, s, cls in KINDS if isinstance(error, cls))
    missing = error.missing if isinstance(error, Incomplete) else ()
    said = Refusal(kind, error.what, error.remedy, missing, cast("Advert | None", error.fields.get("holder")))
    return status, msgspec.json.encode(said)


def _answer(directory: Directory, method: str, path: str, body: bytes) -> object:
    match method, path:
        case "GET", "/health":
            return {"status": "ok"}
        case "GET", "/v1/instances":
            return {
                name: [{"expires_in_s": round(left_s, 3), "advert": advert} for advert, left_s in held]
                for name, held in directory.instances().items()
            }
        case "GET", "/query":
            return _engines(directory)
        case "PUT", "/v1/ask":
            return _carry_out(directory, body)
    raise UsageError(f"there is no resource at {path[:64]!r}", remedy="see the paths in pdstage.control.directory_api")


def _carry_out(directory: Directory, body: bytes) -> object:
    if len(body) > MAX_BODY_NBYTES:
        raise UsageError("the request is too long", remedy=f"send at most {MAX_BODY_NBYTES} bytes")
    try:
        asked = _asks.decode(body)
    except UNREADABLE as error:
        raise UsageError(f"the request does not decode ({error})", remedy="check the peer's version") from error
    match asked:
        case Publish(advert, ttl_s, after):
            directory.publish(advert, ttl_s, after)
        case Withdraw(advert):
            directory.withdraw(advert)
        case Lookup(dp_rank, instance):
            return Adverts(directory.lookup(instance, dp_rank))
        case _:
            assert_never(asked)
    return {}


def _engines(directory: Directory) -> dict[str, object]:
    """Engines by number, with each one's ranks by tp and pp rank. This is the answer of vLLM's MooncakeBootstrapServer,
    from which a router learns the `remote_engine_id` of its requests. There an engine is a data-parallel replica, and
    its number what a router sends as `X-data-parallel-rank`. Others get the next free number.
    """
    engines: dict[str, object] = {}
    for name, listed in directory.instances().items():
        held = [advert for advert, left_s in listed if left_s > 0 and advert.role == "prefill"]
        if not held:
            continue
        number = held[0].replica
        while str(number) in engines:
            number += 1
        ranks: dict[str, dict[str, str]] = {}
        for advert in held:
            place = advert.topology
            ranks.setdefault(str(place.tp_rank), {})[str(place.pp_rank)] = advert.endpoint
        engines[str(number)] = {"engine_id": name, "worker_addr": ranks}
    return engines
