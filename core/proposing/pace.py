"""Whether drafting pays: two clocks per step, added up, and one warning if plain decoding would have been faster."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from statistics import fmean

from specdec.sdk.errors import PluginId, message
from specdec.sdk.hooks import StepStats

logger = logging.getLogger("specdec")

WINDOW = 64  # steps
NUM_OUTLIERS = 4
"""Slowest steps of a window that do not count: something was compiled, captured or collected in them."""
CERTAIN_LOSS = 1.1
"""How much dearer a token must be: clocks of a busy machine are not exact."""


@dataclass
class Pace:
    """Times of the steps that only decode, where a proposer was asked.

    A token costs (draft + rest) / tokens per request and step. Without drafts it would cost at most `rest`: a step that
    verifies nothing is no slower than one that does. So the warning may come late, and never for a proposer that pays.
    Host clocks: what a device still computes when `propose` returns counts as rest, to the proposer's advantage.
    """

    plugin: PluginId
    warned: bool = False
    seconds: list[tuple[float, float]] = field(default_factory=list)  # per step: the whole, the draft
    num_requests: int = 0
    num_tokens: int = 0

    def record(self, stats: StepStats, seconds: float, draft_seconds: float) -> None:
        """Count one step of `seconds`, `draft_seconds` of which the proposer took."""
        if self.warned or stats.num_tokens_computed != stats.num_requests + stats.num_draft_tokens:  # a prompt's chunk
            return
        self.seconds.append((seconds, draft_seconds))
        self.num_requests += stats.num_requests
        self.num_tokens += stats.num_committed_tokens
        if len(self.seconds) == WINDOW:
            self._warn_if_slow()
            self.seconds.clear()
            self.num_requests = self.num_tokens = 0

    def _warn_if_slow(self) -> None:
        tokens = self.num_tokens / self.num_requests
        whole, draft = (1000 * fmean(each) for each in zip(*sorted(self.seconds)[:-NUM_OUTLIERS], strict=True))
        rest = whole - draft
        if draft + rest <= CERTAIN_LOSS * tokens * rest:
            return
        self.warned = True
        gained = (tokens - 1) * rest
        facts = {
            "per step": f"draft {draft:.1f} ms, the rest {rest:.1f} ms, {tokens:.2f} tokens per request",
            "break-even": f"{(draft + rest) / rest:.2f} tokens at this draft time, or "
            + (f"a draft time of {gained:.1f} ms at these tokens" if tokens > 1 else "none: no draft was accepted"),
            "seen in": f"the last {WINDOW} decoding steps; it costs time alone",
            "try": "fewer num_speculative_tokens; where the time goes: specdec bench --profile",
        }
        logger.warning("%s", message("SD-W301", "the proposer costs more than it saves", facts, self.plugin))
