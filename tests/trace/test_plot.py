"""The picture: each kind of slice is to be seen in its colour, and what cannot be drawn is said in one line."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("matplotlib")

from matplotlib.colors import to_rgb
from matplotlib.image import imread

from pdstage import cli
from pdstage.errors import UsageError
from pdstage.tools.trace import chrome, plot
from pdstage.tools.trace.model import Clock, Trace, merged


def colours_of(path):
    image = imread(path)
    assert image.shape[0] > 300 and image.shape[1] > 1500
    seen = {tuple(pixel) for pixel in (image[..., :3].reshape(-1, 3) * 255).round().astype(int)}
    return {kind for kind, c in plot.COLOURS.items() if tuple(round(part * 255) for part in to_rgb(c)) in seen}


def test_the_command_draws_a_room_of_the_files_of_several_processes(run, tmp_path):
    run.move("one")
    run.move("two")
    files = []
    for number, trace in enumerate(run.traces()):
        files.append(str(tmp_path / f"{number}.json"))
        chrome.write(trace, tmp_path / f"{number}.json")
    out, whole = tmp_path / "t.png", tmp_path / "whole.json"
    assert cli.main(["plot", *files, "--room", "two", "--out", str(out), "--merged", str(whole)]) == 0
    assert {"gather", "scatter"} <= colours_of(out)
    assert len(chrome.read(whole).nodes) == 2


@pytest.mark.parametrize(
    ("how", "says"),
    [({"room": "none"}, "no chunk of room 'none'.*it has rooms one"), ({"path": "no/such/folder.png"}, "cannot write"),
     ({"path": "t.xyz"}, "cannot write")],
)  # fmt: skip
def test_what_cannot_be_drawn(run, tmp_path, how, says):
    with pytest.raises(UsageError, match="without one chunk"):
        plot.draw(Trace(Clock("here", 0.0)), tmp_path / "t.png")
    run.move("one")
    with pytest.raises(UsageError, match=says):
        plot.draw(merged(run.traces()), tmp_path / how.get("path", "t.png"), how.get("room"))


def test_more_rows_than_can_be_read_and_no_matplotlib(run, tmp_path, monkeypatch):
    run.move("one")
    monkeypatch.setattr(plot, "MAX_ROWS", 2)
    with pytest.raises(UsageError, match="more than can be read"):
        plot.draw(merged(run.traces()), tmp_path / "t.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pdstage\[trace\]"):
        plot.draw(merged(run.traces()), tmp_path / "t.png")
