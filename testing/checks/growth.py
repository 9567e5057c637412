"""Full: a server runs for weeks."""

from __future__ import annotations

from itertools import pairwise

from ..moves import LONG, Move
from ..reachable import size
from ..report import Violation
from ..stage import Stage
from ..subject import Subject
from .check import check

NUM_REQUESTS = 100


@check("full")
def memory_does_not_grow(subject: Subject) -> None:
    """After many requests have come and gone it holds no more entries than after a few. Shared state is exempt."""
    subject.need_own_state()
    stage = subject.stage()
    sizes = [_size_after(stage, num_requests) for num_requests in (NUM_REQUESTS // 2, NUM_REQUESTS, NUM_REQUESTS)]
    growth = min(later - earlier for earlier, later in pairwise(sizes))
    if growth >= NUM_REQUESTS // 2:
        raise Violation(
            expected=f"about {sizes[0]} entries, as after {NUM_REQUESTS // 2} requests",
            found=f"{sizes[1]} and {sizes[2]} entries, each after {NUM_REQUESTS} more",
            fix='drop what a request left in on_finish; or bound it and declare Needs(state="shared")',
        )


def _size_after(stage: Stage, num_requests: int) -> int:
    """What the proposer holds after so many requests, two at a time, and one step that is always the same."""
    for number in range(num_requests // 2):
        for which in ("a", "b"):
            stage.add(f"{which}{stage.number}-{number}", 6, LONG.replace(max_tokens=6))
        while stage.requests:
            stage.step([Move(name) for name in stage.requests])
    stage.add("last", 6)
    stage.step([Move("last")])
    stage.finish("last")
    return size(stage.host.proposer)
