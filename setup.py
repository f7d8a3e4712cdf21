"""Name mapping and one optional extension; pyproject.toml holds all else.

PDSTAGE_NATIVE: "yes" builds the C++ extension or fails, "no" leaves it out, unset tries and goes on without.
"""

import os
from pathlib import Path

from setuptools import Extension, setup

# Folders of the checkout installed under pdstage: a top-level `kernels` is another project's import name.
MAPPED = {"pdstage.bench": "bench", "pdstage.csrc": "csrc", "pdstage.kernels": "kernels"}
PACKAGES = [
    "bench.peers", "control", "integrations", "integrations.sglang", "integrations.vllm", "layout",
    "manager", "plan", "protocol", "tools", "tools.calibrate", "tools.demo", "tools.doctor",
    "tools.trace", "transport", "watch",
]  # fmt: skip
SOURCES = sorted(str(path) for path in Path("csrc").glob("*.cpp"))


def extensions() -> list[Extension]:
    wanted = os.environ.get("PDSTAGE_NATIVE", "")
    if wanted not in {"", "yes", "no"}:
        raise SystemExit(f"PDSTAGE_NATIVE={wanted!r} is neither yes nor no; set one of them, or unset it")
    if wanted == "no":
        return []
    import pybind11  # noqa: PLC0415  (a build without the extension needs no pybind11)

    headers = sorted(str(path) for path in Path("csrc").rglob("*.hpp"))
    flags = ["-std=c++20", "-O3", "-fvisibility=hidden", "-pthread"]
    include = ["csrc", pybind11.get_include()]
    extension = Extension(
        "pdstage._native", SOURCES, include, depends=headers, extra_compile_args=flags, extra_link_args=["-ldl"]
    )
    extension.optional = wanted != "yes"
    return [extension]


setup(
    package_dir={"pdstage": "pdstage", **MAPPED},
    packages=["pdstage", *(f"pdstage.{name}" for name in PACKAGES), *MAPPED],
    package_data={
        "pdstage": ["py.typed"],
        "pdstage.bench": ["limits.c"],
        "pdstage.csrc": ["cuda/*.cu", "cuda/*.cuh"],
    },
    ext_modules=extensions(),
)
