"""Two servers of each role under one router: what clients see, and what happens when they or processes go away.

The tests share a stack, and each leaves it serving; the last one ends it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator

import httpx
import openai
import pytest
from serve.stack import Stack, exists, truth, wait_until

MODEL = "pdstage-llama"
LONG = 400


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Its pools hold three of the longest requests: servers of both roles wait for each other's pages."""
    sizes = ("--prefill-servers", "2", "--decode-servers", "2", "--prefill-tp", "2", "--decode-tp", "1")
    with Stack(*sizes, "--pool-tokens", "1536") as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=100.0) as made:
        yield made


def body(prompt: object, max_tokens: int, **more: object) -> dict:
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **more}


def servers(stack: Stack) -> list[tuple[str, int]]:
    return [(role, number) for role in ("prefill", "decode") for number in range(2)]


def failed(stack: Stack, role: str) -> int:
    return sum(stack.stats(role, number)["failed"] for number in range(2))


def settled(stack: Stack) -> None:
    """Nobody has a job or a page anywhere."""
    for role, number in servers(stack):
        stack.wait_free(role, number)


def all_up(stack: Stack) -> None:
    wait_until(lambda: all(one["up"] for one in stack.get("/stats").json()["servers"]), "the router has all servers")


# What clients see.


def test_openai_completion(client):
    told = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=9)
    assert told.choices[0].text == truth("llama", "Once upon a time", 9)
    assert told.choices[0].finish_reason == "length"
    assert (told.usage.prompt_tokens, told.usage.completion_tokens, told.usage.total_tokens) == (16, 9, 25)
    assert [model.id for model in client.models.list()] == [MODEL]


def test_openai_completion_streamed(client):
    given = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 9, "stream": True}
    chunks = list(client.completions.create(**given, stream_options={"include_usage": True}))
    *texts, last, usage = chunks
    assert len(texts) == 9, "a chunk for each token, as it comes"
    assert "".join(chunk.choices[0].text for chunk in texts) == truth("llama", "Once upon a time", 9)
    assert last.choices[0].finish_reason == "length"
    assert (usage.choices, usage.usage.total_tokens) == ([], 25)
    assert all(chunk.usage is None for chunk in (*texts, last))
    assert not [chunk for chunk in client.completions.create(**given) if not chunk.choices], "no usage unless asked for"


