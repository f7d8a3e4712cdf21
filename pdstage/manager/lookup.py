"""Who talks to bootstrap directories, so that the driver never waits for HTTP.

Each address that is asked has a thread while somebody waits for its answer, so an address that does not answer keeps
nobody else waiting. One more thread renews what this node has published.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec

from pdstage import environment
from pdstage.control.bootstrap import Advert, Conflict, DirectoryClient, Incomplete, client_of
from pdstage.control.etcd import EtcdClient
from pdstage.errors import DeadlineExceeded, PdstageError, PeerError, TransportError, UsageError
from pdstage.log_limit import LogLimit
from pdstage.transport._peer import Identity, Process, own_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdstage.control.keys import Keys

    Answer = Callable[[list[Advert] | PdstageError], None]

log = logging.getLogger(__name__)

_RETRY_S, _RETRY_CAP_S = 0.1, 1.0
_TTL_S = 15.0
_END_S = 5.0
"""How long `close` waits for a thread that talks to a directory: longer than two steps of a request may take."""
_MAX_ADDRESSES = 256
"""Addresses asked at a time; each has a thread."""


@dataclass(slots=True)
class DirectoryCounters:
    """Totals of one node's requests to directories. A look-up is one room's, however often it was asked."""

    lookups_answered: int = 0
    lookups_failed: int = 0
    publications: int = 0
    """Registrations and renewals that the directory took."""
    publications_failed: int = 0


@dataclass(slots=True, eq=False)
class _Lookup:
    client: DirectoryClient
    key: tuple[str, int | None, str | None]
    """The directory's address, dp_rank and instance, as in the cache."""
    deadline_at: float
    answer: Answer
    ask_at: float = 0.0
    wait_s: float = _RETRY_S
    """Until it is asked again, if not all is there yet."""


