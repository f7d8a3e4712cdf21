"""The right tokens of a prompt, as far as arithmetic decides them.

Where the two best tokens of one engine are nearly equal, the order in which sums are rounded chooses: how many requests
are in a batch, into which chunks a prompt is cut, how many ranks add up. So tokens are compared up to the first such
place, which the engine's own log probabilities tell.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

from tests.e2e import compare, load

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import aiohttp

    from tests.e2e.fleet import Fleet
    from tests.e2e.load import Answer, Prompt
    from tests.e2e.sglang.engines import Engine

NEAR = {"float32": 0.002, "bfloat16": 0.1}
"""Natural logarithms of probability, by dtype. What fp32 rounding was seen to change lay within 0.0004."""

_known: dict[tuple[Engine, int, bool], dict[Prompt, tuple[int, ...]]] = {}


def tokens(
    fleet: Fleet, reference: Engine, prompts: Iterable[Prompt], n_tokens: int = load.N_TOKENS, *, as_text: bool = False
) -> dict[Prompt, tuple[int, ...]]:
    """What the engine `reference` answers to each prompt, up to the first place where two tokens are nearly equal.

    A prompt that is asked `as_text` is what SGLang's tokenizer makes of it.
    """
    known = _known.setdefault((reference, n_tokens, as_text), {})
    new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in known]
    if new:
        (server,) = fleet.up(reference)
        with fleet.timed(f"{reference.name}: {len(new)} right answers"):
            answers = load.ask_all(_to(server.url, n_tokens, as_text), new, 16)
        lost = [one for one in answers if not one.is_ok]
        assert not lost, f"{server.name} did not answer: {lost[0].body}\n{server.tail()}"
        known.update({one.prompt: one.tokens[: _n_decided(one, NEAR[reference.dtype])] for one in answers})
        n_decided = sum(len(known[prompt]) for prompt in new)
        fleet.note(f"{reference.name}: {n_decided} of {len(new) * n_tokens} tokens are decided")
    return known


def text_of(prompt: Prompt) -> str:
    """One word a token."""
    return " ".join(f"w{number}" for number in prompt)


def _to(url: str, n_tokens: int, as_text: bool) -> load.Ask:
    async def ask(session: aiohttp.ClientSession, prompt: Prompt) -> Answer:
        told = load.body(prompt, n_tokens=n_tokens, logprobs=2)
        return await load.post(session, url, prompt, told | ({"prompt": text_of(prompt)} if as_text else {}))

    return ask


def _n_decided(answer: Answer, near: float) -> int:
    """The tokens of an answer before the first whose place was nearly another's."""
    best = answer.body["choices"][0]["logprobs"]["top_logprobs"]
    margins = (sorted(one.values())[-1] - sorted(one.values())[-2] for one in best)
    return len(list(takewhile(lambda margin: margin >= near, margins)))


def cut(answers: Sequence[Answer], right: dict[Prompt, tuple[int, ...]]) -> list[Answer]:
    """The answers as far as they are decided."""
    return [replace(one, tokens=one.tokens[: len(right[one.prompt])]) for one in answers]


def check(answers: Sequence[Answer], right: dict[Prompt, tuple[int, ...]], *, all_ok: bool = True) -> None:
    """As `compare.check`, for tokens that are decided."""
    compare.check(cut(answers, right), right, all_ok=all_ok)


def summary(answers: Sequence[Answer], right: dict[Prompt, tuple[int, ...]]) -> str:
    return compare.summary(cut(answers, right), right)
