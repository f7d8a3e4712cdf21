"""The plugin that SGLang loads in each of its processes (entry point group `sglang.srt.plugins`).

SGLang's list of backends can be extended, but `TransferBackend`, in which its schedulers look names up, is a closed
enum, and `get_kv_class` is a chain of ifs over it. SGLang's own HookRegistry hooks both: the enum is replaced by one
with an extra member, and `get_kv_class` answers for that member. Two more hooks attach the pools to the KVArgs that
hold their addresses. The last passes a sender the common result of all ranks for its request. Must not import the
backend's classes before they are used: most processes never need them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from pkgutil import resolve_name
from typing import Any

from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES, add_disagg_transfer_backend_choices
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_disagg

NAME = "pdstage"

_UTILS = "sglang.srt.disaggregation.utils"
_CLASSES = {
    "manager": "manager:PdStageKVManager",
    "sender": "sender:PdStageKVSender",
    "receiver": "receiver:PdStageKVReceiver",
    "bootstrap_server": "bootstrap:PdStageKVBootstrapServer",
}


def register() -> None:
    """Makes the backend selectable. SGLang calls it before it parses arguments, and applies the hooks afterwards."""
    if NAME in DISAGG_TRANSFER_BACKEND_CHOICES:
        return
    add_disagg_transfer_backend_choices([NAME])
    HookRegistry.register(f"{_UTILS}.TransferBackend", _with_member(), HookType.REPLACE)
    around = {
        "get_kv_class": kv_class, "get_kv_transfer_buf_infos": with_owner, "setup_state_kv_args": with_pools,
        "poll_and_all_reduce_attn_cp_tp_group": polled,
    }  # fmt: skip
    for name, hook in around.items():
        HookRegistry.register(f"{_UTILS}.{name}", hook, HookType.AROUND)


def _with_member() -> type[Enum]:
    """SGLang's enum with one more member, under its own name. HookRegistry replaces the old one in every module."""
    old: type[Enum] = resolve_name(f"{_UTILS}:TransferBackend")
    members = {name: member.value for name, member in old.__members__.items()}
    members[NAME.upper()] = NAME
    return Enum(old.__name__, members, module=old.__module__, qualname=old.__qualname__)  # type: ignore[return-value]


def kv_class(original: Callable[[Enum, Enum], type | None], transfer_backend: Enum, class_type: Enum) -> type | None:
    """Around SGLang's `get_kv_class`: this backend's classes, and the other backends' as before."""
    place = _CLASSES.get(class_type.value) if transfer_backend.value == NAME else None
    if place is None:  # KVArgs too: one class for all backends
        return original(transfer_backend, class_type)
    found: type = resolve_name(f"{__package__}.{place}")
    return found


class Addresses(list[int]):
    """A pool's `kv_data_ptrs`, and the pool: with HiSparse a decode rank hands over another than the model's."""

    owner: object = None


def with_owner(
    original: Callable[[object], tuple[list[int], list[int], list[int]]], pool: object
) -> tuple[list[int], list[int], list[int]]:
    """Around SGLang's `get_kv_transfer_buf_infos`; other backends get what they always did."""
    ptrs, lens, items = original(pool)
    if get_disagg().disaggregation_transfer_backend == NAME:
        ptrs = Addresses(ptrs)
        ptrs.owner = pool
    return ptrs, lens, items


def with_pools(  # noqa: PLR0917  (SGLang's signature)
    original: Callable[..., None],
    kv_args: Any,  # noqa: ANN401  (SGLang's KVArgs)
    token_to_kv_pool: object,
    draft_token_to_kv_pool: object = None,
    total_kv_layers: int | None = None,
    req_to_token_pool: object = None,
) -> None:
    """Around SGLang's `setup_state_kv_args`, the last step before a manager is made: attaches the pools to KVArgs."""
    original(kv_args, token_to_kv_pool, draft_token_to_kv_pool, total_kv_layers, req_to_token_pool=req_to_token_pool)
    owner = getattr(kv_args.kv_data_ptrs, "owner", token_to_kv_pool)
    kv_args.pdstage_pools = (token_to_kv_pool, draft_token_to_kv_pool, req_to_token_pool, owner)


def polled(original: Callable[..., list[int]], pollers: Sequence[Any], *groups: object) -> list[int]:
    """Around SGLang's `poll_and_all_reduce_attn_cp_tp_group`: passes pdstage's senders the minimum over all ranks, and
    returns their answers to SGLang.
    """
    found = zip(pollers, original(pollers, *groups), strict=True)
    return [one.agreed(least) if hasattr(one, "agreed") else least for one, least in found]