class Directory:
    """Lookups, each answered once, on a thread of its address; and what is published, kept alive.

    A context manager. Any thread may call it; once it is closed, nothing is looked up and nothing answers.
    """

    def __init__(self, keys: Keys | None = None, *, cache_s: float = 2.0) -> None:
        self._keys = keys
        self._lock = threading.Lock()
        self._closed = False
        self.counters = DirectoryCounters()
        self._askers: dict[str, _Asker] = {}
        self._publications: dict[str, _Publication] = {}
        """By the directory's address."""
        self._cache_s = cache_s
        self._watching: dict[str, EtcdClient] = {}
        """Clients that keep a watch, by address."""
        self._cache: dict[tuple[str, int | None, str | None], tuple[float, list[Advert]]] = {}

    def client(self, address: str) -> DirectoryClient:
        """Who asks the directory at `address`; raises `UsageError` for an address that is none, or whose key is not let
        in, and counts that as a look-up that failed.
        """
        with self._lock:
            try:
                client = self._watching.get(address) or client_of(address, keys=self._keys)
            except UsageError:
                self.counters.lookups_failed += 1
                raise
            if isinstance(client, EtcdClient):
                self._watching[address] = client
            return client

    def has_ended(self, incarnation: int) -> bool:
        """Whether a directory that is watched says that this prefill process was fenced."""
        with self._lock:
            watching = list(self._watching.values())
        return any(client.has_ended(incarnation) for client in watching)

    def status(self) -> dict[str, float]:
        """The fields of `DirectoryCounters`. Where this node is published, `lease_s`: seconds until the first of its
        leases ends unless it is renewed, 0 once it has. `watch_age_s`: seconds since a directory that it watches
        answered last, 0 where it watches none; `watches_restarted`: how often one stopped answering. Takes no lock.
        """
        now, shown = time.monotonic(), dict[str, float](asdict(self.counters))
        leases = [one.ends_at for one in self._publications.copy().values() if not one.over.is_set()]
        if leases:
            shown["lease_s"] = max(0.0, min(leases) - now)
        watched = [one for client in self._watching.copy().values() if (one := client.watched) is not None]
        shown["watch_age_s"] = max((now - heard_at for heard_at, _ in watched), default=0.0)
        shown["watches_restarted"] = sum(n_restarts for _, n_restarts in watched)
        return shown

    def cached(self, address: str, dp_rank: int | None, instance: str | None) -> list[Advert] | None:
        """An answer of the last `cache_s` seconds; None if there is none."""
        at, adverts = self._cache.get((address, dp_rank, instance), (0.0, []))
        return adverts if adverts and time.monotonic() - at < self._cache_s else None

    def forget(self) -> None:
        """A peer was lost: what was cached may name it."""
        self._cache.clear()

    def lookup(
        self, client: DirectoryClient, dp_rank: int | None, instance: str | None, deadline_at: float, answer: Answer
    ) -> None:
        """Asks until every rank is registered or `deadline_at` (monotonic) has passed, then calls `answer` once."""
        try:
            with self._lock:
                if not self._closed:
                    self._put(_Lookup(client, (client.given, dp_rank, instance), deadline_at, answer))
        except TransportError as error:
            answer(error)

    def publish(self, address: str, adverts: Callable[[], Sequence[Advert]], *, eventually: bool = False) -> None:
        """Publishes now, raising what the directory raises, and keeps the leases renewed until `close`. `eventually`:
        the directory may start later. What was published there before is withdrawn.
        """
        if (before := self._publications.pop(address, None)) is not None:
            before.end(_END_S)
        client = self.client(address)
        if eventually and isinstance(client, EtcdClient):  # to hear what has ended, though no room is looked up there
            client.follow()
        publication = _Publication(client, adverts, self.counters)
        publication.begin(eventually=eventually)
        self._publications[address] = publication

    def withdraw(self, wait_s: float = _END_S) -> None:
        """What was published is renewed no more and taken back, by the thread that renewed it."""
        publications = self._publications.copy().values()
        for publication in publications:
            publication.over.set()
        for publication in publications:
            publication.end(wait_s)

    @property
    def withdrawn(self) -> bool:
        """Whether nothing is published, or no more."""
        return not any(one.thread.is_alive() for one in self._publications.copy().values())

    def close(self) -> None:
        """Ends its threads, then withdraws what was published. Idempotent."""
        with self._lock:
            self._closed = True
            askers = list(self._askers.values())
            for asker in askers:
                asker.changed.notify_all()
        until = time.monotonic() + _END_S
        for asker in askers:
            asker.thread.join(max(0.0, until - time.monotonic()))
        self.withdraw()
        for client in self._watching.values():
            client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, look: _Lookup) -> None:
        """Under the lock: `look` is asked when it says, by the thread of its address."""
        address = look.client.given
        asker = self._askers.get(address)
        if asker is None:
            if len(self._askers) >= _MAX_ADDRESSES:
                raise TransportError(
                    f"{len(self._askers)} bootstrap addresses are being asked, and none has answered yet",
                    remedy="look at the addresses of the rooms before",
                )
            thread = threading.Thread(target=partial(self._serve, address), name="pdstage-directory", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise TransportError(
                    f"no thread could be started for a lookup ({error})", remedy="free some"
                ) from error
            asker = self._askers[address] = _Asker(thread, threading.Condition(self._lock), [])
        asker.waiting.append(look)
        asker.changed.notify()

    def _serve(self, address: str) -> None:
        while looks := self._next(address):
            found = self._ask(looks)
            for look in looks:
                try:
                    if not self._closed:
                        look.answer(found)
                except Exception:
                    log.exception("who waits for the directory at %s did not take its answer", address)

    def _next(self, address: str) -> list[_Lookup]:
        """The lookups of one answer whose time has come; none once there is none, and then nobody asks `address` any
        more.
        """
        with self._lock:
            asker = self._askers[address]
            while asker.waiting and not self._closed:
                first = min(asker.waiting, key=attrgetter("ask_at"))
                wait_s = first.ask_at - time.monotonic()
                if wait_s <= 0:
                    looks = [look for look in asker.waiting if look.key == first.key]
                    asker.waiting[:] = [look for look in asker.waiting if look.key != first.key]
                    return looks
                asker.changed.wait(wait_s)
            del self._askers[address]
        return []

    def _ask(self, looks: list[_Lookup]) -> list[Advert] | PdstageError:
        """Asks once for all of them. Where not all is there yet, those that have time are asked for later, and are not
        among `looks` any more.
        """
        found: list[Advert] | PdstageError
        client, (_, dp_rank, instance) = looks[0].client, looks[0].key
        try:
            found = self.cached(*looks[0].key) or client.lookup(dp_rank, instance=instance)
        except (Incomplete, TransportError) as error:
            now = time.monotonic()
            later = [look for look in looks if now + _RETRY_S < look.deadline_at]
            looks[:] = [look for look in looks if now + _RETRY_S >= look.deadline_at]
            with self._lock:
                for look in later:
                    look.ask_at = min(now + look.wait_s * random.uniform(0.5, 1.0), look.deadline_at)
                    look.wait_s = min(2 * look.wait_s, _RETRY_CAP_S)
                    self._put(look)
            found = DeadlineExceeded(f"no prefill found in time: {error.what}", remedy=error.remedy)
            found.__cause__ = error
        except PdstageError as error:
            found = error
        except Exception as error:  # whatever it is, it is these lookups' alone
            log.exception("a lookup at %s failed", client.address)
            found = PeerError(f"the lookup at {client.address} failed: {error!r}", remedy="see the log")
        if isinstance(found, PdstageError):
            self.counters.lookups_failed += len(looks)
        else:
            self.counters.lookups_answered += len(looks)
            now = time.monotonic()
            for old, (at, _) in list(self._cache.items()):
                if now - at >= self._cache_s:
                    self._cache.pop(old, None)
            self._cache[looks[0].key] = (now, found)
        return found


class _Origin(msgspec.Struct):
    """Where a process runs. In Kubernetes there is one pod of a name at a time."""

    identity: Identity
    pod: str | None


def this_process() -> dict[str, Any]:
    """For `Advert.process`; empty without a Linux /proc."""
    try:
        shown: dict[str, Any] = msgspec.to_builtins(_Origin(own_identity(), environment.POD.read()))
    except UsageError:
        return {}
    return shown


def has_ended(process: dict[str, Any]) -> bool:
    """Whether that is certain of a process that said this of itself: its pid is no more, or another's, or another
    container of its pod had begun before this one.
    """
    try:
        there, here = msgspec.convert(process, _Origin), own_identity()
    except (msgspec.ValidationError, UsageError):
        return False
    was = there.identity
    if (was.boot_id, was.namespaces.get("pid")) == (here.boot_id, here.namespaces["pid"]):
        try:
            Process(was, "").close()
        except TransportError:
            return True
        except OSError:
            return False
        return False
    return (
        there.pod is not None
        and there.pod == environment.POD.read()
        and (was.boot_id != here.boot_id or was.started < here.started)
    )


class _Asker(NamedTuple):
    """The thread that asks one address, and what it is to ask."""

    thread: threading.Thread
    changed: threading.Condition
    waiting: list[_Lookup]


class _Publication:
    """Adverts that `begin` publishes, which may raise, and that a thread renews from then on; at the `end` it withdraws
    them.
    """

    def __init__(
        self, client: DirectoryClient, adverts: Callable[[], Sequence[Advert]], counters: DirectoryCounters
    ) -> None:
        self._client, self._adverts, self._counters = client, adverts, counters
        self.ends_at = 0.0
        """Of the lease, unless it is renewed (monotonic)."""
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="pdstage-lease", daemon=True)
        self._wait_s, self._again_s = 0.0, _RETRY_S  # until it was published
        self._log_limit = LogLimit()

    def begin(self, *, eventually: bool) -> None:
        if not eventually:
            self._publish()
        self.thread.start()

    def end(self, wait_s: float) -> None:
        self.over.set()
        with contextlib.suppress(RuntimeError):  # not begun: what was published, if anything, ends by itself
            self.thread.join(wait_s)

    def _publish(self) -> None:
        asked_at, refused = time.monotonic(), None
        try:
            for advert in self._adverts():
                try:
                    self._put(advert)
                except PeerError as error:  # of this rank; the others' leases go on
                    refused = refused or error
            if refused is not None:
                raise refused  # noqa: TRY301  (counted as any fault)
        except Exception:
            self._counters.publications_failed += 1
            raise
        self._counters.publications += 1
        self.ends_at = asked_at + _TTL_S
        self._wait_s, self._again_s = _TTL_S / 3, _TTL_S / 15

    def _put(self, advert: Advert) -> None:
        try:
            self._client.publish(advert, _TTL_S)
        except Conflict as error:
            holder = error.fields.get("holder")
            if not isinstance(holder, Advert) or not has_ended(holder.process):
                raise
            self._client.publish(advert, _TTL_S, holder.incarnation)

    def _run(self) -> None:
        while not self.over.wait(self._wait_s):
            is_first = not self._wait_s
            self._wait_s = self._again_s  # the lease outlives several failures
            try:
                self._publish()
            except PdstageError as error:
                if is_first:
                    log.info("the directory at %s is asked again: %s", self._client.address, error)
                elif text := self._log_limit.due("", str(error), time.monotonic()):
                    log.warning("a lease at %s is not renewed: %s", self._client.address, text)
            except Exception:
                log.exception("the lease at %s could not be renewed; it is tried again", self._client.address)
        with contextlib.suppress(Exception):  # whatever it is, the lease ends by itself
            for advert in self._adverts():
                self._client.withdraw(advert)
