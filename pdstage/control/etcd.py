"""The directory in etcd, for clusters: prefill ranks' adverts under etcd's leases, and copies in place of look-ups.

A rank is the key PREFIX/INSTANCE/SHAPE/RANK, its value a `Held`. SHAPE is the sizes that all ranks of an instance
agree on. So one transaction registers a rank: nothing of the instance has another shape, and its place is as it was
read. It is renewed by etcd's keepalive, and published anew if the lease was lost. A process that takes the place of one
that has ended also ends its lease.

Beside it is a record of the process, PREFIX/!processes/INCARNATION, which stays when the lease ends and goes when the
rank is withdrawn. So a process that was lost can still be named: `fence` replaces its record by PREFIX/!ended/...,
which every node reads.

Look-ups are answered from a copy. A thread asks every `_EVERY_S` whether anything has changed since, and reads the
table anew if so. The copy goes on answering while etcd is away.

This speaks with etcd's JSON gateway (etcd 3.4 and later, https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/). No
client library for Python has what is needed: etcd3gw 2.7 knows no users and one member, and its watch ends without a
word; aetcd 1.0 has no TLS, one member, and works in asyncio alone.
"""

from __future__ import annotations

import base64
import http
import logging
import ssl
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from urllib.parse import parse_qs, quote, unquote, urlsplit

import msgspec

from pdstage import arguments, environment
from pdstage.closing import Closing
from pdstage.control.address import Address, is_at
from pdstage.control.directory import DECODE, Advert, Conflict, Held, check_advert, check_place, choose, replica
from pdstage.errors import PdstageError, PeerError, TransportError, UsageError

if TYPE_CHECKING:
    import httpx2

log = logging.getLogger(__name__)

SCHEME = "etcd://"
_EVERY_S = 1.0
_TRIES = 8
_FENCE_AGAIN_S = 1.0
_ENDED_S = 24 * 3600
"""How long it is known that a process was fenced. A node that is away from etcd for longer does not hear of it."""
_UNAUTHENTICATED, _DENIED, _FULL, _UNAVAILABLE, _NO_AUTHENTICATION = 16, 7, 8, 14, 9
"""Codes of gRPC, as the gateway passes them on."""
_REMEDIES = {
    _DENIED: "grant the user read and write on the prefix (`etcdctl role grant-permission`)",
    _FULL: "make room: compact, defragment and `etcdctl alarm disarm`, or raise --quota-backend-bytes",
}
_Json: TypeAlias = dict[str, Any]
_answer = msgspec.json.Decoder(_Json)


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


class Cluster:
    """etcd's members: a request goes to the one that answered last, and on to the others if that one does not.

    Any thread may call. Raises `UsageError` without httpx2 or for a certificate that cannot be read.
    """

    def __init__(self, address: EtcdAddress, timeout_s: float) -> None:
        try:
            import httpx2  # noqa: PLC0415  (of the extra "etcd")
        except ImportError as error:
            raise UsageError("etcd needs httpx2", remedy='pip install "pdstage[etcd]"', extra="etcd") from error
        self._unanswered = httpx2.HTTPError, OSError, TransportError
        self.address = address
        # Not its Client, which logs every request at INFO: an engine's log would have one a second.
        self._transport = httpx2.HTTPTransport(verify=_context(address), trust_env=False)
        self._request, self._timeout = httpx2.Request, httpx2.Timeout(timeout_s).as_dict()
        scheme = "https" if address.ca else "http"
        self._members = [f"{scheme}://{member}/v3/" for member in address.members]
        self._at = 0
        self._token = ""

    def close(self) -> None:
        self._transport.close()

    def _post(self, url: str, body: _Json, headers: dict[str, str]) -> _Json:
        request = self._request("POST", url, json=body, headers=headers, extensions={"timeout": self._timeout})
        response = self._transport.handle_request(request)
        response.request = request
        try:
            response.read()
        finally:
            response.close()
        return _read(response)

    def ask(self, method: str, body: _Json) -> _Json:
        """One request's answer. Raises `TransportError` if no member answers, `Refused` for etcd's own errors, and
        `UsageError` for a user that etcd does not let in.
        """
        last: Exception | None = None
        for _ in range(len(self._members) + 1):
            member = self._members[self._at % len(self._members)]
            try:
                headers = {"Authorization": self._log_in(member)} if self.address.user else {}
                return self._post(member + method, body, headers)
            except Refused as error:
                if error.code == _UNAUTHENTICATED and self.address.user:
                    self._token = ""  # it has expired
                elif error.code == _UNAVAILABLE:  # it has no leader, or is about to end
                    self._at += 1
                else:
                    raise
                last = error
            except self._unanswered as error:
                last = error
                self._at += 1
        raise TransportError(
            f"no member of etcd answers at {self.address} ({last})",
            remedy="check that a majority of its members runs, and the network",
            address=str(self.address),
        ) from last

    def _log_in(self, member: str) -> str:
        """The user's token, made once."""
        token = self._token
        if not token:
            login = {"name": self.address.user, "password": environment.ETCD_PASSWORD.read() or ""}
            try:
                answer = self._post(f"{member}auth/authenticate", login, {})
            except Refused as error:
                if error.code == _UNAVAILABLE:
                    raise
                raise UsageError(
                    f"etcd does not let user {self.address.user!r} in ({error.what})",
                    remedy="enable authentication in etcd, or leave the user out of the address"
                    if error.code == _NO_AUTHENTICATION
                    else f"set {environment.ETCD_PASSWORD.name} to that user's password",
                    user=self.address.user,
                ) from error
            self._token = token = str(answer["token"])
        return token


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


