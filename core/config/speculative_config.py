"""`speculative_config`: which proposer, and the settings that all proposers share, under vLLM's names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from specdec.sdk.config import DraftSampleMethod, wrong_values
from specdec.sdk.errors import ConfigError
from specdec.sdk.json_files import as_mapping
from specdec.sdk.ranges import DraftLength, Share, TreeSize

WHERE = "speculative_config"
EXAMPLE = '{"method": "NAME", "num_speculative_tokens": 4}'


def _path_as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _nothing_as_empty(value: Any) -> Any:
    return {} if value is None else value


class SpeculativeConfig(BaseModel):
    """Common keys are checked here; any other key is kept for the chosen proposer's options to declare.

    Constructing one, by whatever way, raises ConfigError: SD-E130 (not JSON), SD-E132 (a wrong value) or
    SD-E133 (something required is missing).
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    method: str | None = Field(
        default=None, min_length=1, description="a name, 'distribution:name' or 'package.module:Class'"
    )
    model: Annotated[str | None, BeforeValidator(_path_as_text)] = Field(
        default=None,
        min_length=1,
        description="the proposer's checkpoint; without a method also 'package.module.Class'",
    )
    num_speculative_tokens: DraftLength | None = Field(
        default=None, strict=True, description="K: the most tokens on a path of a draft; None: what the proposer says"
    )
    max_nodes: TreeSize | None = Field(
        default=None,
        strict=True,
        description="the most nodes of a tree; None: chains, or trees of K nodes where it drafts nothing else",
    )
    draft_sample_method: DraftSampleMethod = Field(
        default="greedy",
        description="greedy: the most likely tokens; probabilistic: drawn, and verified with their distribution",
    )
    rejection_sample_method: str = Field(
        default="standard",
        min_length=1,
        description="how drafts are verified: standard and block are lossless; typical, synthetic and others are not",
    )
    synthetic_acceptance_rate: Share | None = Field(
        default=None, description="what synthetic accepts of the drafts whose predecessors stand"
    )
    proposer_config: Annotated[dict[str, Any], BeforeValidator(_nothing_as_empty)] = Field(
        default_factory=dict, description="the proposer's own options"
    )
    on_proposer_error: Literal["raise", "skip_step", "disable"] = Field(
        default="raise",
        description="raise: after the step; skip_step: go on without drafts; disable: and ask no more after 3",
    )
    isolation: str | dict[str, Any] | None = Field(
        default=None,
        description='None: it runs with the engine; "process", or {"kind": "process", ...}: in a process of its own',
    )
    state_dir: Annotated[str | None, BeforeValidator(_path_as_text)] = Field(
        default=None,
        min_length=1,
        description="shared state of the proposer: loaded from there at the start, saved at close",
    )
    moe_backend: str | None = Field(default=None, description="experts implementation; None inherits the target's")
    quantization: str | None = Field(default=None, description="of the draft network; None: as it is stored")
    dtype: str | None = Field(default=None, description="dtype of the draft network; None inherits the target's")
    trust_remote_code: bool = Field(
        default=False, strict=True, description="run modelling code of the draft checkpoint"
    )

    def __init__(self, /, **values: Any) -> None:
        if values.get("method") is None and values.get("model") is None:
            facts = {"found": ", ".join(values) or "no key", "fix": f"name one: {EXAMPLE}; `specdec list` shows all"}
            raise ConfigError("SD-E133", f"{WHERE} names no proposer", facts)
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise wrong_values(WHERE, error) from error
        if (self.rejection_sample_method == "synthetic") != (self.synthetic_acceptance_rate is not None):
            halves = {
                "rejection_sample_method": self.rejection_sample_method,
                "synthetic_acceptance_rate": self.synthetic_acceptance_rate,
                "fix": "give both, or neither",
            }
            raise ConfigError("SD-E132", f"{WHERE} says one half of synthetic acceptance", halves)

    @classmethod
    def parse(cls, value: object) -> SpeculativeConfig:
        """Read a JSON text, a mapping, or an instance (returned as it is)."""
        return value if isinstance(value, SpeculativeConfig) else cls(**cls.as_mapping(value))

    @classmethod
    def as_mapping(cls, value: object) -> dict[str, Any]:
        """The keys that were written down, not validated yet. Raises ConfigError: SD-E130, SD-E132."""
        if isinstance(value, SpeculativeConfig):
            return {name: getattr(value, name) for name in value.model_fields_set} | dict(value.unclaimed)
        return as_mapping(value, WHERE, EXAMPLE)

    @property
    def unclaimed(self) -> Mapping[str, Any]:
        """The keys that are not common: they stand only if the chosen proposer's options declare them."""
        return self.model_extra or {}

    def replace(self, **changes: Any) -> SpeculativeConfig:
        """A copy with some keys changed, validated as a whole again."""
        return self.parse(self.as_mapping(self) | changes)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """pydantic's copy; an update is validated like everything else."""
        source = self.replace(**update) if update else self
        return super(SpeculativeConfig, source).model_copy(deep=deep)  # type: ignore[return-value]
