"""Which of the plugins that NIXL lists can really be started here.

pdstage uses UCX alone; the others are tried for who uses NIXL beside it. One that takes the process down is named by
the step that its parent last heard of.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdstage.tools.doctor.probes import Say


def plugins(say: Say, *, leave_out: list[str]) -> None:
    """Tells the version, and of each plugin but those of `leave_out` an empty string, or why it does not start."""
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
