"""A request at SGLang's prefill scheduler: its KVSender over a pdstage room.

The scheduler polls, all ranks take the least of their answers, and Success or Failed gives the pages back at once. So a
rank says Failed only when nothing reads its pages any more, and where another rank's failure or an abort decides, pages
are kept for a moment until the writes that read them are over.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVSender

from pdstage import State
from pdstage.errors import PdstageError
from pdstage.integrations.sglang.memory import cache_items, state_items
from pdstage.integrations.sglang.rows import read_row

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from pdstage.integrations.sglang.manager import PdStageKVManager
    from pdstage.manager import Sender

log = logging.getLogger(__name__)


class PdStageKVSender(CommonKVSender):  # type: ignore[misc]
    """One request at one prefill rank."""

    kv_mgr: PdStageKVManager
    _early_send_wait_event: Any
    _transfer_start_time: float | None

    def __init__(
        self,
        mgr: PdStageKVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        self._room: Sender | None = None
        self._first_page = 0
        self._is_cleared = False
        if mgr.is_dummy_cp_rank or mgr.request_status.get(bootstrap_room) == KVPoll.Failed:
            return
        try:
            self._room = mgr.awake().send(bootstrap_room)
        except PdstageError as error:
            mgr.fail(bootstrap_room, str(error))
        else:
            mgr.senders[bootstrap_room] = self
            self.publish()  # what the node said before it could find this sender

    def pop_decode_prefix_len(self) -> int:
        """The tokens that decode has already: pages are counted from there on."""
        held = self._room.prefix_tokens_of("kv") if self._room is not None else 0
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
        if skip or self._room is None:
            return
        if self._transfer_start_time is None:
            self._transfer_start_time = time.perf_counter()
        ready: Any = self._early_send_wait_event
        self._early_send_wait_event = None
        args = self.kv_mgr.kv_args
        try:
            if len(kv_indices):
                pages = cache_items(kv_indices, self._first_page + where.start, args.page_size)
                self._room.chunk(pages, ready=ready)
            if is_last:
                states = state_items(args, state_indices, self._first_page + self.num_kv_indices)
                aux = read_row(args, self.aux_index) if self.aux_index is not None else None
                self._room.finish(aux, states=states or None, ready=ready)
        except PdstageError as error:
            self.kv_mgr.fail(self.bootstrap_room, str(error))
            self._end(self._room, str(error))
            return
        self._record_transfer_indices(kv_indices, state_indices)

    def publish(self) -> None:
        """Writes the room's state where SGLang looks it up, unless the scheduler is done with it. In any thread."""
        with self.kv_mgr.status_lock:
            room = self._room
            if room is None or self._is_cleared or self.conclude_state is not None:
                return
            state = room.state
            if state is State.FAILED:
                self.kv_mgr.fail(self.bootstrap_room, str(room.error))
            else:
                ended = state is State.SUCCESS and not room.released  # the scheduler would take the pages back
                self.kv_mgr.update_status(self.bootstrap_room, int(State.TRANSFERRING if ended else state))

    def _poll_with_status(self, check_status: Callable[[int], int]) -> int:
        room = self._room
        self.publish()
        status: int = super()._poll_with_status(check_status)
        if status == KVPoll.Failed and room is not None:
            self._end(room, f"prefill gave up: {self._reason()}")
            if self._is_read(room):
                return int(KVPoll.Transferring)
        return status

    def _reason(self) -> str:
        with self.kv_mgr.failure_lock:
            return str(self.kv_mgr.failure_records.get(self.bootstrap_room, "another rank failed"))

    def _end(self, room: Sender, reason: str) -> None:
        if room.state not in (State.SUCCESS, State.FAILED):  # else it ended by itself, or with its node
            room.abort(reason)

    def _is_read(self, room: Sender) -> bool:
        """Whether a write may still read the room's pages. Before a chunk there is none."""
        return self._transfer_start_time is not None and not room.released

    def _quiet(self) -> None:
        """Ends a room that did not succeed, before the scheduler takes its pages back."""
        room = self._room
        if room is None or room.state is State.SUCCESS:
            return
        self._end(room, "prefill gave it up")
        if self._is_read(room):
            with contextlib.suppress(TimeoutError):
                room.wait_released(self.kv_mgr.quiet_s)
        if self._is_read(room):
            log.error("room %s: its pages are reused though a write may still read them", self.bootstrap_room)

    def abort(self) -> None:
        super().abort()
        self._quiet()

    def clear(self) -> None:
        with self.kv_mgr.status_lock:
            self._is_cleared = True
            super().clear()
        self._quiet()
