"""A request at SGLang's prefill scheduler: its KVSender over a pdstage room.

The scheduler polls, and takes the minimum of all ranks' answers; Success or Failed then returns the pages of all ranks
at once. So after a request's last chunk, Failed needs an agreement. A rank that gives the room up reports `GIVEN_UP`.
The others see it in the minimum and give theirs up, and each reports `QUIET` when nothing reads its pages any more, or
long after its node has failed. No rank waits: the scheduler polls on. Before its last chunk a room cannot succeed at
decode, whatever arrives there. Its pages are returned at once, even if a write may still read them.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVSender

from pdstage import Items, PdstageError, PrefillNode, Sender, State
from pdstage.integrations.sglang.memory import state_items
from pdstage.integrations.sglang.rows import read_row

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from pdstage.integrations.sglang.manager import PdStageKVManager
    from pdstage.manager.handle import CudaEvent

log = logging.getLogger(__name__)

GIVEN_UP: int = KVPoll.WaitingForInput
"""Keeps a request in SGLang's in-flight queue. Below Transferring, which unfinished ranks report."""
QUIET: int = KVPoll.Success + 1
"""Given up, and nothing reads this rank's pages. It is the minimum only if all ranks report it."""


class PdStageKVSender(CommonKVSender):  # type: ignore[misc]
    """One request at one prefill rank."""

    kv_mgr: PdStageKVManager
    conclude_state: KVPoll | None = None
    adapter: str | None = None
    """The adapter of the request's KV; set after construction, see `manager`."""
    _early_send_wait_event: Any
    _transfer_start_time: float | None
    _node: PrefillNode
    _room: Sender | None = None
    _lost_at: float | None = None
    """When its node was found to have failed."""
    _first_page = 0
    _is_whole = False
    """Its last chunk was sent: it is in the scheduler's in-flight queue."""
    _is_given_up = False
    """By all ranks."""
    _is_cleared = False

    def __init__(
        self,
        mgr: PdStageKVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        number = mgr.number_for(bootstrap_room, self)
        super().__init__(mgr, bootstrap_addr, number, req_has_disagg_prefill_dp_rank)
        if number != bootstrap_room:
            mgr.refuse(self, bootstrap_room)
            return
        if mgr.is_dummy_cp_rank or mgr.request_status.get(bootstrap_room) == KVPoll.Failed:
            return
        try:
            self._node = mgr.awake()
            self._room = self._node.send(bootstrap_room)
        except PdstageError as error:
            mgr.fail(self, error)
        else:
            self.publish()  # events from before the node could find this sender

    def pop_decode_prefix_len(self) -> int:
        """The tokens that decode has already: pages are counted from there."""
        held = None
        if self._room is not None:
            with contextlib.suppress(PdstageError):  # its node has failed: the next poll says so, with the cause
                held = self._room.prefix_tokens_of("kv")
        self._first_page = (held or 0) // self.kv_mgr.kv_args.page_size
        return self._first_page * int(self.kv_mgr.kv_args.page_size)

    def send(
        self,
        kv_indices: npt.NDArray[np.int32],
        state_indices: Sequence[Any] | None = None,
        num_kv_tokens: int | None = None,
        indices_event: Any = None,  # noqa: ANN401
    ) -> None:
        if self.conclude_state in (KVPoll.Success, KVPoll.Failed):
            return
        kv_indices, where, is_last, skip = self._prepare_send_indices(kv_indices, state_indices)
        self._is_whole = is_last
        if skip or self._room is None:
            return
        if self._transfer_start_time is None:
            self._transfer_start_time = time.perf_counter()
        ready = self._ready(is_last=is_last)
        args = self.kv_mgr.kv_args
        try:
            if len(kv_indices):
                first_token = (self._first_page + where.start) * args.page_size
                self._room.chunk({"kv": Items(kv_indices, first_token)}, ready=ready)
            if is_last:
                states = state_items(args, state_indices, self._first_page + self.num_kv_indices)
                aux = read_row(args, self.aux_index, self.adapter) if self.aux_index is not None else None
                self._room.finish(aux, states=states or None, ready=ready)
        except PdstageError as error:
            self.kv_mgr.fail(self, error)
            self._end(str(error))
            return
        self._record_transfer_indices(kv_indices, state_indices)

    def _ready(self, *, is_last: bool) -> CudaEvent | None:
        """After which the pages of a `send` are written; None if they are.

        SGLang gives an event with pages of its cache that a step may still write, or HiCache load for it. Else it sends
        what a step wrote when the step's result is there, but for chunks without overlap: those it sends once launched.
        """
        given: CudaEvent | None = self._early_send_wait_event
        self._early_send_wait_event = None
        if given is None and not is_last and not self.kv_mgr.scheduler.enable_overlap:
            return self.kv_mgr.launched()
        return given

    def publish(self) -> None:
        """Writes the room's state where SGLang looks it up, unless the scheduler is done with it. Any thread may call
        it.
        """
        with self.kv_mgr.status_lock:
            room = self._room
            if room is None or self._is_cleared or self.conclude_state is not None:
                return
            state = room.state
            if state is State.FAILED:
                self.kv_mgr.fail(self, room.error)
            else:
                # Else the scheduler would take the pages back.
                ended = state is State.SUCCESS and not (room.released or self._is_lost())
                self.kv_mgr.update_status(self.bootstrap_room, int(State.TRANSFERRING if ended else state))

    def _poll_with_status(self, check_status: Callable[[int], int]) -> int:
        self.publish()
        status: int = super()._poll_with_status(check_status)
        if status == KVPoll.Failed:
            self._give_up()
        if not self._is_whole:
            return status
        if self._is_given_up:
            return GIVEN_UP if self._is_read() and not self._is_lost() else QUIET
        if status == KVPoll.Failed:
            return GIVEN_UP
        return status if status == KVPoll.Success else int(KVPoll.Transferring)

    def agreed(self, least: int) -> int:
        """What SGLang gets if `least` is the minimum over all ranks' senders of this request at one poll."""
        if not self._is_whole:
            return least
        if least == QUIET:
            return int(KVPoll.Failed)
        if least > GIVEN_UP:
            return least
        self._is_given_up = True
        self.conclude_state = KVPoll.Failed
        self._give_up()
        return int(KVPoll.Transferring)

    def _give_up(self) -> None:
        reason = self.kv_mgr.failure_records.get(self.bootstrap_room, "another rank failed")
        self._end(f"prefill gave up: {reason}")

    def _end(self, reason: str) -> None:
        room = self._room
        if room is not None and room.state not in (State.SUCCESS, State.FAILED):  # else it ended, or its node did
            room.abort(reason)

    def _is_read(self) -> bool:
        """Whether a write may still read the room's pages. There is none before a chunk."""
        return self._room is not None and self._transfer_start_time is not None and not self._room.released

    def _is_lost(self) -> bool:
        """Whether its node has failed for so long that no peer takes anything of it: nothing else tells that its pages
        are not read any more.
        """
        driver = self._node.driver
        if not driver.closed and driver.failure is None:
            return False
        self._lost_at = self._lost_at or time.monotonic()
        return time.monotonic() - self._lost_at > 3 * self._node.config.max_silence_s

    def abort(self) -> None:
        if self.conclude_state != KVPoll.Failed:
            super().abort()
        self._end("prefill gave it up")

    def clear(self) -> None:
        with self.kv_mgr.status_lock:
            self._is_cleared = True
            super().clear()
        self._end("prefill gave it up")
        if self._is_whole and self._is_read():
            log.error("room %s: its pages are reused though a write may still read them", self.bootstrap_room)
