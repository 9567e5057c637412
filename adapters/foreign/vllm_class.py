"""A class for vLLM's `custom_class` as a proposer."""

from __future__ import annotations

import logging
from typing import Any, ClassVar, NoReturn, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from specdec.sdk.config import ProposerConfig
from specdec.sdk.needs import Needs
from specdec.sdk.services import Services
from specdec.sdk.token_ids import token_id
from specdec.sdk.types import Draft, Phase, StepView, TargetInfo

logger = logging.getLogger("specdec")

LACKS = (
    "only speculative_config (with proposer_config's keys), model_config, scheduler_config, parallel_config and "
    "additional_config of vllm_config, with the few fields that are known here; load_model's target has no attribute; "
    "slot_mappings is empty; a step in which no request wants drafts is not shown; drafts beyond the budget are cut"
)


class Offered:
    """A stand-in for an object of vLLM: it has these attributes, and refuses any other by name."""

    def __init__(self, name: str, **attributes: Any) -> None:
        self.__dict__.update(attributes)
        self._offered_as = name

    def __getattr__(self, attribute: str) -> NoReturn:
        own = ", ".join(key for key in vars(self) if not key.startswith("_")) or "nothing"
        name = vars(self).get("_offered_as", "this")
        raise AttributeError(f"{name}.{attribute} does not exist outside vLLM; {name} has: {own}")


class VllmClass:
    """Written for vLLM's custom_class; runs in this engine through an adapter."""

    needs = Needs(history=True, state="shared")
    foreign: ClassVar[type[Any]]

    class Options(BaseModel):
        """Anything that the class reads: attributes of vllm_config.speculative_config and keys of additional_config."""

        model_config = ConfigDict(extra="allow", frozen=True)

    @classmethod
    def around(cls, foreign: type[Any]) -> type[Self]:
        """The proposer class for one foreign class."""
        doc = f"{foreign.__name__}, written for vLLM's custom_class. It lacks here: {LACKS}."
        return type(foreign.__name__, (cls,), {"foreign": foreign, "__module__": foreign.__module__, "__doc__": doc})

    def __init__(self, config: ProposerConfig) -> None:
        self._config = config

    def bind(self, target: TargetInfo, services: Services) -> None:
        """Construct it from what stands in for vLLM's configuration, and let it load."""
        logger.warning("%s was written for vLLM's custom_class. It lacks here: %s.", self.foreign.__name__, LACKS)
        self._drafter = self.foreign(_vllm_config(self._config, target))
        shape = (target.max_num_seqs, target.max_model_len)
        self._token_ids = np.zeros(shape, dtype=np.int32)  # vLLM's rows: those of the batch, from 0 on
        self._num_tokens = np.zeros(shape[0], dtype=np.int32)
        load_model = getattr(self._drafter, "load_model", None)
        if callable(load_model):
            load_model(Offered("target_model"))

    def propose(self, step: StepView) -> Draft:
        """Call the class once for the whole batch."""
        assert step.history is not None, "declared in needs"
        for b, length in enumerate(step.committed_length.tolist()):
            self._token_ids[b, :length] = step.history.token_ids(b)
            self._num_tokens[b] = length
        returned = self._drafter.propose(self._sampled(step), self._num_tokens, self._token_ids, slot_mappings={})
        rows = returned.tolist() if isinstance(returned, torch.Tensor | np.ndarray) else returned
        if not isinstance(rows, list | tuple):
            raise TypeError(f"expected list[list[int]] or a [B, k] tensor, got {type(returned).__name__}")
        if len(rows) > len(step):
            raise ValueError(f"{len(rows)} rows for {len(step)} requests")
        missing = [()] * (len(step) - len(rows))  # vLLM drafts nothing for them either
        budgets = step.budget.tolist()
        drafts = [_usable(row)[:budget] for row, budget in zip([*rows, *missing], budgets, strict=True)]
        return Draft.from_lists(drafts, step.width)

    def _sampled(self, step: StepView) -> list[list[int]]:
        """The new tokens of each request. Empty in the middle of a prompt."""
        counts = torch.where(step.phase == Phase.PREFILL, 0, step.num_accepted + 1).tolist()
        places = zip(range(len(step)), counts, step.committed_length.tolist(), strict=True)
        return [self._token_ids[b, length - count : length].tolist() for b, count, length in places]


def _usable(row: Any) -> list[int]:
    """Up to the first padding: vLLM lets -1 stand, and rejects it and everything after it."""
    token_ids = list(map(token_id, row))
    padding = (place for place, each in enumerate(token_ids) if each == -1)
    return token_ids[: next(padding, None)]


def _vllm_config(config: ProposerConfig, target: TargetInfo) -> Offered:
    options = dict(config.options) if config.options is not None else {}
    speculative = {"num_speculative_tokens": config.num_draft_tokens, "method": "custom_class"} | options
    return Offered(
        "vllm_config",
        speculative_config=Offered("vllm_config.speculative_config", **speculative),
        model_config=Offered(
            "vllm_config.model_config",
            model=target.model,
            max_model_len=target.max_model_len,
            dtype=getattr(torch, target.dtype),
            get_vocab_size=lambda: target.vocab_size,
            get_hidden_size=lambda: target.hidden_size,
        ),
        scheduler_config=Offered("vllm_config.scheduler_config", max_num_seqs=target.max_num_seqs),
        parallel_config=Offered("vllm_config.parallel_config", tensor_parallel_size=1, pipeline_parallel_size=1),
        additional_config=options,
    )
