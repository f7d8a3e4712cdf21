"""The directory in etcd, for clusters: prefill ranks' adverts under etcd's leases, and a watch in place of look-ups.

A rank is the key PREFIX/INSTANCE/SHAPE/RANK, its value a `Held`. SHAPE is the sizes that all ranks of an instance
agree on. So one transaction registers a rank: nothing of the instance has another shape, and its place is as it was
read. It is renewed by etcd's keepalive, and published anew if the lease was lost.

Beside it is a record of the process, PREFIX/!processes/INCARNATION, which stays when the lease ends and goes when the
rank is withdrawn. So a process that was lost can still be named: `fence` replaces its record by PREFIX/!ended/..., of
which the watch tells every node.

Look-ups are answered from a copy that a thread keeps up to date by a watch, and that goes on answering while etcd is
away. A member that was stopped or cut off says nothing: after `_QUIET_S` without an event the watch is taken up at
another one. A compacted revision, or a table that is behind, is read anew.

The maintained way to etcd without a client library of its own for Python is its JSON gateway (etcd 3.4 and later),
https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/.
"""

from __future__ import annotations

import base64
import http
import logging
import re
import ssl
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar
from urllib.parse import parse_qs, quote, unquote, urlsplit

import msgspec

from pdstage import arguments, environment
from pdstage.control.address import Address
from pdstage.control.directory import Advert, Conflict, check_advert, check_place, choose, replica
from pdstage.errors import PdstageError, PeerError, TransportError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

_T = TypeVar("_T")
SCHEME = "etcd://"
_QUIET_S = 5.0
_AGAIN_S = 0.5
_TRIES = 8
_FENCE_AGAIN_S = 1.0
_INCARNATION = re.compile("[0-9a-f]{16}")
_ENDED_S = 24 * 3600
"""How long it is known that a process was fenced. A node that is away from etcd for longer does not hear of it."""
_UNAUTHENTICATED, _DENIED, _FULL, _UNAVAILABLE = 16, 7, 8, 14
"""Codes of gRPC, as the gateway passes them on."""
_REMEDIES = {
    _DENIED: "grant the user read and write on the prefix (`etcdctl role grant-permission`)",
    _FULL: "make room: compact, defragment and `etcdctl alarm disarm`, or raise --quota-backend-bytes",
}


class EtcdAddress(NamedTuple):
    """`etcd://[USER@]HOST:PORT[,HOST:PORT...]/PREFIX[?ca=FILE&cert=FILE&key=FILE]`.

    With `ca`, the authorities' certificates, or `ca=system`, it is TLS; `cert` and `key` are the client's own. The
    user's password is read from PDSTAGE_ETCD_PASSWORD.
    """

    members: tuple[Address, ...]
    prefix: str
    user: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""

    @classmethod
    def parse(cls, text: str) -> EtcdAddress:
        """Raises `UsageError` that quotes `text`."""
        url = urlsplit(arguments.text("an etcd address", text))
        user, _, members = url.netloc.rpartition("@")
        options = {name: values[-1] for name, values in parse_qs(url.query).items()}
        problem = ""
        if not url.path.strip("/"):
            problem = "it has no prefix for the keys"
        elif ":" in user:
            problem = "it holds a password"
        elif unknown := options.keys() - {"ca", "cert", "key"}:
            problem = f"there is no option {min(unknown)!r}"
        elif bool(options.get("cert")) != bool(options.get("key")) or ("cert" in options and "ca" not in options):
            problem = "cert, key and ca go together"
        if problem:
            raise UsageError(
                f"etcd address {text!r}: {problem}",
                remedy="write it as etcd://[USER@]HOST:PORT,HOST:PORT/PREFIX?ca=FILE&cert=FILE&key=FILE; the password "
                f"is read from {environment.ETCD_PASSWORD.name}",
                address=text,
            )
        parsed = tuple(Address.parse(member, "etcd") for member in members.split(","))
        return cls(parsed, f"{url.path.strip('/')}/", unquote(user), **options)

    def __str__(self) -> str:
        return f"{SCHEME}{','.join(map(str, self.members))}/{self.prefix.rstrip('/')}"


