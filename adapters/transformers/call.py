"""One call of `generate`: what it asks for, checked, and the text as it grows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode

from specdec.sdk.errors import RequestError
from specdec.sdk.types import SamplingView

from .states import CACHE_ARGUMENTS, is_filled

_HANDLED = frozenset({"attention_mask", "position_ids", *CACHE_ARGUMENTS, "use_cache", "logits_to_keep"})
_SERVED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


@dataclass
class Call:
    """The state of one call. Positions of the text count from its first token that is no padding."""

    ids: Tensor  # [1, padding + T + K] int64: padding, the text, then room for drafts
    num_padding: int
    num_prompt_tokens: int
    max_tokens: int  # T: prompt and output
    processors: Any  # LogitsProcessorList
    criteria: Any  # StoppingCriteriaList
    settings: Any  # GenerationConfig
    cache: DynamicCache
    scores: list[Tensor] = field(default_factory=list)  # [1, V] of each output token, where they were asked for
    logits: list[Tensor] = field(default_factory=list)  # [1, V] before the processors, likewise

    @classmethod
    def read(
        cls,
        input_ids: Tensor,
        processors: Any,
        criteria: Any,
        settings: Any,
        others: Mapping[str, Any],
        cache: DynamicCache,
        num_draft_tokens: int,
        longest: int,
    ) -> Call:
        """Raises RequestError SD-E197 for what is not offered here, naming it."""
        _refuse_settings(settings)
        _refuse_arguments(input_ids, others)
        num_padding = _num_padding(input_ids, others)
        num_prompt = input_ids.shape[1] - num_padding
        max_tokens = max(settings.max_length - num_padding, num_prompt + 1)
        if max_tokens > longest:
            found = f"{num_prompt} tokens in the prompt, and max_length allows {max_tokens}"
            raise _refused(
                found, f"at most {longest} in all: a smaller max_new_tokens, or speculative(max_model_len=...)"
            )
        room = torch.zeros(1, num_padding + max_tokens + num_draft_tokens, dtype=torch.int64, device=input_ids.device)
        room[:, : input_ids.shape[1]] = input_ids
        return cls(room, num_padding, num_prompt, max_tokens, processors, criteria, settings, cache)

    @property
    def prompt(self) -> list[int]:
        """Without padding."""
        start = self.num_padding
        token_ids: list[int] = self.ids[0, start : start + self.num_prompt_tokens].tolist()
        return token_ids

    @property
    def end_token_ids(self) -> frozenset[int]:
        ends = self.settings.eos_token_id
        return frozenset([ends] if isinstance(ends, int) else ends or ())

    def write(self, start: int, token_ids: list[int]) -> None:
        """Put tokens at the text's positions from `start` on."""
        first = self.num_padding + start
        self.ids[0, first : first + len(token_ids)] = torch.tensor(token_ids, dtype=torch.int64)

    def upto(self, length: int) -> Tensor:
        """Padding and the first `length` tokens of the text: [1, padding + length]."""
        return self.ids[:, : self.num_padding + length]

    def stops_within(self, start: int, token_ids: list[int]) -> int | None:
        """How many of the tokens at `start` stand when the criteria end the text; None if they do not."""
        scores = tuple(self.scores) or None
        for count in range(1, len(token_ids) + 1):
            if bool(self.criteria(self.upto(start + count), scores).all()):
                return count
        return None

    def keep_scores(self, scores: Tensor, logits: Tensor, num_tokens: int) -> None:
        """Those of the last step's output tokens, if the caller wants them back."""
        if self.settings.return_dict_in_generate and self.settings.output_scores:
            self.scores += torch.split(scores[:num_tokens], 1)
        if self.settings.return_dict_in_generate and self.settings.output_logits:
            self.logits += torch.split(logits[:num_tokens], 1)

    def output(self, length: int) -> Tensor | GenerateDecoderOnlyOutput:
        """What `generate` returns of a text of this length."""
        sequences = self.upto(length).clone()
        if not self.settings.return_dict_in_generate:
            return sequences
        count = length - self.num_prompt_tokens
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=tuple(self.scores[:count]) or None,
            logits=tuple(self.logits[:count]) or None,
            past_key_values=self.cache,
        )

    @property
    def sampling(self) -> SamplingView:
        """What the target's distribution depends on, as far as proposers can read it; the logits are processed
        already.
        """
        settings, greedy = self.settings, not self.settings.do_sample
        return SamplingView(
            temperature=torch.tensor([0.0 if greedy else _or(settings.temperature, 1.0)]),
            top_k=torch.tensor([_or(settings.top_k, 0)]),
            top_p=torch.tensor([_or(settings.top_p, 1.0)]),
            min_p=torch.tensor([_or(settings.min_p, 0.0)]),
            all_greedy=greedy,
        )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _refuse_settings(settings: Any) -> None:
    mode = settings.get_generation_mode()
    if mode not in _SERVED_MODES:
        raise _refused(f"generation mode {mode.value}", "greedy search or sampling (num_beams=1)")
    if settings.guidance_scale not in (None, 1):
        raise _refused(f"guidance_scale={settings.guidance_scale}, whose processor counts calls", "no guidance_scale")
    if settings.watermarking_config is not None:
        raise _refused("watermarking_config, whose processors may count calls", "no watermark")
    for name in ("output_attentions", "output_hidden_states"):
        if settings.return_dict_in_generate and getattr(settings, name):
            raise _refused(f"{name}=True", "output_scores and output_logits are returned, this is not")


def _refuse_arguments(input_ids: Tensor, others: Mapping[str, Any]) -> None:
    if input_ids.shape[0] != 1:
        found = f"a batch of {input_ids.shape[0]} (inputs x num_return_sequences)"
        raise _refused(found, "one prompt a call; specdec.LLM serves batches")
    unknown = [name for name, value in others.items() if name not in _HANDLED and value is not None]
    if unknown:
        raise _refused(f"model inputs {', '.join(unknown)}", "input_ids and attention_mask only")
    for name in CACHE_ARGUMENTS:
        if others.get(name) is not None and is_filled(others[name]):
            raise _refused(f"{name} with tokens in it", "the whole text as input_ids")


def _num_padding(input_ids: Tensor, others: Mapping[str, Any]) -> int:
    """Masked tokens before the text. Raises RequestError if there are others, or positions of the caller's own."""
    length, mask, positions = input_ids.shape[1], others.get("attention_mask"), others.get("position_ids")
    shown: list[int] = [1] * length if mask is None else mask[0].tolist()
    num_padding = shown.index(1) if 1 in shown else length
    if num_padding == length or 0 in shown[num_padding:]:
        raise _refused("attention_mask with holes", "padding on the left only, and at least one token")
    if positions is not None and positions[0, num_padding:].tolist() != list(range(length - num_padding)):
        raise _refused("position_ids of its own", "no position_ids: they are 0, 1, 2, ...")
    return num_padding


def _refused(found: str, offered: str) -> RequestError:
    return RequestError(
        "SD-E197", "generate asks for what this decoding does not offer", {"found": found, "offered": offered}
    )
