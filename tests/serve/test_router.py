"""The router between servers that are scripted: what a client gets when a server lags, refuses, lies or breaks off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import pytest

from pdstage.demo.serve.options import Listening, RouterOptions
from pdstage.demo.serve.router import Router

MODEL = "tiny"
TEXT = b'data: {"choices": []}\n\n'
Answer = Callable[["Fake", asyncio.StreamWriter], Awaitable[None]]


def head(status: int, nbytes: int | None = None) -> bytes:
    length = f"content-length: {nbytes}\r\n" if nbytes is not None else "transfer-encoding: chunked\r\n"
    return f"HTTP/1.1 {status} OK\r\ncontent-type: text/plain\r\nconnection: close\r\n{length}\r\n".encode()


def says(status: int, content: bytes) -> Answer:
    async def answer(_: Fake, writer: asyncio.StreamWriter) -> None:
        writer.write(head(status, len(content)) + content)

    return answer


def streams(*parts: bytes, ends: bool) -> Answer:
    """Chunks, and the end of them if it `ends` well; else the connection closes."""

    async def answer(_: Fake, writer: asyncio.StreamWriter) -> None:
        writer.write(head(200) + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts))
        writer.write(b"0\r\n\r\n" if ends else b"")

    return answer


async def hangs(self: Fake, _: asyncio.StreamWriter) -> None:
    """Until the other side closes."""
    await self.reader.read()
    self.closed.set()


GOOD = says(200, b"{}")


class Fake:
    """A server of one role: ready, and answering each request as told."""

    def __init__(self, role: str, answer: Answer, model: str = MODEL) -> None:
        self.role, self.answer, self.model = role, answer, model
        self.n_asked = 0
        self.closed = asyncio.Event()

    async def start(self) -> str:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        if asked.startswith(b"GET /ready"):
            told = {"role": self.role, "process": "1", "model": self.model, "max_model_len": 99, "prefill": "there:1"}
            await says(200, json.dumps(told).encode())(self, writer)
        else:
            nbytes = next(int(line.split()[1]) for line in asked.lower().splitlines() if b"content-length" in line)
            self.body = json.loads(await reader.readexactly(nbytes))
            self.n_asked += 1
            self.reader = reader
            await self.answer(self, writer)
        writer.close()


@asynccontextmanager
async def routing(*fakes: Fake, timeout_s: float = 60.0) -> AsyncIterator[httpx.AsyncClient]:
    urls = {role: tuple([await f.start() for f in fakes if f.role == role]) for role in ("prefill", "decode")}
    router = Router(RouterOptions(listening=Listening(timeout_s=timeout_s), **urls, check_s=0.02))
    router.app.state.server = SimpleNamespace(is_leaving=False)
    router.app.state.on_started = lambda: None
    transport = httpx.ASGITransport(router.app)
    async with (
        router.app.router.lifespan_context(router.app),
        httpx.AsyncClient(transport=transport, base_url="http://router", timeout=60.0) as client,
    ):
        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.01)
        yield client
    for fake in fakes:
        fake.server.close()


async def ask(client: httpx.AsyncClient, *, stream: bool = False) -> httpx.Response:
    return await client.post("/v1/completions", json={"model": MODEL, "prompt": "a", "stream": stream})


def asks(*fakes: Callable[[], Fake], stream: bool = False, **options: float) -> tuple[httpx.Response, list[Fake]]:
    async def run() -> tuple[httpx.Response, list[Fake]]:
        made = [fake() for fake in fakes]
        async with routing(*made, **options) as client:
            answer = await ask(client, stream=stream)
            for fake in made:
                if fake.answer is hangs and fake.n_asked:
                    await asyncio.wait_for(fake.closed.wait(), 30.0)  # a room given up is told to both
            return answer, made

    return asyncio.run(run())


def prefill(answer: Answer = GOOD, **more: str) -> Callable[[], Fake]:
    return lambda: Fake("prefill", answer, **more)


def decode(answer: Answer = GOOD, **more: str) -> Callable[[], Fake]:
    return lambda: Fake("decode", answer, **more)


def test_both_get_the_request_and_the_same_room():
    answer, (one, other) = asks(prefill(), decode(says(200, b'{"text": 1}')))
    assert (answer.status_code, answer.json()) == (200, {"text": 1})
    assert one.body == other.body
    assert one.body["prompt"] == "a"
    assert one.body["pdstage"]["prefill"] == "there:1"


def test_a_whole_stream_is_relayed_as_it_is():
    whole = TEXT + TEXT + b"data: [DONE]\n\n"
    answer, _ = asks(prefill(), decode(streams(whole[:5], whole[5:30], whole[30:], ends=True)), stream=True)
    assert (answer.status_code, answer.content) == (200, whole)


@pytest.mark.parametrize(
    ("parts", "ends"),
    [((TEXT, b'data: {"choi'), False), ((TEXT,), False), ((TEXT,), True), ((TEXT, b"data: [DONE]"), True)],
)
def test_a_stream_that_breaks_off_ends_with_an_error(parts, ends):
    """Whole events only are handed on; without `[DONE]` nothing is complete, however the connection ended."""
    answer, _ = asks(prefill(), decode(streams(*parts, ends=ends)), stream=True)
    first, last, end = answer.content.split(b"\n\n")
    assert (first + b"\n\n", end) == (TEXT, b"")
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "room_failed"


def test_an_error_that_decode_tells_is_told_once():
    told = b'data: {"error": {"message": "gone"}}\n\n'
    answer, _ = asks(prefill(), decode(streams(TEXT, told, ends=True)), stream=True)
    assert answer.content == TEXT + told


def test_an_answer_that_breaks_off_is_502():
    async def half(_: Fake, writer: asyncio.StreamWriter) -> None:
        writer.write(head(200, 10) + b"{")

    answer, _ = asks(prefill(), decode(half))
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "room_failed")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("answer", [says(502, b"broken"), says(500, b""), streams(ends=False)])
def test_a_prefill_that_fails_ends_the_request_at_decode(answer, stream):
    told, (_, other) = asks(prefill(answer), decode(hangs), stream=stream)
    assert (told.status_code, told.json()["error"]["code"]) == (502, "room_failed")
    assert other.n_asked == 1, "what was begun is not tried again"


def test_a_decode_that_dies_ends_the_request_at_prefill():
    async def dies(_: Fake, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    told, (one, _) = asks(prefill(hangs), decode(dies))
    assert told.status_code == 502
    assert one.n_asked == 1


@pytest.mark.parametrize("late", [0, 1])
def test_too_late_is_504(late):
    answers = [GOOD, GOOD]
    answers[late] = hangs
    answers[1] = hangs  # decode cannot end before prefill did
    told, _ = asks(prefill(answers[0]), decode(answers[1]), timeout_s=0.5)
    assert (told.status_code, told.json()["error"]["code"]) == (504, "timeout")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_who_takes_nothing_is_passed_over(role):
    """A server that restarted, drains or is full says 503: nothing was begun with it, so another may."""
    roles = {"prefill": prefill, "decode": decode}
    refusing = roles[role](says(503, b"full"))
    told, made = asks(refusing, prefill(), decode())
    assert told.status_code == 200
    assert made[0].n_asked <= 1
    told, _ = asks(refusing, *(make(hangs) for name, make in roles.items() if name != role))
    assert told.status_code == 503


def test_a_server_of_another_model_is_left_out():
    async def run() -> None:
        fakes = [Fake("prefill", GOOD), Fake("decode", GOOD), Fake("decode", GOOD, model="other")]
        async with routing(*fakes) as client:
            served = (await client.get("/v1/models")).json()["data"][0]["id"]
            told = (await client.get("/stats")).json()["servers"]
            assert all(fake.model == served for fake, one in zip(fakes, told, strict=True) if one["up"])

    asyncio.run(run())


def test_the_least_loaded_is_asked():
    async def run() -> None:
        release = asyncio.Event()

        async def waits(_: Fake, writer: asyncio.StreamWriter) -> None:
            await release.wait()
            await GOOD(_, writer)

        fakes = [Fake("prefill", GOOD), Fake("decode", waits), Fake("decode", waits), Fake("decode", waits)]
        async with routing(*fakes) as client:
            while not all(one["up"] for one in (await client.get("/stats")).json()["servers"]):
                await asyncio.sleep(0.01)
            asking = [asyncio.create_task(ask(client)) for _ in range(6)]
            while sum(fake.n_asked for fake in fakes[1:]) < 6:
                await asyncio.sleep(0.01)
            assert [fake.n_asked for fake in fakes[1:]] == [2, 2, 2]
            release.set()
            assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}

    asyncio.run(run())
