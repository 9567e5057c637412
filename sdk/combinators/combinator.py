"""The base of proposers that are made of other proposers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from pydantic import Field, create_model
from torch import Tensor

from ..config import ProposerConfig, StrictModel
from ..errors import ConfigError, Refusal
from ..needs import Needs
from ..proposer_protocol import Proposer, ProposerBase
from ..services import Services
from ..types import Draft, RequestView, StepView, TargetInfo
from .merge import merged_needs
from .part import Part, PartPlan, part_names, section_of


class _RequestSections(StrictModel):
    """What a request tells the parts: a section for each that declares RequestOptions."""


class Combinator(ProposerBase):
    """Holds its parts, and passes lifecycle calls, steps, draft KV and options on to each as declared.

    A subclass names its parts, or `of` makes one. Its class path is a `method` like any other:

        class Mine(Chain):
            parts = (First, Second)                     # "method": "my_package.module:Mine"

    `proposer_config` has a section for each part, named after its class (`SmallModelProposer` is `small_model`). A
    section takes the part's own options. It also takes `model`, `num_speculative_tokens`, `dtype`, `quantization`,
    `moe_backend` and `trust_remote_code`; without them the part inherits the whole's. A request's options have
    the same sections, for the parts that declare RequestOptions.

    At most one part may keep draft KV. A part on the host can stand beside a part on a device, but the step then waits
    for the device. An error of a part is not contained here: the engine's `on_proposer_error` applies to the whole. A
    lifecycle call reaches all other parts before the error is raised again.
    """

    parts: ClassVar[tuple[type[Proposer], ...]] = ()
    Options: ClassVar[type[StrictModel]] = StrictModel
    RequestOptions: ClassVar[type[StrictModel] | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Options" in vars(cls):
            raise TypeError(f"{cls.__name__}.Options would be lost: own_options() adds options to its parts' sections")
        cls.Options = cls._options_at("proposer_config")
        asked = {name: getattr(part, "RequestOptions", None) for name, part in zip(cls.names(), cls.parts, strict=True)}
        per_request: dict[str, Any] = {
            name: (model, Field(default_factory=model)) for name, model in asked.items() if model is not None
        }
        if per_request and "RequestOptions" in vars(cls):
            raise TypeError(f"{cls.__name__}.RequestOptions would be lost: {', '.join(per_request)} declares its own")
        if per_request:
            cls.RequestOptions = create_model("RequestOptions", __base__=_RequestSections, **per_request)
        elif cls.RequestOptions is not None and issubclass(cls.RequestOptions, _RequestSections):
            cls.RequestOptions = None  # the sections are of its base's parts

    @classmethod
    def _options_at(cls, place: str) -> type[StrictModel]:
        """The model of `Options` with the sections of its parts, whose errors name them as they are below `place`."""
        fields = dict(cls.own_options())
        for name, part in zip(cls.names(), cls.parts, strict=True):
            if name in fields:
                raise TypeError(f"a part of {cls.__name__} is named like its option {name}; rename its class")
            below = f"{place}.{name}"
            options = part._options_at(below) if issubclass(part, Combinator) else getattr(part, "Options", None)
            section = section_of(below, part, options)
            fields[name] = section, Field(default_factory=section)
        return create_model("Options", __base__=StrictModel, **fields)

    @classmethod
    def of(cls, *parts: type[Proposer]) -> type[Self]:
        """A subclass with these parts."""
        name = cls.__name__ + "Of" + "And".join(part.__name__ for part in parts)
        made: type[Self] = type(cls)(name, (cls,), {"parts": parts, "__doc__": cls.__doc__})  # type: ignore[misc]
        return made

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The parts' sections in `proposer_config`."""
        return part_names(cls.parts)

    @classmethod
    def own_options(cls) -> dict[str, Any]:
        """Options beside the parts' sections, as arguments of pydantic's `create_model`."""
        return {}

    @classmethod
    def plans(cls, config: ProposerConfig, target: TargetInfo) -> list[PartPlan]:
        """Make the configuration and the needs of each part. Raises what `PartPlan.make` and a part's `needs` raise."""
        if not cls.parts:
            raise Refusal(f"{cls.__name__} has no parts", f"a subclass with parts, or {cls.__name__}.of(First, Second)")
        sections = dict(config.options or cls.Options())
        named = zip(cls.names(), cls.parts, strict=True)
        return [PartPlan.make(name, part, sections[name], config, target) for name, part in named]

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        """The needs of all parts together. Raises Refusal where two of them exclude each other."""
        return merged_needs(cls.plans(config, target))

    def __init__(self, config: ProposerConfig) -> None:
        super().__init__(config)
        self.members: list[Part] = []

    def bind(self, target: TargetInfo, services: Services) -> None:
        """Construct the parts for the known target, and bind each to the same services.

        Where one raises, those bound before it are closed.
        """
        plans = self.plans(self.config, target)
        self.merged: Needs = merged_needs(plans)
        self.members = [Part(plan, index, self.merged) for index, plan in enumerate(plans)]
        with ExitStack() as bound:
            for part in self.members:
                part.call("bind", target, services)
                bound.callback(part.call, "close")
            bound.pop_all()

    @abstractmethod
    def observe(self, step: StepView) -> None:
        """Show every part the step."""

    @abstractmethod
    def propose(self, step: StepView) -> Draft:
        """Make one draft of the parts' drafts."""

    def warmup(self) -> None:
        """Call `warmup` of each part."""
        self._each(lambda part: part.call("warmup"))

    def on_start(self, request: RequestView) -> None:
        """Call `on_start` of each part."""
        self._each(lambda part: part.call("on_start", part.request(request)))

    def on_preempt(self, request: RequestView) -> None:
        """Call `on_preempt` of each part."""
        self._each(lambda part: part.call("on_preempt", part.request(request)))

    def on_finish(self, request: RequestView) -> None:
        """Call `on_finish` of each part."""
        self._each(lambda part: part.call("on_finish", part.request(request)))

    def save(self, path: Path) -> None:
        """Save each part, in a directory of its name."""
        self._each(lambda part: part.call_below("save", path))

    def load(self, path: Path) -> None:
        """Load each part, from the directory of its name. A part without one begins anew."""
        self._each(lambda part: part.call_below("load", path))

    def update_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Hand the tensors of one part to it. Their names begin with the name of its section and a dot.

        Raises ConfigError SD-E228 for tensors of no part that takes any, and of several parts: one may take them and
        another may not.
        """
        owners = {name.partition(".")[0] for name in tensors}
        members = [part for part in self.members if part.name in owners and part.has("update_weights")]
        if len(owners) != 1 or not members:
            facts = {
                "expected": "tensors of one part, as in " + (", ".join(self._updatable()) or "no part takes any"),
                "found": ", ".join(sorted(tensors)[:6]) or "none",
            }
            raise ConfigError("SD-E228", "the new weights do not belong to one part; nothing was changed", facts)
        (part,) = members
        part.call("update_weights", {name.partition(".")[2]: tensor for name, tensor in tensors.items()})

    def draft_ahead(self, num_outcomes: int, /) -> bool:
        """Call `draft_ahead` of each part."""
        calls = [part.call("draft_ahead", num_outcomes) for part in self.members]  # each of them
        return any(calls)

    def metrics(self) -> dict[str, float]:
        """Collect the metrics of each part. Names begin with the part's section and an underscore."""
        return {
            f"{part.name}_{name}": value
            for part in self.members
            for name, value in cast("Mapping[str, float]", part.call("metrics") or {}).items()
        }

    def close(self) -> None:
        """Call `close` of each part."""
        self._each(lambda part: part.call("close"))

    def _updatable(self) -> list[str]:
        return [f"{part.name}.NAME" for part in self.members if part.has("update_weights")]

    def _each(self, action: Callable[[Part], object], first: int = 0) -> None:
        """Do something with every part in order, also where one of them raises; what was raised is raised after."""
        if first < len(self.members):
            try:
                action(self.members[first])
            finally:
                self._each(action, first + 1)
