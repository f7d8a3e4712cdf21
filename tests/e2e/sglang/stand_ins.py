"""What stands in for libraries that exist with a GPU only, in every process of a real SGLang server.

`sgl_kernel` is not built for the CPU on the package index. SGLang imports names of it where it then takes PyTorch's own
operators: the stand-in's names import, and raise if one is called. `torch.cuda.Event` orders streams; on the CPU there
is one order, so its stand-in does nothing. `tests.engines.stubs` has torchvision's two operators.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

from tests.engines import stubs

KERNELS = ("sgl_kernel", "sgl_kernel.mamba")


class Kernels(ModuleType):
    """A module from which any name can be imported."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(f"{self.__name__}.{name} was called, and is not built for the CPU")

        return missing


class Event:
    """`torch.cuda.Event` where nothing runs behind the host's back."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def wait(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def install() -> None:
    """Called before SGLang is imported. A library that is really there is left alone."""
    import torch  # noqa: PLC0415  (costs seconds, and most tests need none of this)

    stubs.libraries()
    if torch.cuda.is_available():
        return
    torch.cuda.Event = Event  # type: ignore[assignment, misc]
    for name in KERNELS:
        module = sys.modules.setdefault(name, Kernels(name))
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
