"""OpenAI's completions and chat completions: what a request asks for, and how answers and errors look.

Layer 6 (demo). Pure: must not know HTTP servers, models or rooms. What this example cannot do is refused by name,
never ignored. Shapes as in OpenAI's API reference: https://platform.openai.com/docs/api-reference.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from pdstage.demo.serve.text import VOCAB, encode
from pdstage.errors import UsageError

COMPLETION, CHAT = "completion", "chat"
PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}
ROUTED = "pdstage"
"""The field of a request that the router adds, for the servers."""
DONE = b"data: [DONE]\n\n"

_DEFAULT_TOKENS = {COMPLETION: 16, CHAT: 64}
_MOST_STOPS = 4
_ROLES = ("system", "developer", "user", "assistant")
_COMMON = {
    "model", "max_tokens", "stop", "stream", "stream_options", "n", "temperature", "top_p", "seed", "user",
    "ignore_eos",
}  # fmt: skip
_KNOWN = {COMPLETION: {*_COMMON, "prompt"}, CHAT: {*_COMMON, "messages", "max_completion_tokens"}}
# Given with these values they ask for what is done anyway; clients send them as their defaults.
_ONLY: dict[str, tuple[Any, ...]] = {"n": (1,), "temperature": (0,), "top_p": (1,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request that can be served. `max_tokens` is at least 1."""

    kind: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests are checked against."""

    model: str
    max_model_len: int


def parse(kind: str, body: object, limits: Limits, also: str = "") -> Asked:
    """Raises `UsageError`, whose `field` is the parameter, for what is wrong or cannot be done here.

    `also` is a field that the caller reads itself.
    """
    if not isinstance(body, dict):
        raise UsageError("the request's body is no JSON object", remedy="send one")
    for name in body:
        if name not in _KNOWN[kind] and name != also:
            raise UsageError(f"{name!r} is not supported", remedy="leave it out", field=name)
    for name, values in _ONLY.items():
        if body.get(name) is not None and (isinstance(body[name], bool) or body[name] not in values):
            what = f"{name}={json.dumps(body[name])} is not supported"
            raise UsageError(what, remedy=f"leave it out or give {values[0]}: one greedy answer is made", field=name)
    model = body.get("model")
    if model != limits.model:
        what = f"the model {model!r} does not exist here"
        code = "model_not_found" if isinstance(model, str) else None
        raise UsageError(what, remedy=f"there is {limits.model!r}", field="model", code=code)
    prompt = _prompt(body.get("prompt")) if kind == COMPLETION else _chat(body.get("messages"))
    field = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    asked = Asked(
        kind=kind,
        prompt=tuple(prompt),
        max_tokens=_whole_number(body, field, _DEFAULT_TOKENS[kind]),
        stop=_stop(body.get("stop")),
        stream=_flag(body, "stream"),
        include_usage=_include_usage(body),
        ignore_eos=_flag(body, "ignore_eos"),
    )
    if len(asked.prompt) + asked.max_tokens > limits.max_model_len:
        what = f"{len(asked.prompt)} tokens of prompt and {asked.max_tokens} of answer are more than "
        raise UsageError(
            what + f"the {limits.max_model_len} that fit",
            remedy=f"shorten the prompt, or ask for less with {field}",
            field="prompt" if kind == COMPLETION else "messages",
            code="context_length_exceeded",
        )
    return asked


def _prompt(given: object) -> list[int]:
    if isinstance(given, str):
        tokens = encode(given)
    elif isinstance(given, list) and given and all(isinstance(t, int) and not isinstance(t, bool) for t in given):
        tokens = given
        if not all(0 <= token < VOCAB for token in tokens):
            raise UsageError("the prompt has tokens out of range", remedy=f"give 0 to {VOCAB - 1}", field="prompt")
    elif isinstance(given, list) and len(given) == 1:
        return _prompt(given[0])
    else:
        raise UsageError("the prompt is neither a string nor a list of tokens", remedy="give one", field="prompt")
    if not tokens:
        raise UsageError("the prompt is empty", remedy="give at least one character", field="prompt")
    return tokens


def _chat(given: object) -> list[int]:
    """Messages as plain lines; the model is to go on after its own name."""
    if not isinstance(given, list) or not given:
        raise UsageError("there are no messages", remedy="give a list of at least one", field="messages")
    lines = []
    for at, message in enumerate(given):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES:
            remedy = f"give {', '.join(_ROLES)}"
            raise UsageError(f"message {at} has the role {role!r}", remedy=remedy, field="messages")
        lines.append(f"{role}: {_content(message.get('content'), at)}\n")
    return encode("".join(lines) + "assistant:")


def _content(given: object, at: int) -> str:
    if isinstance(given, str):
        return given
    parts = given if isinstance(given, list) else [None]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"the content of message {at} is not text", remedy="give a string", field="messages")
    return "".join(map(str, texts))


def _whole_number(body: dict[str, Any], field: str, usual: int) -> int:
    given = body.get(field)
    if given is None:
        return usual
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise UsageError(f"{field} is {json.dumps(given)}", remedy="give a whole number from 1 on", field=field)
    return given


def _flag(body: dict[str, Any], field: str) -> bool:
    given = body.get(field)
    if given is not None and not isinstance(given, bool):
        raise UsageError(f"{field} is {json.dumps(given)}", remedy="give true or false", field=field)
    return bool(given)


def _stop(given: object) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given if given is not None else []
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        remedy = f"give a string, or a list of at most {_MOST_STOPS}, none of them empty"
        raise UsageError(f"stop is {json.dumps(given)}", remedy=remedy, field="stop")
    return tuple(stops)


def _include_usage(body: dict[str, Any]) -> bool:
    given = body.get("stream_options")
    if given is None:
        return False
    if not body.get("stream"):
        raise UsageError("stream_options without stream", remedy="set stream, or leave it out", field="stream_options")
    if not isinstance(given, dict) or not set(given) <= {"include_usage", "include_obfuscation"}:
        remedy = 'give {"include_usage": true}'
        raise UsageError(f"stream_options is {json.dumps(given)}", remedy=remedy, field="stream_options")
    if _flag(given, "include_obfuscation"):
        raise UsageError("include_obfuscation is not supported", remedy="leave it out", field="stream_options")
    return _flag(given, "include_usage")


class Shape:
    """The answer to one request, whole or in chunks."""

    def __init__(self, asked: Asked, key: str, model: str) -> None:
        self._asked = asked
        prefix, name = ("cmpl", "text_completion") if asked.kind == COMPLETION else ("chatcmpl", "chat.completion")
        streamed = asked.kind == CHAT and asked.stream
        self._head = {
            "id": f"{prefix}-{key}",
            "object": name + ".chunk" if streamed else name,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, text: str, reason: str, n_tokens: int) -> dict[str, Any]:
        chat = self._asked.kind == CHAT
        said = {"message": {"role": "assistant", "content": text, "refusal": None}} if chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
        return {**self._head, "choices": [choice], "usage": self._usage(n_tokens)}

    def first(self) -> list[bytes]:
        """Chunks that come before all text."""
        return [self._chunk({"delta": {"role": "assistant", "content": ""}})] if self._asked.kind == CHAT else []

    def more(self, text: str) -> bytes:
        return self._chunk({"delta": {"content": text}} if self._asked.kind == CHAT else {"text": text})

    def last(self, reason: str, n_tokens: int) -> list[bytes]:
        """Chunks that end an answer that came well to its end."""
        chunks = [self._chunk({"delta": {}} if self._asked.kind == CHAT else {"text": ""}, reason)]
        if self._asked.include_usage:
            chunks.append(event({**self._head, "choices": [], "usage": self._usage(n_tokens)}))
        return [*chunks, DONE]

    def _chunk(self, said: dict[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
        usage = {"usage": None} if self._asked.include_usage else {}
        return event({**self._head, "choices": [choice], **usage})

    def _usage(self, n_tokens: int) -> dict[str, int]:
        n_prompt = len(self._asked.prompt)
        return {"prompt_tokens": n_prompt, "completion_tokens": n_tokens, "total_tokens": n_prompt + n_tokens}


def event(content: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def error(message: str, kind: str, *, param: object = None, code: object = None) -> dict[str, Any]:
    """OpenAI's error shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def bad_request(refused: UsageError) -> dict[str, Any]:
    fields = refused.fields
    return error(str(refused), "invalid_request_error", param=fields.get("field"), code=fields.get("code"))


def models(name: str) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "pdstage"}]}
