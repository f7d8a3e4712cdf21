"""A node in a process of its own: answers every control message on the route it came from, until its stdin closes.

Usage: echo_node.py ENDPOINT IDENTITY. Prints the endpoint it listens on.
"""

from __future__ import annotations

import sys

from pdstage.control.zmq import ControlSocket


def main() -> None:
    with ControlSocket(sys.argv[1], identity=sys.argv[2].encode()) as node:
        print(node.endpoint, flush=True)
        stdin = sys.stdin.fileno()
        while not (ready := node.wait(None, [stdin])).fds:
            if ready.messages:
                for route, frames in node.recv():
                    node.send(route, [sys.argv[2].encode(), *frames])


if __name__ == "__main__":
    main()
