"""vLLM's facts about its model, and about the adapter (LoRA) of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdstage.integrations.model import digest, facts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest


def model_facts(vllm_config: VllmConfig) -> dict[str, str]:
    """Facts about the model that this engine serves. vLLM's NixlConnector compares the same
    (`compute_nixl_compatibility_hash`), except for weights.
    """
    config = vllm_config.model_config
    return facts(
        name=config.model,
        revision=config.revision or getattr(config.hf_config, "_commit_hash", None),
        dtype=config.dtype,
        quantization=config.quantization,
        rope=getattr(config.hf_text_config, "rope_parameters", None),
        dummy=vllm_config.load_config.load_format == "dummy",
    )


def adapter_of(lora: LoRARequest | None) -> str:
    """Identifies the adapter that a request's KV is computed with: a digest of its weights, else its name."""
    return "" if lora is None else digest(lora.lora_path) or lora.lora_name
