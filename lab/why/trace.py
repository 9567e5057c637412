"""What became of each draft token that verification reached, with what is known of both distributions there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..measure import Step


class View(NamedTuple):
    """The target's distribution at one output position, as far as it was kept."""

    top: Sequence[tuple[int, float]]  # token ids and probabilities, the likeliest first
    entropy: float | None  # in nats; None: unknown


class Choices(NamedTuple):
    """What the proposer thought of one draft position."""

    token_ids: Sequence[int]  # its likeliest tokens, the first one first
    probabilities: Sequence[float] | None  # theirs; None: unknown


def free(text_position: int, token_id: int) -> bool:
    """What a text without a grammar refuses: nothing."""
    return False


@dataclass(frozen=True, kw_only=True)
class Traced:
    """One request's steps, and where the distributions at each place can be read."""

    prompt_id: str
    category: str
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]  # output
    steps: Sequence[Step]
    target: Callable[[int], View | None]  # by output position; None: nothing was kept
    proposer: Callable[[int, int], Choices | None]  # by step and draft position; None: it reports none
    refuses: Callable[[int, int], bool] = free  # whether its grammar refuses a token, by output position and token id


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One draft token that verification reached."""

    request: Traced
    step: int
    position: int  # in the draft, from 0
    text_position: int  # in the output, from 0
    context_length: int  # tokens before it
    draft_token_id: int
    target_token_id: int  # what the target said instead, or the same token
    accepted: bool
    num_lost: int  # draft tokens that were thrown away with it, itself included; of a tree, the nodes beside the path
    refused: bool  # by the request's grammar
    view: View | None
    choices: Choices | None

    def context(self, count: int) -> list[int]:
        """The `count` tokens before it, fewer at the beginning."""
        before = [*self.request.prompt_token_ids, *self.request.token_ids[: self.text_position]]
        return before[-count:]


def trials_of(request: Traced) -> Iterator[Trial]:
    """Accepted draft tokens and the first rejected one of each step; what is behind it was never looked at.

    In a tree that is the first token at the end of the accepted path. A path that ends with a leaf has none.
    """
    place = 0
    for number, step in enumerate(request.steps):
        reached = min(_num_reached(step), len(request.token_ids) - place)
        for position in range(reached):
            text_position, accepted = place + position, position < step.num_accepted
            token_id = step.draft_token_ids[position]
            yield Trial(
                request=request,
                step=number,
                position=position,
                text_position=text_position,
                context_length=len(request.prompt_token_ids) + text_position,
                draft_token_id=token_id,
                target_token_id=request.token_ids[text_position],
                accepted=accepted,
                num_lost=0 if accepted else len(step.draft_token_ids) - position,
                refused=not accepted and request.refuses(text_position, token_id),
                view=request.target(text_position),
                choices=request.proposer(number, position),
            )
        place += step.num_committed


def _num_reached(step: Step) -> int:
    """Count the draft tokens that verification reached. In a tree the accepted path stands first, then its end."""
    count = step.num_accepted
    more = count < len(step.draft_token_ids) and (step.parents is None or step.parents[count] == count - 1)
    return count + more


def misses_of(request: Traced) -> list[dict[str, Any]]:
    """The rejected tokens of a request. Whatever is None was not kept or not reported."""
    return [miss_facts(trial) for trial in trials_of(request) if not trial.accepted]


def miss_facts(trial: Trial) -> dict[str, Any]:
    """What is known of a rejected token."""
    return {
        "step": trial.step,
        "position": trial.position,
        "text_position": trial.text_position,
        "context_length": trial.context_length,
        "draft_token_id": trial.draft_token_id,
        "target_token_id": trial.target_token_id,
        "num_lost": trial.num_lost,
        "refused_by_grammar": trial.refused,
        **_of_target(trial.view, trial.draft_token_id),
        **_of_proposer(trial),
    }


def _of_target(view: View | None, token_id: int) -> dict[str, Any]:
    """A rank counts from 1; None means that the token is not among those that were kept."""
    if view is None:
        return dict.fromkeys(("target_rank", "target_probability", "target_top", "entropy"))
    ranks: Mapping[int, int] = {each: rank for rank, (each, _) in enumerate(view.top, start=1)}
    rank = ranks.get(token_id)
    return {
        "target_rank": rank,
        "target_probability": view.top[rank - 1][1] if rank else None,
        "target_top": [list(pair) for pair in view.top[:5]],
        "entropy": view.entropy,
    }


def _of_proposer(trial: Trial) -> dict[str, Any]:
    """A tree of width w would have caught the token if it is among the proposer's w likeliest ones."""
    choices = trial.choices or Choices((), None)
    others = [each for each in choices.token_ids if each != trial.draft_token_id]
    known = dict(zip(choices.token_ids, choices.probabilities or (), strict=False))
    caught = {width: _is_caught(others, trial.target_token_id, width - 1) for width in (2, 3)}
    return {
        "draft_probability": known.get(trial.draft_token_id),
        "second_choice": others[0] if others else None,
        "second_probability": known.get(others[0]) if others else None,
        "second_choice_right": caught[2],
        "caught_by_width_2": caught[2],
        "caught_by_width_3": caught[3],
    }


def _is_caught(others: Sequence[int], wanted: int, count: int) -> bool | None:
    """Whether one of the first `count` is the wanted one; None where not so many are known, and none of them is."""
    return True if wanted in others[:count] else False if len(others) >= count else None
