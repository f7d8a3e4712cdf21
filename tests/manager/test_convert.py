"""bf16 on one side and fp8 on the other, over real nodes: what arrives is what decode would have made of plain bf16.

What each format is, to the bit and in every layout, tests/kernels/test_convert.py says.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from pdstage import Key, PeerError, Pool, State, Topology
from pdstage.kernels.convert_reference import decode, encode
from pdstage.layout import ALL_TOKENS, TokenShard
from pdstage.layout.topology import shard_range
from pdstage.plan.convert import Encoding, fp8_tensor, fp8_token_head, mxfp8, reformat
from pdstage.tensors import build, paged_hnd, paged_nhd
from tests.manager.engine import QUICK, TOKENS, drive
from tests.owners import held, with_owned

LAYERS, HEADS, DIM = 3, 4, 64
CONVERT = replace(QUICK, convert=True)
SCALES = {(role, layer): 0.01 * (layer + 1) + (role == "v") for role in "kv" for layer in range(LAYERS)}
BF16 = dict.fromkeys(SCALES, "bf16")
TENSOR = {where: fp8_tensor(scale, "bf16" if where[1] == 2 else "divide") for where, scale in SCALES.items()}
MX_APART = dict.fromkeys(SCALES, mxfp8(part="data"))
KINDS = {
    "tensor": (TENSOR, None),
    "token_head": (dict.fromkeys(SCALES, fp8_token_head()), None),
    "mx": (dict.fromkeys(SCALES, mxfp8()), None),
    "token_head_apart": (dict.fromkeys(SCALES, fp8_token_head(part="data")), fp8_token_head),
    "mx_apart": (MX_APART, mxfp8),
    "some_layers_alone": (MX_APART | {("k", 0): "bf16", ("v", 0): "bf16"}, mxfp8),
}
"""The formats of K and V by layer, and what makes those of scales that are views of their own."""


def truth():
    """The room's bf16 values by (role, layer): `[tokens, heads, dim]`, of all magnitudes that caches have and a NaN."""
    generator = torch.manual_seed(5)
    values = {where: torch.randn(TOKENS, HEADS, DIM, generator=generator) * 3 for where in SCALES}
    values["k", 0][3, 1, 7] = float("nan")
    values["v", 2][5] = 0
    return {where: value.bfloat16() for where, value in values.items()}


TRUTH = truth()


def coded(formats, where):
    """`[tokens, heads, bytes]` of a view of a pool in `formats`: data, or the scales of the role it is named after."""
    role = where[0].removesuffix("_scale")
    values, encoding = TRUTH[role, where[1]], Encoding.parse(formats[role, where[1]])
    if encoding is None:
        return values.view(torch.uint8)
    part = "scale" if role != where[0] else encoding.part
    return encode(replace(encoding, part=part), values.reshape(-1, DIM)).reshape(TOKENS, HEADS, -1)


def decoded(formats, where):
    """What comes of that at a peer in bf16."""
    encoding = Encoding.parse(formats[where])
    if encoding is None:
        return coded(formats, where)
    views = [where] + [(f"{where[0]}_scale", where[1])] * (encoding.part == "data")
    values = decode(encoding, *(coded(formats, view).reshape(TOKENS * HEADS, -1) for view in views))
    return values.view(torch.uint8).reshape(TOKENS, HEADS, -1)


