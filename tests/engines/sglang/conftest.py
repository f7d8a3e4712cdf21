"""An installed pdstage, as SGLang's plugin loader looks for it."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session", autouse=True)
def installed(tmp_path_factory):
    """Children find this checkout, and a folder with the entry points that pyproject.toml gives an installed pdstage.

    In the engines' environment pdstage is not installed but on the path, so that it is always this checkout's.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = tmp_path_factory.mktemp("metadata") / f"pdstage-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pdstage\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    (info / "entry_points.txt").write_text(
        "\n".join(f"[{group}]\n" + "\n".join(f"{name} = {at}" for name, at in held.items()) for group, held in groups)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (info.parent, ROOT))))
        patch.syspath_prepend(info.parent)  # which spawned children take over
        patch.setenv("SGLANG_HOST_IP", "127.0.0.1")
        yield
