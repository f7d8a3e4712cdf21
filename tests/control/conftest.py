"""Both ports of a control socket."""

from __future__ import annotations

import pytest

from pdstage import native


@pytest.fixture(params=["c++", "pyzmq"])
def either_port(request, monkeypatch) -> str:
    """The port that new sockets get; both must do the same."""
    if request.param == "pyzmq":
        monkeypatch.setattr(native, "ext", None)
    elif native.ext is None:
        pytest.skip("the C++ extension is off")
    return request.param
