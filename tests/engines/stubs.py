"""What stands in for libraries that need a GPU's, where an engine imports them: called before an engine is imported.

A spawned process calls `install` again. Caches lie on `DEVICE`: by default on the second GPU of the double, so that an
index that somebody forgot is seen.
"""

from __future__ import annotations

import importlib.util
import os
import sys

DEVICE = os.environ.get("ENGINES_DEVICE", "cuda:1")
NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_held: list[object] = []  # torch forgets a library's operators with the library


def _use_device() -> None:
    if DEVICE == "cpu":
        return
    from tests import cuda_double  # noqa: PLC0415

    if cuda_double.missing() or cuda_double.is_installed():
        return
    cuda_double.install()
    from tests.cuda_double import torch_cuda  # noqa: PLC0415

    torch_cuda.install(available=False)


def install() -> None:
    """`kernels`: transformers looks for Hugging Face's package of that name, and where Python starts in this checkout
    would find its folder. torchvision: its compiled part needs CUDA's libraries; without it, its import fails at the
    first of two operators that it expects there.
    """
    import torch  # noqa: PLC0415  (costs seconds, and most tests need none of this)

    sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]
    _use_device()
    if _held or not importlib.util.find_spec("torchvision") or torch.cuda.is_available():
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + NMS)
    _held.append(library)
