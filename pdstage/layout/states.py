"""The kinds of state that a request has besides its KV cache, and how the items of each kind are matched.

    StateType.of("nsa").component     # "dsa": one name on both sides, whichever of the two an engine uses
    StateType.register(StateType("rwkv", components=("rwkv",), positional=False, exact=True))

A kind does not describe bytes: views do. Kinds are only names and matching rules; a component may have any name, with
or without a kind. docs/states.md lists them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pdstage.errors import UsageError


@dataclass(frozen=True, slots=True)
class StateType:
    """A kind of state: the components that hold it, and how two sides match their items.

    `components` are the names that both sides use, the usual one first. `positional`: items carry token positions, and
    both sides intersect them. Otherwise items are slots matched by order, and `exact` means that both sides must give
    the same number: a shorter list would be a part of a state. `aliases` are other names of the kind, and of its first
    component.
    """

    name: str
    components: tuple[str, ...] = ()
    positional: bool = True
    exact: bool = False
    aliases: tuple[str, ...] = ()

    NONE: ClassVar[StateType]
    MAMBA: ClassVar[StateType]
    SWA: ClassVar[StateType]
    NSA: ClassVar[StateType]
    DSA: ClassVar[StateType]

    @property
    def component(self) -> str:
        """The name of its usual component. Raises `UsageError` for a kind without a component."""
        if not self.components:
            raise UsageError(f"state kind {self.name!r} has no component", remedy="leave it out", kind=self.name)
        return self.components[0]

    @staticmethod
    def of(kind: StateType | str) -> StateType:
        """The registered kind of that name or alias. Raises `UsageError` that lists all registered kinds."""
        name = kind.name if isinstance(kind, StateType) else str(kind).lower()
        found = _BY_NAME.get(name)
        if found is None:
            known = ", ".join(_described(each) for each in registered())
            raise UsageError(
                f"unknown state kind {name!r}", remedy=f"registered are {known}; StateType.register adds one", kind=name
            )
        return found

    @staticmethod
    def register(kind: StateType) -> StateType:
        """Adds a kind in this process; both sides must do so. Repeating it with equal content has no effect.

        Raises `UsageError` if a name, an alias or a component belongs to another kind.
        """
        names = dict.fromkeys((kind.name, *kind.aliases, *kind.components))
        for name in names:
            owner = _BY_NAME.get(name) or _BY_COMPONENT.get(name)
            if owner not in (None, kind):
                raise UsageError(
                    f"state kind {kind.name!r} claims the name {name!r} of {_described(owner)}",
                    remedy="choose another name, alias or component",
                    kind=kind.name,
                )
        _BY_NAME.update(dict.fromkeys((kind.name, *kind.aliases), kind))
        _BY_COMPONENT.update(dict.fromkeys(kind.components, kind))
        return kind


_BY_NAME: dict[str, StateType] = {}
_BY_COMPONENT: dict[str, StateType] = {}


def registered() -> tuple[StateType, ...]:
    """Every kind, in the order of registration."""
    return tuple(dict.fromkeys(_BY_NAME.values()))


def kind_of(component: str) -> StateType | None:
    """The kind with that component, by canonical name; None for components of no kind, such as "kv"."""
    return _BY_COMPONENT.get(canonical(component))


def canonical(component: str) -> str:
    """The name that both sides use: for a kind's alias, its usual component."""
    if component in _BY_COMPONENT:
        return component
    kind = _BY_NAME.get(component)
    return kind.components[0] if kind and kind.components else component


def _described(kind: StateType | None) -> str:
    assert kind is not None
    return f"{kind.name!r} (also {', '.join(map(repr, kind.aliases))})" if kind.aliases else repr(kind.name)


StateType.NONE = StateType.register(StateType("none"))
StateType.MAMBA = StateType.register(StateType("mamba", ("mamba",), positional=False, exact=True))
StateType.SWA = StateType.register(StateType("swa", ("swa",)))
StateType.NSA = StateType.DSA = StateType.register(StateType("nsa", ("dsa",), aliases=("dsa",)))

# The other kinds of SGLang 0.5.23 (StateType in its disaggregation/base/conn.py). The rings are rows in position order,
# so their sizes may differ. Scales of a quantized cache are best sent as views of the cache's own component.
for _name in (
    "qsa_compressed",
    "dsa_tail",
    "minimax_index_k",
    "minimax_dense_kv",
    "swa_ring",
    "block_scale",
    "block_scale_swa",
):
    StateType.register(StateType(_name, (_name,)))
for _name, _aliases in (("qsa_pending", ()), ("c128_state", ("dsv4_request_state",)), ("request_row", ())):
    StateType.register(StateType(_name, (_name,), positional=False, exact=True, aliases=_aliases))