class Refused(PeerError):
    """etcd answered with an error; `code` is gRPC's."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(what, remedy=_REMEDIES.get(code, "look at etcd's log"), code=code)
        self.code = code


class _Quiet(Exception):
    """A watch told nothing for a while: nothing has changed, or its member is stopped or cut off."""


class Cluster:
    """etcd's members: a request goes to the one that answered last, and on to the others if that one does not.

    Any thread may call. Raises `UsageError` without httpx2 or for a certificate that cannot be read.
    """

    def __init__(self, address: EtcdAddress, timeout_s: float) -> None:
        try:
            import httpx2  # noqa: PLC0415  (of the extra "etcd")
        except ImportError as error:
            raise UsageError("etcd needs httpx2", remedy='pip install "pdstage[etcd]"', extra="etcd") from error
        self._http: Any = httpx2
        self.address = address
        self._timeout_s = timeout_s
        self._client = httpx2.Client(verify=_context(address), timeout=timeout_s, trust_env=False)
        scheme = "https" if address.ca else "http"
        self._members = [f"{scheme}://{member}/v3/" for member in address.members]
        self._at = self._watched = 0
        self._token = ""

    def close(self) -> None:
        self._client.close()

    def ask(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        """One request's answer. Raises `TransportError` if no member answers, `Refused` for etcd's own errors."""
        last: Exception | None = None
        for _ in self._members:
            member = self._members[self._at % len(self._members)]
            try:
                return self._post(member, method, body)
            except Refused as error:
                if error.code != _UNAVAILABLE:  # else it has no leader, or is about to end
                    raise
                last = error
            except (self._http.HTTPError, OSError, PeerError) as error:
                last = error
            self._at += 1
        if isinstance(last, PeerError) and not isinstance(last, Refused):
            raise last
        raise TransportError(
            f"no member of etcd answers at {self.address} ({last or 'none is named'})",
            remedy="check that a majority of its members runs, and the network",
            address=str(self.address),
        ) from last

    def _post(self, member: str, method: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            return _read(self._client.post(member + method, json=body, headers=self._headers(member)))
        except Refused as error:
            if error.code != _UNAUTHENTICATED or not self._token:
                raise
            self._token = ""  # it has expired
            return _read(self._client.post(member + method, json=body, headers=self._headers(member)))

    def _headers(self, member: str) -> dict[str, str]:
        if not self.address.user:
            return {}
        if not self._token:
            password = environment.ETCD_PASSWORD.read() or ""
            login = {"name": self.address.user, "password": password}
            response = self._client.post(f"{member}auth/authenticate", json=login)
            try:
                self._token = str(_read(response)["token"])
            except Refused as error:
                if error.code == _UNAVAILABLE:
                    raise
                raise UsageError(
                    f"etcd does not let user {self.address.user!r} in ({error.what})",
                    remedy=f"set {environment.ETCD_PASSWORD.name} to that user's password",
                    user=self.address.user,
                ) from error
        return {"Authorization": self._token}

    def watch(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """What a watch at the next member tells. Raises `_Quiet` after `_QUIET_S` without an event."""
        self._watched += 1
        member = self._members[self._watched % len(self._members)]
        headers = {**self._headers(member), "Grpc-Metadata-hasleader": "true"}  # a member without a leader ends it
        patience = self._http.Timeout(self._timeout_s, read=_QUIET_S)
        asked = {"json": body, "headers": headers, "timeout": patience}
        try:
            with self._client.stream("POST", f"{member}watch", **asked) as response:
                yield from (_result(msgspec.json.decode(line)) for line in response.iter_lines() if line)
        except self._http.ReadTimeout as error:
            raise _Quiet from error


def _context(address: EtcdAddress) -> ssl.SSLContext | bool:
    if not address.ca:
        return True
    try:
        context = ssl.create_default_context(cafile=None if address.ca == "system" else address.ca)
        if address.cert:
            context.load_cert_chain(address.cert, address.key)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"the certificates of {address} cannot be read ({error})", remedy="name PEM files that this user can read"
        ) from error
    return context


def _read(response: Any) -> dict[str, Any]:  # noqa: ANN401
    """The answer's first line; a stream of one answer has no other."""
    line = response.text.partition("\n")[0]
    try:
        answer = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        what = f"what answers at {response.url} is not etcd's gateway (HTTP status {response.status_code})"
        raise PeerError(what, remedy="check the address; etcd 3.4 and later has it") from error
    return _result(answer, response.status_code)


