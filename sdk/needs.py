"""What a proposer needs from the engine. It declares this once as data, before any weight is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, cast

from pydantic import Field, PlainSerializer, PlainValidator, ValidationInfo, field_validator, model_validator

from .config import Extension, ProposerConfig, StrictModel
from .extensions import DraftKV, TargetLayers, TargetTokens, Trees, as_extension, as_json

if TYPE_CHECKING:
    from .types import TargetInfo

E = TypeVar("E", bound=Extension)
AskedExtension = Annotated[Extension | str, PlainValidator(as_extension), PlainSerializer(as_json)]
Placement = Literal["host", "device"]
DistributionForm = Literal["one_hot", "dense", "sparse"]
SamplingField = Literal["temperature", "top_k", "top_p", "min_p"]


class Needs(StrictModel):
    """Everything that changes what the engine has to allocate, compute or show for a proposer.

    The default is the cheapest proposer: token counts only, on the host, one-hot drafts, no state.
    """

    placement: Placement = Field(default="host", description="host: kept tokens alone; device: fixed shapes, no sync")
    hidden_states: tuple[Annotated[int, Field(ge=0)] | Literal["final"], ...] = Field(
        default=(),
        description="k means the residual stream after k layers, before the final norm. 'final' means after the norm. "
        "Kept tokens carry one tensor for each, in this order.",
    )
    distributions: tuple[Literal["dense", "sparse"], ...] = Field(
        default=(), description="forms of distribution that a draft may report, beside one-hot"
    )
    sparse_top_m: int = Field(default=0, ge=0, description="entries per draft position of a sparse distribution")
    draft_vocabulary: tuple[int, ...] | None = Field(
        default=None,
        description="target id of each draft id, for dense distributions over fewer tokens. None means the target's",
    )
    min_draft_tokens: int = Field(
        default=0, ge=0, description="the fewest drafts that a useful draft of this proposer has"
    )
    max_draft_tokens: int | None = Field(default=None, ge=1, description="the most it can draft. None means any K")
    state: Literal["none", "per_request", "shared"] = Field(
        default="none",
        description="what it keeps between steps. shared means that requests may change each other's drafts. Learn "
        "shared state in the order of request ids",
    )
    history: bool = Field(default=False, description="reads the token history of its requests")
    whole_prompt: bool = Field(
        default=False,
        description="must be shown every position of a request. False: the first kept token may lie behind position 0, "
        "after a cached prefix. That was computed for the same tokens and is not shown. Draft KV is there",
    )
    sampling: tuple[SamplingField, ...] = Field(default=(), description="sampling parameters that it reads")
    deterministic: bool = Field(default=True, description="the same step, seed and state give the same draft")
    extensions: tuple[AskedExtension, ...] = Field(
        default=(), description="what it needs beyond the core: Trees(), or 'trees@1' where no setting differs"
    )

    @property
    def asked(self) -> tuple[Extension, ...]:
        """The extensions, as ids no more."""
        return cast("tuple[Extension, ...]", self.extensions)

    def extension(self, kind: type[E]) -> E | None:
        """The entry of an extension. None means that the proposer does not ask for it."""
        return next((each for each in self.extensions if isinstance(each, kind)), None)

    @property
    def lookahead(self) -> int:
        """Positions past a request's newest token that drafting writes keys and values for."""
        passes = self.extension(DraftKV), self.extension(TargetLayers)
        return max((each.lookahead for each in passes if each is not None), default=0)

    @property
    def stored_form(self) -> DistributionForm:
        """The form that is kept of a draft until it is verified, by an engine that keeps one."""
        return self.distributions[0] if self.distributions else "one_hot"

    @field_validator("distributions", "extensions", mode="before")
    @classmethod
    def _several(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, str | Extension):
            raise ValueError(f"{info.field_name} are a tuple, also where there is one: ({value!r},)")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        twice = [each.id for each in self.asked if sum(each.name == other.name for other in self.asked) > 1]
        if twice:
            raise ValueError(f"an extension is asked for once, under one number; found {', '.join(twice)}")
        if ("sparse" in self.distributions) != (self.sparse_top_m > 0):
            raise ValueError("sparse_top_m must be positive exactly when distributions have 'sparse'")
        if self.draft_vocabulary is not None and "dense" not in self.distributions:
            raise ValueError(
                "draft_vocabulary describes dense distributions; one-hot and sparse drafts carry target ids"
            )
        tokens = self.extension(TargetTokens)
        if tokens and tokens.rejected and self.extension(Trees) and self.placement == "device":
            raise ValueError("rejected nodes of trees are shown on the host: on a device they follow the kept ones")
        if self.max_draft_tokens is not None and self.min_draft_tokens > self.max_draft_tokens:
            raise ValueError("min_draft_tokens is above max_draft_tokens")
        return self


def needs_of(proposer: type, config: ProposerConfig, target: TargetInfo) -> Needs:
    """What a proposer class needs, stated or computed. Raises what its `needs` raises, and TypeError for no Needs."""
    stated: Any = getattr(proposer, "needs", Needs())  # optional by contract
    needs: object = stated if isinstance(stated, Needs) else stated(config, target)
    if not isinstance(needs, Needs):
        raise TypeError(f"{proposer.__name__}.needs returned {needs!r:.80}, expected an instance of specdec.sdk.Needs")
    return needs
