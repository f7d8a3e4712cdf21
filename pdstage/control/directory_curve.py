"""The directory over a control socket with keys: encrypted, and answering only peers that the keys allow.

`directory_api` lists the requests. A request is the frames method, path and body; its answer is status and body.
"""

from __future__ import annotations

import logging
import secrets
import time
from typing import TYPE_CHECKING

from pdstage.control import directory_api as api
from pdstage.control.zmq import ControlSocket
from pdstage.errors import PeerError, TransportError

if TYPE_CHECKING:
    from pdstage.control.address import Address
    from pdstage.control.directory import Directory
    from pdstage.control.keys import Keys

log = logging.getLogger(__name__)

_PAUSE_S = 0.1


class Server:
    """Answers in the thread that calls `serve_forever`, until `shutdown`. `address` is the address for peers."""

    def __init__(self, address: Address, directory: Directory, keys: Keys, advertise: str | None) -> None:
        self._directory = directory
        self._socket = ControlSocket(
            f"tcp://{address}", identity=secrets.token_bytes(8), advertise=advertise, keys=keys
        )
        self.address = self._socket.endpoint.removeprefix("tcp://")
        self._stopping = False

    def serve_forever(self, poll_interval: float) -> None:
        while not self._stopping:
            try:
                self._serve(poll_interval)
            except Exception:
                log.exception("the directory at %s goes on after an error", self.address)
                time.sleep(_PAUSE_S)  # the error may repeat at once, as a lack of descriptors does

    def _serve(self, wait_s: float) -> None:
        self._socket.wait(wait_s)
        for route, frames in self._socket.recv():
            status, body = self._answer(frames)
            self._socket.send(route, [b"%d" % status, body])
        self._socket.take_refusals()

    def shutdown(self) -> None:
        self._stopping = True
        self._socket.wake()

    def server_close(self) -> None:
        self._socket.close()

    def _answer(self, frames: list[bytes]) -> tuple[int, bytes]:
        if len(frames) != 3:
            return api.refusal(PeerError(f"a request of {len(frames)} frames", remedy="send method, path and body"))
        method, target, body = frames
        return api.answer(self._directory, method.decode(errors="replace"), target.decode(errors="replace"), body)


def ask(address: Address, keys: Keys, request: tuple[str, str, bytes], timeout_s: float) -> tuple[int, bytes]:
    """Status and body. Raises `PeerError` if the keys do not match, `TransportError` if nothing answers in time."""
    method, target, body = request
    with ControlSocket(None, identity=secrets.token_bytes(8), keys=keys) as socket:
        route = socket.connect(f"tcp://{address.keyed}")
        socket.send(route, [method.encode(), target.encode(), body])
        for _, frames in socket.arrivals(time.monotonic() + timeout_s):
            if len(frames) == 2 and frames[0].isdigit():
                return int(frames[0]), frames[1]
            raise PeerError(f"what listens at {address} is not a bootstrap server", remedy="check the address")
    raise TransportError(
        f"no bootstrap server with keys answers at {address} in {timeout_s} s",
        remedy="start one with `pdstage bootstrap --keys FILE`; check the prefill node's address, and that it has keys",
        address=str(address),
    )
