"""The table and the JSON a run ends with."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

pytest.importorskip("rich")

from rich.console import Console

from pdstage.tools.demo.options import Options
from pdstage.tools.demo.report import Move, Report, RoomReport, show

KEYS = [
    "transport", "path", "model", "prefill_tp", "decode_tp", "prefill_pp", "decode_pp", "requests", "new_tokens",
    "tokens_identical", "negative_control_caught", "bytes_moved", "descriptors", "seconds",
    "rows_identical", "aux_rows", "aux_fallbacks", "moves", "device",
]  # fmt: skip


TOOK = (("direct", 0.4), ("staged", 0.3), ("direct", 0.2), ("staged", 0.1), ("direct", 0.3), ("staged", 0.2))
MOVES = tuple(Move(path, {"direct": 56_320, "staged": 84}[path], 14_417_920, seconds) for path, seconds in TOOK)


def report_of(options: Options) -> Report:
    return Report(
        transport="nixl", path="staged", model=options.described, prefill_tp=4, decode_tp=2, prefill_pp=1, decode_pp=1,
        requests=2, new_tokens=66, tokens_identical=True, negative_control_caught=True, bytes_moved=14_417_920,
        descriptors=56_320, seconds=1.25, rows_identical=True, aux_rows=2, aux_fallbacks=0, moves=MOVES,
    )  # fmt: skip


def rooms_of() -> list[RoomReport]:
    times = {"began_at": 10.0, "handed_at": 10.2, "came_at": 10.25, "paths": {"staged"}, "identical": True}
    return [
        RoomReport(126, nbytes=2_064_384, descriptors=18, **times),
        RoomReport(309, nbytes=12_353_536, descriptors=56_302, **times),
    ]


def test_json_has_exactly_the_agreed_keys(tmp_path):
    report_of(Options()).write(tmp_path / "out.json")
    told = json.loads((tmp_path / "out.json").read_text())
    assert list(told) == KEYS
    assert told["bytes_moved"] == 14_417_920
    assert told["tokens_identical"] is True


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("caught", [True, False])
@pytest.mark.parametrize("rows", [True, False])
def test_only_all_checks_make_a_good_run(same, caught, rows):
    told = {"tokens_identical": same, "negative_control_caught": caught, "rows_identical": rows}
    report = replace(report_of(Options()), **told)
    assert report.good == (same and caught and rows)


def shown(report: Report, rooms: list[RoomReport], options: Options | None = None) -> str:
    out = io.StringIO()
    show(Console(file=out, width=80), options or Options(), report, rooms, 0.001)
    return out.getvalue()


def test_the_table_fits_a_terminal_and_tells_every_room():
    text = shown(report_of(Options()), rooms_of())
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert rows["0"] == ["0", "126", "2,064,384", "staged", "18", "250.0", "50.0", "0.008", "identical"]
    assert rows["all"] == ["all", "435", "14,417,920", "staged", "56,320", "1250.0", "0.012", "identical"]
    assert "…" not in text
    assert "pages of 16 tokens in NHD at prefill, pages of 32 tokens in HND at decode" in text
    assert "llama: prefill TP 4 -> decode TP 2 over nixl" in text


def test_a_gpu_and_the_dtype_of_its_pools_are_said():
    options = Options(device="cuda:1")
    text = shown(replace(report_of(options), device=options.device, model=options.described), rooms_of(), options)
    assert "all shuffled, on cuda:1" in text
    assert "full attention, KV cache in bfloat16" in text
    assert "cuda" not in shown(report_of(Options()), rooms_of())


def test_what_stands_for_an_engine_is_said():
    options = Options(model="deepseek-v32", decode_pp=2)
    text = shown(report_of(options), rooms_of(), options)
    assert "prefill TP 4 -> decode TP 2 x PP 2" in text
    assert "each prefill rank computes the whole model; it stores and moves only its share" in text
    assert "then on from a copy of its cache" in text
    assert "in each component (dsa, kv)" in text
    text = shown(report_of(options), rooms_of(), Options(model="mamba2", prefill_layout="hnd"))
    assert "slots in HND at prefill, slots in HND at decode" in text


def test_a_red_check_is_said_so():
    rooms = rooms_of()
    rooms[1].identical = False
    text = shown(replace(report_of(Options()), tokens_identical=False, negative_control_caught=False), rooms)
    assert text.count("different") == 2
    assert "NOT the same as" in text
    assert "NOT caught" in text


def test_both_paths_stand_side_by_side_by_their_median_moves():
    said = shown(report_of(Options()), rooms_of())
    direct, staged = (line.split() for line in said.splitlines() if line.split()[1:2] == ["14,417,920"])
    assert direct == ["direct", "14,417,920", "56,320", "300.0", "0.048"]
    assert staged == ["staged", "14,417,920", "84", "200.0", "0.072"]
    assert "staged moved them 1.5 times as fast as direct" in said
    assert "times as fast" not in shown(replace(report_of(Options()), moves=()), rooms_of())
