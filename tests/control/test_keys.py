"""Key files and allow lists: what is read, what is refused, and in which words."""

from __future__ import annotations

import os
import stat

import pytest

from pdstage import UsageError
from pdstage.control.address import Address
from pdstage.control.keys import Keys, keys_of


def listed(path, *keys, mode=0o644):
    path.write_text("# who may come in\n\n" + "".join(f"{one.public.hex()}  node {i}\n" for i, one in enumerate(keys)))
    path.chmod(mode)
    return path


@pytest.fixture
def made(tmp_path):
    return Keys.make(tmp_path / "k")


def test_a_made_key_is_private_and_read_back(tmp_path, made):
    assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o600
    read = Keys.load(tmp_path / "k")
    assert (read.secret, read.public) == (made.secret, made.public)
    assert made.public.hex() in (tmp_path / "k").read_text(), "an operator finds the public half there"
    assert Keys.make(tmp_path / "other").public != made.public


def test_a_secret_is_never_shown(made):
    for text in (repr(made), f"{made}", f"{[made]}"):
        assert made.secret.hex() not in text
        assert made.public.hex() in text


def test_a_key_is_never_overwritten(tmp_path, made):
    before = (tmp_path / "k").read_bytes()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for taken in ("k", "link"):
        with pytest.raises(UsageError, match=f"{taken} exists already.*never overwritten"):
            Keys.make(tmp_path / taken)
    assert (tmp_path / "k").read_bytes() == before
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(UsageError, match="cannot write .*no/such"):
        Keys.make(tmp_path / "no/such/folder")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o602, 0o610])
def test_loose_permissions_are_refused_with_the_remedy(tmp_path, made, mode, monkeypatch):
    path = tmp_path / "k"
    path.chmod(mode)
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UsageError, match=f"other users may.*{path}.*mode {mode:04o}.*chmod 600 {path}"):
        Keys.load(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_mounted_secret_of_roots_may_be_read_by_its_group(tmp_path, made, monkeypatch):
    path = tmp_path / "k"
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    path.chmod(0o440)
    assert Keys.load(path)
    for mode, owner, said in ((0o444, 0, "mode 0444"), (0o460, 0, "mode 0460"), (0o400, 54321, "owner 54321")):
        path.chmod(mode)
        os.chown(path, owner, -1)
        with pytest.raises(UsageError, match=said):
            Keys.load(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"secret\n",
        b"secret 1234\n",
        b"secret " + b"g" * 64,
        b"secret " + b"ab" * 32 + b"\nsecret " + b"cd" * 32,
        b"ab" * 32,
        b"\xc3\xa9" * 40,
    ],
)
def test_garbage_is_no_key_file_and_is_not_quoted(tmp_path, content):
    path = tmp_path / "k"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(UsageError, match=f"{path} is not a .*pdstage keys FILE") as caught:
        Keys.load(path)
    assert "abab" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(UsageError, match=f"cannot read {path}"):
            Keys.load(path)
    (tmp_path / "huge").write_bytes(b"#" * (5 << 20))
    (tmp_path / "huge").chmod(0o600)
    with pytest.raises(UsageError, match="huge is not a text file"):
        Keys.load(tmp_path / "huge")


def test_a_list_is_read_again_when_it_changed(tmp_path, caplog):
    a, b, c = (Keys.make(tmp_path / name) for name in "abc")
    path = listed(tmp_path / "allow", b)
    assert [a.allows(key) for key in (a.public, b.public, b"")] == [True, False, False], "without a list"
    held = Keys.load(tmp_path / "a", path)

    def let_in():
        return [held.allows(one.public) for one in (a, b, c)]

    assert let_in() == [True, True, False]
    listed(tmp_path / "next", c).rename(path)
    assert let_in() == [True, False, True]
    path.write_text("what is this\n")
    for _ in range(3):
        assert held.allows(c.public), "a list gone wrong changes nothing"
    assert caplog.text.count("line 1: 'what'") == 1, "said once"
    listed(path, b, mode=0o666)
    assert not held.allows(b.public), "nor does one that anybody may write"
    path.chmod(0o644)
    assert held.allows(b.public)
    listed(path, c)
    assert held.allows(c.public)
    path.unlink()
    for _ in range(3):
        assert held.allows(c.public)
    assert caplog.text.count("cannot read") == 1
    listed(path, b, c)
    assert let_in() == [True, True, True]


def test_bad_lists_are_refused(tmp_path, made):
    path = listed(tmp_path / "allow", made)
    path.chmod(0o664)
    with pytest.raises(UsageError, match=f"other users may write the allow list {path}.*chmod go-w"):
        Keys.load(tmp_path / "k", path)
    with pytest.raises(UsageError, match="line 3: 'secret"):
        Keys.load(tmp_path / "k", tmp_path / "k")
    with pytest.raises(UsageError, match="absent"):
        Keys.load(tmp_path / "k", tmp_path / "absent")


def test_what_the_option_takes(tmp_path, made):
    assert keys_of(None) is None
    assert keys_of(made) is made
    for path in (tmp_path / "k", str(tmp_path / "k")):
        assert keys_of(path).public == made.public
    with pytest.raises(UsageError, match="a secret key of 3 bytes"):
        Keys(b"abc")


def test_an_address_carries_the_key_of_who_listens():
    key = bytes(range(32))
    for text in (f"tcp://{key.hex()}@127.0.0.1:80", f"{key.hex()}@127.0.0.1:80"):
        address = Address.parse(text, "tcp")
        assert address == Address("127.0.0.1", 80, key)
        assert (str(address), address.keyed) == ("127.0.0.1:80", f"{key.hex()}@127.0.0.1:80")
    assert Address.parse(f"{key.hex()}@[::1]:80", "tcp").key == key
    for wrong in ("", "abc", "g" * 64, f"{key.hex()}a", f" {key.hex()[1:]}"):
        with pytest.raises(UsageError, match="no public key before its @"):
            Address.parse(f"{wrong}@127.0.0.1:80", "tcp")
    with pytest.raises(UsageError, match="no public key before its @"):
        Address.parse(f"{key.hex()}@127.0.0.1:80", "tcp", listening=True)
