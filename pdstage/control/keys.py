"""A node's CURVE keys: its own pair, and the public keys of the peers it talks to.

docs/security.md describes file formats and set-ups.

Keys are written as 64 hexadecimal digits, so that they fit into an address, a shell and a log line.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from pathlib import Path
from typing import Final, TypeAlias

import zmq
from zmq.utils import z85

from pdstage import arguments
from pdstage.errors import UsageError

log = logging.getLogger(__name__)

NBYTES: Final = 32
_MAX_NBYTES = 4 << 20  # of a key file or allow list: 40,000 named keys
_MAX_CANDIDATES = 4
_WRITTEN = re.compile("[0-9a-fA-F]{64}")
_HEADER = """\
# The secret key of a pdstage node, or of a cluster whose nodes all hold this file. Who can read it is one of them.
# Its public half, for allow lists: {public}
secret {secret}
"""


class Keys:
    """A key pair, and the public keys of the peers that may connect.

    Without `allow` (the path of an allow list) only holders of the same key may connect: one key file for the whole
    cluster. With it every node may have its own pair. The list is read again when its file changes, so a node can be
    admitted or removed without restarting the others. Existing connections stay. A node's own key is always allowed.
    """

    def __init__(self, secret: bytes, allow: arguments.GivenPath | None = None) -> None:
        if len(secret) != NBYTES:
            raise UsageError(f"a secret key of {len(secret)} bytes", remedy=f"give {NBYTES}, or a key file's path")
        self.secret = secret
        self.public: bytes = z85.decode(zmq.curve_public(z85.encode(secret)))
        self._allow = _AllowList(Path(allow)) if allow is not None else None

    def __repr__(self) -> str:
        return f"Keys(public={self.public.hex()})"

    @classmethod
    def load(cls, path: arguments.GivenPath, allow: arguments.GivenPath | None = None) -> Keys:
        """Reads a key file, and an allow list if given. Raises `UsageError` that names the file and the remedy."""
        return cls(_read_secret(Path(path)), allow)

    @classmethod
    def make(cls, path: arguments.GivenPath) -> Keys:
        """A new pair, written to a new file that only its owner can read. Raises `UsageError` if the file exists."""
        secret: bytes = z85.decode(zmq.curve_keypair()[1])
        keys = cls(secret)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except FileExistsError as error:
            raise UsageError(f"{path} exists already", remedy="name a new file; keys are never overwritten") from error
        except OSError as error:
            raise UsageError(
                f"cannot write {path} ({error.strerror})", remedy="name a file in a directory that you may write"
            ) from error
        with os.fdopen(fd, "w") as file:
            file.write(_HEADER.format(public=keys.public.hex(), secret=secret.hex()))
        return keys

    def allows(self, public: bytes) -> bool:
        """Whether the holder of this public key, 32 bytes, may connect."""
        return public == self.public or (self._allow is not None and public in self._allow.read())

    def candidates(self, first: bytes) -> list[bytes]:
        """The keys that a server at a fixed address may hold: `first` or our own, then a few of the allow list.

        During key rotation a known address may still carry the old key.
        """
        listed = sorted(self._allow.read()) if self._allow is not None else []
        return list(dict.fromkeys([first or self.public, self.public, *listed]))[:_MAX_CANDIDATES]


GivenKeys: TypeAlias = Keys | arguments.GivenPath | None
"""An option `keys=`."""


def keys_of(given: GivenKeys) -> Keys | None:
    """Reads an option `keys=`: a key file's path, or keys."""
    return given if given is None or isinstance(given, Keys) else Keys.load(arguments.path("keys", given))


def parse_key(text: str) -> bytes | None:
    """The 32 bytes of 64 hexadecimal digits; None for anything else."""
    return bytes.fromhex(text) if _WRITTEN.fullmatch(text) else None


class _AllowList:
    """A file of public keys, one per line, each optionally followed by a name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version, self._keys = self._read()

    def read(self) -> frozenset[bytes]:
        """The list, read again if the file changed. A bad file leaves the last good list in force."""
        try:
            version = _version(self._path.stat())
        except OSError:
            version = ()
        if version != self._version:
            self._version = version  # of a bad file too, so that it is reported once
            try:
                self._version, self._keys = self._read()
            except UsageError as error:
                log.error("the last good allow list stays in force: %s", error)  # noqa: TRY400  (no trace)
        return self._keys

    def _read(self) -> tuple[tuple[int, ...], frozenset[bytes]]:
        text, status = _read(self._path)
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UsageError(f"other users may write the allow list {self._path}", remedy=f"chmod go-w {self._path}")
        keys = set()
        for number, words in _lines(text):
            key = parse_key(words[0])
            if key is None:
                raise UsageError(
                    f"{self._path}, line {number}: {words[0][:16]!r}... is not a public key",
                    remedy="give one key per line, as `pdstage keys --public FILE` prints it",
                )
            keys.add(key)
        return _version(status), frozenset(keys)


def _version(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _read_secret(path: Path) -> bytes:
    text, status = _read(path)
    # PostgreSQL's rule for its key files: owner only, or root's and readable by a group, as mounted secrets.
    loose = 0o037 if status.st_uid == 0 else 0o077
    if status.st_mode & loose or status.st_uid not in (0, os.geteuid()):
        raise UsageError(
            f"other users may read or change the key file {path} (mode {stat.S_IMODE(status.st_mode):04o}, "
            f"owner {status.st_uid})",
            remedy=f"chmod 600 {path}, owned by the node's user; if other users could read it, make new keys",
        )
    match [words for _, words in _lines(text)]:
        case [["secret", written]] if (secret := parse_key(written)) is not None:
            return secret
    # Its content is not quoted: it may be a secret.
    raise UsageError(f"{path} is not a key file", remedy="make one with `pdstage keys FILE`")


def _read(path: Path) -> tuple[str, os.stat_result]:
    """A file's text, and the fstat of that very file."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(_MAX_NBYTES + 1)
    except OSError as error:
        raise UsageError(
            f"cannot read {path} ({error.strerror})", remedy="name a file made by `pdstage keys FILE`, or an allow list"
        ) from error
    if len(data) > _MAX_NBYTES or not data.isascii():
        raise UsageError(f"{path} is not a text file of keys", remedy="make keys with `pdstage keys FILE`")
    return data.decode("ascii"), status


def _lines(text: str) -> list[tuple[int, list[str]]]:
    """Words by line number, without comments and empty lines."""
    words = ((number, line.partition("#")[0].split()) for number, line in enumerate(text.splitlines(), 1))
    return [(number, found) for number, found in words if found]
