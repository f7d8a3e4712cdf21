"""The adapter (LoRA) of a request, on which its KV depends, and which SGLang does not tell a transfer backend.

SGLang's queues make a request's sender and receiver: hooks around the two methods tell them, and have the manager meet
its scheduler, which SGLang shows it nowhere. Imported with the manager, in schedulers alone. Prefill says with the
request's row what made its KV, and decode compares.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation import decode, prefill
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from pdstage.integrations.model import digest

if TYPE_CHECKING:
    from collections.abc import Callable


def adapter_of(scheduler: Any, lora_id: str | None) -> str | None:  # noqa: ANN401  (SGLang's)
    """What names the adapter that a request's KV is made with: its weights where they can be read, else its name.

    Empty for a request without one; None for one of which this engine knows nothing yet.
    """
    if lora_id is None:
        return ""
    loaded = scheduler.tp_worker.model_runner.lora_manager
    known = None if loaded is None else loaded.lora_refs.get(lora_id)
    return None if known is None else digest(known.lora_path) or known.lora_name


def of_sender(original: Callable[..., bool], queue: Any, req: Any, *args: Any, **kwargs: Any) -> bool:  # noqa: ANN401
    """Around `PrefillBootstrapQueue.create_sender`."""
    made = original(queue, req, *args, **kwargs)
    if made:
        _tell(queue, req, req.disagg_kv_sender)
    return made


def of_receiver(original: Callable[..., Any], queue: Any, req: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Around `DecodePreallocQueue._create_receiver_and_enqueue`."""
    made = original(queue, req, *args, **kwargs)
    _tell(queue, req, made.kv_receiver)
    return made


def _tell(queue: Any, req: Any, one: Any) -> None:  # noqa: ANN401
    if hasattr(one, "adapter"):  # not SGLang's own stand-in for a transfer
        one.adapter = adapter_of(queue.scheduler, req.lora_id)
        one.kv_mgr.meet(queue.scheduler)


@cache
def install() -> None:
    """Has every request's sender and receiver told, in this process."""
    for method, hook in (
        (prefill.PrefillBootstrapQueue.create_sender, of_sender),
        (decode.DecodePreallocQueue._create_receiver_and_enqueue, of_receiver),
    ):
        HookRegistry.register(f"{method.__module__}.{method.__qualname__}", hook, HookType.AROUND)
    HookRegistry.apply_hooks()
