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
from tests.trace.conftest import Run


def colours_of(path):
    image = imread(path)
    assert image.shape[0] > 300 and image.shape[1] > 1500
    seen = {tuple(pixel) for pixel in (image[..., :3].reshape(-1, 3) * 255).round().astype(int)}
    return {kind for kind, c in plot.COLOURS.items() if tuple(round(part * 255) for part in to_rgb(c)) in seen}


def test_direct_writes_too(site, tmp_path):
    run = Run(site, path="direct")
    run.move("r")
    plot.draw(merged(run.traces()), tmp_path / "t.png")
    assert colours_of(tmp_path / "t.png") == {"direct"}


def test_the_command_draws_a_room_of_the_files_of_several_processes(run, tmp_path):
    run.move("one")
    run.move("two")
    files = []
    for number, trace in enumerate(run.traces()):
        files.append(str(tmp_path / f"{number}.json"))
        chrome.write(trace, tmp_path / f"{number}.json")
    out, whole = tmp_path / "t.png", tmp_path / "whole.json"
    code = cli.main(["plot", *files, "--room", "two", "--out", str(out), "--merged", str(whole)])
    assert code == 0
    assert {"gather", "scatter"} <= colours_of(out)
    assert len(chrome.read(whole).nodes) == 3


def test_what_is_drawn(run):
    run.move("one")
    run.move("two")
    trace = merged(run.traces())
    all_of_it, two = plot.window_of(trace, None, None, None), plot.window_of(trace, "two", None, None)
    assert all_of_it.start < two.start < two.stop <= all_of_it.stop
    part = plot.window_of(trace, None, 1.0, 2.0)
    assert part.stop - part.start == pytest.approx(1e-3)
    first = min(stage.began_at for stage in trace.stages)
    assert part.start == pytest.approx(first + 1e-3)


@pytest.mark.parametrize(
    ("how", "says"),
    [({"room": "none"}, "no room 'none'.*it has one"), ({"from_ms": 5.0, "to_ms": 1.0}, "between 5.0 and 1.0 ms"),
     ({"out": "no/such/folder.png"}, "cannot write"), ({"out": "t.xyz"}, "cannot write")],
)  # fmt: skip
def test_what_cannot_be_drawn(run, tmp_path, how, says):
    with pytest.raises(UsageError, match="without one chunk"):
        plot.draw(Trace(Clock("here", 0.0)), tmp_path / "t.png")
    run.move("one")
    how = dict(how)
    with pytest.raises(UsageError, match=says):
        plot.draw(merged(run.traces()), tmp_path / how.pop("out", "t.png"), **how)


def test_more_rows_than_can_be_read(run, tmp_path, monkeypatch):
    monkeypatch.setattr(plot, "MAX_ROWS", 3)
    run.move("one")
    with pytest.raises(UsageError, match="more than can be read"):
        plot.draw(merged(run.traces()), tmp_path / "t.png")


def test_without_matplotlib_it_says_what_to_install(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pdstage\[trace\]"):
        plot.draw(merged(run.traces()), tmp_path / "t.png")