def _read(response: httpx2.Response) -> _Json:
    """The answer's first line; a stream of one answer has no other."""
    try:
        answer = _answer.decode(response.text.partition("\n")[0])
    except msgspec.MsgspecError as error:
        raise TransportError(
            f"what answers at {response.url} is not etcd's gateway (HTTP status {response.status_code})",
            remedy="check the address; etcd 3.4 and later has it",
        ) from error
    if response.status_code == http.HTTPStatus.OK and "error" not in answer:
        result: _Json = answer.get("result", answer)
        return result
    fault = answer["error"] if isinstance(answer.get("error"), dict) else answer  # the former in a stream
    raise Refused(str(fault.get("message", fault)), int(fault.get("code", fault.get("grpc_code", 0))))


class Process(msgspec.Struct, frozen=True):
    """A rank's process: its control endpoint, and the rank's key below the prefix."""

    endpoint: str
    rank: str

    @property
    def instance(self) -> str:
        return unquote(self.rank.partition("/")[0]).removeprefix(DECODE)

    def __str__(self) -> str:
        return f"{self.instance} rank {self.rank.rpartition('/')[2]} {self.endpoint}"


_held, _process = msgspec.json.Decoder(Held), msgspec.json.Decoder(Process)
"""Made before any thread decodes, as directory_api's."""
_PROCESSES, _ENDED = "!processes", "!ended"
"""In place of an instance: `quote` leaves no "!"."""


