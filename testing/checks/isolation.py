"""Standard: what a proposer may not touch, and that a request's draft is its own affair."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from ..compare import require_same, require_same_steps, with_fix
from ..drawn_tree import NUM_TWINS, twins
from ..moves import Shown
from ..report import Violation
from ..schedules import PROMPT_LENGTHS, another, ending_together, lockstep
from ..subject import Subject
from .check import check

FIND_BY_ID = "find a request by step.request_ids or step.slots, never by its place in the step"
LEARN_BY_ID = (
    "learn what requests share in observe or on_finish, before any draft of the step is made, and in the order of "
    "their ids:\n  for b in sorted(range(len(step)), key=step.request_ids.__getitem__): ...\n" + FIND_BY_ID
)


@check("standard")
def inputs_not_written(subject: Subject) -> None:
    """A step is borrowed: neither `observe` nor `propose` writes to its tensors."""
    for stage in subject.stages():
        for shown in lockstep(stage):
            if shown.written:
                raise Violation(
                    expected="every tensor of the step as it was",
                    found=f"written to: {', '.join(shown.written)}",
                    where=shown.where,
                    fix="clone what you change; a method whose name ends in an underscore works in place",
                )


@check("standard")
def deterministic(subject: Subject) -> None:
    """Two instances that see the same steps with the same random numbers give the same drafts."""
    subject.need_determinism()
    fix = "draw from step.random only; or declare Needs(deterministic=False)"
    for stage, again in subject.pairs():
        require_same_steps(lockstep(stage), lockstep(again), stage, ("one instance", "another"), fix)


@check("standard")
def views_not_kept(subject: Subject) -> None:
    """A step is borrowed for the time of a call: a proposer copies what it keeps of it."""
    subject.need_determinism()
    fix = "clone what you keep: views and slices of a step use its memory, and the next step does too"
    what = ("memory that stays", "memory that is used again")
    for stage, again in subject.pairs():
        again.host.spoils = True
        require_same_steps(lockstep(stage), with_fix(lockstep(again), fix), stage, what, fix)


@check("standard")
def shared_weights_not_written(subject: Subject) -> None:
    """The target's weights are borrowed too: every one of them stays unchanged."""
    for _ in lockstep(subject.stage(), num_steps=3):
        pass
    written = subject.target.restore_weights()
    if written:
        raise Violation(
            expected="every weight of the target as it was",
            found=f"written to: {', '.join(written)}",
            fix="copy a weight before you scale or train it",
        )


@check("standard")
def instances_apart(subject: Subject) -> None:
    """Two instances in one process share nothing: their requests may have the same ids."""
    subject.need_determinism()
    fix = "keep state in attributes that __init__ makes, never in the class or its module"
    what = ("an instance by itself", "one beside another")
    strangers = replace(subject, seed=subject.seed + 1).stages()
    for (stage, again), stranger in zip(subject.pairs(), strangers, strict=True):
        by_itself = list(lockstep(stage))
        others = (other for other, _ in zip(lockstep(again), lockstep(stranger), strict=True))
        require_same_steps(by_itself, others, stage, what, fix)


@check("standard")
def batch_equals_singles(subject: Subject) -> None:
    """A request gets the same draft whether it runs alone or among others."""
    subject.need_determinism()
    subject.need_own_state()
    fix = 'keep state by request id; or declare Needs(state="shared")'
    batches = [(stage, list(lockstep(stage))) for stage in subject.stages()]
    for number in range(len(PROMPT_LENGTHS)):
        for (stage, together), single in zip(batches, subject.stages(), strict=True):
            alone = lockstep(single, order=(number,))
            require_same_steps(together, alone, stage, ("a batch", "itself alone"), fix)


@check("standard")
def every_row(subject: Subject) -> None:
    """In a full batch, requests with the same tokens and random numbers get the same draft, whatever their row."""
    subject.need_determinism()
    subject.need_own_state()
    fix = "treat every row alike: no buffer for fewer rows than target.max_num_seqs, no figure of another row"
    for stage in subject.stages(max_num_seqs=NUM_TWINS):
        for length, uniform in ((9, 0.2), (16, 0.5), (30, 0.8)):
            uniforms = torch.full((NUM_TWINS, stage.host.views.width), uniform, dtype=torch.float64)
            shown = twins(stage, stage.script.prompt(f"text {length}", length), uniforms)
            first, *others = shown.view.request_ids
            for row, name in enumerate(others, start=1):
                require_same(shown, shown, (first, name), stage, ("row 0", f"row {row}"), fix)


@check("standard")
def row_order(subject: Subject) -> None:
    """The order of the rows of a step means nothing: every request gets the same draft in any order.

    What requests share is therefore learned in the order of their ids, and before any draft is made from it.
    """
    subject.need_determinism()
    shared = subject.needs.state == "shared"
    schedules: list[Callable[..., Iterator[Shown]]] = [lockstep, ending_together] if shared else [lockstep]
    what, fix = ("one order", "another order of rows"), LEARN_BY_ID if shared else FIND_BY_ID
    for schedule in schedules:
        for stage, other in subject.pairs():
            require_same_steps(schedule(stage), schedule(other, order=(2, 0, 1)), stage, what, fix)


@check("standard")
def namespaces_kept_apart(subject: Subject) -> None:
    """What is learned of one namespace's requests changes no draft of another's."""
    subject.need_determinism()
    subject.need_shared_state()
    what = ("a namespace after another was served", "the same namespace alone")
    fix = "keep what requests share in a dict by request.namespace, which on_start is given"
    for stage, other in subject.pairs():
        after_others = [
            shown for shown in ending_together(stage, namespace="others") if "next" in shown.view.request_ids
        ]
        require_same_steps(after_others, another(other), stage, what, fix)
