"""Which of transformers' classes runs a checkpoint, and what it says of itself before any weight is loaded."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from specdec.sdk.errors import UnsupportedModelError


def text_config(config: Any) -> Any:
    """The part of a configuration that describes the language model: all of it where there are no other parts."""
    return config if config.is_encoder_decoder else config.get_text_config(decoder=True)


def auto_class(config: Any) -> Any:
    """transformers' loader of the class that was saved: models of several modalities have one of their own."""
    of_text, of_several = _class_names(config)
    is_text = of_several is None or of_text in (config.architectures or ())
    return AutoModelForCausalLM if is_text else AutoModelForMultimodalLM


def refuse_class(config: Any) -> None:
    """Raise UnsupportedModelError SD-E144 for classes of transformers whose attention or positions are their own."""
    name = _class_names(config)[auto_class(config) is AutoModelForMultimodalLM]
    if name is None or not type(config).__module__.startswith(f"{transformers.__name__}."):
        return  # a class that comes with the checkpoint: it tells when it is loaded
    model_class = getattr(transformers, name)
    if model_class._is_stateful:
        return
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        raise no_interface(config, NO_POSITIONS)
    if not any((model_class._supports_attention_backend, model_class._supports_sdpa, model_class._supports_flash_attn)):
        raise no_interface(config, "its attention is its own: it takes no other implementation")


def drops_positions(model: Any) -> bool:
    """Whether `generate` takes position_ids away from a model, which then counts otherwise than from 0."""
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    given = {"position_ids": positions, "attention_mask": torch.ones_like(tokens), "use_cache": False}
    try:
        return "position_ids" not in model.prepare_inputs_for_generation(tokens, **given)
    except Exception:  # it wants more than text, and the first pass will tell
        return False


NO_POSITIONS = "its forward takes no position_ids, by which requests share a batch"


def no_interface(config: Any, because: str) -> UnsupportedModelError:
    """SD-E144."""
    return UnsupportedModelError(
        "SD-E144",
        "this model does not run through transformers' common interface (attention and logits_to_keep)",
        {"model_type": config.model_type, "because": because},
    )


def _class_names(config: Any) -> tuple[str | None, str | None]:
    """The names of the class for text, and of the one for several modalities."""
    mappings = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    of_text, of_several = (mapping.get(config.model_type) for mapping in mappings)
    return of_text, of_several
