"""What a call of `generate` may not ask for here, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed
from transformers import DynamicCache
from transformers.generation import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    GenerationMode,
    PrefixConstrainedLogitsProcessor,
)
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_managed_module

from specdec.sdk.errors import RequestError

from .row_cache import filled_layers, held_length
from .states import CACHE_ARGUMENTS, given_cache, is_filled

_HANDLED = frozenset({"attention_mask", "position_ids", *CACHE_ARGUMENTS, "use_cache", "logits_to_keep"})
_SERVED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_COUNTING_ROWS = (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)
"""Processors that ask which row of the batch they are given. Here each row is processed by itself."""


def refuse_spread_weights(model: Any) -> None:
    """Raise RequestError SD-E197 for layers whose weights every pass collects from other processes.

    All of these have to make equally many passes. Here that depends on what is accepted, so some would wait for ever.
    """
    is_spread = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    if is_spread and distributed.is_initialized() and distributed.get_world_size() > 1:
        found = f"weights that {distributed.get_world_size()} processes share (ZeRO-3 or FSDP)"
        raise refused(found, "a model that is whole in each process")


def refuse_settings(settings: Any) -> None:
    """Raise RequestError SD-E197 for a configuration that is not served."""
    mode = settings.get_generation_mode()
    if mode not in _SERVED_MODES:
        raise refused(f"generation mode {mode.value}", "greedy search or sampling (num_beams=1)")
    if settings.guidance_scale not in (None, 1):
        raise refused(f"guidance_scale={settings.guidance_scale}, whose processor counts calls", "no guidance_scale")
    if settings.watermarking_config is not None:
        raise refused("watermarking_config, whose processors may count calls", "no watermark")
    for name in ("output_attentions", "output_hidden_states"):
        if settings.return_dict_in_generate and getattr(settings, name):
            raise refused(f"{name}=True", "output_scores and output_logits are returned, this is not")


def refuse_arguments(input_ids: Tensor, others: Mapping[str, Any], processors: Any, most_rows: int) -> None:
    """Raise RequestError SD-E197 for a batch, model inputs, a cache or processors that are not served."""
    if len(input_ids) > most_rows:
        found = f"a batch of {len(input_ids)} (inputs x num_return_sequences)"
        raise refused(found, f"{most_rows} at a time, or more: speculative(max_num_seqs={len(input_ids)})")
    unknown = [name for name, value in others.items() if name not in _HANDLED and value is not None and value != {}]
    if unknown:
        raise refused(f"model inputs {', '.join(unknown)}", "input_ids and attention_mask only")
    if input_ids.dtype not in (torch.int64, torch.int32) or not input_ids.numel():
        found = f"input_ids {list(input_ids.shape)} of {input_ids.dtype}"
        raise refused(found, "integer ids (int64 or int32) of at least one prompt, with at least one token")
    counting = [type(each).__name__ for each in processors if isinstance(each, _COUNTING_ROWS)]
    if len(input_ids) > 1 and counting:
        raise refused(f"{counting[0]}, which counts the rows of a batch", "one prompt a call")
    _refuse_cache(given_cache(others), input_ids)


def _refuse_cache(cache: Any, input_ids: Tensor) -> None:
    if cache is None or not is_filled(cache):
        return
    if not isinstance(cache, DynamicCache):
        raise refused(f"a {type(cache).__name__} with tokens in it", "a DynamicCache, or the text as input_ids alone")
    rows = {len(layer.keys) for layer in filled_layers(cache)} - {len(input_ids)}
    if rows:
        found = f"past_key_values of {max(rows)} rows, and a batch of {len(input_ids)} (inputs x num_return_sequences)"
        raise refused(found, "a row for each, as by past_key_values.batch_repeat_interleave(n)")
    length, width = held_length(cache), input_ids.shape[1]
    if length >= width:
        found = f"past_key_values with {length} tokens, and {width} input_ids"
        raise refused(found, "the whole text as input_ids, of which the cache lacks at least the last token")


def padding_of(input_ids: Tensor, others: Mapping[str, Any]) -> list[int]:
    """Masked tokens before each text. Raises RequestError if there are others, or positions of the caller's own."""
    length, mask, positions = input_ids.shape[1], others.get("attention_mask"), others.get("position_ids")
    paddings = []
    for row in range(len(input_ids)):
        shown: list[int] = [1] * length if mask is None else mask[row].tolist()
        if len(shown) != length:
            raise refused(f"attention_mask of {len(shown)} tokens, and {length} input_ids", "the whole text")
        num_padding = shown.index(1) if 1 in shown else length
        if num_padding == length or 0 in shown[num_padding:]:
            found = f"attention_mask with holes or without a 1 (row {row})"
            raise refused(found, "padding on the left: zeros, then at least one 1")
        expected = list(range(length - num_padding))
        if positions is not None:
            planes = positions[..., [row % positions.shape[-2]], num_padding:].flatten(0, -2)  # of images, several
            if any(plane != expected for plane in planes.tolist()):
                raise refused("position_ids of its own", "no position_ids: they are 0, 1, 2, ...")
        paddings.append(num_padding)
    return paddings


def refused(found: str, offered: str) -> RequestError:
    """Naming what is not served, and what is."""
    return RequestError(
        "SD-E197", "generate asks for what this decoding does not offer", {"found": found, "offered": offered}
    )
