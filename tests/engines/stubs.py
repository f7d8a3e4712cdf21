"""What stands in for libraries that need a GPU's, where an engine imports them: called before an engine is imported.

A spawned process calls `install` again. Caches lie on `DEVICE`: by default on the second GPU of the double, so that an
index that somebody forgot is seen.
"""

from __future__ import annotations

import importlib.util
import os
import sys

DEVICE = os.environ.get("ENGINES_DEVICE", "cuda:1")
"""On a machine with a GPU: that GPU's name, cuda:0."""
NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_held: list[object] = []  # torch forgets a library's operators with the library


def on_gpu():
    """Whether caches lie on a real GPU."""
    import torch  # noqa: PLC0415  (costs seconds, and most tests need none of this)

    return DEVICE != "cpu" and torch.cuda.is_available()


def _use_device():
    if DEVICE == "cpu" or on_gpu():
        return
    from tests import cuda_double  # noqa: PLC0415

    if cuda_double.missing() or cuda_double.is_installed():
        return
    cuda_double.install()
    cuda_double.double().see(0, 1)  # CUDA_VISIBLE_DEVICES is the engine's
    from tests.cuda_double import torch_cuda  # noqa: PLC0415

    torch_cuda.install(available=False)


def _without_platform():
    """vLLM would choose CUDA's platform, whose compiled operators a kit lacks. As in its own tests it has none."""
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")  # else an extension may be compiled at import
    import vllm.platforms  # noqa: PLC0415
    from vllm.platforms.interface import UnspecifiedPlatform  # noqa: PLC0415

    if vllm.platforms._current_platform is None:
        vllm.platforms._current_platform = UnspecifiedPlatform()


def libraries():
    """`kernels`: transformers looks for Hugging Face's package of that name, and where Python starts in this checkout
    would find its folder. torchvision: its compiled part needs CUDA's libraries; without it, its import fails at the
    first of two operators that it expects there.
    """
    import torch  # noqa: PLC0415

    sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]
    if _held or not importlib.util.find_spec("torchvision") or torch.cuda.is_available():
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + NMS)
    _held.append(library)


def install():
    """`libraries`, and the device on which caches lie."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # CUDA must not be initialized before a fork
    import torch  # noqa: PLC0415

    _use_device()
    libraries()
    if torch.cuda.is_available() and importlib.util.find_spec("vllm"):
        _without_platform()
