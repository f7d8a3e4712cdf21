"""Facts about an engine's model that two nodes compare in the handshake: KV of other weights may have the same shape.

A digest of samples of the weight files identifies the weights. Two copies are one model wherever they lie, and a
fine-tuned copy is another model. Reading the files whole would take longer than a server's start.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pdstage import UsageError
from pdstage.arguments import shown
from pdstage.protocol.compat import WEIGHTS

_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
"""Engines load the first kind that a folder has; other kinds beside it are copies."""
_N_SAMPLES = 512
_SAMPLE_NBYTES = 4096
_MAX_SHOWN = 200


def facts(
    config: Any,  # noqa: ANN401  (the engine's ModelConfig: vLLM's and SGLang's name these alike)
    name: str,
    *,
    kv_scales: Mapping[int, float] | None = None,
    dummy: bool = False,
) -> dict[str, str]:
    """What an engine knows of the model `name` that it serves. `dummy`: the weights are random.

    The rotary embedding is compared as configured: scaling may be overridden on one side only. So may be `kv_scales`:
    of quantized KV, each layer's scale that is not from the weights and not 1.
    """
    revision = config.revision or getattr(config.hf_config, "_commit_hash", None)
    rope = getattr(config.hf_text_config, "rope_parameters", None)
    stated = {
        "name": _brief(name),
        "revision": revision,
        "dtype": str(config.dtype).removeprefix("torch."),
        "quantization": config.quantization or "none",
        "rope": _brief(json.dumps(rope, sort_keys=True, default=str)) if rope else None,
    }
    if kv_scales is not None:
        stated["kv_scales"] = _brief(json.dumps(kv_scales, sort_keys=True)) if kv_scales else "none"
    folder = None if dummy else _folder_of(name, revision)
    if folder is not None:
        stated[WEIGHTS] = digest(folder)
    return {known: value for known, value in stated.items() if value}


def overridden(stated: Mapping[str, str], by_operator: object, *, where: str) -> dict[str, str]:
    """`stated` with the operator's values instead; null removes a name. Raises `UsageError` unless it is a mapping."""
    if by_operator is None:
        return dict(stated)
    if not isinstance(by_operator, Mapping):
        raise UsageError(
            f"model of {where} is {shown(by_operator)}", remedy='give a mapping, such as {"revision": null}'
        )
    return {name: value for name, value in {**stated, **by_operator}.items() if value is not None}


def digest(folder: str | os.PathLike[str]) -> str | None:
    """Digest of the weights in `folder`: of the files' names, sizes and 512 samples. None without readable files."""
    try:
        stamp = Path(folder).stat().st_mtime_ns
    except OSError:
        return None
    return _digest(os.fspath(folder), stamp)


@lru_cache(maxsize=1024)
def _digest(folder: str, stamp: int) -> str | None:
    """`stamp` is the folder's modification time: an adapter may be reloaded under its name."""
    del stamp
    try:
        held = sorted(path for path in Path(folder).iterdir() if path.is_file())
        kinds = ([path for path in held if path.suffix == suffix] for suffix in _SUFFIXES)
        files = next(filter(None, kinds), [])
        hashed = hashlib.blake2b(digest_size=16)
        for path in files:
            nbytes = path.stat().st_size
            hashed.update(f"{path.name}\0{nbytes}\0".encode())
            # The file's start, which describes its content, and evenly through the rest.
            n, last = max(2, _N_SAMPLES // len(files)), max(0, nbytes - _SAMPLE_NBYTES)
            with path.open("rb") as file:
                for at in sorted({last * i // (n - 1) for i in range(n)}):
                    file.seek(at)
                    hashed.update(file.read(_SAMPLE_NBYTES))
    except OSError:
        return None
    return hashed.hexdigest() if files else None


def _folder_of(name: str, revision: str | None) -> str | None:
    """The folder on this host with a model's weights, if any: the folder itself, or one of the hub's cache."""
    if Path(name).is_dir():
        return name
    try:
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415  (both engines install it)

        found: Any = try_to_load_from_cache(name, "config.json", revision=revision)
    except Exception:  # noqa: BLE001  (an invalid name for the hub, or no such package)
        return None
    return str(Path(found).parent) if isinstance(found, str) else None


def _brief(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