def _result(answer: Any, status: int = http.HTTPStatus.OK) -> dict[str, Any]:  # noqa: ANN401
    if not isinstance(answer, dict):
        raise PeerError("etcd's answer is no object", remedy="check the address")
    error = answer.get("error")
    if error is None and status == http.HTTPStatus.OK:
        result: dict[str, Any] = answer.get("result", answer)
        return result
    if isinstance(error, dict):  # of a stream
        raise Refused(str(error.get("message", error)), int(error.get("grpc_code", 0)))
    raise Refused(str(error or answer), int(answer.get("code", 0)))


class Held(msgspec.Struct, frozen=True):
    """A rank's value: its advert, and the incarnation of the process that it replaced, if any."""

    advert: Advert
    predecessor: int | None = None


class Process(msgspec.Struct, frozen=True):
    """A rank's process: its control endpoint, and the rank's key below the prefix."""

    endpoint: str
    rank: str

    def is_at(self, where: str) -> bool:
        """Whether it was at `where`, an endpoint or a host."""
        if where == self.endpoint:
            return True
        try:
            return Address.parse(self.endpoint, "tcp").host == where.strip("[]")
        except UsageError:  # an endpoint without a host
            return False

    def __str__(self) -> str:
        instance, _, place = self.rank.partition("/")
        return f"{unquote(instance)} rank {place.rpartition('/')[2]} {self.endpoint}"


_held, _process = msgspec.json.Decoder(Held), msgspec.json.Decoder(Process)
"""Made before any thread decodes, as directory_api's."""
_PROCESSES, _ENDED = "!processes", "!ended"
"""In place of an instance: `quote` leaves no "!"."""


