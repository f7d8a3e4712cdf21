"""bf16 on one side and fp8 on the other, over real nodes: what arrives is what decode would have made of plain bf16."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pdstage import Key, Pool, Region, RowLevel, State, Topology, View, native
from pdstage.errors import PeerError, UsageError
from pdstage.kernels.convert_reference import decode, encode
from pdstage.layout import ALL_TOKENS, TokenShard
from pdstage.layout.topology import shard_range
from pdstage.plan.convert import Encoding, fp8_tensor, fp8_token_head, mxfp8, reformat
from pdstage.tensors import Part, build, paged_hnd, paged_nhd, sglang_mha, vllm_blocks
from tests.manager.engine import QUICK, drive
from tests.owners import held, with_owned

pytestmark = pytest.mark.skipif(native.ext is None, reason="host code converts with the extension only")
LAYERS, HEADS, DIM, TOKENS = 3, 4, 64, 37
CONVERT = replace(QUICK, convert=True)
SCALES = {(role, layer): 0.01 * (layer + 1) + (role == "v") for role in "kv" for layer in range(LAYERS)}
BF16 = dict.fromkeys(SCALES, "bf16")
TENSOR = {where: fp8_tensor(scale, "bf16" if where[1] == 2 else "divide") for where, scale in SCALES.items()}
INLINE = {"tensor": TENSOR, "token_head": dict.fromkeys(SCALES, fp8_token_head()), "mx": dict.fromkeys(SCALES, mxfp8())}


def truth():
    """The room's bf16 values by (role, layer): `[tokens, heads, dim]`, of all magnitudes that caches have and a NaN."""
    generator = torch.manual_seed(5)
    values = {where: torch.randn(TOKENS, HEADS, DIM, generator=generator) * 3 for where in SCALES}
    values["k", 0][3, 1, 7] = float("nan")
    values["v", 2][5] = 0
    return {where: value.bfloat16() for where, value in values.items()}


TRUTH = truth()


def coded(formats, where, part=""):
    """What decode would make of plain bf16: `[tokens, heads, bytes]`; of a view's scales alone with `part`."""
    encoding = Encoding.parse(formats[where])
    if encoding is None:
        return TRUTH[where].view(torch.uint8)
    encoding = replace(encoding, part=part) if part else encoding
    return encode(encoding, TRUTH[where].reshape(-1, DIM)).reshape(TOKENS, HEADS, -1)


