"""UCX's report of the lanes that it chose, and the environment that makes it report them.

With UCX_LOG_LEVEL=info, UCX 1.14 and later name the lanes of each endpoint: `NAME intra-node cfg#1 rma_am(tcp/lo)
am(tcp/lo cma/memory) ka(tcp/lo)`, each a transport and its device. With UCX_PROTO_INFO=y they also print a table for
each operation: of a put, `0..inf | zero-copy | 52% on tcp/lo and 48% on tcp/eth0`. The file is complete when its
process has ended.
"""

from __future__ import annotations

import re

LOG = {"UCX_LOG_LEVEL": "info"}
NETWORK_ONLY = "^sm,cuda_ipc"
"""UCX_TLS as between hosts: without shared memory and NVLink."""
_PUT = re.compile(r"remote memory write by ucp_put")
_ROW = re.compile(r"\| +\S+\.\.inf +\|[^|]*\|([^|]*)\|")
_DEVICE = re.compile(r"(?:(\d+)% on )?([a-z0-9_]+/[A-Za-z0-9_.-]+(?::\d+)?)")
_LINE = re.compile(r"(\S+) (?:intra|inter)-node cfg#\d+ (.*)")
_LANE = re.compile(r"([a-z0-9_]+)/[A-Za-z0-9_.:-]+")
_WAYS = {
    "tcp": ("tcp",),
    "shm": ("sysv", "posix", "cma", "xpmem", "knem"),
    "rdma": ("rc", "dc", "ud", "ib", "srd"),
    "cuda": ("cuda", "gdr"),
    "rocm": ("rocm",),
}


def lanes(log: str) -> list[str]:
    """The transports of the first worker's endpoints to other processes, in order, without repeats."""
    lines = _LINE.findall(log)
    return list(dict.fromkeys(lane for name, line in lines if name == lines[0][0] for lane in _LANE.findall(line)))


def ways(named: list[str]) -> list[str]:
    """The kinds of these lanes, in a fixed order: tcp, shm, rdma, cuda, rocm."""
    kinds = {lane.partition("_")[0] for lane in named}
    return [way for way, prefixes in _WAYS.items() if kinds & set(prefixes)]


def puts(log: str) -> dict[str, int]:
    """The devices of the first table of a put, for the largest sizes, each with its percentage of the bytes."""
    begin = _PUT.search(log)
    row = _ROW.search(log, begin.end()) if begin else None
    found: dict[str, int] = {}
    for share, device in _DEVICE.findall(row.group(1)) if row else ():
        found[device] = found.get(device, 0) + int(share or 100)  # a device with several paths has several shares
    return found
