"""Schedules: who moves in which step. Each yields what the proposer was shown and answered."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from .moves import LONG, Move, Shown
from .stage import Stage

PROMPT_LENGTHS = (17, 1, 40)  # as many as no K: a transposed draft is no draft
NUM_STEPS = 10
FORK = 5  # a token id


def lockstep(stage: Stage, num_steps: int = NUM_STEPS, order: Sequence[int] = (0, 1, 2)) -> Iterator[Shown]:
    """Three requests, or fewer, every one in every step, in the given order."""
    for number in order:
        stage.add(f"request-{number}", PROMPT_LENGTHS[number])
    for _ in range(num_steps):
        yield stage.advance([Move(f"request-{number}") for number in order])


def ending_together(stage: Stage, order: Sequence[int] = (0, 1, 2), namespace: str = "") -> Iterator[Shown]:
    """Three requests that go on from one token in three ways, in the given order, and end in one step; then a fourth.

    The fourth one comes to the same token: a proposer that learns from ended requests has three of equal weight.
    `namespace`: that of the three. The fourth has the default one.
    """
    prompts = [[FORK, 1 + number] * 6 for number in range(3)]
    for number, prompt in enumerate(prompts):
        stage.add(f"request-{number}", prompt, LONG.replace(max_tokens=9, namespace=namespace))
    while stage.requests:
        said = stage.number % 2
        moves = [Move(f"request-{index}", num_accepted=0, forced=prompts[index][said]) for index in order]
        shown = stage.step(moves)
        if shown is not None:
            yield shown
    yield from another(stage)


def another(stage: Stage) -> Iterator[Shown]:
    """A request that comes to the token that `ending_together` is about."""
    stage.add("next", [9, 8])
    for token in (FORK, 7, FORK):
        yield stage.advance([Move("next", num_accepted=0, forced=token)])


def wander(stage: Stage, num_steps: int) -> Iterator[Shown]:
    """Anything that may happen: requests come and go, ids and rows are reused at once, some skip steps.

    Prompts arrive in chunks, requests are preempted and computed again, aborted in the middle of a prompt, and end
    on their own, some of them one step late; the order of a step is arbitrary. Where requests share state there is one,
    which is preempted and does not end.
    """
    dice = random.Random(f"wander:{stage.seed}")
    several = stage.needs.state != "shared"
    for _ in range(num_steps):
        _come_and_go(stage, dice, several=several)
        moves = _moves(stage, dice)
        shown = stage.step(moves) if moves else None
        if shown is not None:
            yield shown


def _come_and_go(stage: Stage, dice: random.Random, *, several: bool) -> None:
    for name in list(stage.requests):
        happens = dice.random()
        if happens < 0.1 and stage.requests[name].row >= 0:
            stage.preempt(name)
        elif happens < 0.15 and several:
            stage.finish(name, late=dice.random() < 0.5)
    for name in (f"name-{number}" for number in range(6 if several else 1)):
        if name not in stage.requests and dice.random() < 0.5:
            max_tokens = dice.randint(2, 40) if several else 10_000
            stage.add(name, dice.randint(1, 40), stage.params_for(name).replace(max_tokens=max_tokens))


def _moves(stage: Stage, dice: random.Random) -> list[Move]:
    chosen = [name for name in stage.requests if dice.random() < 0.8]
    dice.shuffle(chosen)
    rows = stage.num_free_rows
    moves = []
    for name in chosen:
        waits = stage.requests[name].row < 0
        if waits and rows == 0:
            continue
        rows -= waits
        moves.append(Move(name, num_tokens=dice.choice((None, None, 1, 7))))
    return moves
