"""Whether answers are the right ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.e2e.load import Answer

Reference = "Mapping[Prompt, tuple[int, ...]]"


def wrong(answers: Iterable[Answer], right: Reference) -> list[Answer]:
    """Those with status 200 whose tokens are not the right ones, as far as these go."""
    return [one for one in answers if one.is_ok and one.tokens[: len(right[one.prompt])] != right[one.prompt]]


def summary(answers: Sequence[Answer], right: Reference) -> str:
    """One line for people: how many of each kind."""
    ok = [one for one in answers if one.is_ok]
    bad = wrong(ok, right)
    kinds = {
        "left": sum(one.status == -1 for one in answers),
        "hang": sum(one.hangs for one in answers),
        "broken": sum(one.status == 0 for one in answers),
        "error": sum(one.status > 200 for one in answers),
    }
    rest = "".join(f", {n} {kind}" for kind, n in kinds.items() if n)
    return f"{len(ok) - len(bad)} of {len(answers)} right, {len(bad)} wrong{rest}"


def check(answers: Sequence[Answer], right: Reference, *, all_ok: bool = True) -> None:
    """Fails with what came instead, shortest prompts first. With `all_ok`, every answer must have come."""
    told = summary(answers, right)
    hanging = [one for one in answers if one.hangs]
    assert not hanging, f"{told}; nothing came for prompts of {[len(one.prompt) for one in hanging]} tokens"
    bad = sorted(wrong(answers, right), key=lambda one: len(one.prompt))
    shown = "\n".join(
        f"  prompt of {len(one.prompt)} tokens: {list(one.tokens[:8])}..., right is {list(right[one.prompt][:8])}..."
        for one in bad[:8]
    )
    assert not bad, f"{told}\n{shown}"
    missing = [one for one in answers if not one.is_ok]
    assert not (all_ok and missing), f"{told}\n" + "\n".join(f"  {one.status}: {one.body}"[:600] for one in missing[:5])