class EtcdClient:
    """The directory at an `EtcdAddress`: publishes, withdraws and looks up as `BootstrapClient` does.

    The first look-up begins a thread that watches; `close` ends it. Any thread may call.
    """

    def __init__(self, address: str, timeout_s: float = 2.0) -> None:
        self.given = address
        self.address = EtcdAddress.parse(address)
        self._cluster = Cluster(self.address, arguments.number("timeout_s", timeout_s, above=0.0))
        self._prefix = self.address.prefix
        self._leases: dict[str, tuple[Advert, str]] = {}
        self._lock = threading.Lock()
        self._copy: _Copy | None = None
        """What the watch keeps up to date, from the first look-up on."""
        self._is_stale = False
        """The copy must be read anew."""
        self._heard_at = 0.0
        self._n_restarts = 0
        """How often the watch ended otherwise than by silence."""
        self._closing = threading.Event()

    def close(self) -> None:
        """Ends the watch, within `_QUIET_S`. What was published stays until it is withdrawn or its lease ends."""
        self._closing.set()
        self._cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Publishing.

    def publish(self, advert: Advert, ttl_s: float = 15.0) -> None:
        """Registers or renews a rank. A new incarnation replaces its predecessor at once.

        Raises `UsageError` for a bad name or duration, `Conflict` as `Directory.publish`, `TransportError` if no member
        answers, and `PeerError` for what etcd refuses.
        """
        check_advert(advert, ttl_s)
        rank = _rank_key(advert)
        published, lease = self._leases.get(rank, (None, ""))
        if published == advert and self._renewed(rank, lease):
            return
        for _ in range(_TRIES):
            copy = self._read(f"{rank.partition('/')[0]}/")
            there = copy.held(rank)
            place, before = (there.advert, there.predecessor) if there else (None, None)
            predecessor = check_place(advert, copy.adverts(advert.instance).values(), place, before)
            if self._put(Held(advert, predecessor), copy.revision, ttl_s):
                return
            if self._cluster.ask("kv/range", {"key": _encoded(self._key(_ENDED, advert.incarnation))}).get("kvs"):
                raise Conflict(
                    f"{advert.where} at {advert.endpoint} was fenced: peers have taken back what it may still write",
                    remedy="end this process; a new one may take the place",
                    endpoint=advert.endpoint,
                )
        raise PeerError(f"{advert.where}: its place in etcd changed {_TRIES} times", remedy="find who else takes it")

    def _renewed(self, rank: str, lease: str) -> bool:
        """Whether the lease lives, and the key is still ours: a newer process puts it under a lease of its own."""
        if int(self._cluster.ask("lease/keepalive", {"ID": lease}).get("TTL", 0)) <= 0:
            return False
        ours = {"key": _encoded(self._prefix + rank), "target": "LEASE", "result": "EQUAL", "lease": lease}
        return self._change([ours])

    def _put(self, held: Held, revision: int, ttl_s: float) -> bool:
        """False if the instance has another shape, or the place another process, since `revision`; or it was fenced."""
        rank, incarnation = _rank_key(held.advert), held.advert.incarnation
        key = self._prefix + rank
        same = key.rpartition("/")[0]
        whole = same.rpartition("/")[0]
        no_others = [
            {"key": _encoded(low), "range_end": _encoded(high), "target": "CREATE", "result": "EQUAL"}
            | {"create_revision": "0"}
            for low, high in ((f"{whole}/", f"{same}/"), (f"{same}0", f"{whole}0"))  # "0" follows "/"
        ]
        lease: str = self._cluster.ask("lease/grant", {"TTL": str(max(1, round(ttl_s)))})["ID"]
        process = self._key(_PROCESSES, incarnation)
        try:
            done = self._change(
                [*no_others, _as_read(key, revision), _as_read(self._key(_ENDED, incarnation), 0)],
                _put(key, held, lease), _put(process, Process(held.advert.endpoint, rank)),
            )  # fmt: skip
        except PdstageError:
            self._revoke(lease)
            raise
        if done:
            _, before = self._leases.get(rank, (None, ""))
            self._leases[rank] = held.advert, lease
            lease = before
        if lease:
            self._revoke(lease)
        return done

    def _revoke(self, lease: str) -> None:
        try:
            self._cluster.ask("lease/revoke", {"ID": lease})
        except PdstageError as error:  # it ends by itself
            log.debug("a lease of etcd was not revoked: %s", error)

    def withdraw(self, advert: Advert) -> None:
        """Removes the rank, if this incarnation still holds its place."""
        rank = _rank_key(advert)
        copy = self._read(f"{rank.partition('/')[0]}/")
        there, process = copy.held(rank), _delete(self._key(_PROCESSES, advert.incarnation))
        is_there = there is not None and there.advert.incarnation == advert.incarnation
        as_read = [_as_read(self._prefix + rank, copy.revision)]
        if not (is_there and self._change(as_read, process, _delete(self._prefix + rank))):
            self._change([], process)
        published, lease = self._leases.get(rank, (None, ""))
        if published is not None and published.incarnation == advert.incarnation:
            del self._leases[rank]
            self._revoke(lease)

    def _change(self, conditions: list[dict[str, str]], *changes: dict[str, Any]) -> bool:
        """One transaction; False if a condition does not hold."""
        asked = {"compare": conditions, "success": changes}
        return bool(self._cluster.ask("kv/txn", asked).get("succeeded"))

    def _read(self, below: str = "") -> _Copy:
        """What etcd holds below the prefix and `below`."""
        return _Copy(self._cluster.ask("kv/range", _range(self._prefix + below)), self._prefix)

    def _key(self, kind: str, incarnation: int) -> str:
        return f"{self._prefix}{kind}/{incarnation:016x}"

    # Fencing.

    def fence(self, where: str, *, wait_s: float = 0.0) -> dict[int, Process]:
        """Says that the processes at `where`, a host or an endpoint, have ended: every node that holds back memory
        which one of them might still write gives it back. Only for an orchestrator that has ended them, or their host.

        Returns them by incarnation; those that were withdrawn or fenced before are not among them, nor those that come
        to `where` after this call began. A process counts as alive while it is registered, which is until its lease has
        ended: 15 s, as nodes publish themselves. For up to `wait_s` seconds that is waited for; then raises `Conflict`.
        `TransportError` and `PeerError` are as for `publish`.
        """
        where, end = arguments.text("where", where), time.monotonic() + arguments.number("wait_s", wait_s)
        meant = {incarnation for incarnation, one in self._read().processes().items() if one.is_at(where)}
        fenced: dict[int, Process] = {}
        while True:
            try:
                self._fence(where, meant, fenced)
            except Conflict:
                left_s = end - time.monotonic()
                if left_s <= 0:
                    raise
                time.sleep(min(_FENCE_AGAIN_S, left_s))
            else:
                return fenced

    def _fence(self, where: str, meant: set[int], fenced: dict[int, Process]) -> None:
        """Adds to `fenced`; some may be there before a `Conflict` over the others."""
        copy = self._read()
        found = {incarnation: one for incarnation, one in copy.processes().items() if incarnation in meant}
        registered = copy.registered()
        alive = [one for incarnation, one in found.items() if incarnation in registered]
        if alive:
            raise Conflict(
                f"{len(alive)} of {len(found)} processes at {where} are registered, first {alive[0]}",
                remedy="end them, wait until their leases end, and fence them then",
                endpoint=alive[0].endpoint,
            )
        lease = self._cluster.ask("lease/grant", {"TTL": str(_ENDED_S)})["ID"] if found else ""
        for incarnation, one in found.items():
            process = self._key(_PROCESSES, incarnation)
            as_read = [_as_read(key, copy.revision) for key in (self._prefix + one.rank, process)]
            if not self._change(as_read, _put(self._key(_ENDED, incarnation), one, lease), _delete(process)):
                raise Conflict(f"{one} has changed meanwhile", remedy="ask again", endpoint=one.endpoint)
            fenced[incarnation] = one

    def has_ended(self, incarnation: int) -> bool:
        """Whether this process was fenced, as far as the watch has told; False before the first look-up."""
        copy = self._copy
        return copy is not None and f"{incarnation:016x}" in copy.keys.get(_ENDED, ())

    @property
    def watched(self) -> tuple[float, int] | None:
        """When etcd last answered the watch (monotonic seconds; every 5 s where nothing changes), and how often the
        watch was taken up again; None before the first look-up.
        """
        return (self._heard_at, self._n_restarts) if self._copy is not None else None

    # Looking up.

    def lookup(self, dp_rank: int | None = None, *, instance: str | None = None) -> list[Advert]:
        """All ranks of one dp replica, by group rank. Raises as `Directory.lookup`; after `Incomplete`, ask again.

        Raises `TransportError` if etcd has not answered yet; once it has, what it told last is the answer.
        """
        with self._lock:
            if self._copy is None:
                self._copy, self._heard_at = self._read(), time.monotonic()
                threading.Thread(target=self._follow, name="pdstage-etcd", daemon=True).start()
            name = choose(self._copy.names(), None) if instance is None else instance
            held = self._copy.adverts(name)
        return replica(name, held, dp_rank)

    def instances(self) -> bytes:
        """All live adverts as JSON, for people: by instance, each advert and the seconds left of its lease."""
        copy = self._read()
        shown: dict[str, list[dict[str, object]]] = {}
        for name in sorted(copy.names()):
            for _, advert in sorted(copy.adverts(name).items()):
                left = self._cluster.ask("lease/timetolive", {"ID": copy.leases.get(_rank_key(advert), "0")})
                line = {"expires_in_s": int(left.get("TTL", 0)), "advert": advert}
                shown.setdefault(name, []).append(line)
        return msgspec.json.encode(shown)

    def _follow(self) -> None:
        """The thread that keeps the copy up to date."""
        failed_at = 0.0
        while not self._closing.is_set():
            try:
                if self._is_stale:
                    copy = self._read()
                    with self._lock:
                        self._copy = copy
                    self._is_stale, self._heard_at = False, time.monotonic()
                self._watch()
                self._n_restarts += 1  # the member ended it in order
                self._closing.wait(_AGAIN_S)
            except _Quiet:
                continue
            except Exception as error:  # noqa: BLE001  (whatever it is, the copy goes on answering)
                if self._closing.is_set():
                    return
                if self._heard_at > failed_at:  # else it is still away
                    log.warning("the watch at %s ended, and is taken up again: %s", self.address, error)
                    self._n_restarts += 1
                failed_at = time.monotonic()
                self._closing.wait(_AGAIN_S)

    def _watch(self) -> None:
        copy = self._copy
        assert copy is not None
        create = {**_range(self._prefix), "start_revision": str(copy.revision + 1)}
        for answer in self._cluster.watch({"create_request": create}):
            if self._closing.is_set():
                return
            if answer.get("canceled"):
                self._is_stale = True  # compacted, or without a leader
                raise TransportError(f"etcd ended it ({answer.get('cancel_reason', 'no reason given')})")
            with self._lock:
                for event in answer.get("events", ()):
                    copy.take(event["kv"], is_deleted=event.get("type") == "DELETE")
            self._heard_at = time.monotonic()  # its first answer says only that the watch has begun


