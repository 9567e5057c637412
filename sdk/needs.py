"""What a proposer needs from the engine. It declares this once as data, before any weight is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from .config import ProposerConfig, StrictModel

if TYPE_CHECKING:
    from .types import TargetInfo

Placement = Literal["host", "device"]
DistributionForm = Literal["one_hot", "dense", "sparse"]
SamplingField = Literal["temperature", "top_k", "top_p", "min_p"]


class DraftKV(StrictModel):
    """Key-value storage of the proposer's own, on the target's block tables and within its memory budget."""

    num_layers: int = Field(ge=1, description="attention layers that keep keys and values")
    num_heads: int = Field(ge=1, description="key-value heads")
    head_dim: int = Field(ge=1, description="size of a key")
    value_head_dim: int | None = Field(default=None, ge=1, description="size of a value. None means head_dim")
    dtype: str | None = Field(default=None, description="torch dtype name. None means the target's")
    lookahead: int = Field(default=1, ge=1, description="positions past the newest token that one draft pass writes")
    depends_on_next_token: bool = Field(
        default=False, description="a row's KV is computed from the token that follows it"
    )


class LayerPass(StrictModel):
    """Layers of the target that drafting runs itself."""

    layers: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1, description="every layer that may be run")
    lookahead: int = Field(default=1, ge=1, description="positions past the newest token that one draft writes")


class Needs(StrictModel):
    """Everything that changes what the engine has to allocate, compute or show for a proposer.

    The default is the cheapest proposer: token counts only, on the host, one-hot drafts, no state.
    """

    placement: Placement = Field(default="host", description="host: compacted kept rows; device: fixed shapes, no sync")
    hidden_states: tuple[Annotated[int, Field(ge=0)] | Literal["final"], ...] = Field(
        default=(),
        description="k means the residual stream after k layers, before the final norm. 'final' means after the norm. "
        "Kept rows carry them concatenated in this order.",
    )
    target_top_k: int = Field(
        default=0,
        ge=0,
        description="entries of KeptTokens.top_ids and top_logprobs: the target's most likely tokens. 0: none",
    )
    rejected_rows: bool = Field(
        default=False, description="shows rejected drafts, with the target's most likely tokens too"
    )
    target_kv: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(), description="layers of the target whose cached keys and values it reads (`Services.target_kv`)"
    )
    target_layers: LayerPass | None = Field(
        default=None,
        description="layers of the target that it runs for drafting (`Services.target_layers`). None means none",
    )
    draft_kv: DraftKV | None = Field(default=None, description="key-value storage of its own. None means none")
    distribution: DistributionForm = Field(
        default="one_hot", description="the richest form of distribution that a draft may report"
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
    per_row_length: bool = Field(default=True, description="False means that all rows with drafts have the same number")
    state: Literal["none", "per_request", "shared"] = Field(
        default="none",
        description="what it keeps between steps. shared means that requests may change each other's drafts. Learn "
        "shared state in the order of request ids",
    )
    history: bool = Field(default=False, description="reads the token history of its requests")
    whole_prompt: bool = Field(
        default=False,
        description="must be shown every position of a request. False: the first kept row may lie behind position 0, "
        "after a cached prefix. That was computed for the same tokens and is not shown. Draft KV is there",
    )
    sampling: tuple[SamplingField, ...] = Field(default=(), description="sampling parameters that it reads")
    deterministic: bool = Field(default=True, description="the same step, seed and state give the same draft")
    topology: Literal["chain", "tree"] = Field(
        default="chain", description="tree means that a draft may have parents: K is then the most nodes, at most 64"
    )
    max_depth: int | None = Field(default=None, ge=1, description="the most nodes on a path of a tree. None means K")
    multimodal: bool = Field(default=False, description="image or audio inputs: reserved and refused for now")

    @property
    def lookahead(self) -> int:
        """Positions past a request's newest token that drafting writes keys and values for."""
        passes = (self.draft_kv, self.target_layers)
        return max((each.lookahead for each in passes if each is not None), default=0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.distribution == "sparse") != (self.sparse_top_m > 0):
            raise ValueError("sparse_top_m must be positive exactly when distribution is 'sparse'")
        if self.draft_vocabulary is not None and self.distribution != "dense":
            raise ValueError(
                "draft_vocabulary describes dense distributions; one-hot and sparse drafts carry target ids"
            )
        if self.max_depth is not None and self.topology != "tree":
            raise ValueError("max_depth describes trees; declare topology='tree'")
        if self.rejected_rows and self.topology == "tree" and self.placement == "device":
            raise ValueError("rejected_rows of trees are shown on the host: on a device they follow the kept ones")
        if self.rejected_rows and not self.target_top_k:
            raise ValueError("rejected_rows shows the target's most likely tokens: target_top_k says how many")
        if self.max_draft_tokens is not None and self.min_draft_tokens > self.max_draft_tokens:
            raise ValueError("min_draft_tokens is above max_draft_tokens")
        return self


def needs_of(proposer: type, config: ProposerConfig, target: TargetInfo) -> Needs:
    """What a proposer class needs, stated or computed. Raises what its `needs` raises."""
    stated: Any = getattr(proposer, "needs", Needs())  # optional by contract
    needs: Needs = stated if isinstance(stated, Needs) else stated(config, target)
    return needs