class EtcdClient(Closing):
    """The directory at an `EtcdAddress`: publishes, withdraws and looks up as `BootstrapClient` does.

    The first look-up, or `follow`, begins a thread that keeps a copy; `close` ends it. Any thread may call.
    """

    def __init__(self, address: str, timeout_s: float = 2.0) -> None:
        self.given = address
        self.address = EtcdAddress.parse(address)
        self._cluster = Cluster(self.address, arguments.number("timeout_s", timeout_s, above=0.0))
        self._prefix = self.address.prefix
        self._leases: dict[str, tuple[Advert, str]] = {}
        self._lock = threading.Lock()
        self._copy: _Copy | None = None
        """What the thread keeps up to date, from the first look-up on."""
        self._heard_at = 0.0
        self._n_restarts = 0
        """How often etcd went away."""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def close(self) -> None:
        """Ends the thread. What was published stays until it is withdrawn or its lease ends."""
        self._closing.set()
        self._cluster.close()

    # Publishing.

    def publish(self, advert: Advert, ttl_s: float = 15.0, after: int = 0) -> None:
        """Registers or renews a rank; `after` is as for `Directory.publish`.

        Raises `UsageError` for a bad name or duration, `Conflict` as `Directory.publish`, `TransportError` if no member
        answers, and `PeerError` for what etcd refuses.
        """
        check_advert(advert, ttl_s)
        rank = _rank_key(advert)
        published, lease = self._leases.get(rank, (None, ""))
        # The lease may go on without the rank: a process that took its place may have ended before it ended the lease.
        held = {"key": _encoded(self._prefix + rank), "target": "LEASE", "result": "EQUAL", "lease": lease}
        is_ours = published == advert and self._change([held])
        if is_ours and int(self._cluster.ask("lease/keepalive", {"ID": lease}).get("TTL", 0)) > 0:
            return
        for _ in range(_TRIES):
            copy = self._read(f"{rank.partition('/')[0]}/")
            if self._put(check_place(advert, copy.ranks.get(advert.group, {}), after), copy, ttl_s):
                return
            if self._cluster.ask("kv/range", {"key": _encoded(self._key(_ENDED, advert.incarnation))}).get("kvs"):
                raise Conflict(
                    f"{advert.where} at {advert.endpoint} was fenced: peers have taken back what it may still write",
                    remedy="end this process; a new one may take the place",
                    endpoint=advert.endpoint,
                )
        raise PeerError(f"{advert.where}: its place in etcd changed {_TRIES} times", remedy="find who else takes it")

    def _put(self, held: Held, read: _Copy, ttl_s: float) -> bool:
        """False if the instance has another shape, or the place another process, since `read`; or it was fenced."""
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
                [*no_others, _as_read(key, read.revision), _as_read(self._key(_ENDED, incarnation), 0)],
                _put(key, held, lease), _put(process, Process(held.advert.endpoint, rank)),
            )  # fmt: skip
        except PdstageError:
            self._revoke(lease)
            raise
        if done:
            self._leases[rank] = held.advert, lease
            lease = read.leases.get(rank, "")
        if lease:
            self._revoke(lease)
        return done

    def _revoke(self, lease: str) -> None:
        try:
            self._cluster.ask("lease/revoke", {"ID": lease})
        except PdstageError as error:  # it ends by itself
            log.debug("a lease of etcd was not revoked: %s", error)

    def withdraw(self, advert: Advert) -> None:
        """Removes the rank that this client published, unless another process has its place by now."""
        self._change([], _delete(self._key(_PROCESSES, advert.incarnation)))
        published, lease = self._leases.get(_rank_key(advert), (None, ""))
        if published is not None and published.incarnation == advert.incarnation:
            del self._leases[_rank_key(advert)]
            self._revoke(lease)  # and with it what it still holds

    def _change(self, conditions: list[dict[str, str]], *changes: _Json) -> bool:
        """One transaction; False if a condition does not hold."""
        return bool(self._cluster.ask("kv/txn", {"compare": conditions, "success": changes}).get("succeeded"))

    def _read(self, below: str = "") -> _Copy:
        """What etcd holds below the prefix and `below`."""
        return _Copy(self._cluster.ask("kv/range", _range(self._prefix + below)), self._prefix)

    def _key(self, kind: str, incarnation: int) -> str:
        return f"{self._prefix}{kind}/{incarnation:016x}"

    # Fencing.

    def fence(self, where: str, *, wait_s: float = 0.0) -> dict[int, Process]:
        """Says that the processes at `where`, an instance, a host or an endpoint, have ended: every node that holds
        back memory which one of them might still write gives it back. Only for an orchestrator that has ended them, or
        their host.

        Returns them by incarnation; those that were withdrawn or fenced before are not among them, nor those that come
        to `where` after this call began. A process counts as alive while it is registered, which is until its lease has
        ended: 15 s, as nodes publish themselves. For up to `wait_s` seconds that is waited for; then raises `Conflict`,
        as it does for a process that comes back meanwhile. `TransportError` and `PeerError` are as for `publish`.
        """
        where, end = arguments.text("where", where), time.monotonic() + arguments.number("wait_s", wait_s)
        copy = self._read()
        found = {
            incarnation: one
            for incarnation, one in copy.processes.items()
            if where == one.instance or is_at(one.endpoint, where)
        }
        while alive := [one for incarnation, one in found.items() if copy.is_registered(incarnation)]:
            if (left_s := end - time.monotonic()) <= 0:
                raise Conflict(
                    f"{len(alive)} of {len(found)} processes at {where} are registered, first {alive[0]}",
                    remedy="end them, wait until their leases end, and fence them then",
                    endpoint=alive[0].endpoint,
                )
            time.sleep(min(_FENCE_AGAIN_S, left_s))
            copy = self._read()
        fenced = {incarnation: one for incarnation, one in found.items() if incarnation in copy.processes}
        lease = self._cluster.ask("lease/grant", {"TTL": str(_ENDED_S)})["ID"] if fenced else ""
        for incarnation, one in fenced.items():
            process = self._key(_PROCESSES, incarnation)
            as_read = [_as_read(key, copy.revision) for key in (self._prefix + one.rank, process)]
            if not self._change(as_read, _put(self._key(_ENDED, incarnation), one, lease), _delete(process)):
                raise Conflict(f"{one} has changed meanwhile", remedy="ask again", endpoint=one.endpoint)
        return fenced

    def follow(self) -> None:
        """Begins the thread, which goes on until `close`, also while no member answers."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="pdstage-etcd", daemon=True)
                self._thread.start()

    def has_ended(self, incarnation: int) -> bool:
        """Whether this process was fenced, as far as the copy tells; False before there is one."""
        return self._copy is not None and incarnation in self._copy.ended

    @property
    def watched(self) -> tuple[float, int] | None:
        """When etcd last said how the table is (monotonic seconds; every second), and how often it went away; None
        before the first look-up.
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
            ranks = self._copy.ranks
        self.follow()
        name = choose(ranks, instance)
        return replica(name, {rank: held.advert for rank, held in ranks.get(name, {}).items()}, dp_rank)

    def instances(self) -> bytes:
        """All live adverts as JSON, for people: by instance, each advert and the seconds left of its lease."""
        copy = self._read()
        shown = defaultdict(list)
        for name, ranks in sorted(copy.ranks.items()):
            for _, held in sorted(ranks.items()):
                left = self._cluster.ask("lease/timetolive", {"ID": copy.leases[_rank_key(held.advert)]})
                shown[name].append({"expires_in_s": int(left.get("TTL", 0)), "advert": held.advert})
        return msgspec.json.encode(shown)

    def _follow(self) -> None:
        """The thread that keeps the copy up to date."""
        is_away = False
        while not self._closing.wait(_EVERY_S):
            try:
                if (copy := self._copy) is None:
                    self._copy, self._heard_at = self._read(), time.monotonic()
                    continue
                changed = self._cluster.ask(
                    "kv/range", _range(self._prefix) | {"min_mod_revision": str(copy.revision + 1), "keys_only": True}
                )
                is_older = int(changed["header"]["revision"]) < copy.revision  # restored, or another cluster
                if is_older or changed.get("kvs") or int(changed.get("count", 0)) != copy.n_keys:
                    self._copy = self._read()
                self._heard_at, is_away = time.monotonic(), False
            except Exception as error:  # noqa: BLE001  (whatever it is, the copy goes on answering)
                if not is_away and not self._closing.is_set():
                    log.warning("the watch at %s ended, and is taken up again: %s", self.address, error)
                    self._n_restarts += 1
                is_away = True


