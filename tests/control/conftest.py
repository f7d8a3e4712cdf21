"""Control sockets over both ports."""

from __future__ import annotations

import contextlib
import secrets

import pytest

from pdstage import native
from pdstage.control.port import ControlPort
from pdstage.control.zmq import ControlSocket


@pytest.fixture(params=["c++", "pyzmq"])
def make(request, monkeypatch):
    """Makes sockets whose messages go through either port; both must do the same."""
    if request.param == "pyzmq":
        monkeypatch.setattr(native, "ext", None)
    elif native.ext is None:
        pytest.skip("the C++ extension is off")
    with contextlib.ExitStack() as stack:

        def node(identity=None, **options):
            made = stack.enter_context(ControlSocket(identity=identity or b"n" + secrets.token_bytes(8), **options))
            assert isinstance(made._port, ControlPort) == (request.param == "pyzmq")
            return made

        yield node
