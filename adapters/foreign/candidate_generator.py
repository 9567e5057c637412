"""A transformers candidate generator as a proposer: one generator for each request."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from specdec.sdk.config import ProposerConfig
from specdec.sdk.errors import Refusal
from specdec.sdk.needs import Needs
from specdec.sdk.services import Services
from specdec.sdk.types import Draft, Phase, RequestView, StepView, TargetInfo

logger = logging.getLogger("specdec")

LACKS = (
    "scores in update_candidate_strategy (None); logits that it returns are not used, its drafts are verified as "
    "one-hot; the model, its outputs and the call's generation_config and logits_processor"
)


class CandidateGenerator:
    """Written for transformers' assisted generation; runs in this engine through an adapter."""

    foreign: ClassVar[type[Any]]

    class Options(BaseModel):
        """Arguments of the constructor."""

        model_config = ConfigDict(extra="allow", frozen=True)

    @classmethod
    def around(cls, foreign: type[Any]) -> type[Self]:
        """The proposer class for one generator class."""
        doc = f"{foreign.__name__}, a transformers candidate generator. It lacks here: {LACKS}."
        return type(foreign.__name__, (cls,), {"foreign": foreign, "__module__": foreign.__module__, "__doc__": doc})

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        """History alone. Raises Refusal for a generator that reads the model, naming what it asks for."""
        if getattr(cls.foreign, "requires_model_outputs", False):
            raise Refusal(f"{cls.foreign.__name__} reads the model's outputs (requires_model_outputs)", _WORKS)
        arguments = _arguments(cls.foreign, config, target)
        parameters = inspect.signature(cls.foreign).parameters
        missing = [
            name
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            and name not in arguments
        ]
        if missing:
            raise Refusal(f"{cls.foreign.__name__} is constructed with {', '.join(missing)}", _WORKS)
        return Needs(history=True, state="per_request")

    def __init__(self, config: ProposerConfig) -> None:
        self._config = config
        self._generators: dict[str, Any] = {}

    def bind(self, target: TargetInfo, services: Services) -> None:
        """Keep what generators are constructed with."""
        logger.warning("%s is a transformers candidate generator. It lacks here: %s.", self.foreign.__name__, LACKS)
        self._arguments = _arguments(self.foreign, self._config, target)

    def on_start(self, request: RequestView) -> None:
        """A generator of its own."""
        self._generators[request.request_id] = self.foreign(**self._arguments)

    def observe(self, step: StepView) -> None:
        """Tell each how many of its candidates were right."""
        facts = zip(step.request_ids, step.phase.tolist(), step.num_accepted.tolist(), range(len(step)), strict=True)
        for request_id, phase, num_accepted, b in facts:
            update = getattr(self._generators[request_id], "update_candidate_strategy", None)
            if phase == Phase.DECODE and callable(update):
                update(_input_ids(step, b), None, num_accepted)

    def propose(self, step: StepView) -> Draft:
        """Call the class once for each request with a budget."""
        budgets = enumerate(step.budget.tolist())
        drafts = [self._candidates(step, b)[:budget] if budget else [] for b, budget in budgets]
        return Draft.from_lists(drafts, step.width)

    def _candidates(self, step: StepView, b: int) -> list[int]:
        input_ids = _input_ids(step, b)
        candidates, _ = self._generators[step.request_ids[b]].get_candidates(input_ids)
        new: list[int] = candidates[0, input_ids.shape[1] :].tolist()
        return new

    def on_finish(self, request: RequestView) -> None:
        """Drop the generator."""
        self._generators.pop(request.request_id, None)


_WORKS = "a generator that reads input_ids alone; or the same idea as a proposer, which may declare hidden states"


def _input_ids(step: StepView, b: int) -> Tensor:
    """The tokens of one request: [1, T] int64."""
    assert step.history is not None, "declared in needs"
    return step.history.of(b)[None]


def _arguments(foreign: type[Any], config: ProposerConfig, target: TargetInfo) -> Mapping[str, Any]:
    """The user's options, and what the engine knows of the constructor's other parameters."""
    known = {
        "num_output_tokens": config.num_draft_tokens,
        "max_length": target.max_model_len,
        "vocab_size": target.vocab_size,
    }
    parameters = inspect.signature(foreign).parameters
    options = dict(config.options) if config.options is not None else {}
    return {name: value for name, value in known.items() if name in parameters} | options