class Rank:
    """K and V of one rank, in the formats given by (role, layer); with `apart` scales are views of their own.

    With `owned` it is one of context parallelism, which holds those tokens.
    """

    def __init__(self, tp, rank, formats, apart=None, *, page=4, hnd=False, owned=ALL_TOKENS):
        self.heads = range(*shard_range(HEADS, tp, rank))
        self.topology = Topology(tp_size=tp, tp_rank=rank, cp_size=owned.size, cp_rank=owned.rank)
        self.formats, self.hnd, self.page, self.tokens = formats, hnd, page, held(owned, TOKENS)
        self.stored, self.views = {}, {}
        parts = [self._part(formats, "")]
        if apart:
            scales = {(role, layer): apart(part="scale", of=role) for role, layer in formats}
            parts.append(self._part({w: scales[w] for w in formats if formats[w] != "bf16"}, "_scale"))
        self.pool = Pool.of(with_owned(reformat(build(*parts), self.views), owned), keep=self.stored)
        self.pages = np.random.default_rng(rank).permutation(40)[: -(-len(self.tokens) // page)]

    def _part(self, formats, suffix):
        """Tensors of these views, named with `suffix`."""
        n, layers = len(self.heads), sorted({layer for _, layer in formats})
        for (role, layer), format in formats.items():
            encoding, name = Encoding.parse(format), f"{role}{suffix}"
            shape = (40, n, self.page) if self.hnd else (40, self.page, n)
            self.stored[name, layer] = np.zeros((*shape, encoding.nbytes(DIM) if encoding else 2 * DIM), np.uint8)
            self.views[Key("kv", name, layer)] = format
        tensors = [[self.stored[f"{role}{suffix}", layer] for layer in layers] for role in "kv"]
        place = self.topology.tp_size, self.topology.tp_rank
        part = (paged_hnd if self.hnd else paged_nhd)(*tensors, total_heads=HEADS, tp=place, layers=layers)
        views = [replace(v, key=v.key._replace(role=f"{v.key.role}{suffix}")) for v in part.views]
        return replace(part, views=views)

    def cells(self, where):
        """`[tokens, heads, bytes]` of the room's pages."""
        stored = self.stored[where][self.pages]
        stored = stored.swapaxes(1, 2) if self.hnd else stored
        return stored.reshape(-1, len(self.heads), stored.shape[-1])[: len(self.tokens)]

    def fill(self):
        """Writes what this rank computed."""
        for where in self.stored:
            cells = coded(self.formats, where)[:, self.heads.start : self.heads.stop].numpy()
            rows = np.zeros((len(self.pages) * self.page, *cells.shape[1:]), np.uint8)
            rows[: len(self.tokens)] = cells[self.tokens]
            rows = rows.reshape(len(self.pages), self.page, *cells.shape[1:])
            self.stored[where][self.pages] = rows.swapaxes(1, 2) if self.hnd else rows


def transfer(site, src, dst, config=CONVERT, **options):
    """The room from all of `src` to all of `dst`; the nodes of each side."""
    options = {"path": "staged", "config": config} | options
    ps, ds = [site.prefill(rank, **options) for rank in src], [site.decode(rank, **options) for rank in dst]
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
            cells = want(where).numpy()[rank.tokens, rank.heads.start : rank.heads.stop]
            np.testing.assert_array_equal(rank.cells(where), cells, err_msg=str(where))


def refusal(site, src, dst, at_prefill=CONVERT, at_decode=CONVERT):
    """With what words a room from `src` to `dst` fails."""
    ps = [site.prefill(rank, path="staged", config=at_prefill) for rank in src]
    receiver = site.decode(dst, path="staged", config=at_decode).receive("room", site.address)
    receiver.bind(dst.pages, TOKENS)
    site.ends(receiver)
    assert isinstance(receiver.error, PeerError)
    assert any(node.stats()["sessions_refused"] for node in ps)
    return str(receiver.error)


WHOLE = [((4, 1, 0), (2, 1, 0)), ((2, 1, 0), (4, 1, 0)), ((1, 1, 0), (4, 1, 0)), ((2 * HEADS, 1, 0), (1, 1, 0))]
PARTS = [((1, 2, 1), (1, 1, 0)), ((1, 1, 0), (1, 2, 4)), ((1, 2, 8), (1, 4, 1))]
"""Both sides: TP, CP, and tokens of a block."""
CASES = [*product(KINDS, WHOLE, [False]), *product(["mx_apart"], PARTS, [False, True])]


@pytest.mark.parametrize("to_fp8", [True, False])
@pytest.mark.parametrize(("kind", "sides", "hnd"), CASES)
def test_it_is_converted_as_it_is_gathered_or_scattered_and_half_the_bytes_cross(site, kind, sides, hnd, to_fp8):
    """Data and scales of a layer come of one writer, also where ranks hold the same heads or different tokens."""
    formats, apart = KINDS[kind]
    held = [(BF16, None), (formats, apart)] if to_fp8 else [(formats, apart), (BF16, None)]
    src, dst = (
        [
            Rank(tp, rank, *what, page=page, hnd=hnd or page == 8, owned=TokenShard(cp, part, block))
            for rank, part in product(range(tp), range(cp))
        ]
        for (tp, cp, block), what, page in zip(sides, held, (4, 8), strict=True)
    )
    receivers, ps, ds = transfer(site, src, dst, replace(CONVERT, checksums=True))
    check(dst, receivers, lambda where: (coded if to_fp8 else decoded)(formats, where))
    plain = 2 * LAYERS * TOKENS * HEADS * DIM * 2
    if sides in WHOLE and kind != "some_layers_alone":
        assert plain / 2 <= sum(node.stats()["bytes_written"] for node in ps) < 0.65 * plain
    assert all(session.checksums for node in ds for session in node.core.sessions.values())
    assert all(node.stats()["chunks_altered"] == 0 for node in ds)


def test_the_plans_of_a_session_go_with_it(site):
    """Its layouts are its own, so no other session would ever ask for them (I14)."""
    _, (p,), (d,) = transfer(site, [Rank(1, 0, BF16)], [Rank(1, 0, TENSOR)])
    assert p.stager._plans
    assert d.stager._plans
    for session in list(p.core.sessions.values()):
        p.core.lose(session, PeerError("gone", remedy="none"))
    drive(site.nodes, lambda: not p.stager._plans and not d.stager._plans)


@pytest.mark.parametrize("path", ["direct", "auto"])
def test_no_path_but_the_staged_one_converts(site, path):
    src, dst = Rank(1, 0, BF16), Rank(1, 0, TENSOR)
    receivers, (p,), _ = transfer(site, [src], [dst], path=path)
    check([dst], receivers, lambda where: coded(TENSOR, where))
    assert p.stats()["chunks_direct"] == 0
    assert p.stats()["chunks_staged"] > 0


@pytest.mark.parametrize("who", ["prefill", "decode", "nobody"])
def test_unless_both_sides_offer_it_other_formats_are_refused(site, who):
    configs = (CONVERT if who == "prefill" else QUICK), (CONVERT if who == "decode" else QUICK)
    said = refusal(site, [Rank(1, 0, BF16)], Rank(1, 0, TENSOR), *configs)
    assert "format bf16 at prefill, fp8_e4m3:tensor:0x1.47ae14" in said
    assert "set Config.convert" in said


REFUSED = {
    "an fp8 format that names no scale": (BF16, dict.fromkeys(SCALES, "fp8_e4m3"), "fp8_e4m3 at decode"),
    "another scale": (TENSOR, dict.fromkeys(SCALES, fp8_tensor(7.0)), "format fp8_e4m3:tensor:"),
    "data without its scales": (BF16, MX_APART, "mx32:floor:data at decode"),
    "int8": (BF16, dict.fromkeys(SCALES, "int8"), "int8 at decode"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused_naming_both_formats(site, case):
    ours, theirs, words = REFUSED[case]
    said = refusal(site, [Rank(1, 0, ours)], Rank(1, 0, theirs))
    assert words in said
    assert "at prefill" in said
    assert "Config.convert" not in said


@pytest.mark.parametrize("kind", ["mx", "mx_apart"])
def test_cut_pages_of_unequal_strides_decode_no_scales_in_views_of_their_own(site, kind):
    src = [Rank(1, 0, *KINDS[kind], page=8, owned=TokenShard(2, rank, 1)) for rank in range(2)]
    dst = Rank(1, 0, BF16, page=8)
    padded = np.zeros((40, 11, HEADS, 2 * DIM), np.uint8)
    dst.stored["k", 1] = padded[:, :8]
    k, v = ([dst.stored[role, layer] for layer in range(LAYERS)] for role in "kv")
    layout = build(paged_nhd(k, v, total_heads=HEADS, tp=(1, 0)))
    dst.pool = Pool.of(reformat(layout, dict.fromkeys(layout.by_key(), "bf16")), keep=dst.stored)
    if kind == "mx_apart":
        said = refusal(site, src, dst)
        assert "mx32:floor:data at prefill, bf16 at decode" in said
        assert "pages of unequal strides" in said
    else:
        receivers, *_ = transfer(site, src, [dst])
        check([dst], receivers, lambda where: decoded(KINDS[kind][0], where))
