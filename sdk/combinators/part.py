"""A part of a combinator: how it is configured, what it needs, and what it is shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, Field, create_model
from torch import Tensor

from ..check import check_class, check_extensions
from ..config import NetworkSettings, ProposerConfig
from ..errors import PluginId, Refusal
from ..extensions import KNOWN, RejectedTokens, TargetTokens
from ..lifecycle import extension_methods, lifecycle_methods
from ..needs import Needs, needs_of
from ..proposer_protocol import Proposer
from ..ranges import DraftLength
from ..request_options import request_options_model
from ..types import Draft, DraftDistribution, KeptTokens, RequestView, SamplingView, StepView, TargetInfo
from .host_form import host_form

Author = Tensor | Sequence[int] | None
"""[B], the index of the part whose draft each row had. None means that all rows are the part's."""


class PartSettings(NetworkSettings):
    """What may differ between parts; what a section leaves out is what `speculative_config` says for all of them."""

    model: str | None = Field(default=None, description="this part's checkpoint")
    num_speculative_tokens: DraftLength | None = Field(
        default=None, strict=True, description="the most drafts of this part"
    )


def part_names(parts: Sequence[type[Proposer]]) -> tuple[str, ...]:
    """A key for each part: its class's name in lower case with underscores, without "Proposer"; a number if taken."""
    names: list[str] = []
    for part in parts:
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", part.__name__.removesuffix("Proposer") or part.__name__)
        name, number = words.lower().strip("_"), 2
        while name in names:
            name, number = f"{words.lower().strip('_')}_{number}", number + 1
        names.append(name)
    return tuple(names)


def section_of(place: str, part: type[Proposer], options: type[Any] | None) -> type[PartSettings]:
    """The model of a part's section: PartSettings, and the part's own options beside them. Errors name the `place`."""
    bases: tuple[type[PartSettings], ...] = (PartSettings,) if options is None else (PartSettings, options)
    section = create_model(place, __base__=bases)
    if options is not None and (taken := PartSettings.key_names() & options.model_fields.keys()):
        found = f"{part.__name__}.Options has {', '.join(sorted(taken))}"
        raise TypeError(f"{found}, which every part's section has; rename them")
    return section


@dataclass(frozen=True)
class PartPlan:
    """A part before it is constructed."""

    name: str
    cls: type[Proposer]
    config: ProposerConfig
    needs: Needs

    @classmethod
    def make(
        cls, name: str, part: type[Proposer], section: BaseModel, config: ProposerConfig, target: TargetInfo
    ) -> PartPlan:
        """The part's configuration and needs; it drafts at most as many tokens as it can.

        Raises Refusal if it is to draft more than all together or cannot draft as few, and PluginLoadError as
        `check_class`, `check_extensions` and `request_options_model` do: nobody else looks at a part.
        """
        plugin = PluginId(name, f"{part.__module__}:{part.__qualname__}")
        check_class(part, plugin)
        request_options_model(part, plugin)
        settings = dict(section)
        limit = settings["num_speculative_tokens"] or config.num_draft_tokens
        if limit > config.num_draft_tokens:
            reason = f"its part {name} is to draft {limit} tokens, and all parts together {config.num_draft_tokens}"
            raise Refusal(reason, f'"num_speculative_tokens": {limit} beside "proposer_config", or less in it')
        told = {key: settings[key] for key in NetworkSettings.key_names() & section.model_fields_set}
        own_config = config.replace(
            model=settings["model"] or config.model,
            network=config.network.replace(**told),
            num_draft_tokens=limit,
            options=section,
        )
        needs = needs_of(part, own_config, target)
        if needs.max_draft_tokens is not None and needs.max_draft_tokens < limit:
            own_config = own_config.replace(num_draft_tokens=needs.max_draft_tokens)
            needs = needs_of(part, own_config, target)
        fewest = needs.min_draft_tokens
        if own_config.num_draft_tokens < fewest:
            reason = f"its part {name} drafts at least {fewest} tokens, and may draft {own_config.num_draft_tokens}"
            raise Refusal(reason, f'"num_speculative_tokens": {fewest}')
        check_extensions(part, needs, [each for id_, each in KNOWN.items() if id_ in target.extensions], plugin)
        return cls(name, part, own_config, needs)


