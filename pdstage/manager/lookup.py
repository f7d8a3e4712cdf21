"""The one worker that talks to bootstrap directories, so that the driver never waits for HTTP.

It runs jobs and repeats publications.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from typing import TYPE_CHECKING, Self

from pdstage.control.bootstrap import Advert, BootstrapClient, Incomplete
from pdstage.errors import DeadlineExceeded, PdstageError, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdstage.control.keys import Keys

    Answer = Callable[[list[Advert] | None, PdstageError | None], None]

_RETRY_S, _RETRY_CAP_S = 0.1, 1.0
_TTL_S = 15.0


class Directory:
    """Lookups and publications, in a daemon thread that starts with the first of them. Answers come on that thread.

    A context manager. Any thread may call it; once it is closed, nothing is looked up and nothing answers.
    """

    def __init__(self, keys: Keys | None = None, *, cache_s: float = 2.0) -> None:
        self._keys = keys
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closed = False
        self._cache_s = cache_s
        self._cache: dict[tuple[str, int | None, str | None], tuple[float, list[Advert]]] = {}
        self._published: tuple[BootstrapClient, Callable[[], Advert]] | None = None
        self._renew_at = 0.0

    def cached(self, address: str, dp_rank: int | None, instance: str | None) -> list[Advert] | None:
        """An answer of the last `cache_s` seconds; None if there is none."""
        at, adverts = self._cache.get((address, dp_rank, instance), (-self._cache_s, []))
        return adverts if adverts and time.monotonic() - at < self._cache_s else None

    def forget(self) -> None:
        """A peer was lost: what was cached may name it."""
        self._cache.clear()

    def lookup(
        self, address: str, dp_rank: int | None, instance: str | None, deadline_at: float, answer: Answer
    ) -> None:
        """Asks until every rank is registered or `deadline_at` (monotonic) has passed, then calls `answer` once."""
        client = BootstrapClient(address, keys=self._keys)
        self._run(lambda: self._look(client, (address, dp_rank, instance), deadline_at, answer, _RETRY_S))

    def publish(self, address: str, advert: Callable[[], Advert]) -> None:
        """Publishes now, raising what the directory raises, and keeps the lease renewed until `close`."""
        client = BootstrapClient(address, keys=self._keys)
        client.publish(advert(), _TTL_S)
        self._published = (client, advert)
        self._renew_at = time.monotonic() + _TTL_S / 3
        self._run(lambda: None)

    def close(self) -> None:
        """Ends the thread, then withdraws what was published, which the thread can renew no more. Idempotent."""
        with self._starting:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()
        if self._published is not None:
            client, advert = self._published
            self._published = None
            with contextlib.suppress(PdstageError):  # the directory is gone: the lease ends by itself
                client.withdraw(advert())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        with self._starting:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._loop, name="pdstage-directory", daemon=True)
                self._thread.start()

    def _loop(self) -> None:
        while True:
            wait_s = max(0.0, self._renew_at - time.monotonic()) if self._published is not None else None
            try:
                job = self._jobs.get(timeout=wait_s)
            except queue.Empty:
                self._renew()
                continue
            if job is None:
                return
            job()

    def _renew(self) -> None:
        published = self._published
        if published is None:
            return
        client, advert = published
        try:
            client.publish(advert(), _TTL_S)
            self._renew_at = time.monotonic() + _TTL_S / 3
        except PdstageError:
            self._renew_at = time.monotonic() + _TTL_S / 15  # the lease outlives several failures

    def _look(
        self,
        client: BootstrapClient,
        key: tuple[str, int | None, str | None],
        deadline_at: float,
        answer: Answer,
        wait_s: float,
    ) -> None:
        """Where not all is there yet, again after `wait_s`, and from then on ever more seldom."""
        _, dp_rank, instance = key
        try:
            adverts = self.cached(*key) or client.lookup(dp_rank, instance=instance)
        except (Incomplete, TransportError) as error:
            now = time.monotonic()
            if now + _RETRY_S < deadline_at:
                longer_s = min(2 * wait_s, _RETRY_CAP_S)
                timer = threading.Timer(
                    min(wait_s * random.uniform(0.5, 1.0), deadline_at - now),
                    self._jobs.put,
                    [lambda: self._look(client, key, deadline_at, answer, longer_s)],
                )
                timer.daemon = True
                timer.start()
                return
            late = DeadlineExceeded(f"no prefill found in time: {error.what}", remedy=error.remedy)
            late.__cause__ = error
            answer(None, late)
        except PdstageError as error:
            answer(None, error)
        else:
            now = time.monotonic()
            for old in [old for old, (at, _) in list(self._cache.items()) if now - at >= self._cache_s]:
                self._cache.pop(old, None)
            self._cache[key] = (now, adverts)
            answer(adverts, None)
