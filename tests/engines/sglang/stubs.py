"""Import it before sglang, in every process: it installs what stands in for libraries that SGLang imports."""

from __future__ import annotations

from tests.engines import stubs

stubs.install()
