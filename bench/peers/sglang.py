"""SGLang's Triton gather and scatter beside ours.

One file of SGLang's package is loaded, sglang/srt/disaggregation/common/staging_buffer.py: from the installed package,
or from the path in PDSTAGE_SGLANG (the file, or a folder with it). Its imports of sglang are stubbed, so neither an
engine nor its dependencies are needed. Its functions as of 0.5.23: `gather_all_layers_to_staging`,
`scatter_staging_to_kv`, `StagingBuffer`.

Both of its functions build tables and, when gathering, wait for the stream. So its kernels are timed separately: a
call's launches are recorded once, and then only they are repeated. `pdstage.integrations.sglang.staging`, which
replaces both functions, is called with their own arguments, and timed as whole calls.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pdstage import environment
from pdstage.bench import curves, shapes
from pdstage.bench.gpu_kernels import Case, model_case
from pdstage.bench.harness import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdstage.bench.bed import Bed, Work

FILE = Path("srt/disaggregation/common/staging_buffer.py")
TARGET = 1.5
DROP_IN = "in its place"
PAIRS = tuple(pair for pair in shapes.PAIRS if pair.model in (shapes.LLAMA_70B, shapes.QWEN3_235B))


def find() -> Path | None:
    """The file, from PDSTAGE_SGLANG or the installed package; None if neither is there."""
    path = environment.SGLANG.read()
    if path is not None:
        if path.is_file():
            return path
        return next(iter(sorted(path.rglob(FILE.name))), None)
    spec = importlib.util.find_spec("sglang")
    places = (spec.submodule_search_locations or []) if spec else []
    return next((path for place in places if (path := Path(place) / FILE).is_file()), None)


class Launchable(Protocol):
    """A Triton kernel: `kernel[grid](*args)` launches it."""

    def __getitem__(self, grid: object) -> Callable[..., object]: ...


class Recorded:
    """A Triton kernel that also keeps each of its launches, to be repeated."""

    def __init__(self, kernel: Launchable, launches: list[Work]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: object) -> Callable[..., object]:
        def launch(*args: object, **options: object) -> object:
            again = partial(self._kernel[grid], *args, **options)
            self._launches.append(again)
            return again()

        return launch


class Setting:
    """What SGLang's settings answer: off, all of them."""

    def __getattr__(self, name: str) -> Setting:
        return self

    def get(self) -> bool:
        return False


def _stubs() -> dict[str, ModuleType]:
    """The modules of sglang that the file imports, with the little of them that it uses."""
    given: dict[str, dict[str, object]] = {
        "sglang.srt.environ": {"envs": Setting()},
        "sglang.srt.utils": {
            "create_device_stream": torch.cuda.Stream,
            "device_stream_context": torch.cuda.stream,
        },
        "sglang.srt.plugins.hook_registry": {"HookRegistry": None, "HookType": None},
        "sglang.kernels.ops.memory.ptr_table": {
            "make_ptr_table": lambda rows, device: torch.tensor(rows, dtype=torch.int64, device=device)
        },
    }
    made: dict[str, ModuleType] = {}
    for name, content in given.items():
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            module = made.setdefault(".".join(parts[:n]), ModuleType(".".join(parts[:n])))
            module.__path__ = []
        vars(made[name]).update(content)
    return made


@contextlib.contextmanager
def _standing_in(modules: dict[str, ModuleType]) -> Iterator[None]:
    held = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in held.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


