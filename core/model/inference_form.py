"""The form in which a network runs: fused layers, quantization, rotary tables, and what experts are computed by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from specdec.sdk.errors import ConfigError, UnsupportedModelError, not_offered

from ..kernels.backend import Backend, is_plain_linear
from .loading import loading
from .model_class import text_config

QUANTIZATIONS = ("int8_weight_only", "int8_dynamic")
"""int8 weights with activations as they are; int8 weights and, row by row, int8 activations."""
_STATIC = "default"  # what transformers calls tables that no pass changes


def check_quantization(name: str | None, where: str) -> None:
    """Raise ConfigError SD-E132 unless `name` is None or one of QUANTIZATIONS."""
    if name is None or name in QUANTIZATIONS:
        return
    stored = {"or": "a checkpoint that is stored quantised: it is loaded as it is"}
    raise not_offered(f"{where}.quantization has a value that is not offered", name, QUANTIZATIONS, **stored)


def stored_quantization(config: Any) -> Any:
    """What transformers reads: `quantization_config` of the whole model, or else of its text part. None: neither."""
    return config.to_dict().get("quantization_config") or text_config(config).to_dict().get("quantization_config")


def check_stored_quantization(config: Any, asked: str | None) -> None:
    """Refuse what would be quantised twice, and layers whose output for a token depends on the tokens beside it.

    Raises ConfigError SD-E143, SD-E266, UnsupportedModelError SD-E267.
    """
    stored = stored_quantization(config)
    if stored is None:
        return
    with loading("SD-E143", "cannot read the quantization_config of the checkpoint"):
        method, because = stored.get("quant_method"), _why_batch_dependent(stored)
    if asked is not None:
        facts = {"stored": method, "asked": asked, "fix": "leave `quantization` out: it is loaded as it is"}
        raise ConfigError("SD-E266", "the checkpoint is quantised already", facts)
    if because:
        facts = {"quant_method": method, "because": because}
        raise UnsupportedModelError("SD-E267", "this quantisation computes a token with those beside it", facts)


def _why_batch_dependent(stored: Mapping[str, Any]) -> str | None:
    if stored.get("load_in_8bit") and (stored.get("llm_int8_threshold", 6.0) or 0.0) > 0.0:  # transformers' default
        return "8-bit layers choose what they leave in 16 bits by all tokens of a pass (llm_int8_threshold above 0)"
    return "activations are scaled by the largest of all tokens of a pass" if _shares_scale(stored) else None


def _shares_scale(stored: Any) -> bool:
    """Whether settings, of any of the layers, give the activations of a pass one scale: compressed-tensors, torchao."""
    settings = stored if isinstance(stored, Mapping) else {}
    if "DynamicActivation" in str(settings.get("_type")):
        data = settings["_data"]
        each = data.get("granularity") or {}
        of_tensor = (each[0] if isinstance(each, list) else each).get("_type") == "PerTensor"
        return of_tensor or data.get("use_dynamic_per_tensor_scale") is True
    shares = settings.get("dynamic") is True and settings.get("strategy") == "tensor"
    return shares or any(map(_shares_scale, settings.values()))


def experts_settings(moe_backend: str | None) -> dict[str, str]:
    """What `from_pretrained` is told: nothing for None and "auto", so that transformers chooses.

    Raises ConfigError SD-E132 for a name that transformers does not know.
    """
    if moe_backend in (None, "auto"):
        return {}
    offered = ["auto", "eager", *sorted(ALL_EXPERTS_FUNCTIONS.valid_keys())]
    if moe_backend not in offered:
        raise not_offered("moe_backend names no experts implementation", str(moe_backend), offered)
    return {"experts_implementation": str(moe_backend)}


def prepare(
    network: nn.Module,
    quantization: str | None,
    backend: Backend,
    *,
    keep: nn.Module | None = None,
    room: int | None = None,
    drop: bool = False,
) -> None:
    """Fuse, quantise and lay out the layers of a network, in place.

    keep: a layer that is not quantised. room: the most bytes that second copies of weights may take. None means as many
    as there are. drop: whether weights that only other layouts need leave the network; a proposer's author may look at
    them. Raises ConfigError SD-E176 where the quantisation needs a library that is missing.
    """
    backend.fuse(network)
    if quantization is not None:
        _quantize(network, quantization, backend, keep)
    backend.lay_out(network, room=room, drop=drop)


def _quantize(network: nn.Module, name: str, backend: Backend, keep: nn.Module | None) -> None:
    """Quantise every linear layer in place but `keep`. Raises ConfigError SD-E176 where torchao is missing."""
    if name == "int8_weight_only" and backend.narrow(network, keep):
        return
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        facts = {"fix": "pip install torchao", "because": error}
        raise ConfigError("SD-E176", "quantization needs torchao, which is not installed", facts) from error

    def is_plain(module: nn.Module, path: str) -> bool:
        """Whether a layer is neither `keep` nor met before: a group's product has a place in each of its layers."""
        return is_plain_linear(module) and module is not keep

    form = Int8WeightOnlyConfig if name == "int8_weight_only" else Int8DynamicActivationInt8WeightConfig
    quantize_(network, form(), is_plain)


def freeze_tables(network: nn.Module, max_length: int) -> None:
    """Keep the tables of "dynamic" and "longrope" layers, if no text of `max_length` tokens changes them.

    transformers chooses between tables by the largest position of a pass. On a device the host would wait for it in
    every pass, and a pass could not be captured.
    """
    for module in network.modules():
        kinds, config = vars(module).get("rope_type"), vars(module).get("config")
        if isinstance(kinds, str):
            module.rope_type = _kept(kinds, module, config.rope_parameters, max_length)  # type: ignore[union-attr,assignment]
        elif isinstance(kinds, Mapping):
            module.rope_type = {  # type: ignore[assignment]
                layer: _kept(kind, module, config.rope_parameters[layer], max_length)  # type: ignore[union-attr]
                for layer, kind in kinds.items()
            }


def _kept(kind: str, module: nn.Module, parameters: Mapping[str, Any], max_length: int) -> str:
    if kind == "longrope" and max_length <= parameters["original_max_position_embeddings"]:
        return _STATIC
    if "dynamic" in kind and max_length <= vars(module)["max_seq_len_cached"]:
        return _STATIC
    return kind
