"""Makes a release of the commit that is checked out, all but its upload: wheels, checksums, provenance, tag.

    python -m tests.wheels.release    # `make release`

It refuses before it builds anything, and names all that is missing at once. Then it builds that commit, in a work tree
of its own, by `make wheels`. dist/pdstage-VERSION has the wheels and the sdist, each tried in an empty venv;
`provenance.json`, an in-toto statement with SLSA's provenance about them (https://slsa.dev/spec/v1.0/provenance); and
SHA256SUMS, of all these. Both are signed with git's own key by `ssh-keygen -Y sign`, and so is the tag, which comes
last: a release that fails leaves neither.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.wheels.__main__ import VERSIONS
from tests.wheels.__main__ import found as pythons

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "file"
"""That of a signature of a file, as ssh-keygen's manual has it."""


def main(root: Path = ROOT) -> None:
    began, commit = datetime.now(UTC), _git(root, "rev-parse", "HEAD")
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    version = project["version"]
    if missing := lacking(root, project):
        raise SystemExit("\n".join([f"{version} is not released:", *(f"* {one}" for one in missing)]))
    source, final = root / "build/release", root / f"dist/pdstage-{version}"
    _git(root, "worktree", "add", "--force", "--detach", str(source), commit)
    try:
        if subprocess.run([sys.executable, "-m", "tests.wheels"], cwd=source, check=False).returncode:
            raise SystemExit(f"{version} is not released: its wheels are not right")
        made = source / "dist"
        statement, sums = made / "provenance.json", made / "SHA256SUMS"
        statement.write_text(json.dumps(provenance(made, project, commit, began), indent=2) + "\n")
        sums.write_text("".join(f"{_sha256(path)}  {path.name}\n" for path in sorted(made.iterdir())))
        subprocess.run([*_signer(root), sums, statement], check=True)
        message = f"pdstage {version}\n\n{changes(root, version)}"
        _git(root, "tag", "-s", "--cleanup=whitespace", "-m", message, f"v{version}", commit)
        if final.exists():
            shutil.rmtree(final)
        shutil.copytree(made, final)
    finally:
        _git(root, "worktree", "remove", "--force", str(source))
    print(f"{final} has {version}, and v{version} is its tag, signed. What is left to do:")
    print(f"  git push origin v{version}")
    print(f"  twine upload {final}/*.whl {final}/*.tar.gz")
    print("  put SHA256SUMS, provenance.json and their .sig files beside them, where the project's URLs lead")


def lacking(root: Path, project: dict[str, Any]) -> list[str]:
    """What must be true of the checkout before it is released, and is not; each with its remedy."""
    version, found = project["version"], []
    if f'__version__ = "{version}"\n' not in (root / "pdstage/__init__.py").read_text():
        found.append(f"pdstage/__init__.py has another version than pyproject.toml's {version}: write it there too")
    if not changes(root, version):
        found.append(f"CHANGELOG.md has no section [{version}] with a date and entries: make one of [Unreleased]")
    if changes(root, "Unreleased"):
        found.append(f"CHANGELOG.md has entries under [Unreleased]: move them to [{version}]")
    if "Source" not in project.get("urls", ()):
        found.append("pyproject.toml has no [project.urls] with Source: say where users find the project")
    if _git(root, "status", "--porcelain"):
        found.append("the checkout has changes: commit or stash them")
    if _git(root, "tag", "--list", f"v{version}"):
        found.append(f"v{version} is there: give this one a higher version")
    if absent := pythons(VERSIONS)[1]:
        found.append(f"Python {', '.join(absent)} is not here with its headers: see `make wheels`")
    if _git(root, "config", "--default", "", "gpg.format") != "ssh" or not _can_sign(root):
        found.append("git signs with no SSH key of a file: git config gpg.format ssh; git config user.signingkey FILE")
    return found


def changes(root: Path, title: str) -> str:
    """CHANGELOG.md's section of that title, without its heading; empty if there is none."""
    dated = "" if title == "Unreleased" else r" - \d{4}-\d\d-\d\d"
    section = rf"^## \[{re.escape(title)}\]{dated}\n(.*?)(?=^## \[|\Z)"
    found = re.search(section, (root / "CHANGELOG.md").read_text(), re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else ""


def provenance(dist: Path, project: dict[str, Any], commit: str, began: datetime) -> dict[str, object]:
    """Which files `dist` has, of which commit they were made, and the files that pin what made them."""
    source = project["urls"]["Source"]
    pins = ("constraints.txt", "tests/wheels/requirements.txt")
    tools = [{"uri": name, "digest": {"sha256": _sha256(dist.parent / name)}} for name in pins]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": path.name, "digest": {"sha256": _sha256(path)}} for path in sorted(dist.iterdir())],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": f"{source}#make-release",
                "externalParameters": {"source": source, "version": project["version"]},
                "resolvedDependencies": [{"uri": f"git+{source}", "digest": {"gitCommit": commit}}, *tools],
            },
            "runDetails": {
                "builder": {"id": f"{source}#tests/wheels"},
                "metadata": {
                    "startedOn": began.isoformat(timespec="seconds"),
                    "finishedOn": datetime.now(UTC).isoformat(timespec="seconds"),
                },
            },
        },
    }


def _signer(root: Path) -> list[str]:
    key = _git(root, "config", "--default", "", "--type", "path", "user.signingkey")
    return ["ssh-keygen", "-Y", "sign", "-n", NAMESPACE, "-f", key]


def _can_sign(root: Path) -> bool:
    try:
        return subprocess.run(_signer(root), input=b"", capture_output=True, check=False).returncode == 0
    except OSError:  # there is no ssh-keygen
        return False


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