class Peer:
    """The loaded file, its kernels recorded."""

    def __init__(self, path: Path) -> None:
        self.launches: list[Work] = []
        spec = importlib.util.spec_from_file_location("pdstage_peer_staging_buffer", path)
        assert spec is not None
        assert spec.loader is not None
        self.module: Any = importlib.util.module_from_spec(spec)
        with _standing_in(_stubs()):
            spec.loader.exec_module(self.module)
        for name, value in list(vars(self.module).items()):
            if type(value).__name__ in {"JITFunction", "InterpretedFunction"}:
                setattr(self.module, name, Recorded(value, self.launches))

        self.drop_in = self._drop_in()

    def _drop_in(self) -> ModuleType:
        """What takes the place of its functions, made anew over this file."""
        place = "sglang.srt.disaggregation.common.staging_buffer"
        found = importlib.util.find_spec("pdstage.integrations.sglang.staging")
        assert found is not None
        assert found.loader is not None
        made = importlib.util.module_from_spec(found)
        parents = {name: ModuleType(name) for name in (place.rpartition(".")[0], "sglang.srt.disaggregation")}
        with _standing_in({**_stubs(), **parents, place: self.module}):
            found.loader.exec_module(made)
        return made

    def call(self, function: str, drop_in: bool = False, **arguments: object) -> Work:
        """The function, or what takes its place, with those of the arguments that its version takes."""
        wanted = getattr(self.drop_in if drop_in else self.module, function)
        taken = inspect.signature(wanted).parameters
        return partial(wanted, **{name: value for name, value in arguments.items() if name in taken})

    def kernels_of(self, whole: Work) -> Work:
        """The launches that one call of `whole` makes, without the rest of it."""
        self.launches.clear()
        whole()
        kept = list(self.launches)
        if not kept:
            raise RuntimeError("SGLang's call launched no Triton kernel")

        def again() -> None:
            for launch in kept:
                launch()

        return again


