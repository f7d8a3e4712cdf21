"""The directory's requests and answers, for any carrier: a method, a path and a body; a status and JSON.

    PUT    /v1/adverts                                      {"advert": {...}, "ttl_s": 15}
    DELETE /v1/adverts/{instance}/{unique_rank}/{incarnation}
    GET    /v1/lookup?instance=NAME&dp_rank=N               both optional where there is one choice
    GET    /v1/instances                                    everything live, for people
    GET    /query                                           the same as vLLM's routers ask Mooncake's bootstrap
    GET    /health

Refusals carry {"error": kind, "what": ..., "remedy": ..., "missing": [...]}; the client raises the same typed error.
"""

from __future__ import annotations

from typing import Annotated
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

import msgspec
from msgspec import Meta

from pdstage.control.directory import Advert, Conflict, Directory, Incomplete
from pdstage.errors import PdstageError, PeerError, UsageError

MAX_BODY_NBYTES = 64 << 10
MAX_ANSWER_NBYTES = 64 << 20

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding untrusted JSON may raise: for text that is not UTF-8, for endless nesting, for anything else."""


class Put(msgspec.Struct, frozen=True):
    advert: Advert
    ttl_s: float


class Adverts(msgspec.Struct, frozen=True):
    adverts: list[Advert]


class Refusal(msgspec.Struct, frozen=True, omit_defaults=True):
    error: str
    what: Annotated[str, Meta(min_length=1, max_length=4096)]
    remedy: Annotated[str, Meta(max_length=4096)] = ""
    missing: Annotated[tuple[int, ...], Meta(max_length=1 << 20)] = ()


# Kind on the wire, HTTP status and class; the first class that an error is an instance of counts.
KINDS: tuple[tuple[str, int, type[PdstageError]], ...] = (
    ("incomplete", 404, Incomplete),
    ("conflict", 409, Conflict),
    ("usage", 400, UsageError),
    ("peer", 503, PeerError),
)


# Made before any thread decodes: two threads that decode a type for the first time at once end the process (msgspec
# 0.22, a null pointer).
_puts = msgspec.json.Decoder(Put)
adverts_of = msgspec.json.Decoder(Adverts)
refusal_of = msgspec.json.Decoder(Refusal)


def answer(directory: Directory, method: str, target: str, body: bytes) -> tuple[int, bytes]:
    """Status and body. Never raises, whatever the request."""
    try:
        url = _parse_url(target)
        return 200, msgspec.json.encode(_answer(directory, method, url.path, parse_qs(url.query), body))
    except PdstageError as error:
        return refusal(error)


def refusal(error: PdstageError) -> tuple[int, bytes]:
    kind, status = next((k, s) for k, s, cls in KINDS if isinstance(error, cls))
    missing = error.missing if isinstance(error, Incomplete) else ()
    return status, msgspec.json.encode(Refusal(kind, error.what, error.remedy, missing))


def _answer(directory: Directory, method: str, path: str, query: dict[str, list[str]], body: bytes) -> object:
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
        case "GET", "/v1/lookup":
            dp_rank = query.get("dp_rank", [None])[0]
            number = None if dp_rank is None else parse_number(dp_rank, "dp_rank")
            return Adverts(directory.lookup(query.get("instance", [None])[0], number))
        case "PUT", "/v1/adverts":
            return _put(directory, body)
    parts = path.split("/")
    if method == "DELETE" and path.startswith("/v1/adverts/") and len(parts) == 6:
        rank, incarnation = parse_number(parts[4], "unique_rank"), parse_number(parts[5], "incarnation")
        return {"withdrawn": directory.withdraw(unquote(parts[3]), rank, incarnation)}
    raise UsageError(f"there is no resource at {path[:64]!r}", remedy="see the paths in pdstage.control.directory_api")


def _engines(directory: Directory) -> dict[str, object]:
    """Engines by number, with each one's ranks by tp and pp rank. This is the answer of vLLM's MooncakeBootstrapServer,
    from which a router learns the `remote_engine_id` of its requests. There an engine is a data-parallel replica, and
    its number what a router sends as `X-data-parallel-rank`. Others get the next free number.
    """
    engines: dict[str, object] = {}
    for name, held in directory.instances().items():
        number = held[0][0].replica
        while str(number) in engines:
            number += 1
        ranks: dict[str, dict[str, str]] = {}
        for advert, _ in held:
            place = advert.topology
            ranks.setdefault(str(place.tp_rank), {})[str(place.pp_rank)] = advert.endpoint
        engines[str(number)] = {"engine_id": name, "worker_addr": ranks}
    return engines


def _put(directory: Directory, body: bytes) -> object:
    try:
        put = _puts.decode(body)
    except UNREADABLE as error:
        raise UsageError(f"the advert does not decode ({error})", remedy="check the peer's version") from error
    directory.publish(put.advert, put.ttl_s)
    return {"ttl_s": put.ttl_s}


def check_body(nbytes: int) -> None:
    if not 0 <= nbytes <= MAX_BODY_NBYTES:
        raise UsageError(f"an advert of {nbytes} bytes", remedy=f"send at most {MAX_BODY_NBYTES}")


def parse_number(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise UsageError(f"{name} is {text[:32]!r}, not a number", remedy="send digits")
    return int(text)


def _parse_url(target: str) -> SplitResult:
    try:
        return urlsplit(target)
    except ValueError as error:
        raise UsageError(f"{target[:64]!r} is not a path ({error})", remedy="check the request") from error