class Rank:
    """K and V of one rank, in the formats given by (role, layer); with `apart` scales are views of their own.

    With `owned` it is one of context parallelism, which holds those tokens.
    """

    def __init__(self, tp, rank, formats, *, page=4, hnd=False, apart=None, owned=ALL_TOKENS):
        self.heads = range(*shard_range(HEADS, tp, rank))
        self.topology = Topology(tp_size=tp, tp_rank=rank, cp_size=owned.size, cp_rank=owned.rank)
        self.formats, self.hnd, self.page, self.tokens = formats, hnd, page, held(owned, TOKENS)
        n, make = len(self.heads), paged_hnd if hnd else paged_nhd
        shape = (40, n, page) if hnd else (40, page, n)
        self.stored, views = {}, {}
        for where, format in formats.items():
            encoding = Encoding.parse(format)
            self.stored[where] = np.zeros((*shape, encoding.nbytes(DIM) if encoding else 2 * DIM), np.uint8)
            views[Key("kv", *where)] = format
        parts = [
            make(*([self.stored[role, i] for i in range(LAYERS)] for role in "kv"), total_heads=HEADS, tp=(tp, rank))
        ]
        if apart:
            names = {role: f"{role}_scale" for role in "kv"}
            coded_layers = [i for i in range(LAYERS) if formats["k", i] != "bf16"]
            for role, layer in [(role, layer) for role in "kv" for layer in coded_layers]:
                scales = apart(part="scale", of=role)
                self.stored[names[role], layer] = np.zeros((*shape, Encoding.parse(scales).nbytes(DIM)), np.uint8)
                views[Key("kv", names[role], layer)] = scales
            part = make(
                *([self.stored[names[role], i] for i in coded_layers] for role in "kv"),
                total_heads=HEADS,
                tp=(tp, rank),
                layers=coded_layers,
            )
            parts.append(
                replace(part, views=[replace(v, key=v.key._replace(role=names[v.key.role])) for v in part.views])
            )
        self.pool = Pool.of(with_owned(reformat(build(*parts), views), owned), keep=self.stored)
        self.pages = np.random.default_rng(rank).permutation(40)[: -(-len(self.tokens) // page)]

    def cells(self, where):
        """`[tokens, heads, bytes]` of the room's pages."""
        stored = self.stored[where][self.pages]
        stored = stored.swapaxes(1, 2) if self.hnd else stored
        return stored.reshape(-1, len(self.heads), stored.shape[-1])[: len(self.tokens)]

    def write(self, where, cells):
        rows = np.zeros((len(self.pages) * self.page, *cells.shape[1:]), np.uint8)
        rows[: len(self.tokens)] = cells[self.tokens]
        rows = rows.reshape(len(self.pages), self.page, *cells.shape[1:])
        self.stored[where][self.pages] = rows.swapaxes(1, 2) if self.hnd else rows

    def fill(self):
        """Writes what this rank computed; its scales too where they are views of their own."""
        for where in self.stored:
            role = where[0].removesuffix("_scale")
            part = "scale" if role != where[0] else ""
            found = coded(self.formats, (role, where[1]), part)
            self.write(where, found[:, self.heads.start : self.heads.stop].numpy())


def transfer(site, src, dst, config=CONVERT, **options):
    """The room from all of `src` to all of `dst`; the nodes of each side."""
    ps = [site.prefill(rank, **{"path": "staged", "config": config} | options) for rank in src]
    ds = [site.decode(rank, **{"path": "staged", "config": config} | options) for rank in dst]
    receivers = [node.receive("room", site.address) for node in ds]
    for receiver, rank in zip(receivers, dst, strict=True):
        receiver.bind(rank.pages, TOKENS)
    senders = []
    for rank, node in zip(src, ps, strict=True):
        rank.fill()
        senders.append(node.send("room"))
        senders[-1].chunk(rank.pages, 20)
        senders[-1].chunk(rank.pages, (20, TOKENS))
        senders[-1].finish()
    drive(site.nodes, lambda: all(handle.released for handle in (*receivers, *senders)))
    return receivers, ps, ds


def check(dst, receivers, want):
    for rank, receiver in zip(dst, receivers, strict=True):
        assert receiver.wait(0) is State.SUCCESS
        for where in rank.stored:
            heads = slice(rank.heads.start, rank.heads.stop)
            np.testing.assert_array_equal(rank.cells(where), want(where)[rank.tokens, heads], err_msg=str(where))


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("kind", INLINE)
@pytest.mark.parametrize(("src_tp", "dst_tp"), [(4, 2), (1, 4)])
def test_bf16_becomes_fp8_while_it_is_gathered_and_half_the_bytes_cross(site, kind, src_tp, dst_tp, checksums):
    formats, config = INLINE[kind], replace(CONVERT, checksums=checksums)
    src = [Rank(src_tp, rank, BF16, hnd=True) for rank in range(src_tp)]
    dst = [Rank(dst_tp, rank, formats, page=16) for rank in range(dst_tp)]
    receivers, ps, ds = transfer(site, src, dst, config)
    check(dst, receivers, lambda where: coded(formats, where).numpy())
    crossed = sum(node.stats()["bytes_written"] for node in ps)
    plain = 2 * LAYERS * TOKENS * HEADS * DIM * 2
    most = plain / 2 * Encoding.parse(formats["k", 0]).nbytes(DIM) / DIM
    assert most <= crossed < most * 1.15  # views begin at multiples of 128 bytes
    assert all(session.checksums is checksums for node in ds for session in node.core.sessions.values())
    assert all(node.stats()["chunks_altered"] == 0 for node in ds)


@pytest.mark.parametrize("kind", INLINE)
@pytest.mark.parametrize(("src_tp", "dst_tp"), [(4, 2), (2, 4)])
def test_fp8_becomes_bf16_while_it_is_scattered(site, kind, src_tp, dst_tp):
    formats = INLINE[kind]
    src = [Rank(src_tp, rank, formats) for rank in range(src_tp)]
    dst = [Rank(dst_tp, rank, BF16, page=16, hnd=True) for rank in range(dst_tp)]
    receivers, ps, _ = transfer(site, src, dst, replace(CONVERT, checksums=True))

    def want(where):
        values = decode(Encoding.parse(formats[where]), coded(formats, where).reshape(TOKENS * HEADS, -1))
        return values.view(torch.uint8).reshape(TOKENS, HEADS, -1).numpy()

    check(dst, receivers, want)
    assert sum(node.stats()["bytes_written"] for node in ps) < 2 * LAYERS * TOKENS * HEADS * DIM * 1.35


@pytest.mark.parametrize("to_fp8", [True, False])
@pytest.mark.parametrize("apart", [fp8_token_head, mxfp8])
def test_scales_in_views_of_their_own_come_of_the_same_source_view(site, apart, to_fp8):
    formats = dict.fromkeys(SCALES, apart(part="data"))
    plain = [Rank(2, rank, BF16) for rank in range(2)]
    fp8 = [Rank(4, rank, formats, page=8, apart=apart) for rank in range(4)]
    src, dst = (plain, fp8) if to_fp8 else (fp8, plain)
    receivers, *_ = transfer(site, src, dst, replace(CONVERT, checksums=True))
    check(dst, receivers, lambda where: (apart_cells if to_fp8 else decoded_cells)(formats, where))


def test_data_and_scales_come_of_one_writer_where_some_layers_have_no_scales(site):
    """Ranks that hold the same heads take layers in turn: by their place in the model, not among those with scales."""
    formats = dict.fromkeys(SCALES, mxfp8(part="data")) | {("k", 0): "bf16", ("v", 0): "bf16"}
    src = [Rank(2 * HEADS, rank, formats, page=8, apart=mxfp8) for rank in range(2 * HEADS)]
    dst = [Rank(1, 0, BF16)]
    receivers, *_ = transfer(site, src, dst)

    def want(where):
        return TRUTH[where].view(torch.uint8).numpy() if where[1] == 0 else decoded_cells(formats, where)

    check(dst, receivers, want)


def apart_cells(formats, where):
    """What a pool with scales apart has at a place: data, or the scales of the role that the place is named after."""
    role = where[0].removesuffix("_scale")
    return coded(formats, (role, where[1]), "scale" if role != where[0] else "").numpy()


def decoded_cells(formats, where):
    data, scales = (
        torch.from_numpy(apart_cells(formats, (role, where[1]))) for role in (where[0], f"{where[0]}_scale")
    )
    values = decode(Encoding.parse(formats[where]), *(c.reshape(TOKENS * HEADS, -1) for c in (data, scales)))
    return values.view(torch.uint8).reshape(TOKENS, HEADS, -1).numpy()


@pytest.mark.parametrize("to_fp8", [True, False])
@pytest.mark.parametrize(("src_by", "dst_by"), [((2, 1), (1, 0)), ((1, 0), (2, 4)), ((2, 8), (4, 1))])
@pytest.mark.parametrize("hnd", [False, True])
def test_ranks_that_hold_different_tokens_convert_too(site, src_by, dst_by, hnd, to_fp8):
    formats = dict.fromkeys(SCALES, mxfp8(part="data"))

    def side(by, fp8):
        given = {"apart": mxfp8} if fp8 else {}
        ranks = [TokenShard(by[0], rank, by[1]) for rank in range(by[0])]
        return [Rank(1, 0, formats if fp8 else BF16, page=8, hnd=hnd, owned=owned, **given) for owned in ranks]

    src, dst = side(src_by, not to_fp8), side(dst_by, to_fp8)
    receivers, *_ = transfer(site, src, dst, replace(CONVERT, checksums=True))
    check(dst, receivers, lambda where: (apart_cells if to_fp8 else decoded_cells)(formats, where))


def test_the_plans_of_a_session_go_with_it(site):
    """Its layouts are its own, so no other session would ever ask for them (I14)."""
    _, (p,), (d,) = transfer(site, [Rank(1, 0, BF16)], [Rank(1, 0, TENSOR)])
    assert p.stager._plans
    assert d.stager._plans
    for session in list(p.core.sessions.values()):
        p.core.lose(session, PeerError("gone", remedy="none"), time.monotonic())
    drive(site.nodes, lambda: not p.stager._plans and not d.stager._plans)


@pytest.mark.parametrize("path", ["direct", "auto"])
def test_no_path_but_the_staged_one_converts(site, path):
    src, dst = Rank(1, 0, BF16), Rank(1, 0, TENSOR)
    receivers, (p,), _ = transfer(site, [src], [dst], path=path)
    check([dst], receivers, lambda where: coded(TENSOR, where).numpy())
    assert p.stats()["chunks_direct"] == 0
    assert p.stats()["chunks_staged"] > 0


@pytest.mark.parametrize("who", ["prefill", "decode", "nobody"])
def test_unless_both_sides_offer_it_other_formats_are_refused(site, who):
    src, dst = Rank(1, 0, BF16), Rank(1, 0, TENSOR)
    p = site.prefill(src, path="staged", config=CONVERT if who == "prefill" else QUICK)
    d = site.decode(dst, path="staged", config=CONVERT if who == "decode" else QUICK)
    receiver = d.receive("room", site.address)
    receiver.bind(dst.pages, TOKENS)
    drive(site.nodes, lambda: receiver.released)
    with pytest.raises(
        PeerError, match=r"format bf16 at prefill, fp8_e4m3:tensor:0x1.47ae14.* at decode; .* set Config.convert"
    ):
        receiver.wait(0)
    assert p.stats()["sessions_refused"] >= 1  # a greeting is repeated while its answer is on the way


REFUSED = {
    "an fp8 format that names no scale": (BF16, dict.fromkeys(SCALES, "fp8_e4m3"), "format bf16 .* fp8_e4m3 at decode"),
    "another scale": (TENSOR, dict.fromkeys(SCALES, fp8_tensor(7.0)), "format fp8_e4m3:tensor:.* at prefill"),
    "data without its scales": (BF16, dict.fromkeys(SCALES, mxfp8(part="data")), "mx32:floor:data at decode"),
    "int8": (BF16, dict.fromkeys(SCALES, "int8"), "int8 at decode"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused_naming_both_formats(site, case):
    ours, theirs, words = REFUSED[case]
    src, dst = Rank(1, 0, ours), Rank(1, 0, theirs)
    site.prefill(src, path="staged", config=CONVERT)
    receiver = site.decode(dst, path="staged", config=CONVERT).receive("room", site.address)
    receiver.bind(dst.pages, TOKENS)
    drive(site.nodes, lambda: receiver.released)
    with pytest.raises(PeerError, match=words) as caught:
        receiver.wait(0)
    assert "Config.convert" not in str(caught.value)


@pytest.mark.parametrize("apart", [None, mxfp8])
def test_cut_pages_of_unequal_strides_decode_no_scales_in_views_of_their_own(site, apart):
    formats = dict.fromkeys(SCALES, mxfp8(part="data") if apart else mxfp8())
    src = [Rank(1, 0, formats, page=8, apart=apart, owned=TokenShard(2, rank, 1)) for rank in range(2)]
    dst = Rank(1, 0, BF16, page=8)
    padded = np.zeros((40, 11, HEADS, 2 * DIM), np.uint8)
    k = [dst.stored["k", 0], padded[:, :8], dst.stored["k", 2]]
    v = [dst.stored["v", layer] for layer in range(LAYERS)]
    dst.stored["k", 1] = k[1]
    layout = build(paged_nhd(k, v, total_heads=HEADS, tp=(1, 0)))
    dst.pool = Pool.of(reformat(layout, dict.fromkeys(layout.by_key(), "bf16")), keep=dst.stored)
    if not apart:
        receivers, *_ = transfer(site, src, [dst])
        assert receivers[0].wait(0) is State.SUCCESS
        return
    for rank in src:
        site.prefill(rank, path="staged", config=CONVERT)
    receiver = site.decode(dst, path="staged", config=CONVERT).receive("room", site.address)
    receiver.bind(dst.pages, TOKENS)
    drive(site.nodes, lambda: receiver.released)
    with pytest.raises(PeerError, match="mx32:floor:data at prefill, bf16 at decode.* pages of unequal strides"):
        receiver.wait(0)


def test_a_pool_that_cannot_convert_says_so_at_once(site, monkeypatch):
    monkeypatch.setattr(native, "ext", None)
    with pytest.raises(UsageError, match="cannot be converted here.*needs the extension"):
        site.decode(Rank(1, 0, BF16), config=CONVERT)


# The pools that engines have, written by their own rules: an emulator of each, independent of the library.

PAGES = [3, 1, 6]
N_PAGES, LONG = 8, 300


def prompt():
    values = (
        torch.randn(2, LONG, HEADS, 128, generator=torch.manual_seed(11)) * torch.logspace(-4, 3, LONG)[:, None, None]
    )
    values[0, 7] = 0
    return values.bfloat16()


def bf16_site(site, values):
    """A prefill node that keeps `values` as SGLang's bf16 pool does, with pages of 64; and its sender's chunk."""
    k, v = (torch.zeros(N_PAGES * 64, HEADS, 128, dtype=torch.bfloat16) for _ in "kv")
    pages = np.array([5, 0, 2, 7, 1])
    for t in range(LONG):
        slot = pages[t // 64] * 64 + t % 64
        k[slot], v[slot] = values[0, t], values[1, t]
    pool = Pool.of(build(sglang_mha([k], [v], page_size=64, total_heads=HEADS, tp=(1, 0))), keep=(k, v))
    return site.prefill(SimpleNamespace(pool=pool, topology=Topology()), config=CONVERT), pages


def send_to(site, layout, keep, into):
    """Sends the prompt into items `into` of a decode rank's pool; its values, `[k or v, token, head, 128]`."""
    values = prompt()
    p, pages = bf16_site(site, values)
    d = site.decode(SimpleNamespace(pool=Pool.of(layout, keep=keep), topology=Topology()), config=CONVERT)
    receiver, sender = d.receive("room", site.address), p.send("room")
    receiver.bind(into, LONG)
    sender.chunk(pages, LONG)
    sender.finish()
    drive(site.nodes, lambda: receiver.released and sender.released)
    assert receiver.wait(0) is State.SUCCESS
    return values.float().numpy()


def test_sglangs_mxfp8_pool_with_interleaved_scales(site):
    """SGLang 0.5.23, MHATokenToKVPoolMXFP8 and kernels/ops/kvcache/mxfp8_quant_store_kv.py, pages of 128."""
    data = [np.zeros((N_PAGES * 128, HEADS, 128), np.uint8) for _ in "kv"]
    scales = [np.zeros((N_PAGES, HEADS, 32, 4, 4), np.uint8) for _ in "kv"]
    part = sglang_mha(data[:1], data[1:], page_size=128, total_heads=HEADS, tp=(1, 0), format=mxfp8("ceil", "data"))
    regions = [Region(one.ctypes.data, one.nbytes) for one in scales]
    views = [
        View(
            key=Key("kv", f"{role}_scale", 0), region=number, offset=0, n_items=N_PAGES, item_stride=HEADS * 512,
            tokens_per_item=128, rows=(RowLevel(32, 4), RowLevel(1, 16)), shards=HEADS, shard_stride=512, width=4,
            axis=part.views[0].axis, format=mxfp8("ceil", "scale", role),
        )
        for number, role in enumerate("kv")
    ]  # fmt: skip
    values = send_to(site, build(part, Part(tuple(regions), tuple(views))), (data, scales), PAGES)
    want_data, want_scales = ([np.zeros_like(one) for one in many] for many in (data, scales))
    for i, t, head in np.ndindex(2, LONG, HEADS):
        slot = PAGES[t // 128] * 128 + t % 128
        x = values[i, t, head].reshape(4, 32)
        amax = np.maximum(np.abs(x).max(1), np.float32(1e-30))
        byte = np.clip(np.ceil(np.log2(amax.astype(np.float64) / 448)) + 127, 0, 254)
        scaled = np.clip(x / np.exp2(byte - 127)[:, None], -448, 448).reshape(-1)
        want_data[i][slot, head] = torch.from_numpy(scaled).float().to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        want_scales[i][slot // 128, head, t % 128 % 32, t % 128 // 32] = byte
    for found, want in zip((*data, *scales), (*want_data, *want_scales), strict=True):
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
def test_vllms_blocks_with_a_scale_behind_each_heads_keys_and_values(site, order):
    """vLLM 0.33, fp8_per_token_head: `[K | K's scale | V | V's scale]` a head and slot, in either memory order."""
    shape = (N_PAGES * 8, HEADS, 16, 264) if order == "LBHNC" else (N_PAGES * 8, 16, HEADS, 264)
    memory = np.zeros(shape, np.uint8)
    cache = memory if order == "LBHNC" else memory.swapaxes(1, 2)
    layout = build(vllm_blocks([cache], total_heads=HEADS, tp=(1, 0), format=fp8_token_head()))
    blocks = np.random.default_rng(2).permutation(N_PAGES * 8)[: -(-LONG // 16)]
    values = send_to(site, layout, memory, blocks)
    want = np.zeros_like(memory)
    logical = want if order == "LBHNC" else want.swapaxes(1, 2)
    for i, t, head in np.ndindex(2, LONG, HEADS):
        x = values[i, t, head]
        scale = np.maximum(np.abs(x).max() / np.float32(448), np.float32(1e-6))
        stored = torch.from_numpy(np.clip(x * (np.float32(1) / scale), -448, 448)).to(torch.float8_e4m3fn)
        cell = np.r_[stored.view(torch.uint8).numpy(), np.frombuffer(scale.tobytes(), np.uint8)]
        logical[blocks[t // 16], head, t % 16, i * 132 : (i + 1) * 132] = cell
    np.testing.assert_array_equal(memory, want)
