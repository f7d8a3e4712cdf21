"""The `pdstage` command: demo, bench, top, plot, calibrate, doctor, bootstrap, instances, drain, fence,
keys, sim.

It parses arguments and prints; `COMMANDS` is the table of both. Each command's module is imported only for that
command, so that `--help` needs no package.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import pdstage
from pdstage.bench import BENCHES
from pdstage.errors import PdstageError, UsageError
from pdstage.tools.demo import options as demo
from pdstage.tools.doctor import AREAS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdstage.control.directory import Advert
    from pdstage.control.keys import Keys
    from pdstage.control.operate import NodeState
    from pdstage.tools.calibrate.peer import Peer

_ANSWER_S = 20.0
"""How long a person waits for a directory: on a busy host it may need seconds."""


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


def _demo(given: argparse.Namespace) -> int:
    options = demo.Options(**{name: value for name, value in vars(given).items() if name in demo.Options.__slots__})
    try:
        from pdstage.tools.demo.run import is_good, run  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        raise UsageError(f"the demo needs {missing.name}", remedy="pip install 'pdstage[demo]'") from missing
    return 0 if is_good(run(options)) else 1


def _bench(given: argparse.Namespace) -> int:
    from pdstage.bench.harness import run_named, run_traced  # noqa: PLC0415

    names = ("scale", "transport", "device")
    options = {name: value for name in names if (value := getattr(given, name)) is not None}
    if given.trace is None:
        result = run_named(given.name, given.quick, **options)
    else:
        result = run_traced(given.name, given.quick, given.trace, **options)
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def _top(given: argparse.Namespace) -> int:
    from pdstage.watch.top import run  # noqa: PLC0415

    endpoints = given.endpoints
    if given.directory is not None:
        endpoints = [one.metrics for one in _members(given, given.endpoints) if one.metrics]
    if not endpoints:
        raise UsageError("no endpoint of metrics", remedy="name some, or a --directory whose nodes say theirs")
    return run(endpoints, interval_s=given.interval, once=given.once)


def _members(given: argparse.Namespace, names: Sequence[str]) -> list[Advert]:
    """What the living nodes of the instances `names` say of themselves in the directory; of all without names."""
    from pdstage.control.bootstrap import client_of  # noqa: PLC0415
    from pdstage.control.operate import members  # noqa: PLC0415

    listed = members(client_of(given.directory, _ANSWER_S, keys=_keys_given(given)), names)
    return [one.advert for one in listed if one.expires_in_s > 0]


def _plot(given: argparse.Namespace) -> int:
    from pdstage.tools.trace import chrome, load, steps  # noqa: PLC0415

    trace = load(given.traces)
    if given.merged is not None:
        chrome.write(trace, given.merged)
    if given.steps or given.merged is None:
        print(steps.table(trace, given.room))
    return 0


def _calibrate(given: argparse.Namespace) -> int:
    from pdstage.tools.calibrate.caller import Caller, calibrate, own_peer, to_json, write  # noqa: PLC0415
    from pdstage.tools.calibrate.peer import Peer  # noqa: PLC0415

    options = {"device": given.device, "keys": _keys_given(given), "insecure": given.insecure}
    if given.serve is not None:
        return _serve(Peer(given.serve, **options))
    with (
        own_peer(given.device, given.keys) if given.peer is None else nullcontext(given.peer) as endpoint,
        Caller(endpoint, bind=given.bind, **options) as caller,
    ):
        made, left_out = calibrate(caller, [given.transport], decode_host=given.peer or "", quick=given.quick)
    print(to_json(made))
    for line in left_out:
        print(f"left out: {line}", file=sys.stderr)
    if given.out is not None:
        write(made, given.out)
    return 0


def _serve(peer: Peer) -> int:
    with peer:
        print(f"serving at {peer.endpoint}", flush=True)
        peer.serve()
    return 0


def _doctor(given: argparse.Namespace) -> int:
    """The exit code is 1 if something that was asked for cannot work."""
    if given.serve is not None:
        from pdstage.tools.calibrate.peer import Peer  # noqa: PLC0415

        keys = _keys_given(given)
        return _serve(Peer(_scheme(given.serve), device=given.device, keys=keys, insecure=given.insecure))
    from pdstage.tools.doctor import report as reports  # noqa: PLC0415
    from pdstage.tools.doctor.probe import Asked  # noqa: PLC0415
    from pdstage.tools.doctor.table import examine  # noqa: PLC0415

    if given.node is not None:
        from pdstage.control.operate import STATE, ask  # noqa: PLC0415

        return _print_states(ask([_scheme(given.node)], STATE, keys=_keys_given(given)))
    if given.keys is None:
        _keys_given(given)  # refuses --allow alone
    asked = Asked(
        areas=tuple(given.only.split(",")), transports=tuple(given.transport), device=given.device, peer=given.peer,
        bind=_scheme(given.bind), keys=str(given.keys or ""), allow=str(given.allow or ""), insecure=given.insecure,
        deadline_s=given.deadline,
    )  # fmt: skip
    report = examine(asked) if given.json else examine(asked, lambda found: print(reports.line(found), flush=True))
    print(report.to_json() if given.json else "\n".join(reports.summary(report)))
    return 1 if report.verdict == "fail" else 0


def _scheme(address: str) -> str:
    return address if "://" in address or not address else f"tcp://{address}"


def _bootstrap(given: argparse.Namespace) -> int:
    from pdstage.control.bootstrap import BootstrapServer  # noqa: PLC0415

    keys = _keys_given(given)
    with BootstrapServer(given.bind, advertise=given.advertise, insecure=given.insecure, keys=keys) as server:
        print(f"directory at {server.address}", flush=True)
        signal.pause()
    return 0


def _instances(given: argparse.Namespace) -> int:
    from pdstage.control.bootstrap import client_of  # noqa: PLC0415

    print(client_of(given.address, _ANSWER_S, keys=_keys_given(given)).instances().decode())
    return 0


def _drain(given: argparse.Namespace) -> int:
    """The exit code is 1 if a node is not drained by the end of the wait."""
    from pdstage.arguments import number  # noqa: PLC0415
    from pdstage.control.operate import drain  # noqa: PLC0415

    wait_s, endpoints = number("--wait", given.wait, above=0.0), [_scheme(one) for one in given.endpoints]
    if given.directory is not None:
        endpoints = [one.endpoint for one in _members(given, given.endpoints)]
    said = drain(endpoints, keys=_keys_given(given), wait_s=wait_s)
    return _print_states(said) or int(not all(state.drained for state in said.values()))


def _print_states(said: Mapping[str, NodeState]) -> int:
    for endpoint, state in said.items():
        print(f"{endpoint}: {state}")
    return int(any(state.failed for state in said.values()))


def _fence(given: argparse.Namespace) -> int:
    """The exit code is 1 if a node has failed."""
    from pdstage.arguments import number  # noqa: PLC0415
    from pdstage.control.bootstrap import client_of  # noqa: PLC0415
    from pdstage.control.operate import fence  # noqa: PLC0415

    keys = _keys_given(given)
    client = client_of(given.address, _ANSWER_S, keys=keys)
    ended, told = fence(client, given.where, keys=keys, wait_s=number("--wait", given.wait, above=0.0))
    for process in ended:
        print(f"fenced {process}")
    if not ended:
        print(f"nothing to fence: every process that was at {given.where} was withdrawn or fenced before")
    print(f"{len(told)} nodes were told; they kept memory for {sum(one.fenced for one in told.values())} lost sessions")
    return _print_states({endpoint: state for endpoint, state in told.items() if state.unfenced or state.failed})


def _keys(given: argparse.Namespace) -> int:
    from pdstage.control.keys import Keys  # noqa: PLC0415

    keys = Keys.load(given.file) if given.public else Keys.make(given.file)
    print(keys.public.hex())
    return 0


def _keys_given(given: argparse.Namespace) -> Keys | None:
    from pdstage.control.keys import Keys  # noqa: PLC0415

    if given.keys is None and given.allow is not None:
        raise UsageError("--allow without --keys", remedy="pass this side's own key file too", field="allow")
    return Keys.load(given.keys, given.allow) if given.keys is not None else None


def _sim(given: argparse.Namespace) -> int:
    root = Path(__file__).resolve().parent.parent
    if not (root / "tests" / "sim" / "run.py").is_file():
        raise UsageError("the simulator is not installed", remedy="run pdstage sim in a checkout of the repository")
    sys.path.insert(0, str(root))
    names = ("seed", "seeds", "first", "steps", "replay", "workers")
    options = {name: getattr(given, name) for name in names}
    return int(import_module("tests.sim.run").main(**options, shrink_s=given.shrink))


_Option: TypeAlias = tuple[str, dict[str, Any]]


def _option(name: str, text: str, metavar: str | None = None, **how: Any) -> _Option:  # noqa: ANN401  (argparse's)
    """An argument as argparse takes it; a flag if nothing follows its text."""
    if metavar is not None:
        how["metavar"] = metavar
    elif not how:
        how["action"] = "store_true"
    return name, {"help": text, **how}


def _number(name: str, default: int, text: str) -> _Option:
    return _option(name, f"{text}; default %(default)s", "N", type=int, default=default)


_PLAIN = demo.Options()
_DEVICE = _option("--device", "where pools lie: cpu or cuda:N; default %(default)s", "DEVICE", default="cpu")
_INSECURE = _option("--insecure", "allow addresses that other machines can reach")
_KEYS = (
    _option("--keys", "encrypt, and trust who holds this key file's key", "FILE", type=Path),
    _option("--allow", "with --keys: public keys of others to trust", "FILE", type=Path),
)
_DIRECTORY = _option("--directory", "take instances' names, and find their nodes here", "ADDRESS")
_TRACE = _option("--trace", "write a trace to FILE, for Perfetto or pdstage plot", "FILE", type=Path)
_LAYOUT = "memory order of a page's tokens and heads at"

COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], str, tuple[_Option, ...]]] = {
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
        _number("--seed", _PLAIN.seed, "of weights, prompts and page order"),
        _DEVICE,
        _option("--prefill-layout", f"{_LAYOUT} prefill; default %(default)s", choices=demo.LAYOUTS,
                default=_PLAIN.prefill_layout),
        _option("--decode-layout", f"{_LAYOUT} decode; default %(default)s", choices=demo.LAYOUTS,
                default=_PLAIN.decode_layout),
        _option("--json", "write the result to FILE", "FILE", type=Path),
        _TRACE,
    )),
    "bench": (_bench, "measure one part against its baselines", (
        _option("name", f"one of {', '.join(BENCHES)}", "NAME"),
        _option("--json", "write the numbers to FILE", "FILE", type=Path),
        _option("--quick", "fewer repetitions: a look, not a measurement"),
        _option("--scale", "kv-transfer: keep 1 of N of a model's layers", "N", type=int),
        _option("--transport", "kv-transfer: measure only this transport", "NAME"),
        _option("--device", "where pools are; kv-transfer: cpu or cuda:N; rooms: also double", "DEVICE"),
        _TRACE,
    )),
    "top": (_top, "watch running nodes in the terminal, by their metrics endpoints", (
        _option("endpoints", "HOST:PORT or PORT, where metrics are served, or instances", "ENDPOINT", nargs="*"),
        _DIRECTORY,
        _option("--interval", "seconds a frame; default %(default)s", "S", type=float, default=1.0),
        _option("--once", "print one frame and end; 1 if an endpoint did not answer"),
        *_KEYS,
    )),
    "plot": (_plot, "say where the time of a trace's rooms went, and merge traces", (
        _option("traces", "what --trace wrote; files of several processes are merged", "TRACE", type=Path, nargs="+"),
        _option("--room", "the time of this room alone", "ROOM"),
        _option("--merged", "write the merged trace to FILE", "FILE", type=Path),
        _option("--steps", "print where rooms' time went; the default"),
    )),
    "calibrate": (_calibrate, "measure what each transport costs here, for path auto", (
        _option("--transport", "one, or all that can be used; the default", "NAME", default="all"),
        _option("--out", "write the numbers to FILE, for PDSTAGE_CALIBRATION", "FILE", type=Path),
        _option("--quick", "fewer sizes and repetitions"),
        _option("--serve", "be the decode side, at tcp://HOST:PORT, until interrupted", "ADDRESS"),
        _option("--peer", "the decode side elsewhere; default: a process of its own", "ADDRESS"),
        _option("--bind", "of this side's node; default %(default)s", "ADDRESS", default="tcp://127.0.0.1:0"),
        _DEVICE,
        _INSECURE,
        *_KEYS,
    )),
    "doctor": (_doctor, "say what this node can do, and whether it can work with another", (
        _option("--json", "print the report as JSON (docs/doctor.md)"),
        _option("--only", "of %(default)s; default: all of them", "AREA,...", default=",".join(AREAS)),
        _option("--transport", "one that must work; default: what is installed", "NAME", action="append", default=[]),
        _DEVICE,
        _option("--serve", "be the other side of --peer, until interrupted", "HOST:PORT"),
        _option("--peer", "work with the node that --serve runs on", "HOST:PORT", default=""),
        _option("--node", "ask a running node, in an engine too, how it is; 1 if it has failed", "HOST:PORT"),
        _option("--bind", "of this side's node; default: towards the peer", "ADDRESS", default=""),
        _option("--deadline", "of a probe; default %(default)s", "S", type=float, default=60.0),
        _INSECURE,
        *_KEYS,
    )),
    "bootstrap": (_bootstrap, "run the directory in which prefill ranks announce themselves", (
        _option("--bind", "default %(default)s; port 0: a free one", "HOST:PORT", default="127.0.0.1:8998"),
        _option("--advertise", "the host peers are told, where --bind names a wildcard", "HOST"),
        _INSECURE,
        *_KEYS,
    )),
    "instances": (_instances, "print what a bootstrap directory holds, as JSON", (
        _option("address", "as the directory or the prefill node printed it", "ADDRESS"),
        *_KEYS,
    )),
    "drain": (_drain, "ask running nodes to begin no room any more, and wait until none is left", (
        _option("endpoints", "nodes' control sockets, tcp://HOST:PORT, or instances", "ENDPOINT", nargs="+"),
        _DIRECTORY,
        _option("--wait", "for rooms to end; default %(default)s", "S", type=float, default=60.0),
        *_KEYS,
    )),
    "fence": (_fence, "say that an instance's processes have ended, to every node in a directory", (
        _option("address", "of the directory", "ADDRESS"),
        _option("where", "the instance or host that was ended, or one node's endpoint", "WHERE"),
        _option("--wait", "for leases to end; default %(default)s", "S", type=float, default=30.0),
        *_KEYS,
    )),
    "keys": (_keys, "make the key file of a cluster or of a node", (
        _option("file", "a new file; with --public one that exists", "FILE", type=Path),
        _option("--public", "print the public key of FILE instead"),
    )),
    "sim": (_sim, "run the real cores under simulated faults; only in a checkout", (
        _number("--seeds", 2000, "how many seeds"),
        _number("--first", 0, "the first seed"),
        _number("--steps", 500, "steps a seed before its faults end"),
        _number("--workers", 2, "processes"),
        _option("--seed", "this seed alone", "N", type=int),
        _option("--replay", "with --seed: print every step in words"),
        _option("--shrink", "seconds to shrink; default %(default)s", "S", type=float, default=30.0),
    )),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 success, 1 the demo's check, the doctor's verdict or the draining failed, 2 bad arguments or a
    `PdstageError`.

    An error is printed in one line.
    """
    given = parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")  # warnings and worse, to stderr
    # A container's first process ignores what it has no handler for.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        return int(given.run(given))
    except PdstageError as error:
        print(f"pdstage {given.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