@dataclass(frozen=True, kw_only=True)
class OwnDrafts(StepView[Any]):
    """A step that counts a part's own drafts alone. What the others' drafts added is committed all the same.

    Drafts are counted where they are read: small tensors cost a host more than most parts do.
    """

    whole: StepView[Any]
    author: Tensor | Sequence[int]  # [B]
    index: int  # of the part, where it is the author

    @classmethod
    def of(cls, step: StepView[Any], own: dict[str, Any], author: Tensor | Sequence[int], index: int) -> OwnDrafts:
        """Take a step as it is but for the part's `own` values."""
        shown = cls.__new__(cls)
        known = vars(shown)
        known.update(vars(step) | own, whole=step, author=author, index=index)
        for counted in ("num_drafted", "num_accepted", "_is_author"):  # of another part, where parts nest
            known.pop(counted, None)
        return shown

    if not TYPE_CHECKING:  # where they are fields like the others

        @cached_property
        def num_drafted(self) -> Tensor:
            """[B] int64"""
            return self.whole.num_drafted * self._is_author

        @cached_property
        def num_accepted(self) -> Tensor:
            """[B] int64"""
            return self.whole.num_accepted * self._is_author

    @cached_property
    def _is_author(self) -> Tensor:
        return torch.as_tensor(self.author, device=self.whole.slots.device) == self.index

    @property
    def num_committed(self) -> Tensor:
        """Count what the whole step added to each request's output: [B] int64."""
        return self.whole.num_committed.to(self.num_accepted.device)


