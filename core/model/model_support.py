"""Which target models can be served, decided from their configuration alone, and facts read from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.utils import cached_file

from specdec.sdk.errors import ConfigError, UnsupportedModelError
from specdec.sdk.json_files import read_json_file
from specdec.sdk.packaged import packaged, refused_name

from .loading import loading

_MODELS = "a directory, a hub id such as OWNER/NAME, or 'tiny' (packaged)"
_SLIDING = "sliding_attention"
_SERVED_LAYER_TYPES = {"full_attention", _SLIDING, "chunked_attention"}
_STATE_KEYS = ("state_size", "ssm_cfg", "mamba_d_state", "linear_conv_kernel_dim", "conv_L_cache")
_OWN_STATE_KEYS = ("lru_width", "rescale_every", "chunkwise_kernel")
"""Of models that keep their state outside of transformers' cache layers."""
_NOTHING = {"mlp", "moe"}
_LAYER_TYPE_KEYS = ("layer_types", "layers_block_type")
_BIDIRECTIONAL_FOR_IMAGES = "vision"


def locate_model(model: str | Path) -> str:
    """The directory of a packaged model for its short name, an existing directory, or the hub id as it is.

    Raises ConfigError SD-E140 for a path where no model is.
    """
    name = str(model)
    with loading("SD-E140", f"there is no model {name[:80]!r}"):  # too long for a file, or with a null in it
        shipped = packaged(name)
        path = Path(name).expanduser()
        is_directory = path.is_dir()
    if shipped is not None:
        return str(shipped)
    if is_directory:
        if not (path / "config.json").is_file():
            raise ConfigError("SD-E140", f"{name!r} is not a model directory", {"missing": str(path / "config.json")})
        return str(path)
    if path.is_absolute() or name.startswith(("./", "../", "~")) or name.count("/") > 1:
        raise ConfigError("SD-E140", f"there is no model at {name!r}", {"looked for": str(path)})
    facts = refused_name(name)
    if facts:
        raise ConfigError("SD-E140", f"there is no model {name!r}", facts | {"fix": _MODELS})
    return name


def read_config(path: str) -> tuple[Mapping[str, Any], Path]:
    """config.json of a directory or hub id as it is written, and the directory where it lies.

    Raises ConfigError SD-E140 if there is none, SD-E143 if it is not a JSON object.
    """
    with loading("SD-E140", f"there is no model {path!r}", {"": _MODELS}):
        file = Path(cached_file(path, "config.json"))
    with loading("SD-E143", f"cannot read the configuration of {path!r}"):
        config = read_json_file(file)
    if not isinstance(config, dict):
        facts = {"file": file, "expected": "a JSON object", "found": type(config).__name__}
        raise ConfigError("SD-E143", f"cannot read the configuration of {path!r}", facts)
    return config, file.parent


def slides(config: Mapping[str, Any], layer: int) -> bool:
    """Whether the configuration gives this layer a sliding window."""
    layer_types = next((config[key] for key in _LAYER_TYPE_KEYS if config.get(key)), None)
    if layer_types:
        return bool(layer_types[layer] == _SLIDING)
    return bool(config.get("sliding_window")) and config.get("use_sliding_window") is not False


def state_layers(config: Any) -> dict[int, LinearAttentionCacheLayerMixin]:
    """Layers that keep a state, or nothing, by number: as transformers' own cache for this configuration has them."""
    try:
        layers = DynamicCache(config=config).layers
    except Exception:  # a configuration that transformers makes no such cache of
        return {}
    return {i: layer for i, layer in enumerate(layers) if isinstance(layer, LinearAttentionCacheLayerMixin)}


def storing_nothing(config: Any) -> set[int]:
    """Layers that transformers' cache has a place for and that store nothing there."""
    return {i for i, layer_type in enumerate(getattr(config, "layer_types", None) or ()) if layer_type in _NOTHING}


def refuse_unsupported(text_config: Any, *, with_states: bool = False) -> None:
    """Raise UnsupportedModelError with the configuration key that says why the model cannot be served.

    text_config: transformers' own. with_states: whether layers may keep a state in transformers' cache layers besides
    keys and values. If only that is in the way, the code is SD-E262, and else SD-E142.
    """
    config, stateful = text_config.to_dict(), {*state_layers(text_config), *storing_nothing(text_config)}
    reason = _why_unsupported(config, stateful if with_states else None)
    if reason:
        facts = {"model_type": config.get("model_type"), "reason": reason}
        if not with_states and _why_unsupported(config, stateful) is None:
            facts["fix"] = "such a model is served as a target, not as a draft network"
            raise UnsupportedModelError("SD-E262", "here a model may have no layers that keep a state", facts)
        facts["served"] = "decoder-only causal language models on text with (sliding) softmax attention"
        raise UnsupportedModelError("SD-E142", "this model cannot be served as a target", facts)


def longest_length(config: Mapping[str, Any], attribute_map: Mapping[str, str]) -> int | None:
    """The most positions that the model serves alike for every text; None: it states no limit.

    `attribute_map` is the configuration's own, from common names to its names. A model with "longrope" changes its
    rotary tables where the longest text of a batch exceeds `original_max_position_embeddings`: beyond that, what one
    request is given would depend on the others.
    """
    name = "max_position_embeddings"
    longest: int | None = config.get(attribute_map.get(name, name))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_layer_type = [rope] if "rope_type" in rope else [each for each in rope.values() if isinstance(each, Mapping)]
    key = "original_max_position_embeddings"
    limits = (each.get(key) or config.get(key) for each in by_layer_type if each.get("rope_type") == "longrope")
    return min(filter(None, limits), default=longest)


def _why_unsupported(config: Mapping[str, Any], stateful: Collection[int] | None) -> str | None:
    """stateful: numbers of layers with a state, or nothing, in transformers' cache. None: none of these is served."""
    if config.get("is_encoder_decoder"):
        return "encoder-decoder models are not served (configuration key 'is_encoder_decoder')"
    if config.get("use_bidirectional_attention") not in (None, False, _BIDIRECTIONAL_FOR_IMAGES):
        return "bidirectional attention (configuration key 'use_bidirectional_attention')"
    return _why_layers_unsupported(config, stateful)


def _why_layers_unsupported(config: Mapping[str, Any], stateful: Collection[int] | None) -> str | None:
    own = next((key for key in _OWN_STATE_KEYS if config.get(key) is not None), None)
    if own is not None:
        place = "its state is not in transformers' cache layers, where it could be kept apart"
        return f"{place} (configuration key {own!r})"
    kinds = next((key for key in _LAYER_TYPE_KEYS if config.get(key)), None)
    if kinds is not None:  # keys of recurrent layers, of which it may have none, tell nothing then
        unserved = {i for i, kind in enumerate(config[kinds]) if kind not in _SERVED_LAYER_TYPES} - {*(stateful or ())}
        others = ", ".join(sorted({config[kinds][i] for i in unserved}))
        return f"layers of type {others} are not served ({kinds!r})" if others else None
    recurrent = next((key for key in _STATE_KEYS if config.get(key) is not None), None)
    if recurrent is not None and stateful is None:
        return f"recurrent layers keep a state that cannot be rolled back (configuration key {recurrent!r})"
    return None
