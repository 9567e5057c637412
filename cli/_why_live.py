"""Rejected tokens of texts that were just generated, for `generate --show why`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from specdec.core.engine.outputs import StreamUpdate
    from specdec.lab.measure import Step

Miss = Mapping[str, Any]
SHOWN_TOP = 3


def step_of(update: StreamUpdate) -> Step:
    """The lab's form of a streamed step."""
    from specdec.lab.measure import Step

    return Step(update.draft_token_ids, update.num_accepted, len(update.token_ids), update.draft_parents)


def live_misses(prompt: Sequence[int], updates: Sequence[StreamUpdate]) -> list[dict[str, Any]]:
    """List the misses as `misses_of` does. Probabilities come from the target's logits, before bias, penalties and
    temperature.
    """
    from specdec.lab.why import Traced, View, misses_of

    rows = [row for update in updates for row in update.logprobs or ()]

    def view(place: int) -> View | None:
        pairs = sorted(rows[place].items(), key=lambda pair: -pair[1])
        return View([(token_id, math.exp(logprob)) for token_id, logprob in pairs], None)

    traced = Traced(
        prompt_id="",
        category="",
        prompt_token_ids=prompt,
        token_ids=[token_id for update in updates for token_id in update.token_ids],
        steps=[step_of(each) for each in updates],
        target=view,
        proposer=lambda step, position: None,
    )
    return misses_of(traced)


def print_misses(prompts: Sequence[Sequence[Miss]], tokenizer: Any, console: Console) -> None:
    """Print a line for each rejected token."""

    def shown(token_id: int) -> str:
        return json.dumps(tokenizer.decode([token_id]) if tokenizer else f"<{token_id}>", ensure_ascii=False)

    for number, misses in enumerate(prompts, start=1):
        head = f"prompt {number}, " if len(prompts) > 1 else ""
        for miss in misses:
            console.print(head + _line(miss, shown), markup=False, highlight=False, soft_wrap=True)


def _line(miss: Miss, shown: Callable[[int], str]) -> str:
    rank = f"rank {miss['target_rank']}" if miss["target_rank"] else "not among its 20 likeliest"
    likely = "" if miss["target_probability"] is None else f", {100 * miss['target_probability']:.2g} %"
    top = ", ".join(f"{shown(each)} {100 * p:.2g} %" for each, p in miss["target_top"][:SHOWN_TOP])
    place = f"step {miss['step'] + 1}, draft position {miss['position'] + 1}"
    drafted, said = shown(miss["draft_token_id"]), shown(miss["target_token_id"])
    return f"{place}: {drafted} ({rank}{likely}), the target said {said}; its top: {top}"
