"""Trees in engines that verify chains: one path of each is verified, and the proposer is told which nodes it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec.core.host import (
    CheckedDraft,
    Committed,
    DraftReport,
    ProposerHost,
    ViewBuilder,
)
from specdec.sdk.extensions import RejectedTokens
from specdec.sdk.needs import Needs
from specdec.sdk.trees import ROOT
from specdec.sdk.types import DraftDistribution, KeptTokens, StepView, TargetInfo, TokenHistory


def on_best_path(draft: CheckedDraft) -> tuple[CheckedDraft, list[list[int]]]:
    """A draft of trees as chains, and the nodes of each. A draft of chains stays as it is.

    The path is the leftmost one: the first child at each place, which is drawn from the reported distribution itself.
    Later siblings are drawn from what is left, and a choice among them would depend on what was drawn. So for drawn
    nodes no other choice is lossless.
    """
    reports = [report for report in draft.reports if report is not None]
    if all(report.parents is None for report in reports):
        return draft, [[*range(length)] for length in draft.lengths]
    paths = [_best_path(report) for report in reports]
    chains = [_along(report, path) for report, path in zip(reports, paths, strict=True)]
    distribution = None if draft.distribution is None else _distribution_along(draft.distribution, paths)
    return CheckedDraft.read(chains, distribution), paths


def _best_path(report: DraftReport) -> list[int]:
    parents = (report.parents or [])[: report.length]
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    best = {node: min(each) for node, each in children.items()}  # the first child of each place
    path: list[int] = []
    place = ROOT
    while place in best:
        place = best[place]
        path.append(place)
    return path


def _along(report: DraftReport, path: Sequence[int]) -> DraftReport:
    token_ids = [report.token_ids[node] for node in path]
    return DraftReport(len(path), len(path), report.kind, token_ids)


def _distribution_along(distribution: DraftDistribution, paths: Sequence[Sequence[int]]) -> DraftDistribution:
    """Row j is that of the place from which node j of the path was drawn."""
    width = max(map(len, paths))
    places = [[0, *(node + 1 for node in path[:-1])] if path else [] for path in paths]
    table = torch.tensor([[*each, *[0] * (width - len(each))] for each in places], device=distribution.kind.device)
    rows = torch.arange(len(paths), device=table.device)[:, None]
    held = vars(distribution).items()
    tables: dict[str, Any] = {
        name: each[rows, table] for name, each in held if isinstance(each, Tensor) and name != "kind"
    }
    return replace(distribution, **tables, replacement=False)


class PathViews(ViewBuilder):
    """Shows a proposer of trees which of its nodes were accepted, though the rows of a pass are those of chains."""

    def __init__(self, needs: Needs, width: int, info: TargetInfo, device: torch.device) -> None:
        """Take what `ViewBuilder` takes."""
        super().__init__(needs, width, info, device)
        self._nodes: dict[int, list[int]] = {}  # by row, those of its last tree that are verified
        self._rows: list[int] = []  # of the last view
        self.shows_nodes, self._draws_trees = self._draws_trees, False

    def _view(
        self,
        committed: Sequence[Committed],
        sent: Mapping[str, Tensor],
        kept: KeptTokens,
        rejected: RejectedTokens | None,
        history: TokenHistory | None,
    ) -> StepView:
        view = super()._view(committed, sent, kept, rejected, history)
        if not self.shows_nodes:
            return view
        self._rows = [each.row for each in committed]
        table = torch.full((len(committed), self.width), -1)
        for b, each in enumerate(committed):
            nodes = self._nodes.get(each.row, [])[: each.num_accepted]
            table[b, : len(nodes)] = torch.tensor(nodes, dtype=torch.int64)
        return replace(view, accepted_nodes=table.to(self.device))

    def note(self, paths: Sequence[list[int]]) -> None:
        """Keep which nodes are verified of the trees that were drawn for the last view."""
        self._nodes.update(zip(self._rows, paths, strict=True))

    def forget(self, row: int) -> None:
        """Show no nodes of a row's next drafts: they are of no tree that was noted."""
        self._nodes.pop(row, None)


class PathHost(ProposerHost):
    """The host of a proposer whose trees are verified along one path each."""

    views: PathViews

    def draft(self, step: StepView, budgets: Sequence[int]) -> CheckedDraft | None:
        """Draft as `ProposerHost` does. The draft is of chains."""
        checked = super().draft(step, budgets)
        if checked is None or not self.views.shows_nodes:
            return checked
        chains, paths = on_best_path(checked)
        self.views.note(paths)
        return chains
