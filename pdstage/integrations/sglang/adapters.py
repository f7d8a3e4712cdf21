"""The adapter (LoRA) of a request. Its KV depends on it, but SGLang does not pass it to a transfer backend.

SGLang's queues create a request's sender and receiver. Hooks around those two methods pass them the adapter, and pass
the manager its scheduler, which SGLang does not expose to it. Only schedulers import this, with the manager. Prefill
sends the adapter of its KV with the request's row, and decode compares.
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
    """Identifies the adapter that a request's KV is computed with: a digest of its weights if readable, else its name.

    Empty for a request without one; None for an adapter that this engine does not know yet.
    """
    if lora_id is None:
        return ""
    loaded = scheduler.tp_worker.model_runner.lora_manager
    known = None if loaded is None else loaded.lora_refs.get(lora_id)
    return None if known is None else digest(known.lora_path) or known.lora_name


def told(original: Callable[..., Any], queue: Any, req: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Around the methods that create a request's sender, which `req` has then, and its receiver, which is returned."""
    made = original(queue, req, *args, **kwargs)
    one = getattr(made, "kv_receiver", None) or req.disagg_kv_sender
    if hasattr(one, "adapter"):  # not SGLang's fake transfer, nor a request that got no sender
        one.adapter = adapter_of(queue.scheduler, req.lora_id)
        one.kv_mgr.meet(queue.scheduler)
    return made


@cache
def install() -> None:
    """Hooks the creation of every request's sender and receiver in this process."""
    queues = prefill.PrefillBootstrapQueue, decode.DecodePreallocQueue
    for method in (queues[0].create_sender, queues[1]._create_receiver_and_enqueue):
        HookRegistry.register(f"{method.__module__}.{method.__qualname__}", told, HookType.AROUND)
    HookRegistry.apply_hooks()
