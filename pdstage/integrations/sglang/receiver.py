"""A request at SGLang's decode scheduler: its KVReceiver over a pdstage room.

A failed room is reported to the scheduler at once, so that its client learns of it. The scheduler keeps the pages and
the metadata row until the manager's `is_abort_release_safe`, that is until pdstage has released the room.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import CommonKVReceiver

from pdstage import Items, PdstageError, PeerError, Receiver, State
from pdstage.arguments import quotient
from pdstage.control.bootstrap import PLAIN
from pdstage.integrations.sglang.memory import state_items
from pdstage.integrations.sglang.rows import write_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from pdstage.integrations.sglang.manager import PdStageKVManager

MAX_S = 3600.0
"""A room's deadline. SGLang's own timeouts are much shorter."""


class PdStageKVReceiver(CommonKVReceiver):  # type: ignore[misc]
    """One request at one decode rank."""

    kv_mgr: PdStageKVManager
    conclude_state: KVPoll | None = None
    adapter: str | None = None
    """The adapter that decode uses; set after construction, see `manager`."""
    _room: Receiver | None = None
    _aux_index: int | None = None
    _whole_at: float | None = None
    _is_cleared = False

    def __init__(self, mgr: PdStageKVManager, bootstrap_addr: str, bootstrap_room: int) -> None:
        self.number = bootstrap_room
        """The router's, which SGLang's scheduler goes on to use."""
        super().__init__(mgr, bootstrap_addr, mgr.number_for(bootstrap_room, self))
        if self.bootstrap_room != bootstrap_room:
            mgr.refuse(self, bootstrap_room)

    def _setup_bootstrap_infos(self) -> None:
        """Called by `init` instead of SGLang's look-up of peers: pdstage finds and connects them itself."""
        self.bootstrap_infos: list[dict[str, Any]] = []
        try:
            self._room = self.kv_mgr.awake().receive(
                self.bootstrap_room, PLAIN + self.bootstrap_addr, dp_rank=self.prefill_dp_rank, deadline_s=MAX_S
            )
        except PdstageError as error:
            self._fail(error)

    def send_metadata(  # noqa: PLR0917  (SGLang's signature)
        self,
        kv_indices: npt.NDArray[np.int32],
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: KVTransferDestination = KVTransferDestination.DEVICE,
        device_kv_indices: npt.NDArray[np.int32] | None = None,
    ) -> None:
        if destination != KVTransferDestination.DEVICE or device_kv_indices is not None:
            raise NotImplementedError("pdstage writes to the KV pool on the device only")
        if self._room is None:
            return
        args, self._aux_index = self.kv_mgr.kv_args, aux_index
        try:
            first = quotient("decode_prefix_len", decode_prefix_len or 0, args.page_size)
            items = {"kv": Items(kv_indices, first * args.page_size)}
            items |= state_items(args, state_indices, first + len(kv_indices))
            self._room.bind(items, after=self.kv_mgr.launched())
        except PdstageError as error:
            self._fail(error)
        self.init_time = time.time()

    def _fail(self, error: PdstageError) -> None:
        self.kv_mgr.fail(self, error)
        self.conclude_state = KVPoll.Failed
        self._give_up(str(error))

    def _give_up(self, reason: str) -> None:
        room = self._room
        if room is None:
            return
        if room.state not in (State.SUCCESS, State.FAILED):
            room.abort(reason)
        if room.bound and not room.released:
            self.kv_mgr.hold(self.number, room)

    def _poll(self) -> int:
        room = self._room
        if room is not None and self.conclude_state is None:
            if room.state is State.FAILED:
                self.kv_mgr.fail(self, room.error)
            elif room.state is State.SUCCESS:
                self._whole_at = self._whole_at or time.monotonic()
                node = self.kv_mgr.node
                if room.released:  # a request of one token returns its pages at once
                    self._take_row(room)
                elif node is not None and time.monotonic() > self._whole_at + 3 * node.config.drain_s:
                    # SGLang itself would wait for ever.
                    what = "a writer of the room has not closed it, and may write to the pages still"
                    self.kv_mgr.fail(self, PeerError(what, remedy="send the request again; fence the writer"))
            elif room.state is State.TRANSFERRING:
                self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Transferring)
        return int(super()._poll())

    def _take_row(self, room: Receiver) -> None:
        """Writes the row before the scheduler sees Success."""
        try:
            if self._aux_index is not None and isinstance(room.aux, bytes):
                write_row(self.kv_mgr.kv_args, self._aux_index, room.aux, self.adapter)
        except PdstageError as error:
            self.kv_mgr.fail(self, error)
        else:
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        """Called once by `abort`, by a timeout, and for a room that failed without decode's doing."""
        self._give_up("decode gave it up")

    def clear(self) -> None:
        """Called again when a failed room's memory is returned, which is held no more then."""
        if self._is_cleared:
            if self._room is not None and self._room.bound and self.conclude_state != KVPoll.Success:
                self.kv_mgr.let_go(self.number, self._room)
            return
        self._is_cleared = True
        super().clear()
        if self.conclude_state != KVPoll.Success:
            self._give_up("decode gave it up")
