"""What SGLang 0.5.23 needs to be imported on a machine without a GPU. Import it before sglang, in every process.

`kernels`: a package of Hugging Face that transformers looks for by name; the checkout's own folder of that name would
be taken for it. `torchvision`: where its compiled half does not fit the torch that is there, its import asks for two
operators by name, and none of the code under test calls them.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

if "kernels" not in sys.modules:
    _kernels = ModuleType("kernels")
    _kernels.__spec__ = ModuleSpec("kernels", None)
    _kernels.__version__ = "0"  # older than any that transformers would use
    sys.modules["kernels"] = _kernels

_operators = torch.library.Library("torchvision", "FRAGMENT")
if importlib.util.find_spec("torchvision") is not None and "torchvision" not in sys.modules:
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
