"""Which of the plugins that NIXL lists start here.

pdstage uses only UCX; the others are tried for those who use NIXL beside it. If one crashes the process, the last step
that the parent read names it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdstage.tools.doctor.probes import Say


def plugins(say: Say, *, leave_out: list[str]) -> None:
    """Reports the version, and for each plugin except `leave_out` an empty string, or why it does not start."""
    say.step("import")
    api: Any = import_module("nixl._api")
    bindings: Any = import_module("nixl._bindings")
    held = vars(bindings).values()
    kinds: list[type[Exception]] = [kind for kind in held if isinstance(kind, type) and issubclass(kind, Exception)]
    refusals: tuple[type[Exception], ...] = (*kinds, RuntimeError, ValueError, KeyError, OSError)
    say.step("agent")
    agent = api.nixl_agent("pdstage.doctor", api.nixl_agent_config(backends=[]))
    listed = list(agent.get_plugin_list())
    say.found(listed=listed)
    for name in listed:
        if name in leave_out:
            continue
        say.step(name)
        try:
            agent.create_backend(name)
        except refusals as error:
            say.found(**{f"plugin {name}": f"{type(error).__name__}({error})"})
        else:
            say.found(**{f"plugin {name}": ""})
    say.step("exit")
