"""A worked example: a transport of another distribution, in one file. Posts are files in the peer's directory.

For processes of one host. The receiver copies a post into its memory when it polls, and renames the file, by which the
sender knows. A lock on a file tells the living from the dead, since the kernel drops it with the process.
Found by the entry point `postbox` of the group `pdstage.transports`; see docs/transports.md, "Your own transport".
"""

import ctypes
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

import msgspec

from pdstage import TransportError
from pdstage.transport import Backend, Description, Done, Inbound, Link, PostFailed, Traits
from pdstage.transport.base import write_description


class Address(Description, frozen=True, tag="postbox.1", array_like=True):
    """`life` is the path of the directory."""


class Postbox(Backend):
    traits = Traits("postbox", notifies=True, max_descriptors=1 << 16, kinds=frozenset({"cpu"}), post_blocks=False,
        fences=False, stops_reads=True, bytes_per_s=1e9, descriptor_s=1e-6, post_s=1e-4)  # fmt: skip
    description_type, link_type = Address, Link

    def __init__(self):
        super().__init__()
        self._box = Path(tempfile.mkdtemp(prefix="postbox.", dir=os.environ.get("POSTBOX_DIR")))
        self._alive = (self._box / "alive").open("w")
        fcntl.flock(self._alive, fcntl.LOCK_EX)
        self.life = str(self._box)
        self._seen, self._sent = set(), {}

    def describe(self):
        self.check_open()
        return write_description(Address(self.life, [(region.base, region.nbytes) for region in self.own.regions]))

    def _write(self, link, post):
        ticket, spans, tag, *_ = post
        if is_dead(link.description.life):
            raise TransportError(f"peer {link.peer!r} has ended", remedy="connect its next life")
        header = msgspec.msgpack.encode((tag, spans.dst.tolist(), spans.nbytes.tolist()))
        body = map(ctypes.string_at, spans.src.tolist(), spans.nbytes.tolist())
        letter = Path(link.description.life, f"{ticket:012}-{self._box.name[8:]}.part")
        letter.write_bytes(b"".join([len(header).to_bytes(8, "little"), header, *body]))
        self._sent[ticket] = letter.rename(letter.with_suffix(".post"))  # whole, or not there

    def _progress(self):
        for letter in sorted(self._box.glob("*.post")):
            content = letter.read_bytes()
            at = 8 + int.from_bytes(content[:8], "little")
            tag, dst, nbytes = msgspec.msgpack.decode(content[8:at], type=tuple[bytes, list[int], list[int]])
            if not all(map(self.own.holds, dst, nbytes)):  # unregistered since: no peer's to write any more
                letter.rename(letter.with_suffix(".refused"))
                continue
            for address, n in zip(dst, nbytes, strict=True):
                ctypes.memmove(address, content[at : at + n], n)
                at += n
            letter.rename(letter.with_suffix(".read"))
            self.events.extend([Inbound(tag)] * bool(tag))
        for ticket, letter in list(self._sent.items()):
            if letter.with_suffix(".read").exists():
                self.events.append(Done(ticket))
            elif letter.with_suffix(".refused").exists():
                unregistered = TransportError("the peer has unregistered that memory", remedy="connect it again")
                self.events.append(PostFailed(ticket, unregistered))
            elif is_dead(letter.parent):
                gone = TransportError(f"the peer of {letter.parent} has ended", remedy="send it again")
                self.events.append(PostFailed(ticket, gone))
            else:
                continue
            del self._sent[ticket]
            letter.unlink(missing_ok=True)
            letter.with_suffix(".read").unlink(missing_ok=True)

    def _target(self, peer, description):
        self._seen.add(description.life)
        return Writer(description.life)

    def _may_land(self, since):
        self._progress()  # the dead write no more; what they had written lands when it is read
        return False

    def _shut(self):
        self._alive.close()
        for box in {self.life, *filter(is_dead, self._seen)}:
            shutil.rmtree(box, ignore_errors=True)


class Writer:
    def __init__(self, box):
        self._box = box

    def gone(self):
        return is_dead(self._box)

    def close(self):
        pass


def is_dead(box):
    try:
        with Path(box, "alive").open() as alive:
            fcntl.flock(alive, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        pass
    return True
