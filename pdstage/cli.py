"""The `pdstage` command: demo, bench, top, plot, calibrate, doctor, bootstrap, instances, drain, fence,
keys, sim.

It parses arguments and prints; `COMMANDS` is the table of both. Each command's module is imported only for that
command, so that `--help` needs no package. What an argument means is said by its type, once for all commands, which
refuses before anything is done.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import re
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import pdstage
from pdstage.bench import BENCHES
from pdstage.errors import PdstageError, UsageError
from pdstage.tools.demo import options as demo
from pdstage.tools.doctor import AREAS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdstage.control.address import Address
    from pdstage.control.directory import Advert
    from pdstage.control.keys import Keys
    from pdstage.control.operate import Listed, NodeState
    from pdstage.tools.calibrate.peer import Peer

_ANSWER_S = 20.0
"""How long a person waits for a directory: on a busy host it may need seconds."""


class Done(NamedTuple):
    """What a command came to: its exit code, and what `--json` prints and `--output` writes."""

    code: int = 0
    result: Any = None


class Parser(argparse.ArgumentParser):
    """Reports errors in one line; argparse prints the whole usage first."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser() -> Parser:
    top = Parser(prog="pdstage", description="Moves KV caches between prefill and decode ranks of different layouts.")
    top.add_argument("--version", action="version", version=f"pdstage {pdstage.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, (run, text, arguments) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=run)
        for argument, how in arguments:
            command.add_argument(argument, **how)
    return top


def _demo(given: argparse.Namespace) -> Done:
    options = demo.Options(**{name: value for name, value in vars(given).items() if name in demo.Options.__slots__})
    try:
        from pdstage.tools.demo.run import is_good, run  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        raise UsageError(f"the demo needs {missing.name}", remedy="pip install 'pdstage[demo]'") from missing
    report = run(options)
    return Done(int(not is_good(report)), report)


def _bench(given: argparse.Namespace) -> Done:
    from pdstage.bench.harness import run_named, run_traced  # noqa: PLC0415

    names = ("scale", "transport", "device")
    options = {name: value for name in names if (value := getattr(given, name)) is not None}
    if given.trace is not None:
        return Done(0, run_traced(given.name, given.quick, given.trace, **options))
    return Done(0, run_named(given.name, given.quick, **options))


def _top(given: argparse.Namespace) -> Done:
    from pdstage.watch.top import run  # noqa: PLC0415

    endpoints = given.endpoints
    if given.directory is not None:
        endpoints = [one.metrics for one in _members(given, given.endpoints) if one.metrics]
    if not endpoints:
        raise UsageError("no endpoint of metrics", remedy="name some, or a --directory whose nodes say theirs")
    return Done(run(endpoints, interval_s=given.interval, once=given.once))


def _listed(given: argparse.Namespace, names: Sequence[str] = ()) -> list[Listed]:
    from pdstage.control.bootstrap import client_of  # noqa: PLC0415
    from pdstage.control.operate import members  # noqa: PLC0415

    return members(client_of(given.directory, _ANSWER_S, keys=_keys_given(given)), names)


def _members(given: argparse.Namespace, names: Sequence[str]) -> list[Advert]:
    """What the living nodes of the instances `names` say of themselves in the directory; of all without names."""
    return [one.advert for one in _listed(given, names) if one.expires_in_s > 0]


def _plot(given: argparse.Namespace) -> Done:
    from pdstage.tools.trace import chrome, load, steps  # noqa: PLC0415

    trace = load(given.traces)
    if given.merged is not None:
        chrome.write(trace, given.merged)
    if given.steps or given.merged is None:
        print(steps.table(trace, given.room))
    return Done()


def _calibrate(given: argparse.Namespace) -> Done:
    from pdstage.tools.calibrate.caller import Caller, calibrate, own_peer, table  # noqa: PLC0415
    from pdstage.tools.calibrate.peer import Peer  # noqa: PLC0415
    from pdstage.transport import available  # noqa: PLC0415

    if given.transport not in ("all", *available()):
        raise UsageError(f"no transport {given.transport!r}", remedy=f"name one of all, {', '.join(available())}")
    options = {"device": given.device, "keys": _keys_given(given), "insecure": given.insecure}
    if given.serve is not None:
        return _serve(Peer(given.serve, **options))
    with (
        own_peer(given.device, given.keys) if given.peer is None else contextlib.nullcontext(given.peer) as endpoint,
        Caller(endpoint, bind=given.bind, **options) as caller,
    ):
        made, left_out = calibrate(caller, [given.transport], decode_host=given.peer or "", quick=given.quick)
    print("\n".join([*table(made), *(f"left out: {line}" for line in left_out)]))
    return Done(0, made)


def _serve(peer: Peer) -> Done:
    with peer:
        print(f"serving at {peer.endpoint}", flush=True)
        peer.serve()
    return Done()


def _doctor(given: argparse.Namespace) -> Done:
    """The exit code is 1 if something that was asked for cannot work."""
    if given.serve is not None:
        from pdstage.tools.calibrate.peer import Peer  # noqa: PLC0415

        return _serve(Peer(given.serve, device=given.device, keys=_keys_given(given), insecure=given.insecure))
    from pdstage.tools.doctor import report as reports  # noqa: PLC0415
    from pdstage.tools.doctor.probe import Asked  # noqa: PLC0415
    from pdstage.tools.doctor.table import examine  # noqa: PLC0415

    if given.node is not None:
        from pdstage.control.operate import STATE, ask  # noqa: PLC0415

        return _states(ask([given.node], STATE, keys=_keys_given(given)))
    if given.keys is None:
        _keys_given(given)  # refuses --allow alone
    asked = Asked(
        areas=given.only, transports=tuple(given.transport), device=given.device, peer=given.peer or "",
        bind=given.bind or "", keys=str(given.keys or ""), allow=str(given.allow or ""), insecure=given.insecure,
        deadline_s=given.deadline,
    )  # fmt: skip
    report = examine(asked, lambda found: print(reports.line(found), flush=True))
    print("\n".join(reports.summary(report)))
    return Done(int(report.verdict == "fail"), report)


def _bootstrap(given: argparse.Namespace) -> Done:
    from pdstage.control.bootstrap import BootstrapServer  # noqa: PLC0415

    keys = _keys_given(given)
    with BootstrapServer(given.bind, advertise=given.advertise, insecure=given.insecure, keys=keys) as server:
        print(f"directory at {server.address}", flush=True)
        signal.pause()
    return Done()


def _instances(given: argparse.Namespace) -> Done:
    from pdstage.watch.terminal import table  # noqa: PLC0415

    listed = sorted(
        _listed(given), key=lambda one: (one.advert.role, one.advert.instance, one.advert.topology.unique_rank)
    )
    head = ("instance", "role", "rank", "of", "engine", "model", "endpoint", "metrics", "lease")
    rows = [
        (
            one.advert.instance, one.advert.role, one.advert.topology.unique_rank, one.advert.topology.group_size,
            one.advert.engine, one.advert.model, one.advert.endpoint, one.advert.metrics,
            f"{one.expires_in_s:.0f} s" if one.expires_in_s > 0 else "ended",
        )
        for one in listed
    ]  # fmt: skip
    print("\n".join(table(head, rows)) if rows else f"no node is in the directory at {given.directory}")
    return Done(0, listed)


def _drain(given: argparse.Namespace) -> Done:
    """The exit code is 1 if a node is not drained by the end of the wait."""
    from pdstage.control.operate import drain  # noqa: PLC0415

    if given.directory is not None:
        endpoints = [one.endpoint for one in _members(given, given.endpoints)]
    else:
        endpoints = [endpoint(one) for one in given.endpoints]
    said = drain(endpoints, keys=_keys_given(given), wait_s=given.wait)
    return Done(_states(said).code or int(not all(state.drained for state in said.values())), said)


def _states(said: Mapping[str, NodeState]) -> Done:
    for name, state in said.items():
        print(f"{name}: {state}")
    return Done(int(any(state.failed for state in said.values())), said)


def _fence(given: argparse.Namespace) -> Done:
    """The exit code is 1 if a node has failed."""
    from pdstage.control.bootstrap import client_of  # noqa: PLC0415
    from pdstage.control.operate import fence  # noqa: PLC0415

    keys = _keys_given(given)
    client = client_of(given.directory, _ANSWER_S, keys=keys)
    done = fence(client, given.where, keys=keys, wait_s=given.wait)
    for process in done.ended:
        print(f"fenced {process}")
    if not done.ended:
        print(f"nothing to fence: every process that was at {given.where} was withdrawn or fenced before")
    n_fenced = sum(one.fenced for one in done.told.values())
    print(f"{len(done.told)} nodes were told; they kept memory for {n_fenced} lost sessions")
    odd = {name: state for name, state in done.told.items() if state.unfenced or state.failed}
    return Done(_states(odd).code, done._asdict())


def _keys(given: argparse.Namespace) -> Done:
    from pdstage.control.keys import Keys  # noqa: PLC0415

    keys = Keys.load(given.file) if given.public else Keys.make(given.file)
    print(keys.public.hex())
    return Done()


def _keys_given(given: argparse.Namespace) -> Keys | None:
    from pdstage.control.keys import Keys  # noqa: PLC0415

    if given.keys is None and given.allow is not None:
        raise UsageError("--allow without --keys", remedy="pass this side's own key file too")
    return Keys.load(given.keys, given.allow) if given.keys is not None else None


def _sim(given: argparse.Namespace) -> Done:
    root = Path(__file__).resolve().parent.parent
    if not (root / "tests" / "sim" / "run.py").is_file():
        raise UsageError("the simulator is not installed", remedy="run pdstage sim in a checkout of the repository")
    sys.path.insert(0, str(root))
    names = ("seed", "seeds", "first", "steps", "replay", "workers")
    options = {name: getattr(given, name) for name in names}
    return Done(int(import_module("tests.sim.run").main(**options, shrink_s=given.shrink)))


# Types of arguments.


def whole(text: str) -> int:
    """A number of things, or a seed."""
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return int(text)


def count(text: str) -> int:
    if not (number := whole(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return number


def seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.0 < (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")


def endpoint(text: str) -> str:
    """Of a node, or of a peer: what they print."""
    return f"tcp://{_parsed(text, 'tcp', listening=False).keyed}"


def listener(text: str) -> str:
    """Where a node is to listen, port 0 for any."""
    return f"tcp://{_parsed(text, 'tcp', listening=True)}"


def http_listener(text: str) -> str:
    return str(_parsed(text, "http", listening=True))


def directory(text: str) -> str:
    """As `pdstage bootstrap`, or a prefill node, printed it; or one in etcd."""
    from pdstage.control.bootstrap import PLAIN  # noqa: PLC0415
    from pdstage.control.etcd import SCHEME, EtcdAddress  # noqa: PLC0415

    if not text.startswith(SCHEME):
        _parsed(text.removeprefix(PLAIN), "http", listening=False)
        return text
    try:
        EtcdAddress.parse(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _parsed(text: str, scheme: str, *, listening: bool) -> Address:
    from pdstage.control.address import Address  # noqa: PLC0415

    try:
        return Address.parse(text, scheme, listening=listening)
    except UsageError as error:
        wanted = "HOST:PORT, an IPv6 host in brackets"
        raise argparse.ArgumentTypeError(f"{error.what}; write it as {wanted}") from error


def device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is none; give cpu, cuda or cuda:N")
    return text


def devices(text: str) -> str:
    """Of a bench: one for each side."""
    return text if text == "double" else ",".join(map(device, text.split(",", 1)))


def areas(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    if unknown := [one for one in chosen if one not in AREAS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(AREAS)}")
    return chosen


def readable(text: str) -> Path:
    """A file that is there."""
    path = Path(text)
    try:
        path.open("rb").close()
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {text!r}: {getattr(error, 'strerror', error)}") from error
    return path


def writable(text: str) -> Path:
    """Where a result goes. It is tried before the work begins."""
    path, why = Path(text), ""
    try:
        folder = path.absolute().parent
        if path.is_dir():
            why = "it is a folder; name a file"
        elif not folder.is_dir():
            why = "its folder does not exist; create it"
        elif not os.access(path if path.exists() else folder, os.W_OK):
            why = "it is not permitted"
    except (OSError, ValueError) as error:
        why = str(getattr(error, "strerror", error))
    if why:
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {why}")
    return path


_Option: TypeAlias = tuple[str, dict[str, Any]]


def _option(name: str, text: str, metavar: str | None = None, **how: Any) -> _Option:  # noqa: ANN401  (argparse's)
    """An argument as argparse takes it; a flag if nothing follows its text."""
    if metavar is not None:
        how["metavar"] = metavar
    elif not how:
        how["action"] = "store_true"
    return name, {"help": text, **how}


def _number(name: str, default: int, text: str, kind: Callable[[str], int] = count) -> _Option:
    return _option(name, f"{text}; default %(default)s", "N", type=kind, default=default)


_PLAIN = demo.Options()
_DEVICE = _option(
    "--device", "where pools lie: cpu or cuda:N; default %(default)s", "DEVICE", type=device, default="cpu"
)
_INSECURE = _option("--insecure", "allow addresses that other machines can reach")
_KEYS = (
    _option("--keys", "encrypt, and trust who holds this key file's key", "FILE", type=readable),
    _option("--allow", "with --keys: public keys of others to trust", "FILE", type=readable),
)
_DIRECTORY = _option("--directory", "take instances' names, and find their nodes here", "ADDRESS", type=directory)
_TRACE = _option("--trace", "write a trace to FILE, for Perfetto or pdstage plot", "FILE", type=writable)
_RESULT = (
    _option("--json", "print the result as JSON, and nothing else on standard output"),
    _option("--output", "write the result as JSON to FILE", "FILE", type=writable),
)
_LAYOUT = "memory order of a page's tokens and heads at"

COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], Done], str, tuple[_Option, ...]]] = {
    "demo": (_demo, "move a real model's KV cache between ranks and go on decoding from it", (
        _option("--model", "default %(default)s", choices=demo.MODELS, default=_PLAIN.model),
        _option("--transport", "default: nixl where it starts, else local", choices=demo.TRANSPORTS),
        _option("--path", "default %(default)s", choices=demo.PATHS, default=_PLAIN.path),
        _option("--aux", "how first tokens travel: by message or by the transport", choices=demo.AUX,
                default=_PLAIN.aux),
        _number("--prefill-tp", _PLAIN.prefill_tp, "prefill ranks"),
        _number("--decode-tp", _PLAIN.decode_tp, "decode ranks"),
        _number("--prefill-pp", _PLAIN.prefill_pp, "pipeline stages at prefill, each of that many ranks"),
        _number("--decode-pp", _PLAIN.decode_pp, "pipeline stages at decode"),
        _number("--prefill-page", _PLAIN.prefill_page, "tokens a page at prefill"),
        _number("--decode-page", _PLAIN.decode_page, "tokens a page at decode"),
        _number("--requests", _PLAIN.requests, "prompts"),
        _number("--seed", _PLAIN.seed, "of weights, prompts and page order", whole),
        _DEVICE,
        _option("--prefill-layout", f"{_LAYOUT} prefill; default %(default)s", choices=demo.LAYOUTS,
                default=_PLAIN.prefill_layout),
        _option("--decode-layout", f"{_LAYOUT} decode; default %(default)s", choices=demo.LAYOUTS,
                default=_PLAIN.decode_layout),
        _option("--picture", "write an SVG of both paths to FILE", "FILE", type=writable),
        _TRACE,
        *_RESULT,
    )),
    "bench": (_bench, "measure one part against its baselines", (
        _option("name", f"one of {', '.join(BENCHES)}", "NAME", choices=BENCHES),
        _option("--quick", "fewer repetitions: a look, not a measurement"),
        _option("--scale", "kv-transfer: keep 1 of N of a model's layers", "N", type=count),
        _option("--transport", "kv-transfer: measure only this transport", "NAME"),
        _option("--device", "where pools are; kv-transfer: cpu or cuda:N; rooms: also double", "DEVICE",
                type=devices),
        _TRACE,
        *_RESULT,
    )),
    "top": (_top, "watch running nodes in the terminal, by their metrics endpoints", (
        _option("endpoints", "HOST:PORT or PORT, where metrics are served, or instances", "ENDPOINT", nargs="*"),
        _DIRECTORY,
        _option("--interval", "seconds a frame; default %(default)s", "S", type=seconds, default=1.0),
        _option("--once", "print one frame and end; 1 if an endpoint did not answer"),
        *_KEYS,
    )),
    "plot": (_plot, "say where the time of a trace's rooms went, and merge traces", (
        _option("traces", "what --trace wrote; files of several processes are merged", "TRACE", type=readable,
                nargs="+"),
        _option("--room", "the time of this room alone", "ROOM"),
        _option("--merged", "write the merged trace to FILE", "FILE", type=writable),
        _option("--steps", "print where rooms' time went; the default"),
    )),
    "calibrate": (_calibrate, "measure what each transport costs here, for path auto", (
        _option("--transport", "one, or all that can be used; the default", "NAME", default="all"),
        _option("--quick", "fewer sizes and repetitions"),
        _option("--serve", "be the decode side, until interrupted", "HOST:PORT", type=listener),
        _option("--peer", "the decode side elsewhere; default: a process of its own", "HOST:PORT", type=endpoint),
        _option("--bind", "of this side's node; default %(default)s", "HOST:PORT", type=listener,
                default="127.0.0.1:0"),
        _DEVICE,
        _INSECURE,
        *_KEYS,
        *_RESULT,
    )),
    "doctor": (_doctor, "say what this node can do, and whether it can work with another", (
        _option("--only", "of %(default)s; default: all of them", "AREA,...", type=areas, default=",".join(AREAS)),
        _option("--transport", "one that must work; default: what is installed", "NAME", action="append", default=[]),
        _DEVICE,
        _option("--serve", "be the other side of --peer, until interrupted", "HOST:PORT", type=listener),
        _option("--peer", "work with the node that --serve runs on", "HOST:PORT", type=endpoint),
        _option("--node", "ask a running node, in an engine too, how it is; 1 if it has failed", "HOST:PORT",
                type=endpoint),
        _option("--bind", "of this side's node; default: towards the peer", "HOST:PORT", type=listener),
        _option("--deadline", "of a probe; default %(default)s", "S", type=seconds, default=60.0),
        _INSECURE,
        *_KEYS,
        *_RESULT,
    )),
    "bootstrap": (_bootstrap, "run the directory in which prefill ranks announce themselves", (
        _option("--bind", "default %(default)s; port 0: a free one", "HOST:PORT", type=http_listener,
                default="127.0.0.1:8998"),
        _option("--advertise", "the host peers are told, where --bind names a wildcard", "HOST"),
        _INSECURE,
        *_KEYS,
    )),
    "instances": (_instances, "say which nodes a directory lists", (
        _option("directory", "as the directory or the prefill node printed it", "ADDRESS", type=directory),
        *_KEYS,
        *_RESULT,
    )),
    "drain": (_drain, "ask running nodes to begin no room any more, and wait until none is left", (
        _option("endpoints", "nodes' control sockets, HOST:PORT, or instances", "ENDPOINT", nargs="+"),
        _DIRECTORY,
        _option("--wait", "for rooms to end; default %(default)s", "S", type=seconds, default=60.0),
        *_KEYS,
        *_RESULT,
    )),
    "fence": (_fence, "say that an instance's processes have ended, to every node in a directory", (
        _option("directory", "its address", "ADDRESS", type=directory),
        _option("where", "the instance or host that was ended, or one node's endpoint", "WHERE"),
        _option("--wait", "for leases to end; default %(default)s", "S", type=seconds, default=30.0),
        *_KEYS,
        *_RESULT,
    )),
    "keys": (_keys, "make the key file of a cluster or of a node", (
        _option("file", "a new file; with --public one that exists", "FILE", type=Path),
        _option("--public", "print the public key of FILE instead"),
    )),
    "sim": (_sim, "run the real cores under simulated faults; only in a checkout", (
        _number("--seeds", 2000, "how many seeds"),
        _number("--first", 0, "the first seed", whole),
        _number("--steps", 500, "steps a seed before its faults end"),
        _number("--workers", 2, "processes"),
        _option("--seed", "this seed alone", "N", type=whole),
        _option("--replay", "with --seed: print every step in words"),
        _option("--shrink", "seconds to shrink; default %(default)s", "S", type=seconds, default=30.0),
    )),
}  # fmt: skip


def _run(given: argparse.Namespace) -> int:
    printed, output = getattr(given, "json", False), getattr(given, "output", None)
    with contextlib.redirect_stdout(sys.stderr) if printed else contextlib.nullcontext():
        done: Done = given.run(given)
    from pdstage.tools.results import as_json, save  # noqa: PLC0415

    if output is not None and done.result is not None:
        save(done.result, output)
    if printed:
        sys.stdout.write(as_json(done.result))
    sys.stdout.flush()
    return done.code


def _in_options(words: str, given: argparse.Namespace) -> str:
    """Remedies name the library's arguments: of a command they are options."""

    def option(found: re.Match[str]) -> str:
        name, value = found.groups()
        if name not in vars(given):
            return found[0]
        return f"--{name.replace('_', '-')}" + (f" {value}" if value not in ("", "True") else "")

    return re.sub(r"\b([a-z_]+)=(\w*)", option, words)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 right; 1 wrong: the demo's check, the doctor's verdict, a node that is not drained, whatever
    failed; 2 arguments that are none, or cannot be had here.

    An error is printed in one line.
    """
    given = parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")  # warnings and worse, to stderr
    # A container's first process ignores what it has no handler for.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        return _run(given)
    except BrokenPipeError:  # who reads has read enough; nothing more is written at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (PdstageError, OSError, argparse.ArgumentTypeError) as error:
        print(f"pdstage {given.command}: {_in_options(str(error), given)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError | argparse.ArgumentTypeError) else 1
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
