"""`pdstage demo` on the GPU: a model's KV cache moves between ranks that share it, and every token is compared."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .harness import Row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .bed import Bed

_NEEDS = ("msgspec", "zmq", "transformers", "rich")
TRANSPORTS = ("local", "nixl")
_TAIL = 500


def rows(bed: Bed, quick: bool) -> Iterator[Row]:
    """By transport: how many of decode's tokens are right, and the time of a transfer by each path."""
    if bed.lacks("demo", _NEEDS):
        return
    missing, failed = bed.transports_missing(), []
    for transport in TRANSPORTS:
        if missing[transport]:
            bed.left_out.append(f"demo: {transport}: {missing[transport]}")
            continue
        report, said = _run(bed, transport)
        if report is None:
            failed.append(f"demo, {transport}: {said[-_TAIL:]}")
            continue
        yield from _rows(transport, report)
        if not (report["tokens_identical"] and report["rows_identical"] and report["negative_control_caught"]):
            failed.append(f"demo, {transport}: tokens or rows differ, or a spoilt page went unseen")
    if failed:
        raise RuntimeError("; ".join(failed))


def _run(bed: Bed, transport: str) -> tuple[dict[str, Any] | None, str]:
    """The demo's report, or None, and its output."""
    ranks = (
        ("--prefill-tp", "2", "--decode-tp", "1") if bed.kind != "cpu" else ("--prefill-tp", "1", "--decode-tp", "1")
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "demo.json"
        command = [sys.executable, "-m", "pdstage.cli", "demo", "--transport", transport, "--device", bed.device]
        command += [*ranks, "--requests", "2", "--json", str(path)]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(done.stdout, flush=True)
        return json.loads(path.read_text()) if path.exists() else None, done.stdout.strip()


def _rows(transport: str, report: dict[str, Any]) -> Iterator[Row]:
    yield Row(
        name=f"demo, {transport}: new tokens the same as one process's",
        value=report["new_tokens"] if report["tokens_identical"] else 0,
        baseline=report["new_tokens"],
        unit="tokens",
        target=1.0,
        detail=f"{report['model']}, TP {report['prefill_tp']} to {report['decode_tp']}, path {report['path']}",
        point={"table": "demo", "transport": transport, "caught": report["negative_control_caught"]},
    )
    moves = {path: sorted(m["seconds"] for m in report["moves"] if m["path"] == path) for path in ("staged", "direct")}
    if all(moves.values()):
        middle = {path: took[len(took) // 2] * 1e3 for path, took in moves.items()}
        yield Row(
            name=f"demo, {transport}: its caches once more, staged beside direct",
            value=middle["staged"],
            baseline=middle["direct"],
            unit="ms",
            better="lower",
            detail=f"{report['moves'][0]['bytes_moved']} bytes; baseline: direct",
            point={"table": "demo moves", "transport": transport},
        )
