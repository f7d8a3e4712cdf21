"""Serves a tiny model by two real engines and their router, prefill and decode apart: `make serve ENGINE=vllm`.

The engine is the one whose Python runs this. The model has random weights; token 17 is the word w17.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e import models
from tests.e2e.conftest import ENGINES
from tests.e2e.fleet import Fleet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.e2e.servers import Server

TRY = """curl {url}/v1/completions -H 'content-type: application/json' \\
    -d '{{"model": "tiny", "prompt": "w5 w17 w42 w99", "max_tokens": 24, "temperature": 0}}'"""


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    told = argparse.ArgumentParser(prog="make serve", description=__doc__.partition("\n")[0])
    told.add_argument("--model", default="llama", choices=sorted(models.MODELS), help="what is served (default: llama)")
    told.add_argument("--prefill-tp", type=int, default=1, metavar="N", help="prefill's ranks (default: 1)")
    told.add_argument("--decode-tp", type=int, default=1, metavar="N", help="decode's ranks (default: 1)")
    told.add_argument("--transport", default="nixl", help="nixl (the default), local, or another that runs here")
    told.add_argument("--port", type=int, default=0, help="the router's (default: a free one)")
    told.add_argument("--logs", type=Path, help="keep the servers' logs and the model here")
    return told.parse_args(argv)


def vllm(given: argparse.Namespace, logs: Path) -> tuple[Fleet, Server]:
    """Two vLLM servers, and vLLM's router, which is not up yet."""
    from tests.e2e.vllm.engines import pair  # noqa: PLC0415
    from tests.e2e.vllm.proxies import router  # noqa: PLC0415

    fleet = Fleet(logs)
    row = pair((given.prefill_tp, 128), (given.decode_tp, 128), model=given.model, transport=given.transport)
    prefill, decode = fleet.up(row.prefill, row.decode)
    return fleet, router(prefill, decode, logs)


def sglang(given: argparse.Namespace, logs: Path) -> tuple[Fleet, Server]:
    """Two SGLang servers, and SGLang's router, which is not up yet."""
    from tests.e2e.sglang.engines import WINDOWS_WHOLE, pair, router  # noqa: PLC0415

    fleet = Fleet(logs)
    options = WINDOWS_WHOLE * (given.model == "gemma3")
    node = f'{{"transport": "{given.transport}"}}'
    row = pair({"tp": given.prefill_tp}, {"tp": given.decode_tp}, model=given.model, options=options, node=node)
    prefill, decode = fleet.up(row.prefill, row.decode)
    return fleet, router(prefill, decode, logs)


def main(argv: Sequence[str]) -> None:
    given = arguments(argv)
    engine = next(name for name, environment in ENGINES.items() if environment == Path(sys.prefix).name)
    end = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: end.set())
    with tempfile.TemporaryDirectory(prefix="pdstage-serve-") as folder:
        logs = (given.logs or Path(folder)).resolve()
        logs.mkdir(parents=True, exist_ok=True)
        print(f"two {engine} servers start; their logs are in {logs}", flush=True)
        fleet, front = {"vllm": vllm, "sglang": sglang}[engine](given, logs)
        try:
            front.port = given.port
            front.start().wait()
            print(f"ready at {front.url}; Ctrl-C ends it. Try:\n\n{TRY.format(url=front.url)}\n", flush=True)
            end.wait()
        finally:
            front.stop()
            fleet.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
