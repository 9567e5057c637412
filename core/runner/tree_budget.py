"""How many nodes of each tree are worth a place in the next step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from specdec.sdk.needs import Needs
from specdec.sdk.trees import ROOT

from ..proposing.calibration import NUM_BINS, RATE
from ..proposing.draft_store import DraftStore
from ..request.metrics import EngineMetrics
from ..request.request import Committed, Request
from .cost_curve import CostCurve
from .draft_budget import RATE_WEIGHT, DraftBudget

LOWEST = 0.5 / NUM_BINS  # confidences around it share a calibrated chance; smaller ones have a part of it
LONGEST = 256.0  # nodes that a rate of acceptance is an average of


class Place(NamedTuple):
    """Where a node hangs."""

    parent: int
    depth: int  # from 1 on
    rank: int  # among its siblings, from 0 on


class TreeBudget(DraftBudget):
    """Sizes trees and chains of one batch as `DraftBudget` sizes chains: the first nodes of each are verified.

    A node's worth is the product of the chances on its path, calibrated by depth. It counts for no more than the nodes
    before it. So whether it is verified depends on these and never on itself or on later ones, and drawn trees stay
    lossless. Of a tree whose likeliest nodes come first, the least likely ones are left out.

    Where the proposer cannot tell, earlier nodes of the same depth and rank say how likely a node is to be accepted.
    """

    def __init__(
        self, num_draft_nodes: int, running: Sequence[Request], drafts: DraftStore, metrics: EngineMetrics
    ) -> None:
        """See `DraftBudget`. Trees are grown level by level, and no row of them stops early."""
        super().__init__(num_draft_nodes, running, drafts, metrics)
        self._draft = CostCurve(convex=False)  # the passes that grow a tree follow its depth
        self._places: dict[Request, list[Place]] = {}  # of the nodes that wait
        self._rates: dict[tuple[int, int], tuple[float, float]] = {}  # acceptance by depth and rank, and its weight

    def _confidences_of(self, request: Request, num_drafts: int) -> list[float]:
        report = self._drafts.report(request.row)
        parents, told = (report.parents, report.confidence) if report else (None, ())
        places = list(places_of((parents or range(ROOT, num_drafts))[:num_drafts]))
        told = told[:num_drafts] or [math.nan] * num_drafts
        self._places[request] = places
        return [self._rate(place)[0] if math.isnan(each) else each for place, each in zip(places, told, strict=True)]

    def _worths(self, request: Request) -> list[float]:
        worths: list[float] = []
        for place, confidence in zip(self._places[request], self._confidences[request], strict=True):
            chance = self.calibration.probability(place.depth - 1, confidence) * min(confidence / LOWEST, 1.0)
            worths.append(chance if place.parent == ROOT else chance * worths[place.parent])
        return list(accumulate(worths, min))

    def _learn_outcomes(self, committed: Sequence[Committed]) -> None:
        for each in committed:
            if each.num_drafted:
                accepted = {ROOT, *each.accepted_nodes[: each.num_accepted]}
                known = zip(self._places[each.request], self._confidences[each.request], strict=True)
                for node, (place, confidence) in zip(range(each.num_drafted), known, strict=False):
                    if place.parent in accepted:
                        self._learn_node(place, confidence, accepted=node in accepted)
        self._places.clear()

    def _learn_node(self, place: Place, confidence: float, *, accepted: bool) -> None:
        self.calibration.count(place.depth - 1, confidence, accepted=accepted)
        rate, weight = self._rate(place)
        weight = min(weight + 1, LONGEST)
        self._rates[place.depth, place.rank] = rate + (accepted - rate) / weight, weight

    def _rate(self, place: Place) -> tuple[float, float]:
        """How often nodes of a depth and rank were accepted, and how many nodes that counts for."""
        first = RATE if place.rank == 0 else (1 - RATE) / 2**place.rank
        return self._rates.get((place.depth, place.rank), (first, RATE_WEIGHT))


def places_of(parents: Sequence[int]) -> Iterator[Place]:
    """Of the nodes of a tree, in their order."""
    found: list[Place] = []
    ranks: Counter[int] = Counter()
    for parent in parents:
        found.append(Place(parent, 1 if parent == ROOT else found[parent].depth + 1, ranks[parent]))
        ranks[parent] += 1
        yield found[-1]


def budget_for(
    needs: Needs, num_drafts: int, running: Sequence[Request], drafts: DraftStore, metrics: EngineMetrics
) -> DraftBudget:
    """What sizes the drafts of a proposer with such needs."""
    if needs.topology == "tree":
        return TreeBudget(num_drafts, running, drafts, metrics)
    may_stop = needs.confidence and needs.placement == "host"
    return DraftBudget(num_drafts, running, drafts, metrics, may_stop=may_stop)
