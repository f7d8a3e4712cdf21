"""A room end to end through real nodes, a process each rank: staged beside direct, and beside one raw bulk write.

Layer 6. Pages are shuffled. Prefill has computed everything before the clock starts; the clock runs from the first `bind` to the
last Success (the processes share one monotonic clock).
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import NamedTuple

import numpy as np

from pdstage.control.bootstrap import BootstrapServer
from pdstage.layout import Region
from pdstage.manager import DecodeNode, PrefillNode
from pdstage.protocol.config import Config
from pdstage.topology import Topology
from pdstage.transport import Done, Spans, open_transport

from .harness import Row
from .ranks import Actor, Rank, Shape

HEAD_DIM = 128
HEAD_NBYTES = 2 * HEAD_DIM
LAYERS = 8
WAIT_S = 120.0
_CONFIG = Config(max_silence_s=200.0)  # the node of the path that is not measured is not polled


class Case(NamedTuple):
    src_tp: int
    dst_tp: int
    run: int
    nbytes: int
    page: int = 16

    @property
    def tokens(self):
        return self.nbytes // (4 * LAYERS * HEAD_DIM * self.kv_heads)

    @property
    def kv_heads(self):
        return self.run // HEAD_NBYTES * self.src_tp

    def shape(self, tp, rank):
        n_pages = self.tokens // self.page
        return Shape(self.kv_heads, HEAD_DIM, LAYERS, self.page, n_pages + n_pages // 4 + 1, tp, rank)

    def pages(self, seed):
        shape = self.shape(1, 0)
        return np.random.default_rng(seed).permutation(shape.n_pages)[: self.tokens // self.page]


class RawEnd(Actor):
    """One end of the baseline: a transport and one region."""

    def open_raw(self, name, nbytes):
        self.raw = open_transport(name)
        self.memory = np.ones(nbytes, np.uint8)
        self.raw.register([Region(self.memory.ctypes.data, nbytes)])
        return self.raw.describe(), Region(self.memory.ctypes.data, nbytes)

    def connect_raw(self, description, region):
        self.raw.connect("raw", description)
        self.raw.prepare("raw", [region])
        self.target = region

    def write_raw(self):
        nbytes = self.target.nbytes
        spans = Spans(*(np.array([n], np.int64) for n in (self.memory.ctypes.data, self.target.base, nbytes)))
        start = time.perf_counter()
        self.raw.post("raw", spans, b"x")
        while not any(isinstance(event, Done) for event in self.raw.poll()):
            pass
        return time.perf_counter() - start

    def use(self, path):
        self.active = path

    def idle(self):
        node = self.nodes.get(self.active)
        if node is None:
            time.sleep(1e-3)
        else:
            node.turn(1e-3)

    def close(self):
        for path, node in self.nodes.items():
            node.close()
        if hasattr(self, "raw"):
            self.raw.close()


class Source(RawEnd):
    def __init__(self, case, rank, boots, transport, staging_nbytes, n_buffers):
        topology = Topology(tp_size=case.src_tp, tp_rank=rank)
        self.case = case
        self.pool = case.shape(case.src_tp, rank).pool()
        self.active = ""
        self.nodes = {
            path: PrefillNode(self.pool, topology, transport=transport, bootstrap=boots[path], path=path,
                staging_nbytes=staging_nbytes, n_buffers=n_buffers, config=_CONFIG) for path in boots}
        self.cpu = 0

    def offer(self, path, rooms, n):
        self.use(path)
        for r in rooms:
            s = self.nodes[path].send(r)
            pages = self.case.pages(r)
            tok = self.case.tokens
            per = -(-tok // n // 64) * 64
            for start in range(0, tok, per):
                s.chunk(pages, tokens=(start, min(tok, start + per)))
            s.finish()

    def stats(self, path):
        return self.nodes[path].stats()


class Sink(RawEnd):
    def __init__(self, case, rank, boots, transport, staging_nbytes, n_lanes):
        topology = Topology(tp_size=case.dst_tp, tp_rank=rank)
        self.case = case
        self.boots = boots
        self.pool = case.shape(case.dst_tp, rank).pool()
        self.active = ""
        self.nodes = {
            path: DecodeNode(self.pool, topology, transport=transport, path=path,
                staging_nbytes=staging_nbytes, n_lanes=n_lanes, config=_CONFIG) for path in boots}

    def pull(self, path, rooms):
        self.use(path)
        node = self.nodes[path]
        receivers = [node.receive(r, self.boots[path]) for r in rooms]
        pages = [self.case.pages(1000 + r) for r in rooms]
        while any(r.state < 2 for r in receivers):
            node.turn(1e-3)
        start = time.monotonic()
        for r, p in zip(receivers, pages):
            r.bind(p, tokens=self.case.tokens)
        for r in receivers:
            r.wait(WAIT_S)
        end = time.monotonic()
        for r in receivers:
            r.wait_released(WAIT_S)
        return start, end


class Bed:
    def __init__(self, case, transport, paths, staging=(64 << 20, 64 << 20), parts=(4, 2), raw=True, env=None):
        self.boot = {p: BootstrapServer().start() for p in paths}
        boots = {p: b.address for p, b in self.boot.items()}
        self.src = [Rank(Source, case, r, boots, transport, staging[0], parts[0], env=env) for r in range(case.src_tp)]
        self.dst = [Rank(Sink, case, r, boots, transport, staging[1], parts[1], env=env) for r in range(case.dst_tp)]
        for r in self.src + self.dst:
            r.ready()
        self.next = 0
        self.case = case
        if raw:
            a, ra = self.src[0].call("open_raw", transport, case.nbytes)
            b, rb = self.dst[0].call("open_raw", transport, case.nbytes)
            self.src[0].call("connect_raw", b, rb)
            self.dst[0].call("connect_raw", a, ra)

    def room(self, path, n_rooms=1, n=1):
        rooms = list(range(self.next, self.next + n_rooms))
        self.next += n_rooms
        for r in self.src: r.begin("offer", path, rooms, n)
        for r in self.src: r.result()
        for r in self.dst: r.begin("pull", path, rooms)
        spans = [r.result() for r in self.dst]
        return max(e for _, e in spans) - min(s for s, _ in spans)

    def raw(self):
        for r in self.src + self.dst: r.call("use", "")
        return self.src[0].call("write_raw")

    def close(self):
        for r in self.dst+self.src: r.close()
        for b in self.boot.values(): b.close()


if __name__ == "__main__":
    tr = sys.argv[1]
    sp, dp, run, mib, page = map(int, sys.argv[2:7])
    n = int(sys.argv[7]); stg=int(float(sys.argv[8])*(1<<20)); nb=int(sys.argv[9]); paths=sys.argv[10].split(",")
    case = Case(sp, dp, run, mib << 20, page)
    env = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"} if os.environ.get("TCP") else None
    bed = Bed(case, tr, paths, (stg, stg), (nb, 2), env=env)
    t = {p: [] for p in [*paths, "raw"]}
    for k in range(6):
        for p in paths:
            t[p].append(bed.room(p, 1, n))
        t["raw"].append(bed.raw())
    for p in paths:
        st = [r.call("stats", p) for r in bed.src]
        print(p, "desc", sum(s["descriptors"] for s in st), "chunks", sum(s["chunks_staged"]+s["chunks_direct"] for s in st))
    bed.close()
    for p in t: print(p, "median %.1f ms  %.2f GB/s"%(statistics.median(t[p][1:])*1e3, case.nbytes/statistics.median(t[p][1:])/1e9), [round(x*1e3,1) for x in t[p]])
