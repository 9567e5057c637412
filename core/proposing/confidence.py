"""What a draft says of its own tokens: whether it may say that, and whether these are probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.sdk.errors import PluginId, ProposerError
from specdec.sdk.needs import Needs

from .draft_table import DraftReport

TOLERANCE = 1e-4


def require_declared(needs: Needs, plugin: PluginId) -> None:
    """Raise ProposerError SD-E235 for a confidence that nobody announced."""
    if not needs.confidence:
        facts = {
            "declared": "Needs.confidence = False",
            "found": "a draft with a confidence",
            "fix": "needs = Needs(confidence=True, ...), or leave it out of the draft",
        }
        raise ProposerError("SD-E235", "a draft has a confidence that was not declared", facts, plugin=plugin)


def require_probabilities(reports: Sequence[DraftReport], request_ids: Sequence[str], plugin: PluginId) -> None:
    """Raise ProposerError SD-E236 for a value outside of 0 .. 1. NaN says that the proposer cannot tell."""
    for b, each in enumerate(reports):
        for position, value in enumerate(each.confidence[: each.length]):
            if value < -TOLERANCE or value > 1 + TOLERANCE:
                facts = {
                    "request": f"{request_ids[b]!r}, row {b} of the step, draft position {position}",
                    "expected": "0 .. 1, the probability that it is accepted; or NaN where the proposer cannot tell",
                    "found": f"{value:.6g}",
                    "likely": "a logit, or a score before its sigmoid",
                }
                raise ProposerError("SD-E236", "a confidence is no probability", facts, plugin=plugin)
