"""The `pdstage` command: demo, bench, top, plot, calibrate, doctor, bootstrap, instances, drain, fence,
keys, sim.

It parses arguments and prints. Each command's module is imported only for that command, so that `--help` needs no
package.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pdstage
from pdstage.bench import BENCHES
from pdstage.errors import PdstageError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdstage.control.keys import Keys
    from pdstage.tools.calibrate.peer import Peer

DEFAULT_BIND = "127.0.0.1:8998"
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
    _add_demo(commands.add_parser("demo", help="move a real model's KV cache between ranks and go on decoding from it"))
    bench = commands.add_parser("bench", help="measure one part against its baselines")
    bench.add_argument("name", metavar="NAME", help=f"one of {', '.join(BENCHES)}")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE")
    bench.add_argument("--quick", action="store_true", help="fewer repetitions: a look, not a measurement")
    bench.add_argument("--scale", type=int, metavar="N", help="kv-transfer: keep 1 of N of a model's layers")
    bench.add_argument("--transport", metavar="NAME", help="kv-transfer: measure only this transport")
    bench.add_argument(
        "--device", metavar="DEVICE", help="where pools are; kv-transfer: cpu or cuda:N; rooms: also double"
    )
    _add_trace(bench)
    bench.set_defaults(run=_bench)
    _add_top(commands.add_parser("top", help="watch running nodes in the terminal, by their metrics endpoints"))
    _add_plot(commands.add_parser("plot", help="say where the time of a trace's rooms went, and merge traces"))
    _add_calibrate(commands.add_parser("calibrate", help="measure what each transport costs here, for path auto"))
    _add_doctor(commands.add_parser("doctor", help="say what this node can do, and whether it can work with another"))
    bootstrap = commands.add_parser("bootstrap", help="run the directory in which prefill ranks announce themselves")
    bootstrap.add_argument(
        "--bind", default=DEFAULT_BIND, metavar="HOST:PORT", help="default %(default)s; port 0: a free one"
    )
    bootstrap.add_argument("--advertise", metavar="HOST", help="the host peers are told, where --bind names a wildcard")
    bootstrap.add_argument("--insecure", action="store_true", help="allow a bind that other machines can reach")
    _add_keys_options(bootstrap)
    bootstrap.set_defaults(run=_bootstrap)
    instances = commands.add_parser("instances", help="print what a bootstrap directory holds, as JSON")
    instances.add_argument("address", metavar="ADDRESS", help="as the directory or the prefill node printed it")
    _add_keys_options(instances)
    instances.set_defaults(run=_instances)
    drain = commands.add_parser(
        "drain", help="ask running nodes to begin no room any more, and wait until none is left"
    )
    drain.add_argument("endpoints", nargs="+", metavar="ENDPOINT", help="a node's control socket: tcp://HOST:PORT")
    drain.add_argument("--wait", type=float, default=60.0, metavar="S", help="for rooms to end; default %(default)s")
    _add_keys_options(drain)
    drain.set_defaults(run=_drain)
    fence = commands.add_parser("fence", help="say in etcd that a host's processes have ended: every node hears it")
    fence.add_argument("address", metavar="ADDRESS", help="of the directory: etcd://...")
    fence.add_argument("where", metavar="HOST", help="the host that was ended, or one node's endpoint")
    fence.add_argument("--wait", type=float, default=30.0, metavar="S", help="for leases to end; default %(default)s")
    fence.set_defaults(run=_fence)
    keys = commands.add_parser("keys", help="make the key file of a cluster or of a node")
    keys.add_argument("file", type=Path, metavar="FILE", help="a new file; with --public one that exists")
    keys.add_argument("--public", action="store_true", help="print the public key of FILE instead")
    keys.set_defaults(run=_keys)
    _add_sim(commands.add_parser("sim", help="run the real cores under simulated faults; only in a checkout"))
    return top


def _add_keys_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--keys", type=Path, metavar="FILE", help="encrypt, and trust who holds this key file's key")
    command.add_argument("--allow", type=Path, metavar="FILE", help="with --keys: public keys of others to trust")


def _add_trace(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a trace to FILE, for Perfetto or pdstage plot"
    )


def _add_demo(demo: argparse.ArgumentParser) -> None:
    from pdstage.tools.demo import options as known  # noqa: PLC0415

    plain = known.Options()
    demo.add_argument("--model", choices=known.MODELS, default=plain.model, help="default %(default)s")
    demo.add_argument("--transport", choices=known.TRANSPORTS, help="default: nixl where it starts, else local")
    demo.add_argument("--path", choices=known.PATHS, default=plain.path, help="default %(default)s")
    demo.add_argument(
        "--aux", choices=known.AUX, default=plain.aux, help="how first tokens travel: by message or by the transport"
    )
    for name, value, text in (
        ("--prefill-tp", plain.prefill_tp, "prefill ranks"),
        ("--decode-tp", plain.decode_tp, "decode ranks"),
        ("--prefill-pp", plain.prefill_pp, "pipeline stages at prefill, each of that many ranks"),
        ("--decode-pp", plain.decode_pp, "pipeline stages at decode"),
        ("--prefill-page", plain.prefill_page, "tokens a page at prefill"),
        ("--decode-page", plain.decode_page, "tokens a page at decode"),
        ("--requests", plain.requests, "prompts"),
        ("--seed", plain.seed, "of weights, prompts and page order"),
    ):
        demo.add_argument(name, type=int, default=value, metavar="N", help=f"{text}; default %(default)s")
    demo.add_argument(
        "--device",
        default=plain.device,
        metavar="DEVICE",
        help="all ranks share it: cpu or cuda:N; default %(default)s",
    )
    for side, layout in (("prefill", plain.prefill_layout), ("decode", plain.decode_layout)):
        text = f"memory order of a page's tokens and heads at {side}; default %(default)s"
        demo.add_argument(f"--{side}-layout", choices=known.LAYOUTS, default=layout, help=text)
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE")
    _add_trace(demo)
    demo.set_defaults(run=_demo)


def _demo(given: argparse.Namespace) -> int:
    from pdstage.tools.demo.options import Options  # noqa: PLC0415

    options = Options(**{name: value for name, value in vars(given).items() if name in Options.__slots__})
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


def _add_top(top: argparse.ArgumentParser) -> None:
    top.add_argument("endpoints", nargs="+", metavar="ENDPOINT", help="HOST:PORT or PORT, where metrics are served")
    top.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds a frame; default %(default)s")
    top.add_argument("--once", action="store_true", help="print one frame and end; 1 if an endpoint did not answer")
    top.set_defaults(run=_top)


def _top(given: argparse.Namespace) -> int:
    from pdstage.tools.watch.top import run  # noqa: PLC0415

    return run(given.endpoints, interval_s=given.interval, once=given.once)


def _add_plot(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "traces",
        type=Path,
        nargs="+",
        metavar="TRACE",
        help="what --trace wrote; files of several processes are merged",
    )
    command.add_argument("--room", metavar="ROOM", help="the time of this room alone")
    command.add_argument("--merged", type=Path, metavar="FILE", help="write the merged trace to FILE")
    command.add_argument("--steps", action="store_true", help="print where rooms' time went; the default")
    command.set_defaults(run=_plot)


def _plot(given: argparse.Namespace) -> int:
    from pdstage.tools.trace import chrome, load, steps  # noqa: PLC0415

    trace = load(given.traces)
    if given.merged is not None:
        chrome.write(trace, given.merged)
    if given.steps or given.merged is None:
        print(steps.table(trace, given.room))
    return 0


def _add_calibrate(command: argparse.ArgumentParser) -> None:
    command.add_argument("--transport", default="all", metavar="NAME", help="one, or all that can be used; the default")
    command.add_argument("--out", type=Path, metavar="FILE", help="write the numbers to FILE, for PDSTAGE_CALIBRATION")
    command.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    command.add_argument("--serve", metavar="ADDRESS", help="be the decode side, at tcp://HOST:PORT, until interrupted")
    command.add_argument("--peer", metavar="ADDRESS", help="the decode side elsewhere; default: a process of its own")
    command.add_argument(
        "--bind", default="tcp://127.0.0.1:0", metavar="ADDRESS", help="of this side's node; default %(default)s"
    )
    command.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu or cuda:N; default %(default)s")
    command.add_argument("--insecure", action="store_true", help="allow addresses that other machines can reach")
    _add_keys_options(command)
    command.set_defaults(run=_calibrate)


def _calibrate(given: argparse.Namespace) -> int:
    from pdstage.tools.calibrate.caller import Caller, calibrate, own_peer  # noqa: PLC0415
    from pdstage.tools.calibrate.peer import Peer  # noqa: PLC0415

    options = {"device": given.device, "keys": _keys_given(given), "insecure": given.insecure}
    if given.serve is not None:
        return _serve(Peer(given.serve, **options))
    with (
        own_peer(given.device, given.keys) if given.peer is None else nullcontext(given.peer) as endpoint,
        Caller(endpoint, bind=given.bind, **options) as caller,
    ):
        made, left_out = calibrate(caller, [given.transport], decode_host=given.peer or "", quick=given.quick)
    print(made.to_json())
    for line in left_out:
        print(f"left out: {line}", file=sys.stderr)
    if given.out is not None:
        made.write(given.out)
    return 0


def _serve(peer: Peer) -> int:
    with peer:
        print(f"serving at {peer.endpoint}", flush=True)
        peer.serve()
    return 0


def _add_doctor(command: argparse.ArgumentParser) -> None:
    from pdstage.tools.doctor import AREAS  # noqa: PLC0415

    command.add_argument("--json", action="store_true", help="print the report as JSON (docs/doctor.md)")
    command.add_argument(
        "--only", metavar="AREA,...", default=",".join(AREAS), help="of %(default)s; default: all of them"
    )
    command.add_argument(
        "--transport",
        action="append",
        default=[],
        metavar="NAME",
        help="one that must work; default: what is installed",
    )
    command.add_argument("--device", default="cpu", metavar="DEVICE", help="where pools lie: cpu or cuda:N")
    command.add_argument("--serve", metavar="HOST:PORT", help="be the other side of --peer, until interrupted")
    command.add_argument("--peer", default="", metavar="HOST:PORT", help="work with the node that --serve runs on")
    command.add_argument("--bind", default="", metavar="ADDRESS", help="of this side's node; default: towards the peer")
    command.add_argument("--deadline", type=float, default=60.0, metavar="S", help="of a probe; default %(default)s")
    command.add_argument("--insecure", action="store_true", help="allow addresses that other machines can reach")
    _add_keys_options(command)
    command.set_defaults(run=_doctor)


def _doctor(given: argparse.Namespace) -> int:
    """The exit code is 1 if something that was asked for cannot work."""
    if given.serve is not None:
        from pdstage.tools.calibrate.peer import Peer  # noqa: PLC0415

        keys = _keys_given(given)
        return _serve(Peer(_scheme(given.serve), device=given.device, keys=keys, insecure=given.insecure))
    from pdstage.tools.doctor import report as reports  # noqa: PLC0415
    from pdstage.tools.doctor.probe import Asked  # noqa: PLC0415
    from pdstage.tools.doctor.table import examine  # noqa: PLC0415

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

    server = BootstrapServer(given.bind, advertise=given.advertise, insecure=given.insecure, keys=_keys_given(given))
    print(f"directory at {server.address}", flush=True)
    try:
        server.serve_forever()
    finally:
        server.close()
    return 0


def _instances(given: argparse.Namespace) -> int:
    from pdstage.control.bootstrap import client_of  # noqa: PLC0415

    print(client_of(given.address, _ANSWER_S, keys=_keys_given(given)).instances().decode())
    return 0


def _drain(given: argparse.Namespace) -> int:
    """The exit code is 1 if a node is not drained by the end of the wait."""
    from pdstage.arguments import number  # noqa: PLC0415
    from pdstage.control.drain import drain  # noqa: PLC0415

    wait_s = number("--wait", given.wait, above=0.0)
    said = drain([_scheme(one) for one in given.endpoints], keys=_keys_given(given), wait_s=wait_s)
    for endpoint, draining in said.items():
        print(f"{endpoint}: {draining}")
    return 0 if all(draining.drained for draining in said.values()) else 1


def _fence(given: argparse.Namespace) -> int:
    from pdstage.arguments import number  # noqa: PLC0415
    from pdstage.control.etcd import SCHEME, EtcdClient  # noqa: PLC0415

    if not given.address.startswith(SCHEME):
        raise UsageError(
            f"the directory at {given.address} keeps no record of processes that ended",
            remedy=f"use one in etcd ({SCHEME}...), or call Node.fence at each node",
            address=given.address,
        )
    wait_s = number("--wait", given.wait, above=0.0)
    with EtcdClient(given.address, _ANSWER_S) as client:
        fenced = client.fence(given.where, wait_s=wait_s)
    for incarnation, process in fenced.items():
        print(f"fenced {process} {incarnation:016x}")
    if not fenced:
        print(f"nothing to fence: every process that was at {given.where} was withdrawn or fenced before")
    return 0


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


def _add_sim(sim: argparse.ArgumentParser) -> None:
    for name, value, text in (
        ("--seeds", 2000, "how many seeds"),
        ("--first", 0, "the first seed"),
        ("--steps", 500, "steps a seed before its faults end"),
        ("--workers", 2, "processes"),
    ):
        sim.add_argument(name, type=int, default=value, metavar="N", help=f"{text}; default %(default)s")
    sim.add_argument("--seed", type=int, metavar="N", help="this seed alone")
    sim.add_argument("--replay", action="store_true", help="with --seed: print every step in words")
    sim.add_argument("--shrink", type=float, default=30.0, metavar="S", help="seconds to shrink; default %(default)s")
    sim.set_defaults(run=_sim)


def _sim(given: argparse.Namespace) -> int:
    root = Path(__file__).resolve().parent.parent
    if not (root / "tests" / "sim" / "run.py").is_file():
        raise UsageError("the simulator is not installed", remedy="run pdstage sim in a checkout of the repository")
    sys.path.insert(0, str(root))
    names = ("seed", "seeds", "first", "steps", "replay", "workers")
    options = {name: getattr(given, name) for name in names}
    return int(import_module("tests.sim.run").main(**options, shrink_s=given.shrink))


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 success, 1 the demo's check, the doctor's verdict or the draining failed, 2 bad arguments or a
    `PdstageError`.

    An error is printed in one line.
    """
    given = parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")  # warnings and worse, to stderr
    try:
        return int(given.run(given))
    except PdstageError as error:
        print(f"pdstage {given.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
