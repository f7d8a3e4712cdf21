"""Which kernels the GPU tests try, and on what. Needs no more than numpy, torch and pytest."""

from __future__ import annotations

import pytest

from pdstage import environment
from pdstage.bench import variants

HOST = pytest.param(variants.HOST, id="host")  # the same checks on the CPU: they must be able to pass, and to fail
ON_GPU = [pytest.param(name, id=name.replace(" ", "-"), marks=pytest.mark.gpu) for name in variants.ON_GPU]
FEW = environment.GPU_TESTS.read() == "few"  # what a sanitizer, some fifty times slower, has time for


def pytest_generate_tests(metafunc):
    if "variant" in metafunc.fixturenames:
        on_host = metafunc.definition.get_closest_marker("also_on_host")
        metafunc.parametrize("variant", [HOST, *ON_GPU] if on_host else ON_GPU, indirect=True)


@pytest.fixture
def variant(request):
    """A kernel's name; skips, saying why, where it cannot run."""
    problem = variants.missing(request.param)
    if problem:
        pytest.skip(f"{request.param}: {problem}")
    return request.param


@pytest.fixture
def device(variant):
    return "cpu" if variant == variants.HOST else "cuda:0"
