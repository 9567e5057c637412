"""A call of `generate`: what it asks for, after checks, and the texts of its batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput

from specdec.core.host import Request
from specdec.sdk.needs import SamplingField
from specdec.sdk.types import SamplingView, TargetInfo

from .refusals import padding_of, refuse_arguments, refuse_settings, refused
from .row_cache import RowCache
from .states import given_cache
from .text import Text


@dataclass
class Call:
    """The state of one call."""

    room: Tensor  # [B, padding + T + K] int64, a row for each text
    num_inputs: int  # tokens of each row that the call brought, padding included
    texts: list[Text]
    processors: Any  # LogitsProcessorList
    criteria: Any  # StoppingCriteriaList
    settings: Any  # GenerationConfig
    given: Any  # the cache that the call brought; None: none

    @classmethod
    def read(
        cls,
        input_ids: Tensor,
        processors: Any,
        criteria: Any,
        settings: Any,
        others: Mapping[str, Any],
        num_draft_tokens: int,
        info: TargetInfo,
    ) -> Call:
        """Raises RequestError SD-E197 for what is not offered here, naming it. info: the most rows and tokens."""
        refuse_settings(settings)
        refuse_arguments(input_ids, others, processors, info.max_num_seqs)
        num_rows, width = input_ids.shape
        most = max(criteria.max_length, width + 1)  # a criterion of the caller's replaces that of the settings
        paddings = padding_of(input_ids, others)
        for padding in paddings:
            if most - padding > info.max_model_len:
                found = f"{width - padding} tokens in the prompt, and max_length allows {most - padding}"
                offered = f"at most {info.max_model_len} in all"
                raise refused(found, f"{offered}: a smaller max_new_tokens, or speculative(max_model_len=...)")
        room = torch.zeros(num_rows, most + num_draft_tokens, dtype=torch.int64).to(input_ids.device)
        room[:, :width] = input_ids
        texts = [
            Text(ids, padding, width - padding, most - padding, width - padding)
            for ids, padding in zip(torch.split(room, 1), paddings, strict=True)
        ]
        return cls(room, width, texts, processors, criteria, settings, given_cache(others))

    def row_of(self, request: Request) -> int:
        """The number of its row."""
        return next(b for b, text in enumerate(self.texts) if text.request is request)

    @property
    def keeps_cache(self) -> bool:
        """Whether somebody gets it."""
        returned = self.settings.return_dict_in_generate and self.settings.use_cache
        return returned or isinstance(self.given, DynamicCache)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end a text, by the criteria: one of the caller's replaces that of the settings."""
        ends = [each.eos_token_id for each in self.criteria if type(each) is EosTokenCriteria]
        return frozenset(token for each in ends for token in each.flatten().tolist())

    def commit(self, text: Text, token_ids: list[int]) -> None:
        """Take the output tokens of a step. What follows a text that has ended is padding.

        Raises RequestError SD-E197 for a token that was sampled from what is no distribution.
        """
        asked = self.settings
        kept = (asked.output_scores, asked.output_logits) if asked.return_dict_in_generate else (False, False)
        num_before = text.length
        text.commit(token_ids, self.criteria, *kept)
        if asked.do_sample and not text.last_scores[: text.length - num_before].amax(-1).isfinite().all():
            found = "a token sampled from scores without a finite maximum (all -inf, a NaN or +inf)"
            raise refused(found, "scores with one, from the model and the logits processors")
        if text.ended:
            text.ids[:, text.num_padding + text.length :] = self._pad_token_id

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that every row has. A row that ended goes on with padding."""
        running = [text.num_output_tokens for text in self.texts if not text.ended]
        return min(running) if running else max(text.num_output_tokens for text in self.texts)

    def column(self, index: int) -> Tensor:
        """Output token `index` of each row: [B] on the CPU."""
        return self.room[:, self.num_inputs + index].cpu()

    def output(self, cache: RowCache) -> Tensor | GenerateDecoderOnlyOutput:
        """What `generate` returns when all texts have ended."""
        sequences = self.room[:, : self.num_inputs + self.num_output_tokens].clone()
        if isinstance(self.given, DynamicCache):
            self.given.layers = cache.cache.layers
        if not self.settings.return_dict_in_generate:
            return sequences
        kept = cache.cache if self.settings.use_cache else None
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=self._by_step([text.scores for text in self.texts]),
            logits=self._by_step([text.logits for text in self.texts]),
            past_key_values=self.given if isinstance(self.given, DynamicCache) else kept,
        )

    def _by_step(self, kept: list[list[Tensor]]) -> tuple[Tensor, ...] | None:
        """[B, V] of each output token; zero for rows that have ended."""
        if not kept[0]:
            return None
        nothing = torch.zeros_like(kept[0][0])
        ends = [text.num_output_tokens for text in self.texts]
        return tuple(
            torch.stack([rows[step] if step < end else nothing for rows, end in zip(kept, ends, strict=True)])
            for step in range(self.num_output_tokens)
        )

    @property
    def _pad_token_id(self) -> int:
        """The padding that plain `generate` chooses. 0 for a model that has neither padding nor an end."""
        pad, ends = self.settings.pad_token_id, self.settings.eos_token_id
        return int(pad) if pad is not None else int(torch.as_tensor(_or(ends, 0)).flatten()[0])

    def sampling(self, names: Sequence[SamplingField], num_rows: int, device: torch.device) -> SamplingView:
        """What the target's distribution depends on, as far as it is asked for; the logits are processed already."""
        settings, greedy = self.settings, not self.settings.do_sample
        found = {
            "temperature": 0.0 if greedy else float(_or(settings.temperature, 1.0)),
            "top_k": _or(settings.top_k, 0),
            "top_p": float(_or(settings.top_p, 1.0)),
            "min_p": float(_or(settings.min_p, 0.0)),
        }
        columns: dict[str, Any] = {name: torch.full((num_rows,), found[name], device=device) for name in names}
        return SamplingView(**columns, all_greedy=greedy)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
