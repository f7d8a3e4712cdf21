"""A release of a small repository, with real git and real signatures; the wheels are files."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.wheels import release

pytestmark = pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="needs ssh-keygen")
FILES = {
    "pyproject.toml": '[project]\nversion = "1.2.0"\n[project.urls]\nSource = "https://example.org/pdstage"\n',
    "pdstage/__init__.py": '__version__ = "1.2.0"\n',
    "CHANGELOG.md": (
        "## [Unreleased]\n## [1.2.0] - 2026-01-02\n\n### Changed\n\n- Faster.\n\n## [1.1.0] - 2025-01-02\n\n- Old.\n"
    ),
    ".gitignore": "dist\nbuild\n",
    "constraints.txt": "",
    "tests/wheels/requirements.txt": "",
}


def ran(root: Path, *words: str | Path, given: str = "") -> str:
    return subprocess.run(words, cwd=root, check=True, text=True, input=given, stdout=subprocess.PIPE).stdout


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Git knows nothing of this user, and all Pythons are here."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setattr(release, "pythons", lambda versions: (versions, []))
    root = tmp_path / "checkout"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    ran(tmp_path, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key")
    ran(root, "git", "init", "-q")
    settings = {
        "user.name": "a",
        "user.email": "a@example.org",
        "gpg.format": "ssh",
        "user.signingkey": tmp_path / "key",
    }
    for name, value in settings.items():
        ran(root, "git", "config", name, value)
    ran(root, "git", "add", ".")
    ran(root, "git", "commit", "-qm", "all")
    return root


def project(root: Path):
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("pdstage/__init__.py", '__version__ = "1.1.0"\n', "another version than pyproject.toml's 1.2.0"),
        ("CHANGELOG.md", "## [1.2.0]\n\n- Faster.\n", "no section [1.2.0] with a date"),
        ("CHANGELOG.md", FILES["CHANGELOG.md"].replace("]\n", "]\n\n- New.\n", 1), "entries under [Unreleased]"),
        ("pyproject.toml", '[project]\nversion = "1.2.0"\n', "no [project.urls] with Source"),
        (".git/refs/tags/v1.2.0", "", "v1.2.0 is there"),
        (".git/config", "[user]\n\tname = a\n", "git signs with no SSH key"),
        (".git/config", "[gpg]\n\tformat = ssh\n[user]\n\tsigningkey = /nowhere\n", "git signs with no SSH key"),
    ],
)
def test_it_refuses(root: Path, name: str, text: str, said: str) -> None:
    assert not release.lacking(root, project(root))
    (root / name).write_text(text or ran(root, "git", "rev-parse", "HEAD"))
    found = "; ".join(release.lacking(root, project(root)))
    assert said in found
    assert ("the checkout has changes" in found) is not name.startswith(".git/")


def test_a_user_can_check_every_file_and_the_tag(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the commands of docs/wheels.md, and a byte that changed is found."""

    def wheels(command, **options):
        if command[1:] == ["-m", "tests.wheels"]:
            (options["cwd"] / "dist").mkdir()
            (options["cwd"] / "dist/pdstage-1.2.0.whl").write_text("bytes")
            command = ["true"]
        return run(command, **options)

    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", wheels)
    release.main(root)
    signer = f"a@example.org {(tmp_path / 'key.pub').read_text()}"
    (tmp_path / "allowed").write_text(signer)
    verify = ("ssh-keygen", "-Y", "verify", "-f", tmp_path / "allowed", "-I", "a@example.org", "-n", "file", "-s")
    dist = root / "dist/pdstage-1.2.0"
    for name in ("SHA256SUMS", "provenance.json"):
        ran(dist, *verify, f"{name}.sig", given=(dist / name).read_text())
    assert ran(dist, "sha256sum", "-c", "SHA256SUMS") == "pdstage-1.2.0.whl: OK\nprovenance.json: OK\n"
    tag = ran(root, "git", "-c", f"gpg.ssh.allowedSignersFile={tmp_path}/allowed", "tag", "-v", "v1.2.0")
    assert "### Changed\n\n- Faster." in tag
    assert ran(root, "git", "worktree", "list").count("\n") == 1
    (dist / "pdstage-1.2.0.whl").write_text("other")
    with pytest.raises(subprocess.CalledProcessError):
        ran(dist, "sha256sum", "-c", "SHA256SUMS")
    with pytest.raises(subprocess.CalledProcessError):
        ran(dist, *verify, "SHA256SUMS.sig", given=(dist / "SHA256SUMS").read_text() + "0  more\n")


def test_the_provenance_names_the_commit_and_each_file(root: Path) -> None:
    (root / "dist").mkdir()
    (root / "dist/a.whl").write_bytes(b"abc")
    held = release.provenance(root / "dist", project(root), "c0ffee", datetime.now(UTC))
    sha = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert held["subject"] == [{"name": "a.whl", "digest": {"sha256": sha}}]
    built_from = held["predicate"]["buildDefinition"]["resolvedDependencies"][0]
    assert built_from == {"uri": "git+https://example.org/pdstage", "digest": {"gitCommit": "c0ffee"}}