def buffers(case: Case, model: shapes.Model, role: str) -> list[torch.Tensor]:
    """The case's own memory as SGLang's `[slot, head, element]` tensors, one a layer."""
    found = []
    for view in case.layout.views():
        if view.key.role == role:
            n_slots = view.n_items * model.page
            row = view.shards * view.width
            flat = case.memory[view.offset : view.offset + n_slots * row].view(torch.bfloat16)
            found.append(flat.view(n_slots, view.shards, view.width // 2))
    return found


def gather_call(peer: Peer, pair: shapes.Pair, case: Case, out: object, drop_in: bool = False) -> Work:
    return peer.call(
        "gather_all_layers_to_staging",
        drop_in,
        k_buffers=buffers(case, pair.model, "k"),
        v_buffers=buffers(case, pair.model, "v"),
        page_indices_np=case.items["kv"],
        staging_buffer=out,
        src_head_start=case.select[0].start,
        num_heads=case.select[0].count,
        page_size=pair.model.page,
        gpu_id=0,
    )


def scatter_call(peer: Peer, pair: shapes.Pair, case: Case, staged: torch.Tensor, drop_in: bool = False) -> Work:
    axis = next(iter(case.layout.views())).axis
    return peer.call(
        "scatter_staging_to_kv",
        drop_in,
        staging_buffer_view=staged,
        k_buffers=buffers(case, pair.model, "k"),
        v_buffers=buffers(case, pair.model, "v"),
        page_idx_tensor=torch.from_numpy(case.items["kv"]).long().to(staged.device),
        page_size=pair.model.page,
        prefill_attn_tp_size=pair.src_tp,
        decode_attn_tp_size=pair.dst_tp,
        dst_tp_rank=0,
        total_kv_heads=axis.total,
    )


def rows(bed: Bed, quick: bool) -> Iterator[Row]:
    """Every comparison, and last the geometric mean of each kernel's and direction's ratios."""
    path = find()
    if path is None:
        bed.left_out.append(f"SGLang: not installed, and {environment.SGLANG.name} names no {FILE.name}")
        return
    if bed.kind == "cpu":
        bed.left_out.append("SGLang: its kernels need a GPU")
        return
    peer = Peer(path)
    found: list[Row] = []
    for pair in PAIRS[:1] if quick else PAIRS:
        for tokens in (4096,) if quick else (256, 1024, 4096, 8192):
            measured = [*_gathers(bed, peer, pair, tokens), *_scatters(bed, peer, pair, tokens)]
            yield from measured
            found += measured
    yield from means(found)


def _gathers(bed: Bed, peer: Peer, pair: shapes.Pair, tokens: int) -> list[Row]:
    case = model_case(bed, pair, tokens, "gather")
    out = peer.module.StagingBuffer(case.nbytes, "cuda:0", 0)
    theirs = gather_call(peer, pair, case, out)
    kernel = peer.kernels_of(theirs)
    for v in bed.variants:
        if not bool((case.gathered(v) == out.buffer[: case.nbytes]).all()):
            raise RuntimeError(f"{v} and SGLang gather different bytes for {pair.name}")
    ours = {v: case.works(v)["gather"] for v in bed.variants}
    case.index = case.indexes(on_device=False)
    whole = {v: case.works(v)["gather"] for v in bed.variants}
    whole[DROP_IN] = gather_call(peer, pair, case, out, drop_in=True)
    expected = out.buffer.clone()
    out.buffer.zero_()
    whole[DROP_IN]()
    if not bool((out.buffer[: case.nbytes] == expected[: case.nbytes]).all()):
        raise RuntimeError(f"what takes the place of SGLang's gathers different bytes for {pair.name}")
    return _compare(bed, ("gather", pair.name, tokens), case.nbytes, {"": kernel, **ours}, {"": theirs, **whole})


def _scatters(bed: Bed, peer: Peer, pair: shapes.Pair, tokens: int) -> list[Row]:
    """SGLang scatters all writers' parts in one launch; ours is one for each writer, and counted together."""
    cases = [model_case(bed, pair, tokens, "scatter", part=part) for part in shapes.sends(pair, tokens)]
    staged = bed.memory(sum(case.nbytes for case in cases))
    # All writers' parts go to the first case's pool, from one staging memory, by one list.
    target, at = cases[0], 0
    for case in cases:
        case.pool, case.index, case.items = target.pool, target.index, target.items
        case.staging = staged[at : at + case.nbytes]
        at += case.nbytes
    theirs = scatter_call(peer, pair, target, staged)
    target.memory.fill_(0)
    kernel = peer.kernels_of(theirs)
    bed.wait()
    expected = target.memory.clone()
    ours, whole = {}, {}
    for v in bed.variants:
        ours[v] = _one_after_another([case.works(v)["scatter"] for case in cases])
        target.memory.fill_(0)
        ours[v]()
        bed.wait()
        if not bool((target.memory == expected).all()):
            raise RuntimeError(f"{v} and SGLang scatter different bytes for {pair.name}")
    on_host = target.indexes(on_device=False)
    for case in cases:
        case.index = on_host
    for v in bed.variants:
        whole[v] = _one_after_another([case.works(v)["scatter"] for case in cases])
    whole[DROP_IN] = scatter_call(peer, pair, target, staged, drop_in=True)
    target.memory.fill_(0)
    whole[DROP_IN]()
    bed.wait()
    if not bool((target.memory == expected).all()):
        raise RuntimeError(f"what takes the place of SGLang's scatters different bytes for {pair.name}")
    return _compare(bed, ("scatter", pair.name, tokens), staged.numel(), {"": kernel, **ours}, {"": theirs, **whole})


def _one_after_another(works: list[Work]) -> Work:
    def all_of_them() -> None:
        for work in works:
            work()

    return all_of_them


def _compare(
    bed: Bed, where: tuple[str, str, int], nbytes: int, kernels: dict[str, Work], calls: dict[str, Work]
) -> list[Row]:
    """Rates of kernels alone and of whole calls; "" is theirs."""
    way, pair, tokens = where
    found = []
    for what, times in (("kernel", bed.seconds(kernels, 9)), ("whole call", bed.whole_calls(calls, 9))):
        rates = {v: nbytes / seconds / 1e9 for v, seconds in times.items()}
        found += [
            Row(
                name=f"{way}, {what}, {v} beside SGLang, {pair}, {tokens} tokens",
                value=rates[v],
                baseline=rates[""],
                unit="GB/s",
                detail=f"{nbytes / 2**20:.1f} MiB; baseline: SGLang's",
                point={
                    "table": "sglang", "what": what, "way": way, "variant": v, "pair": pair, "tokens": tokens,
                },
            )
            for v in rates
            if v
        ]  # fmt: skip
    return found


def means(found: list[Row]) -> list[Row]:
    """The geometric mean of the kernel-time ratios, for each of our kernels and each direction."""
    groups: dict[tuple[Any, Any], list[float]] = {}
    for row in found:
        if row.point["what"] == "kernel":
            groups.setdefault((row.point["way"], row.point["variant"]), []).append(row.ratio)
    return [
        Row(
            name=f"{way}, kernel, {variant} beside SGLang, geometric mean of {len(ratios)} shapes",
            value=curves.geometric_mean(ratios),
            baseline=1.0,
            unit="x",
            target=TARGET,
            detail="kernel time; baseline: SGLang's",
            point={"table": "sglang mean", "way": way, "variant": variant},
        )
        for (way, variant), ratios in groups.items()
    ]
