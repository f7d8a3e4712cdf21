"""Whether an installed pdstage works: its C++ extension, and a request's KV cache between two processes, byte by byte.

It runs where pdstage is installed and no checkout is, and imports nothing else. It exits 1 at the first thing that is
wrong.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

import pdstage
from pdstage import DecodeNode, Pool, PrefillNode, Topology, native
from pdstage.tensors import build, paged_hnd, paged_nhd

LAYERS, HEADS, DIM, TOKENS = 4, 8, 128, 1000
SRC_PAGE, DST_PAGE = 16, 8
SRC_PAGES, DST_PAGES = -(-TOKENS // SRC_PAGE), -(-TOKENS // DST_PAGE)
ROOM, AUX, PATIENCE_S = "request-1", b"the first token", 300

FLAGS = {
    "amd": {"AuthenticAMD"},
    "avx": {"avx"},
}
"""The words of /proc/cpuinfo that stand for each entry of `_native.processor`."""

DAEMON = """
import sys, threading, numpy as np
from pdstage import native
sys.setswitchinterval(1e-6)
src = np.ones(1 << 20, np.uint8)
dst, begun = np.zeros_like(src), threading.Event()
spans = [np.array([number], np.int64) for number in (src.ctypes.data, dst.ctypes.data, src.nbytes)]
def copy():
    while True:
        begun.set()
        native.ext.copy_spans(*spans)
for _ in range(4):
    threading.Thread(target=copy, daemon=True).start()
begun.wait()
"""
"""It ends while threads are in C++ without the GIL, some at their first call; Python ends them as they ask for it."""


def drawn() -> tuple[np.ndarray, np.ndarray]:
    """Prefill's K and V, `[layer, page, token, head, dim]`, with as many pages again that nobody sends."""
    k, v = np.random.default_rng(0).random((2, LAYERS, 2 * SRC_PAGES, SRC_PAGE, HEADS, DIM), np.float32)
    return k, v


def pages(n: int) -> list[int]:
    """Pages in an order that is not theirs, out of twice as many."""
    return [int(page) for page in np.random.default_rng(n).permutation(2 * n)[:n]]


def prefill(pipe: Connection) -> None:
    k, v = drawn()
    pool = Pool.of(build(paged_nhd(k, v, total_heads=HEADS, tp=(1, 0))))
    with PrefillNode(pool, Topology(), transport="local", progress="thread") as node:
        pipe.send(node.directory_address)
        sender = node.send(ROOM)
        for start in range(0, TOKENS, 256):
            sender.chunk(items=pages(SRC_PAGES), tokens=(start, min(start + 256, TOKENS)))
        sender.finish(aux=AUX)
        sender.wait(timeout_s=PATIENCE_S)
        pipe.recv()  # until decode has compared


def transfer() -> int:
    """Moves one request from another process; returns how many bytes were compared."""
    k = np.zeros((LAYERS, 2 * DST_PAGES, HEADS, DST_PAGE, DIM), np.float32)
    v = np.zeros_like(k)
    pool = Pool.of(build(paged_hnd(k, v, total_heads=HEADS, tp=(1, 0))))
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=prefill, args=(there,))
    child.start()
    with DecodeNode(pool, Topology(), transport="local", progress="thread") as node:
        receiver = node.receive(ROOM, directory=here.recv())
        receiver.bind(items=pages(DST_PAGES), tokens=TOKENS)
        receiver.wait(timeout_s=PATIENCE_S)
        assert receiver.aux == AUX
        receiver.wait_released(timeout_s=PATIENCE_S)
        here.send("compared")
        child.join(PATIENCE_S)
    assert child.exitcode == 0, f"prefill ended with {child.exitcode}"
    for sent, received in zip(drawn(), (k, v), strict=True):
        wanted = np.zeros_like(received)
        tokens = sent[:, pages(SRC_PAGES)].reshape(LAYERS, -1, HEADS, DIM)[:, :TOKENS]
        wanted[:, pages(DST_PAGES)] = tokens.reshape(LAYERS, DST_PAGES, DST_PAGE, HEADS, DIM).swapaxes(2, 3)
        assert np.array_equal(received.view(np.uint32), wanted.view(np.uint32)), "other bytes arrived"
    return k.nbytes + v.nbytes


def check_processor() -> None:
    """The extension chooses its loops by what it finds; if it found nothing, it would only be slow."""
    words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    expected = {name: flags <= words for name, flags in FLAGS.items()}
    assert native.ext.processor == expected, f"{native.ext.processor}, but /proc/cpuinfo says {expected}"


def check_end() -> None:
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", DAEMON], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert ended.returncode == 0, f"a program with threads in C++ ended with {ended.returncode}: {ended.stderr}"


def main() -> None:
    assert native.active() == "c++", "the C++ extension is not active"
    check_processor()
    check_end()
    began = time.perf_counter()
    nbytes = transfer()
    said = f"local {nbytes / 2**20:.0f} MiB in {time.perf_counter() - began:.1f} s"
    print(f"{Path(pdstage.__file__).parent}: {native.active()}; two processes, every byte compared: {said}")


if __name__ == "__main__":
    main()
