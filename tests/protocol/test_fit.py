"""Two engines whose state is not the same state are refused, in one sentence that names both, at every rank at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from pdstage import Axis, Key, Layout, PeerError, Region, RowLevel, State, Topology, View
from pdstage.protocol import messages as m
from pdstage.protocol.compat import incompatible
from tests.pair import Memory, World, assert_failed, assert_flat

REGION = Region(1 << 32, 1 << 20)
KV = View(
    key=Key("kv", "k", 0), region=0, offset=0, n_items=4, item_stride=1024, tokens_per_item=4, rows=(RowLevel(1, 256),),
    shards=2, shard_stride=128, width=128, axis=Axis("kv_head", 2, 0, 2), format="bf16",
)  # fmt: skip


def views(component: str = "kv", layers: Iterable[int] = (0, 1), roles: str = "kv", **change: object) -> list[View]:
    keys = [Key(component, role, layer) for role in roles for layer in layers]
    return [replace(KV, key=key, **change) for key in keys]  # type: ignore[arg-type]


def layout(*held: list[View], **kinds: tuple[str, ...]) -> Layout:
    return Layout.of([REGION], [view for views in held for view in views], **kinds)


WHOLE, STAGE = Topology(), Topology(pp_size=2)
SAME = layout(views())
MISFITS = {
    "head_dim": (SAME, layout(views(width=64)), "128 bytes a kv_head at prefill, 64 at decode"),
    "format": (SAME, layout(views(format="fp8_e4m3")), "format bf16 at prefill, fp8_e4m3 at decode"),
    "heads": (
        layout(views(axis=Axis("kv_head", 8, 0, 2))), SAME,
        "axis kv_head of 8 shards at prefill, kv_head of 2 at decode",
    ),
    "compression": (SAME, layout(views(rows=(RowLevel(4, 256),))), "a row covers 1 tokens at prefill, 4 at decode"),
    "positions": (
        layout(views(), slots=("kv",)), SAME,
        "component 'kv' has token positions at decode alone",
    ),
    "exact": (
        layout(views(), slots=("kv",), exact=("kv",)), layout(views(), slots=("kv",)),
        "component 'kv' takes unequal numbers of slots at decode alone",
    ),
    "fewer layers at prefill": (
        layout(views(layers=range(30))), layout(views(layers=range(32))),
        "'k' of component 'kv' has 30 layers at prefill and 32 at decode: no prefill rank has layer 30",
    ),
    "fewer layers at decode": (
        layout(views(layers=range(32))), layout(views(layers=range(30))),
        "'k' of component 'kv' has 32 layers at prefill and 30 at decode: no decode rank has layer 30",
    ),
    "as many layers, and others": (
        layout(views(layers=(0, 3))), layout(views(layers=(0, 4))),
        "'k' of component 'kv' has 2 layers at prefill and 2 at decode: no prefill rank has layer 4",
    ),
    "a component missing at prefill": (
        SAME, layout(views(), views("mamba")),
        "no prefill rank has component 'mamba': prefill has 'kv', decode 'kv' and 'mamba'",
    ),
    "a state kind unknown to decode": (
        layout(views(), views("rwkv"), slots=("rwkv",)), SAME,
        "no decode rank has component 'rwkv': prefill has 'kv' and 'rwkv', decode 'kv'",
    ),
    "a role missing": (
        layout(views(roles="k")), SAME,
        "no prefill rank has 'v' of component 'kv': prefill has 'k', decode 'k' and 'v'",
    ),
}  # fmt: skip


class Ranks(World):
    """Ranks of these layouts, each a stage of a pipeline where there are several. Nothing is ever moved."""

    def __init__(self, src: list[Layout], dst: list[Layout], models: tuple[dict[str, str], ...] = ({}, {})) -> None:
        self.layouts = {"P": src, "D": dst}
        facts = tuple(tuple(m.Fact(*fact) for fact in sorted(model.items())) for model in models)
        super().__init__(prefill=len(src), decode=len(dst), models=facts)

    def rank_of(self, side: str, rank: int) -> tuple[Memory, Layout, Topology]:
        held = self.layouts[side]
        return Memory(0), held[rank], Topology(pp_size=len(held), pp_rank=rank)


@pytest.mark.parametrize("what", MISFITS)
def test_a_misfit_is_refused_at_hello_and_both_nodes_hear_why(what: str) -> None:
    src, dst, words = MISFITS[what]
    older = Ranks([src], [dst])
    older.prefill[0].core.handshake._hello_problem = lambda _: ""  # type: ignore[method-assign]
    handle = older.announce(1)
    older.run()
    assert "a prefill rank does not fit" in str(handle.error), "prefill checks less, so decode looks for itself"
    assert words in str(handle.error)
    world = Ranks([src], [dst])
    handle = world.announce(1)
    world.run()
    assert world.now == 0.0
    assert handle.released
    assert_failed(handle, words, PeerError)
    assert str(handle.error).count("\n") == 0
    (warning,) = world.p.peer_warnings
    assert words in warning
    assert not world.p.core.sessions
    assert_flat(world)


LLAMA = {"name": "llama", "revision": "4f0c", "dtype": "bfloat16"}
OTHER_MODELS = {
    "another revision": (LLAMA, LLAMA | {"revision": "9a1d"}, "revision is '4f0c' at prefill and '9a1d' at decode"),
    "other weights of one name": (
        LLAMA | {"weights": "01"}, LLAMA | {"weights": "02"}, "weights is '01' at prefill and '02' at decode",
    ),
    "one folder's weights, read as another type": (
        LLAMA | {"weights": "01"}, LLAMA | {"weights": "01", "dtype": "float16"},
        "dtype is 'bfloat16' at prefill and 'float16' at decode",
    ),
}  # fmt: skip


@pytest.mark.parametrize("older", [False, True], ids=["at hello", "at welcome"])
@pytest.mark.parametrize("what", OTHER_MODELS)
def test_another_model_of_the_same_shape_is_refused(what: str, older: bool) -> None:
    """Its KV would fit, and mean nothing (vllm issue 55776)."""
    src, dst, words = OTHER_MODELS[what]
    world = Ranks([SAME], [SAME], models=(src, dst))
    if older:  # a prefill that checks less
        world.p.core.handshake._hello_problem = lambda _: ""  # type: ignore[method-assign]
    handle = world.announce(1)
    world.run()
    assert_failed(handle, f"the model's {words}")
    assert_flat(world)


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ({}, LLAMA),
        (LLAMA, {"quantization": "fp8"}),
        (LLAMA | {"weights": "01"}, LLAMA | {"weights": "01", "name": "/models/llama", "revision": "main"}),
    ],
    ids=["one says nothing", "nothing that both say", "the same weights in a folder of another name"],
)
def test_what_only_one_side_says_of_its_model_is_not_compared(src: dict[str, str], dst: dict[str, str]) -> None:
    world = Ranks([SAME], [SAME], models=(src, dst))
    handle = world.announce(1)
    world.run()
    assert handle.state is State.WAITING_FOR_INPUT


LAYERS = range(4)
FIRST, LAST = layout(views(layers=(0, 1))), layout(views(layers=(2, 3)), views("draft", (0,)))
ALL = layout(views(layers=LAYERS), views("draft", (0,)))


def test_a_stage_with_more_than_the_whole_other_side_is_a_misfit() -> None:
    without_draft = layout(views(layers=LAYERS))
    assert incompatible(FIRST, without_draft, STAGE, WHOLE) == ""
    words = "no decode rank has component 'draft': prefill has 'draft' and 'kv', decode 'kv'"
    assert incompatible(LAST, without_draft, STAGE, WHOLE) == words
    words = "no prefill rank has component 'draft': prefill has 'kv', decode 'draft' and 'kv'"
    assert incompatible(without_draft, LAST, WHOLE, STAGE) == words


SHORT = layout(views(layers=(2,)), views("draft", (0,)))
"""A last stage without layer 3."""


@pytest.mark.parametrize("submit_first", [True, False])
@pytest.mark.parametrize(
    ("src", "dst", "words"),
    [
        ([FIRST, SHORT], [ALL], "3 layers at prefill and 4 at decode: no prefill rank has layer 3"),
        ([ALL], [FIRST, SHORT], "4 layers at prefill and 3 at decode: no decode rank has layer 3"),
    ],
    ids=["prefill", "decode"],
)
def test_a_pipeline_without_a_layer_is_refused_and_each_stage_is_told(
    src: list[Layout], dst: list[Layout], words: str, submit_first: bool
) -> None:
    """Prefill's before Open. No stage of decode can see what the others lack; each prefill rank hears from all."""
    world = Ranks(src, dst)
    sent = [world.submit(1, rank) for rank in range(len(src))] if submit_first else []
    handles = [world.announce(1, rank) for rank in range(len(dst))]
    for node, handle in zip(world.decode, handles, strict=True):
        node.core.bind(handle, (m.Asked("kv", 0, 4),), {})
        world.carry(node)
    world.run()
    sent = sent or [world.submit(1, rank) for rank in range(len(src))]
    world.run()
    assert world.now == 0.0
    assert any("Open(" in line for line in world.log) is (len(dst) > 1)
    for room in (*sent, *handles):
        assert room.released
        assert_failed(room, f"'k' of component 'kv' has {words}")
    assert_flat(world)


def test_a_refusal_of_an_older_try_does_not_touch_a_room_that_its_rank_has_opened() -> None:
    """I6: the room's name was used again: whoever says that it will never open it means the try before."""
    world = World()
    handle = world.receive(1)
    out = world.submit(1)
    world.run()
    session = world.d.session
    world.d.core.endpoint.send(session, m.Abort(handle.epoch + 7, "no", False, b"i1"))
    world.carry(world.d)
    world.run()
    assert not out.ended
    world.chunk(out)
    world.finish(out)
    world.run()
    world.check(handle, 1)
