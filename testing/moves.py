"""What happens on a stage: moves in, what was shown and answered out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdec import SamplingParams
from specdec.sdk.types import DraftDistribution, StepView

LONG = SamplingParams(temperature=0, max_tokens=10_000, ignore_eos=True)
PARAMS = (
    LONG.replace(temperature=1.0),
    LONG.replace(temperature=0.7, top_k=20, top_p=0.9),
    LONG,
    LONG.replace(temperature=1.3, min_p=0.02),
)


@dataclass(frozen=True)
class Move:
    """What the next step does to one request."""

    name: str
    num_tokens: int | None = None  # committed tokens to compute; None: all that have no KV
    num_accepted: int | None = None  # None: as the script says
    forced: int | None = None  # the token that is sampled; None: as the script says


@dataclass(frozen=True)
class GivenUniforms:
    """Random numbers that the caller chose."""

    uniforms: Tensor  # [B, K] float64

    def uniform(self, draft_index: int) -> Tensor:
        """[B] float64."""
        return self.uniforms[:, draft_index]


@dataclass(frozen=True)
class Shown:
    """One step that was shown to the proposer, and its answer."""

    where: str
    view: StepView
    budgets: list[int]
    drafts: list[list[int]]  # in the view's order; empty where none was asked for
    parents: list[list[int]]  # of each draft's nodes; of a chain, those before them
    distribution: DraftDistribution | None
    written: list[str]  # fields of the view that were changed

    def draft_of(self, name: str) -> list[int]:
        return self.drafts[self.view.request_ids.index(name)]

    def nodes_of(self, name: str) -> tuple[tuple[int, int], ...]:
        """Parent and token of each node."""
        row = self.view.request_ids.index(name)
        return self.before(row, len(self.drafts[row]))

    def before(self, row: int, node: int) -> tuple[tuple[int, int], ...]:
        """Parent and token of the nodes before one."""
        return tuple(zip(self.parents[row][:node], self.drafts[row][:node], strict=True))

    def earlier_siblings(self, row: int, node: int) -> list[int]:
        """The tokens that were taken from a node's distribution before its own was drawn from what they leave."""
        if self.distribution is None or self.distribution.replacement:
            return []
        parent = self.parents[row][node]
        return [token for above, token in self.before(row, node) if above == parent]