class Part:
    """A part that runs: it is called like any proposer, and is shown what it declared and nothing else."""

    def __init__(self, plan: PartPlan, index: int, whole: Needs) -> None:
        """`index`: its place among the parts. `whole`: what all need, which the engine's views are made for."""
        self.name: str = plan.name
        self.index: int = index
        self.needs: Needs = plan.needs
        self.num_draft_tokens: int = plan.config.num_draft_tokens
        self.proposer: Proposer = plan.cls(plan.config)
        self._hidden_places = [whole.hidden_states.index(wanted) for wanted in plan.needs.hidden_states]
        self._tokens = plan.needs.extension(TargetTokens)
        self._changes_form = whole.placement != plan.needs.placement
        self._methods: dict[str, Callable[..., object]] = {
            name: getattr(self.proposer, name)
            for name in lifecycle_methods(plan.cls) | extension_methods(plan.cls, plan.needs)
        }

    def has(self, method: str) -> bool:
        """Whether the part has a lifecycle method."""
        return method in self._methods

    def call(self, method: str, *args: object) -> object:
        """Call a lifecycle method if the part has it. Returns what it returns."""
        return self._methods[method](*args) if method in self._methods else None

    def call_below(self, method: str, path: Path) -> None:
        """`save` or `load`, in a directory of the part's own. A part without one has nothing to load."""
        own = path / self.name
        if method == "save" and self.has(method):
            own.mkdir(exist_ok=True)
        if own.is_dir():
            self.call(method, own)

    def request(self, request: RequestView) -> RequestView:
        """The request as this part is shown it: with the section of its options that is the part's."""
        if request.options is None:
            return request
        return replace(request, options=getattr(request.options, self.name, None))  # None: the part declares none

    def observe(self, step: StepView, budget: Tensor, author: Author = None) -> None:
        """Show it the step, if it looks at steps. Arguments as of `view`."""
        if self.has("observe"):
            self.call("observe", self.view(step, budget, author))

    def propose(self, step: StepView, budget: Tensor, author: Author = None) -> Draft:
        """The part's draft, as wide as the part drafts. Arguments as of `view`.

        Raises TypeError for what is no draft, and ValueError for one of another form.
        """
        draft: object = self.proposer.propose(self.view(step, budget, author))
        if not isinstance(draft, Draft):
            found = "None" if draft is None else type(draft).__name__
            raise TypeError(f"its part {self.name} returned {found}, expected a Draft")
        if draft.parents is not None:
            raise ValueError(f"its part {self.name} returned a draft with parents, and trees were not asked for")
        shape = (len(step), self.num_draft_tokens)
        if tuple(draft.token_ids.shape) != shape or tuple(draft.lengths.shape) != shape[:1]:
            found = f"token_ids {tuple(draft.token_ids.shape)} and lengths {tuple(draft.lengths.shape)}"
            raise ValueError(f"its part {self.name} returned {found}, expected {shape} and {shape[:1]}")
        if draft.distribution is not None:
            self._check_distribution(draft.distribution, shape)
        return draft

    def _check_distribution(self, distribution: DraftDistribution, shape: tuple[int, int]) -> None:
        """Raise ValueError for one of another form than declared: merging would cut it or fill it up. shape: [B, K]."""
        for name, value in vars(distribution).items():
            if not isinstance(value, Tensor):
                continue
            entries = (self.needs.sparse_top_m,) if name.startswith("sparse") else value.shape[-1:]
            expected = shape[:1] if name == "kind" else (*shape, *entries)
            if tuple(value.shape) != expected:
                found = f"distribution.{name} {tuple(value.shape)}"
                raise ValueError(f"its part {self.name} returned {found}, expected {expected}")

    def view(self, step: StepView, budget: Tensor, author: Author = None) -> StepView:
        """The step as this part is shown it.

        `budget` [B] replaces the step's. `author` [B]: the index of the part whose draft each row had; rows
        of others count as not drafted. None: all rows are the part's.
        """
        own: dict[str, Any] = {
            "width": self.num_draft_tokens,
            "budget": self._budget(budget, step.width),
            "kept": self._kept(step.kept),
            "sampling": self._sampling(step.sampling),
            "requests": tuple([self.request(request) for request in step.requests]),
            "history": step.history if self.needs.history else None,
            "rejected": self._rejected(step.rejected),
        }
        shown = replace(step, **own) if author is None else OwnDrafts.of(step, own, author, self.index)
        return host_form(shown) if self._changes_form else shown

    def _budget(self, budget: Tensor, width: int) -> Tensor:
        """What the part can use of a budget [B] below `width`. Small tensors cost a host more than these questions."""
        if self.num_draft_tokens < width:
            budget = budget.clamp(max=self.num_draft_tokens)
        fewest = self.needs.min_draft_tokens
        return torch.where(budget >= fewest, budget, 0) if fewest > 1 else budget

    def _kept(self, kept: KeptTokens) -> KeptTokens:
        """The kept tokens, with what the part declared beside them."""
        if not kept.hidden and kept.top_ids is None:
            return kept
        hidden = tuple([kept.hidden[place] for place in self._hidden_places])  # in the part's order
        return replace(kept, hidden=hidden, **self._top(kept))

    def _top(self, rows: KeptTokens | RejectedTokens) -> dict[str, Any]:
        """The target's most likely tokens, as many as the part reads."""
        if rows.top_ids is None or rows.top_logprobs is None or self._tokens is None:
            return {"top_ids": None, "top_logprobs": None}
        count = self._tokens.top_k
        return {"top_ids": rows.top_ids[:, :count], "top_logprobs": rows.top_logprobs[:, :count]}

    def _rejected(self, rejected: RejectedTokens | None) -> RejectedTokens | None:
        if rejected is None or self._tokens is None or not self._tokens.rejected:
            return None
        return replace(rejected, **self._top(rejected))

    def _sampling(self, sampling: SamplingView | None) -> SamplingView | None:
        if sampling is None or not self.needs.sampling:
            return None
        values = {name: getattr(sampling, name) for name in self.needs.sampling}
        return SamplingView(**values, all_greedy=sampling.all_greedy)
