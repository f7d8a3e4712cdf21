"""`pdstage demo` itself: real processes, a real model, both transports, both paths."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pdstage.plan import shard_overlap
from pdstage.tools.demo.families import HEAD_DIM, N_LAYERS
from pdstage.tools.demo.options import Options
from pdstage.tools.trace import load
from pdstage.transport import available
from tests import cuda_double
from tests.trace.test_trace import check_document

torch = pytest.importorskip("torch")
pytest.importorskip("rich")

N_REQUESTS = 2
DEVICE = "cuda:1"


def demo(tmp_path, *argv: str, env: dict[str, str] | None = None) -> tuple[int, dict, str]:
    command = [sys.executable, "-m", "pdstage.cli", "demo", "--requests", str(N_REQUESTS), *argv]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "out.json")], env=env,
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert (tmp_path / "out.json").exists(), said
    return done.returncode, json.loads((tmp_path / "out.json").read_text()), said


def needs(transport: str) -> None:
    if available().get(transport):
        pytest.skip(available()[transport])


@pytest.mark.parametrize(
    ("transport", "path", "prefill_tp", "decode_tp", "kv_heads"),
    [
        pytest.param("local", "staged", 4, 2, 8, marks=pytest.mark.full),
        pytest.param("local", "direct", 2, 4, 8, marks=pytest.mark.full),
        pytest.param("local", "direct", 1, 2, 4, marks=pytest.mark.full),
        pytest.param("auto", "auto", 1, 1, 8, marks=pytest.mark.full),
        pytest.param("nixl", "staged", 3, 2, 6, marks=pytest.mark.full),  # README.md's command is one of TP 4 -> 2
        pytest.param("nixl", "direct", 4, 2, 4, marks=pytest.mark.full),
        pytest.param("nixl", "staged", 8, 4, 4, marks=pytest.mark.full),
        pytest.param("mooncake", "auto", 4, 2, 4, marks=pytest.mark.full),
    ],
)
def test_decoding_goes_on_token_for_token(tmp_path, transport, path, prefill_tp, decode_tp, kv_heads):
    needs(transport)
    sizes = ("--prefill-tp", prefill_tp, "--decode-tp", decode_tp, "--kv-heads", kv_heads)
    trace = tmp_path / "trace.json"
    options = ("--transport", transport, "--path", path, "--trace", str(trace))
    code, told, said = demo(tmp_path, *options, *map(str, sizes))
    assert code == 0, said
    check_document(json.loads(trace.read_text()))
    assert len(load([trace]).nodes) == prefill_tp + decode_tp
    assert told["tokens_identical"] is True
    assert told["negative_control_caught"] is True
    assert told["transport"] == (transport if transport != "auto" else "local")
    assert told["path"] == path if path != "auto" else told["path"] in {"staged", "direct", "direct+staged"}
    assert (told["prefill_tp"], told["decode_tp"], told["requests"]) == (prefill_tp, decode_tp, N_REQUESTS)
    assert told["new_tokens"] == N_REQUESTS * 33
    assert told["seconds"] > 0
    n_tokens = int(next(line for line in said.splitlines() if line.split()[:1] == ["all"]).split()[1])
    pairs = ((src, dst) for src in range(prefill_tp) for dst in range(decode_tp))
    shards = (shard_overlap(kv_heads, prefill_tp, src, decode_tp, dst) for src, dst in pairs)
    held = sum(shard.count for shard in shards if shard)
    payload = n_tokens * held * N_LAYERS * 2 * HEAD_DIM * 8
    assert payload <= told["bytes_moved"] <= payload * 1.02, "every shard once to each rank that wants it, and no more"
    if path == "direct":
        n_runs = n_tokens // Options().prefill_page * held * N_LAYERS * 2
        assert told["descriptors"] >= n_runs, "no run is longer than one head's part of a page"
    if path == "staged":
        assert told["descriptors"] < n_tokens, "one write carries a chunk"


@pytest.mark.parametrize(
    ("transport", "prefill_tp", "decode_tp", "decode_aux"),
    [
        pytest.param("local", 1, 2, "rdma", marks=pytest.mark.full),
        pytest.param("nixl", 2, 1, "rdma", marks=pytest.mark.full),
        pytest.param("nixl", 1, 1, "tcp", marks=pytest.mark.full),
    ],
)
def test_rows_travel_by_the_transport_and_by_message_where_decode_offers_none(
    tmp_path, transport, prefill_tp, decode_tp, decode_aux
):
    """The demo compares the rows' bytes on both sides; each decode rank gets each room's row once."""
    needs(transport)
    sizes = ("--prefill-tp", str(prefill_tp), "--decode-tp", str(decode_tp))
    aux = ("--aux", "rdma") if decode_aux == "rdma" else ("--aux", "rdma", "--decode-aux", decode_aux)
    code, told, said = demo(tmp_path, "--transport", transport, *sizes, *aux)
    assert code == 0, said
    assert told["rows_identical"] is True
    n_rows = N_REQUESTS * decode_tp
    written = n_rows if decode_aux == "rdma" else 0
    assert (told["aux_rows"], told["aux_fallbacks"]) == (written, n_rows - written)
    moves = told["moves"]
    assert [move["path"] for move in moves] == ["direct", "staged"] * 3
    assert len({move["bytes_moved"] for move in moves}) == 1
    assert told["bytes_moved"] - n_rows * 4096 <= moves[0]["bytes_moved"] <= told["bytes_moved"], "all but the rows"
    assert moves[0]["descriptors"] > 10 * moves[1]["descriptors"], "one write carries a chunk"


def test_an_unusable_transport_is_one_line(tmp_path, monkeypatch):
    """A rank that cannot start is named, and everybody else is ended."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "nixl.py").write_text("raise ImportError('no fabric here')\n")
    done = subprocess.run(
        [sys.executable, "-m", "pdstage.cli", "demo", "--transport", "nixl", "--prefill-tp", "1", "--decode-tp", "1"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "rank 0: transport 'nixl' does not import here" in done.stderr


@pytest.mark.skipif(
    cuda_double.missing() or torch.cuda.is_available(), reason="the double cannot be built, or a GPU is here"
)
def test_caches_on_the_second_device(tmp_path):
    """Over the double of CUDA's driver, whose work is late."""
    sizes = ("--prefill-tp", "2", "--decode-tp", "1", "--requests", "1", "--device", DEVICE)
    code, told, said = demo(tmp_path, "--transport", "local", *sizes, env=cuda_double.everywhere(tmp_path))
    assert code == 0, said
    assert told["tokens_identical"] is True
    assert told["negative_control_caught"] is True
    assert f"on {DEVICE}" in said
