"""`pdstage serve`: its arguments, and the call of what they ask for.

Layer 6. `--help` needs nothing installed: the servers are imported when they start.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pdstage.demo.options import LAYOUTS, MODELS, PATHS, TRANSPORTS
from pdstage.demo.serve.options import DECODE, PREFILL, ROUTER, TOLD, Listening, RouterOptions, ServerOptions
from pdstage.errors import UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

_LISTENING = ("host", "port", "with_parent", "drain_s", "timeout_s")
# What all servers of `pdstage serve all` share, and what each side has of its own.
_SHARED = ("model", "seed", "transport", "path", "keys", "metrics_port", "pool_tokens", "max_model_len", "max_running",
           "max_waiting", "chunk_tokens")  # fmt: skip
_OWN = ("tp", "page", "layout")


def add(serve: argparse.ArgumentParser) -> None:
    """Adds the four commands."""
    roles = serve.add_subparsers(dest="role", required=True, metavar="ROLE", parser_class=type(serve))
    for role, text in (
        (PREFILL, "compute prompts, and hand their state over"),
        (DECODE, "take prompts' state, and go on from there"),
    ):
        command = roles.add_parser(role, help=text)
        _add_listening(command)
        _add_server(command)
        _add_own(command, "", "of this server; default: the role's usual")
        command.set_defaults(run=_serve_one)
    router = roles.add_parser(ROUTER, help="take requests, and send each to a prefill and a decode server")
    _add_listening(router)
    for role in (PREFILL, DECODE):
        text = f"a {role} server; may be repeated"
        router.add_argument(f"--{role}", action="append", default=[], metavar="URL", help=text)
    router.set_defaults(run=_serve_router)
    everything = roles.add_parser("all", help="all of it on this machine, with one command")
    _add_listening(everything, port=8000)
    _add_server(everything)
    for role in (PREFILL, DECODE):
        everything.add_argument(
            f"--{role}-servers", type=int, default=1, metavar="N", help=f"{role} servers; default %(default)s"
        )
        _add_own(everything, f"{role}-", f"of each {role} server; default: its usual")
    everything.set_defaults(run=_serve_all)


def _add_listening(command: argparse.ArgumentParser, port: int = 0) -> None:
    usual = Listening()
    command.add_argument("--host", default=usual.host, metavar="HOST", help="to listen at; default %(default)s")
    command.add_argument("--port", type=int, default=port, metavar="N", help="0: a free one; default %(default)s")
    command.add_argument(
        "--drain", dest="drain_s", type=float, default=usual.drain_s, metavar="S",
        help="how long running requests may take to end once it is told to go; default %(default)s",
    )  # fmt: skip
    command.add_argument(
        "--timeout", dest="timeout_s", type=float, default=usual.timeout_s, metavar="S",
        help="the longest a request may take; default %(default)s",
    )  # fmt: skip
    command.add_argument("--with-parent", action="store_true", help="end when standard input does")


def _add_server(command: argparse.ArgumentParser) -> None:
    usual = ServerOptions(role=PREFILL, listening=Listening())
    command.add_argument(
        "--model", "--family", choices=MODELS, default=usual.model, help="the same for all; default %(default)s"
    )
    command.add_argument("--transport", choices=TRANSPORTS, default=usual.transport, help="default %(default)s")
    command.add_argument("--path", choices=PATHS, default=usual.path, help="default %(default)s")
    command.add_argument("--trace", type=Path, metavar="FILE", help="write a trace to FILE in the end, for Perfetto")
    command.add_argument("--keys", type=Path, metavar="FILE", help="encrypt pdstage's messages with this key file")
    command.add_argument(
        "--metrics-port", type=int, metavar="PORT",
        help="serve the ranks' metrics at 127.0.0.1, each server at the first free port from this one on",
    )  # fmt: skip
    for name, value, text in (
        ("seed", usual.seed, "of the weights, the same for all"),
        ("pool-tokens", usual.pool_tokens, "tokens that a server's pages hold"),
        ("max-model-len", usual.max_model_len, "the most tokens of a request with its answer"),
        ("max-running", usual.max_running, "requests stepped together"),
        ("max-waiting", usual.max_waiting, "requests beyond those that may wait"),
        ("chunk-tokens", usual.chunk_tokens, "tokens of a prompt that one step computes"),
    ):
        command.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"{text}; default %(default)s")


def _add_own(command: argparse.ArgumentParser, prefix: str, text: str) -> None:
    command.add_argument(f"--{prefix}tp", type=int, default=0, metavar="N", help=f"ranks {text}")
    command.add_argument(f"--{prefix}page", type=int, default=0, metavar="N", help=f"tokens a page {text}")
    command.add_argument(f"--{prefix}layout", choices=LAYOUTS, default="", help=f"memory order {text}")


def _of(given: argparse.Namespace, names: tuple[str, ...], prefix: str = "") -> dict[str, Any]:
    return {name: getattr(given, prefix + name) for name in names}


def _serve_one(given: argparse.Namespace) -> int:
    listening = Listening(**_of(given, _LISTENING))
    options = ServerOptions(role=given.role, listening=listening, **_of(given, (*_SHARED, *_OWN, "trace")))
    try:
        from pdstage.demo.serve.server import run  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        raise _lacks(missing) from missing
    return run(options, _tell)


def _serve_router(given: argparse.Namespace) -> int:
    listening = Listening(**_of(given, _LISTENING))
    options = RouterOptions(listening=listening, prefill=tuple(given.prefill), decode=tuple(given.decode))
    try:
        from pdstage.demo.serve.router import run  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        raise _lacks(missing) from missing
    return run(options, _tell)


def _serve_all(given: argparse.Namespace) -> int:
    from pdstage.demo.serve.everything import Everything  # noqa: PLC0415
    from pdstage.trace import check, merge_files  # noqa: PLC0415

    check(given.trace)
    common = ["--drain", str(given.drain_s), "--timeout", str(given.timeout_s), "--host", given.host]
    router = [*common, "--port", str(given.port)]
    with TemporaryDirectory(prefix="pdstage-serve-") as folder:
        parts = Path(folder) if given.trace is not None else None
        servers = [(role, [*common, *words]) for role, words in _servers(given, parts)]
        name = ServerOptions(role=PREFILL, listening=Listening(), model=given.model).model_name
        everything = Everything(servers, router, drain_s=given.drain_s, say=_say)
        code = everything.run(lambda url: _welcome(url, name))
        traces = list(Path(folder).iterdir())
        if traces:
            merge_files(traces, given.trace)
    return code


def _servers(given: argparse.Namespace, parts: Path | None) -> Iterator[tuple[str, list[str]]]:
    """The servers of `serve all`, by role and arguments; each writes its part of a trace into the folder `parts`."""
    shared = [word for name, value in _of(given, _SHARED).items() if value is not None for word in _option(name, value)]
    for role in (PREFILL, DECODE):
        own = _of(given, _OWN, f"{role}_")
        ServerOptions(role=role, listening=Listening(), **_of(given, _SHARED), **own)  # refuses what is wrong
        count = getattr(given, f"{role}_servers")
        if count < 1:
            raise UsageError(f"--{role}-servers is {count}", remedy="give at least 1", field=f"{role}-servers")
        words = [word for key, value in own.items() if value for word in _option(key, value)]
        for number in range(count):
            trace = _option("trace", parts / f"{role}-{number}.json") if parts is not None else ()
            yield role, [*shared, *words, *trace]


def _option(name: str, value: object) -> tuple[str, str]:
    return f"--{name.replace('_', '-')}", str(value)


def _tell(url: str) -> None:
    print(f"{TOLD}{url}", flush=True)


def _say(line: str) -> None:
    print(f"pdstage serve: {line}", flush=True)


def _welcome(url: str, model: str) -> None:
    _say(f"ready at {url}; try")
    print(
        f"curl {url}/v1/completions -H 'content-type: application/json' \\\n"
        f'    -d \'{{"model": "{model}", "prompt": "Once upon a time", "max_tokens": 24}}\'',
        flush=True,
    )


def _lacks(missing: ModuleNotFoundError) -> UsageError:
    return UsageError(f"pdstage serve needs {missing.name}", remedy="pip install 'pdstage[serve,nixl]'")
