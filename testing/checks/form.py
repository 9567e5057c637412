"""Basic: it loads, and its drafts have the form of drafts."""

from __future__ import annotations

import warnings
from contextlib import suppress

from specdec import SamplingParams
from specdec.sdk.errors import Refusal, SpecdecDeprecationWarning, SpecdecWarning

from ..moves import Move
from ..report import NEVER_CALLED, Violation
from ..schedules import lockstep
from ..subject import Subject
from .check import check

MOST_DRAFT_TOKENS = 8


@check("basic")
def loads(subject: Subject) -> None:
    """Its class, options and needs are accepted without a warning, and it is constructed, bound and warmed up."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SpecdecWarning)
        warnings.simplefilter("ignore", SpecdecDeprecationWarning)
        for _ in subject.stages():
            pass
    told = dict.fromkeys(str(each.message) for each in caught if issubclass(each.category, SpecdecWarning))
    if told:
        raise Violation(
            expected="public methods that the engine calls, or with names of their own",
            found="\n".join(told),
            fix="correct the name; ask for the extension in Needs.extensions; or begin the name of a helper with _",
            cause=NEVER_CALLED,
        )


@check("basic")
def draft_form(subject: Subject) -> None:
    """Every draft has the step's shape, an integer dtype, the CPU as device and ids of the target's vocabulary."""
    for stage in subject.stages():
        for _ in lockstep(stage, num_steps=6):
            pass


@check("basic")
def every_k(subject: Subject) -> None:
    """It drafts for K = 1 and for the largest K that it declares, and for a step whose K is smaller, 0 included.

    A K that it refuses at the start with these settings, as an engine would be told, is left out.
    """
    asked = subject.load().config.num_draft_tokens
    fewest = max(subject.needs.min_draft_tokens, 1)
    most = subject.needs.max_draft_tokens or max(MOST_DRAFT_TOKENS, asked)
    stages = []
    for k in sorted({fewest, most}):
        with suppress(Refusal):
            stages.append(subject.stage(k=k))
    for stage in stages:
        for _ in lockstep(stage, num_steps=3):
            pass
    stage = subject.stage()
    stage.add("a", 20)
    for width in (asked, 0, 1, asked):
        stage.step([Move("a")], width=width)


@check("basic")
def budgets(subject: Subject) -> None:
    """No row gets more drafts than its budget, and one whose budget is 0 gets none."""
    stage = subject.stage()
    for allowed in range(4):
        params = SamplingParams(temperature=0, max_tokens=1000, num_speculative_tokens=allowed)
        stage.add(f"at most {allowed}", 12, params)
    for _ in range(6):
        stage.step([Move(name) for name in stage.requests])


@check("basic")
def one_token_prompts(subject: Subject) -> None:
    """A prompt of one token is a request like any other, also where every request of a step ends in it."""
    stage = subject.stage()
    for generation in range(2):
        for number in range(3):
            params = SamplingParams(temperature=0, max_tokens=1 + 3 * generation)
            stage.add(f"request {number} of {generation}", 1, params)
        while stage.requests:
            stage.step([Move(name) for name in stage.requests])


@check("basic")
def context_limit(subject: Subject) -> None:
    """A request may grow to max_model_len: its drafts get shorter towards the end and never reach over it."""
    stage = subject.stage(max_model_len=32)
    stage.add("from the start", 1)
    stage.add("nearly full", 29)
    stage.add("all but full", 31)
    for _ in range(40):
        if stage.requests:
            stage.step([Move(name) for name in stage.requests])
    if stage.requests:
        raise Violation(expected="all ended", found=", ".join(stage.requests), fix="report this as a bug of the kit")