class _Copy:
    """What the keys under a prefix held at `revision`, and since."""

    def __init__(self, read: dict[str, Any], prefix: str) -> None:
        self._prefix = prefix
        self.keys: dict[str, dict[str, Held | Process]] = {}
        """By instance, quoted, `_PROCESSES` or `_ENDED`; and by the rest of the key."""
        self.leases: dict[str, str] = {}
        """By key below the prefix."""
        self.revision = 0
        for one in read.get("kvs", ()):
            self.take(one)
        self.revision = int(read["header"]["revision"])

    def take(self, one: dict[str, Any], *, is_deleted: bool = False) -> None:
        key = _decoded(one["key"]).removeprefix(self._prefix)
        group, _, rest = key.partition("/")
        decoder: msgspec.json.Decoder[Any] = _process if group in (_PROCESSES, _ENDED) else _held
        value: Held | Process | None = None if is_deleted else _read_value(one, decoder)
        if value is not None:
            self.keys.setdefault(group, {})[rest] = value
            self.leases[key] = one.get("lease", "0")
        elif rest in self.keys.get(group, ()):
            del self.keys[group][rest], self.leases[key]
            if not self.keys[group]:
                del self.keys[group]
        self.revision = max(self.revision, int(one["mod_revision"]))

    def names(self) -> list[str]:
        """All instances'."""
        return [unquote(group) for group in self.keys if not group.startswith("!")]

    def held(self, rank: str) -> Held | None:
        """At a rank's key."""
        group, _, rest = rank.partition("/")
        one = self.keys.get(group, {}).get(rest)
        return one if isinstance(one, Held) else None

    def adverts(self, instance: str) -> dict[int, Advert]:
        """By unique rank."""
        held = self.keys.get(quote(instance, safe=""), {}).values()
        return {one.advert.topology.unique_rank: one.advert for one in held if isinstance(one, Held)}

    def processes(self) -> dict[int, Process]:
        """By incarnation: those that were neither withdrawn nor fenced."""
        found = self.keys.get(_PROCESSES, {}).items()
        return {int(key, 16): one for key, one in found if isinstance(one, Process) and _INCARNATION.fullmatch(key)}

    def registered(self) -> set[int]:
        """Incarnations under a lease."""
        return {advert.incarnation for name in self.names() for advert in self.adverts(name).values()}


