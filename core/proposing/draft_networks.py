"""Draft networks: read from checkpoints, built from configurations, made ready to run like the target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from specdec.sdk.config import NetworkSettings
from specdec.sdk.errors import ConfigError, Refusal, UnsupportedModelError
from specdec.sdk.model_proposer.updates import require_fit
from specdec.sdk.model_proposer.weights import joined_experts

from ..kernels.backend import Backend
from ..model.attention import ATTENTION_NAME
from ..model.inference_form import experts_settings, prepare
from ..model.model_class import text_config
from ..model.model_support import refuse_unsupported
from ..model.target import TargetModel, load_config

_STUB_VOCABULARY = 1


def load_causal_lm(
    path: str, settings: NetworkSettings, device: torch.device, backend: Backend, tensors: Mapping[str, Tensor]
) -> Any:
    """A transformers causal LM that runs through our attention. Raises ConfigError, UnsupportedModelError.

    tensors: in the place of its parameters of these names.
    """
    config = load_config(path, trust_remote_code=settings.trust_remote_code)
    refuse_unsupported(text_config(config))  # nobody keeps states of a draft network
    model = TargetModel.load(
        path, config, _dtype(settings), device, settings.moe_backend, trust_remote_code=settings.trust_remote_code
    ).model
    tensors = joined_experts(tensors, model.state_dict().keys())
    require_fit(tensors, model.state_dict())
    model.load_state_dict(tensors, strict=False)
    prepare(model, settings.quantization, backend, keep=model.get_output_embeddings(), drop=True)
    return model.requires_grad_(False)


def build_decoder(config: Mapping[str, Any], settings: NetworkSettings, device: torch.device) -> Any:
    """A transformers decoder with random weights and a stub for an embedding. Raises Refusal."""
    values = {key: value for key, value in config.items() if key not in _NOT_OF_THE_NETWORK}
    try:
        hf_config = AutoConfig.for_model(values.pop("model_type"), **values)
        refuse_unsupported(hf_config)
        hf_config.vocab_size = _STUB_VOCABULARY
        hf_config.pad_token_id = None
        with torch.device(device):
            model = AutoModel.from_config(
                hf_config,
                dtype=_dtype(settings),
                attn_implementation=ATTENTION_NAME,
                **experts_settings(settings.moe_backend),
            )
    except UnsupportedModelError as error:
        raise Refusal(f"its layers cannot be served: {error.facts['reason']}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(f"transformers cannot build its layers: {error}") from error
    return model.eval()


_NOT_OF_THE_NETWORK = frozenset(
    {"architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "quantization_config"}
)


def finish(network: nn.Module, settings: NetworkSettings, device: torch.device, backend: Backend) -> None:
    """Ready for inference: on the device, in its dtype, without gradients, weights packed where that pays."""
    network.to(device=device).eval().requires_grad_(False)
    for parameter in network.parameters():  # buffers keep their precision: rotary frequencies are float32 in any model
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(_dtype(settings))
    prepare(network, settings.quantization, backend)


def _dtype(settings: NetworkSettings) -> torch.dtype:
    """Raises ConfigError SD-E132 for a name that is no floating-point dtype of torch."""
    offered = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if settings.dtype not in offered:
        facts = {"expected": ", ".join(offered), "found": repr(settings.dtype)}
        raise ConfigError("SD-E132", "speculative_config.dtype is no dtype of a draft network", facts)
    return offered[settings.dtype]