def test_openai_chat(client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    expected = truth("llama", "system: Be brief.\nuser: Hello\nassistant:", 7)
    told = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=7)
    assert (told.choices[0].message.role, told.choices[0].message.content) == ("assistant", expected)
    streamed = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=7, stream=True)
    deltas = [chunk.choices[0] for chunk in streamed]
    assert deltas[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in deltas) == expected
    assert [choice.finish_reason for choice in deltas if choice.finish_reason] == ["length"]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_the_answer(client, stream):
    """A stop string that lies across two tokens, beside one that never comes to its end."""
    whole = truth("llama", "Stop me", 12)
    stop = whole[15:19]
    told = client.completions.create(
        model=MODEL, prompt="Stop me", max_tokens=12, stop=[stop, whole[-2:] + "!"], stream=stream
    )
    choices = [chunk.choices[0] for chunk in told] if stream else [told.choices[0]]
    assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
    assert choices[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("path", "changes", "field"),
    [
        ("completions", {"n": 2}, "n"),
        ("completions", {"temperature": 0.7}, "temperature"),
        ("completions", {"logprobs": 1}, "logprobs"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"max_tokens": 10_000}, "prompt"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": ["a", "b"]}, "prompt"),
        ("completions", {"prompt": [1, 512]}, "prompt"),
        ("completions", {"stop": ["a"] * 5}, "stop"),
        ("completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("completions", {"model": "gpt-4"}, "model"),
        ("completions", {"pdstage": {}}, "pdstage"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"role": "robot", "content": "?"}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ("chat/completions", {"tools": []}, "tools"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(stack, path, changes, field):
    good = {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    given = {"model": MODEL, "max_tokens": 2, **good, **changes}
    told = httpx.post(f"{stack.url}/v1/{path}", json=given, trust_env=False)
    assert told.status_code == (404 if field == "model" else 400)
    error = told.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", field)
    assert set(error) == {"message", "type", "param", "code"}


def test_what_is_no_json_is_refused(stack):
    told = httpx.post(f"{stack.url}/v1/completions", content=b"{", trust_env=False)
    assert (told.status_code, told.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_server_refuses_what_did_not_come_by_the_router(stack):
    for role in ("prefill", "decode"):
        url, _ = stack.children[role][0]
        told = httpx.post(f"{url}/v1/completions", json=body("a", 2), trust_env=False)
        assert (told.status_code, told.json()["error"]["param"]) == (400, "pdstage")
        assert stack.get("/health", url).status_code == stack.get("/ready", url).status_code == 200


# Clients that go away.


def test_a_client_that_leaves_its_stream_frees_the_room(stack):
    before = failed(stack, "decode")
    given = body("Away", LONG, stream=True)
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=given, trust_env=False) as told:
        assert next(told.iter_lines()).startswith("data: ")
    wait_until(lambda: failed(stack, "decode") == before + 1, "decode gives the request up")
    settled(stack)


def test_a_client_that_leaves_before_its_answer_frees_the_room_on_both_sides(stack):
    """Decode is stopped meanwhile: the room is computed at prefill, and waits to be sent."""
    before = failed(stack, "prefill"), failed(stack, "decode")
    pids = [pid for _, pid in stack.children["decode"].values()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        asyncio.run(_leave_once_prefill_is_at_it(stack))
        wait_until(lambda: failed(stack, "prefill") == before[0] + 1, "prefill gives the room up")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    wait_until(lambda: failed(stack, "decode") == before[1] + 1, "decode gives the room up")
    settled(stack)


async def _leave_once_prefill_is_at_it(stack: Stack) -> None:
    async with httpx.AsyncClient(timeout=100.0, trust_env=False) as client:
        asking = asyncio.create_task(client.post(f"{stack.url}/v1/completions", json=body("Gone" * 30, 8)))

        async def begun() -> bool:
            told = [await client.get(f"{url}/stats") for url, _ in stack.children["prefill"].values()]
            return any(one.json()["jobs"] for one in told)

        async with asyncio.timeout(100.0):
            while not await begun():
                await asyncio.sleep(0.02)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


# Processes that go away.


class Asking:
    """Requests under way at once, streamed and not; answers are (prompt, status, text, whether it came to its end)."""

    def __init__(self, url: str, n: int, n_tokens: int, seed: int, lengths: tuple[int, int] = (8, 60)) -> None:
        draw = random.Random(seed)
        self.n_tokens = n_tokens
        self._url = f"{url}/v1/completions"
        self._prompts = [[draw.randrange(512) for _ in range(draw.randint(*lengths))] for _ in range(n)]
        self.n_begun = 0

    async def all(self) -> list[tuple[list[int], int, str, bool]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=150.0, trust_env=False) as client:
            asked = (
                self._stream(client, prompt) if i % 2 else self._whole(client, prompt)
                for i, prompt in enumerate(self._prompts)
            )  # fmt: skip
            return await asyncio.gather(*asked)

    async def _whole(self, client: httpx.AsyncClient, prompt: list[int]) -> tuple[list[int], int, str, bool]:
        told = await client.post(self._url, json=body(prompt, self.n_tokens))
        good = told.status_code == 200
        return prompt, told.status_code, told.json()["choices"][0]["text"] if good else "", good

    async def _stream(self, client: httpx.AsyncClient, prompt: list[int]) -> tuple[list[int], int, str, bool]:
        text, good, error = "", False, False
        async with client.stream("POST", self._url, json=body(prompt, self.n_tokens, stream=True)) as told:
            if told.status_code != 200:
                return prompt, told.status_code, "", False
            async for line in told.aiter_lines():
                self.n_begun += bool(line)
                if line == "data: [DONE]":
                    good = True
                elif line:
                    content = json.loads(line.removeprefix("data: "))
                    error |= "error" in content
                    text += "" if error else content["choices"][0]["text"]
        assert good != error, "a stream ends with [DONE], or with an error"
        return prompt, 200, text, good


def hold_to_truth(answers: list[tuple[list[int], int, str, bool]], n_tokens: int) -> int:
    """Nothing is wrong; returns how many came to their ends."""
    for prompt, status, text, good in answers:
        expected = truth("llama", prompt, n_tokens)
        assert status in (200, 502, 503, 504)
        assert text == expected if good else expected.startswith(text), (status, text, expected)
    return sum(good for *_, good in answers)


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_killed_server_costs_its_requests_and_no_more(stack, role):
    """Every request ends, no answer is wrong, and the stack serves as before without anybody's doing."""
    all_up(stack)
    url, pid = stack.children[role][0]
    moved = stack.stats("prefill")["pdstage"]["bytes_written"]

    def is_at_it() -> bool:
        told = stack.get("/stats", url).json()
        return told["jobs"] > 2 and (
            told["running"] > 1 if role == "decode" else told["pdstage"]["bytes_written"] > moved
        )

    async def ask_and_kill() -> list[tuple[list[int], int, str, bool]]:
        asking = Asking(stack.url, 16, 24, seed=len(role), lengths=(250, 400))
        answers = asyncio.create_task(asking.all())
        async with asyncio.timeout(100.0):
            while not await asyncio.to_thread(is_at_it):
                await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        return await answers

    answers = asyncio.run(ask_and_kill())
    n_good = hold_to_truth(answers, 24)
    assert 0 < n_good < len(answers), "requests of the other servers come to their ends, those of the killed one fail"
    stack.hear(f"{role} 0 ended")
    stack.hear(f"{role} 0 is at {url}")
    all_up(stack)
    assert hold_to_truth(asyncio.run(Asking(stack.url, 12, 4, seed=99).all()), 4) == 12
    settled(stack)


def test_a_server_that_is_told_to_go_ends_what_it_began(stack):
    all_up(stack)
    url, pid = stack.children["decode"][0]

    async def ask_and_end() -> list[tuple[list[int], int, str, bool]]:
        asking = Asking(stack.url, 8, 40, seed=5)
        answers = asyncio.create_task(asking.all())
        async with asyncio.timeout(100.0):
            while not await asyncio.to_thread(lambda: stack.get("/stats", url).json()["running"]):
                await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGTERM)
        return await answers

    assert hold_to_truth(asyncio.run(ask_and_end()), 40) == 8
    assert "exit code 0:" in stack.hear("decode 0 ended")
    stack.hear(f"decode 0 is at {url}")
    all_up(stack)


def test_the_whole_drains_and_leaves_no_process(stack):
    """Last: it ends the stack."""

    async def ask_and_end() -> list[tuple[list[int], int, str, bool]]:
        asking = Asking(stack.url, 8, 40, seed=6)
        answers = asyncio.create_task(asking.all())
        async with asyncio.timeout(100.0):
            while not asking.n_begun:
                await asyncio.sleep(0.01)
        stack.process.send_signal(signal.SIGINT)
        return await answers

    answers = asyncio.run(ask_and_end())
    assert hold_to_truth(answers, 40) == sum(good for *_, good in answers)
    assert all(good for _, status, _, good in answers if status == 200), "what was begun comes to its end"
    assert stack.process.wait(100.0) == 0
    assert not [pid for told in stack.children.values() for _, pid in told.values() if exists(pid)]