class _Copy:
    """What the keys under a prefix held at `revision`."""

    def __init__(self, read: _Json, prefix: str) -> None:
        self.revision, self.n_keys = int(read["header"]["revision"]), int(read.get("count", 0))
        self.ranks: dict[str, dict[int, Held]] = {}
        """By instance and unique rank."""
        self.leases: dict[str, str] = {}
        """By a rank's key below the prefix."""
        self.processes: dict[int, Process] = {}
        """By incarnation: those that were neither withdrawn nor fenced."""
        self.ended: dict[int, Process] = {}
        for one in read.get("kvs", ()):
            key = base64.b64decode(one["key"]).decode(errors="replace").removeprefix(prefix)
            group, _, rest = key.partition("/")
            try:
                value = base64.b64decode(one.get("value", ""))
                if group in (_PROCESSES, _ENDED):
                    of_kind = self.processes if group == _PROCESSES else self.ended
                    of_kind[int(rest, 16)] = _process.decode(value)
                else:
                    held = _held.decode(value)
                    self.ranks.setdefault(unquote(group), {})[held.advert.topology.unique_rank] = held
                    self.leases[key] = one.get("lease", "0")
            except (msgspec.MsgspecError, ValueError) as error:
                log.warning("key %s in etcd is left out: %s", key, error)

    def is_registered(self, incarnation: int) -> bool:
        """Whether a process is there under a lease."""
        return any(held.advert.incarnation == incarnation for ranks in self.ranks.values() for held in ranks.values())


def _rank_key(advert: Advert) -> str:
    """Below the prefix."""
    shape = ".".join(map(str, advert.shape))
    return f"{quote(advert.group, safe='')}/{shape}/{advert.topology.unique_rank}"


def _range(prefix: str) -> _Json:
    """All keys that begin with `prefix`, which ends in "/"."""
    return {"key": _encoded(prefix), "range_end": _encoded(prefix[:-1] + "0")}


def _put(key: str, value: msgspec.Struct, lease: str = "0") -> _Json:
    put = {"key": _encoded(key), "value": base64.b64encode(msgspec.json.encode(value)).decode(), "lease": lease}
    return {"request_put": put}


def _delete(key: str) -> _Json:
    return {"request_delete_range": {"key": _encoded(key)}}


def _as_read(key: str, revision: int) -> dict[str, str]:
    """A transaction's condition: nobody has put or deleted and put `key` since `revision`."""
    return {"key": _encoded(key), "target": "MOD", "result": "LESS", "mod_revision": str(revision + 1)}


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
