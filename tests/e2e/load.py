"""Prompts, drawn from a seed, and clients that ask many at a time.

A prompt is a list of token ids. What is asked is greedy, of a fixed length, and answered with token ids.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping, Sequence

VOCABULARY = 512
SHORTEST, LONGEST = 20, 600
N_TOKENS = 24
DEADLINE_S = 300.0
"""For one request, whatever happens to the servers: later is a hang."""

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """What became of one prompt. `status` is HTTP's, 0 where the connection broke, -1 where the client left, -2 where
    nothing came before the deadline. `body` is the answer's JSON, or the error's text.
    """

    prompt: Prompt
    status: int
    tokens: tuple[int, ...] = ()
    seconds: float = 0.0
    body: Any = field(default=None, repr=False)

    @property
    def is_ok(self) -> bool:
        return self.status == 200

    @property
    def hangs(self) -> bool:
        return self.status == -2


Ask = "Callable[[aiohttp.ClientSession, Prompt], Awaitable[Answer]]"


def prompts(n: int, seed: int, *, shortest: int = SHORTEST, longest: int = LONGEST, shared: int = 0) -> list[Prompt]:
    """`n` prompts of `shortest` to `longest` tokens; the first `shared` are the same in all that are longer."""
    drawn = random.Random(seed)
    words = range(4, VOCABULARY)
    first = drawn.choices(words, k=shared)
    made = []
    for _ in range(n):
        own = drawn.choices(words, k=drawn.randint(shortest, longest))
        made.append(tuple((first + own[shared:])[: len(own)]))
    return made


def body(prompt: Sequence[int], /, *, n_tokens: int = N_TOKENS, **more: Any) -> dict[str, Any]:
    """A request of OpenAI's completions API, with what vLLM and SGLang add to it; None leaves a field out."""
    told = {
        "model": "tiny",
        "prompt": list(prompt),
        "max_tokens": n_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }
    return {name: value for name, value in told.items() if value is not None}


def tokens_of(told: Mapping[str, Any]) -> tuple[int, ...]:
    """The answer's token ids; its words are the ids too, where what is between has dropped them."""
    choice = told["choices"][0]
    ids = choice.get("token_ids")
    return tuple(ids) if ids else tuple(int(word[1:]) for word in choice["text"].split())


async def post(session: aiohttp.ClientSession, url: str, prompt: Prompt, told: Mapping[str, Any]) -> Answer:
    """Asks one server. Nothing is raised: what goes wrong is in the answer."""
    began = time.monotonic()
    try:
        async with session.post(url + "/v1/completions", json=told) as response:
            if response.status != 200:
                return Answer(prompt, response.status, (), time.monotonic() - began, await response.text())
            answer = await response.json()
            return Answer(prompt, 200, tokens_of(answer), time.monotonic() - began, answer)
    except TimeoutError as error:
        return Answer(prompt, -2, (), time.monotonic() - began, repr(error))
    except (aiohttp.ClientError, ValueError) as error:  # ValueError: half a body, or another one
        return Answer(prompt, 0, (), time.monotonic() - began, repr(error))


def to(url: str, *, as_text: bool = False, **more: Any) -> Ask:
    """Asks the one server at `url`; `as_text`: by one word a token."""

    async def ask(session: aiohttp.ClientSession, prompt: Prompt) -> Answer:
        text = {"prompt": " ".join(f"w{number}" for number in prompt)} if as_text else {}
        return await post(session, url, prompt, body(prompt, **more, **text))

    return ask


def ask_all(
    ask: Ask, asked: Sequence[Prompt], at_a_time: int, *, while_: Awaitable[None] | None = None,
    leaves: Mapping[int, float] | None = None,
) -> list[Answer]:  # fmt: skip
    """All answers, in the order of `asked`, `at_a_time` under way; `while_` runs beside them. `leaves`: after how many
    seconds the client of a prompt goes away, by its index.
    """
    return asyncio.run(_ask_all(ask, asked, at_a_time, while_, leaves or {}))


async def _ask_all(
    ask: Ask, asked: Sequence[Prompt], at_a_time: int, while_: Awaitable[None] | None, leaves: Mapping[int, float]
) -> list[Answer]:
    free = asyncio.Semaphore(at_a_time)
    limit = aiohttp.ClientTimeout(total=DEADLINE_S)
    connections = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=limit, connector=connections) as session:

        async def one(index: int, prompt: Prompt) -> Answer:
            async with free:
                after = leaves.get(index)
                if after is None:
                    return await ask(session, prompt)
                try:
                    return await asyncio.wait_for(ask(session, prompt), after)
                except TimeoutError:
                    return Answer(prompt, -1, (), after)

        beside = asyncio.ensure_future(while_) if while_ is not None else None
        answers = await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(asked)))
        if beside is not None:
            await beside
        return answers