def _rank_key(advert: Advert) -> str:
    """Below the prefix."""
    shape = ".".join(map(str, advert.shape))
    return f"{quote(advert.instance, safe='')}/{shape}/{advert.topology.unique_rank}"


def _range(prefix: str) -> dict[str, str]:
    """All keys that begin with `prefix`, which ends in "/"."""
    return {"key": _encoded(prefix), "range_end": _encoded(prefix[:-1] + "0")}


def _put(key: str, value: msgspec.Struct, lease: str = "0") -> dict[str, Any]:
    put = {"key": _encoded(key), "value": base64.b64encode(msgspec.json.encode(value)).decode(), "lease": lease}
    return {"request_put": put}


def _delete(key: str) -> dict[str, Any]:
    return {"request_delete_range": {"key": _encoded(key)}}


def _as_read(key: str, revision: int) -> dict[str, str]:
    """A transaction's condition: nobody has put or deleted and put `key` since `revision`."""
    return {"key": _encoded(key), "target": "MOD", "result": "LESS", "mod_revision": str(revision + 1)}


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _decoded(text: str) -> str:
    return base64.b64decode(text).decode(errors="replace")


def _read_value(one: dict[str, Any], decoder: msgspec.json.Decoder[_T]) -> _T | None:
    try:
        return decoder.decode(base64.b64decode(one.get("value", "")))
    except (msgspec.MsgspecError, ValueError) as error:
        log.warning("key %s in etcd is left out: %s", _decoded(one["key"]), error)
        return None
