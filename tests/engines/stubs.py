"""What stands in for libraries that need a GPU's, where an engine imports them: called before an engine is imported.

A spawned process calls `install` again.
"""

from __future__ import annotations

import importlib.util
import sys

NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_held: list[object] = []  # torch forgets a library's operators with the library


def install() -> None:
    """`kernels`: transformers looks for Hugging Face's package of that name, and where Python starts in this checkout
    would find its folder. torchvision: its compiled part needs CUDA's libraries; without it, its import fails at the
    first of two operators that it expects there.
    """
    import torch  # noqa: PLC0415  (costs seconds, and most tests need none of this)

    sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]
    if _held or not importlib.util.find_spec("torchvision") or torch.cuda.is_available():
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + NMS)
    _held.append(library)
