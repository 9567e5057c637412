"""Standard: whatever happened before, a draft is that of a fresh prefill of the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps

from specdec.sdk import HostProposer
from specdec.sdk.extensions import TargetTokens

from ..compare import FreshPrefill, require_same, with_fix
from ..moves import LONG, Move, Shown
from ..reachable import holds
from ..report import NotApplicable, Violation
from ..schedules import lockstep, wander
from ..stage import Stage
from ..subject import Subject
from .check import Check, check

NUM_CACHED = 11  # tokens of a prompt
SHORT = LONG.replace(max_tokens=8)
MOST_TOKENS, CHUNK, NUM_LAST = 2048, 256, 64  # of a long text, of its chunks, and behind its prompt


def _as_fresh_prefill(
    *, own_state: bool = False, anew: bool = False
) -> Callable[[Callable[[Stage], Iterator[Shown]]], Check]:
    """Decorator: the schedule becomes a check that each of its drafts is that of a fresh prefill of the same tokens.

    own_state: requests may not influence each other. anew: see `FreshPrefill`.
    """

    def made(schedule: Callable[[Stage], Iterator[Shown]]) -> Check:
        @check("standard")
        @wraps(schedule)
        def run(subject: Subject) -> None:
            if own_state:
                subject.need_own_state()
            subject.need_whole_prefill()
            for probabilistic in subject.modes:
                stage = subject.stage(probabilistic=probabilistic)
                fresh = FreshPrefill(subject, probabilistic=probabilistic, anew=anew)
                for shown in schedule(stage):
                    fresh.require(stage, shown)

        return run

    return made


def _steps(stage: Stage, *steps: list[Move]) -> Iterator[Shown]:
    for moves in steps:
        shown = stage.step(moves)
        if shown is not None:
            yield shown


@_as_fresh_prefill()
def accepts_and_rejects(stage: Stage) -> Iterator[Shown]:
    """After all, some or none of its drafts were accepted, a draft is that of a fresh prefill of the same tokens."""
    stage.add("a", 20)
    for accepted in (0, 0, 99, 99, 1, 0, 2, 99, 0):
        yield from _steps(stage, [Move("a", num_accepted=accepted)])


@_as_fresh_prefill()
def chunked_prefill(stage: Stage) -> Iterator[Shown]:
    """A prompt that is shown in chunks leaves the same state as one that is shown whole."""
    stage.add("a", 23)
    for size in (1, 5, 3, 8, 20, 20, 20):
        yield from _steps(stage, [Move("a", num_tokens=size)])


@_as_fresh_prefill(own_state=True)
def skipped_steps(stage: Stage) -> Iterator[Shown]:
    """A request that sits out some steps keeps its draft and its state."""
    for name in ("a", "b", "c"):
        stage.add(name, 14)
    for present in ("abc", "b", "ca", "b", "b", "a", "cb", "abc"):
        yield from _steps(stage, [Move(name) for name in present])


@_as_fresh_prefill()
def preempted_requests(stage: Stage) -> Iterator[Shown]:
    """A request that lost its row and KV comes back whole, in whatever row, also from the middle of its prompt."""
    stage.add("a", 19)
    yield from _steps(stage, [Move("a", num_tokens=6)])
    stage.preempt("a")
    yield from _steps(stage, [Move("a")], [Move("a")], [Move("a")])
    stage.preempt("a")
    yield from _steps(stage, [Move("a", num_tokens=11)], [Move("a")], [Move("a")])


@_as_fresh_prefill(own_state=True)
def aborted_requests(stage: Stage) -> Iterator[Shown]:
    """A request that is aborted, also in the middle of its prompt, leaves nothing behind in others."""
    stage.add("stays", 15)
    stage.add("aborted early", 15)
    stage.add("aborted late", 15)
    yield from _steps(stage, [Move("stays"), Move("aborted early", num_tokens=4), Move("aborted late")])
    stage.finish("aborted early")
    yield from _steps(stage, [Move("aborted late"), Move("stays")])
    stage.finish("aborted late")
    yield from _steps(stage, [Move("stays")], [Move("stays")])


@check("standard")
def ends_known_late(subject: Subject) -> None:
    """A request may be shown one step after its end. `on_finish` follows, and knows fewer tokens than were shown."""
    fix = (
        "take an output from request.end.output_token_ids, as it is: steps may have shown more of it or less.\n"
        "In on_finish(request) drop what is kept of the request, whatever was shown"
    )
    shared = subject.needs.state == "shared"
    for probabilistic in subject.modes:
        stage = subject.stage(probabilistic=probabilistic)
        fresh = FreshPrefill(subject, probabilistic=probabilistic)
        for shown in with_fix(_ending_late(stage), fix):
            if not shared and subject.needs.deterministic and not subject.needs.extension(TargetTokens):
                fresh.require(stage, shown)


def _ending_late(stage: Stage) -> Iterator[Shown]:
    for name in ("stays", "ends"):
        stage.add(name, 15)
    for names in (["stays", "ends"], ["ends", "stays"], ["stays", "ends"]):
        yield stage.advance([Move(name) for name in names])
    stage.finish("ends", late=True)
    yield stage.advance([Move("stays")])
    stage.add("next in its row", 9)
    for _ in range(3):
        yield stage.advance([Move("next in its row"), Move("stays")])


@check("standard")
def cached_prefix(subject: Subject) -> None:
    """A request's first kept token may lie behind a cached prefix. Nothing of its slot's last owner is in a draft."""
    if subject.needs.whole_prompt:
        raise NotApplicable("it declares whole_prompt: an engine with a prefix cache computes all of its prompts")
    subject.need_determinism()
    subject.need_own_state()
    fix = (
        "a row's state begins anew when its generation changes (step.generation), never at kept_start == 0;\n"
        "read the whole text with Needs(history=True); or declare Needs(whole_prompt=True)"
    )
    for stages in subject.pairs():
        new, used = (with_fix(_cached(stage, ended), fix) for stage, ended in zip(stages, (False, True), strict=True))
        for one, other in zip(new, used, strict=True):
            require_same(one, other, "behind", stages[0], ("a row that nobody had", "a row that somebody had"), fix)


def _cached(stage: Stage, other_ended: bool) -> Iterator[Shown]:
    """A request behind a prefix that another one left in the cache, in the row of an ended one or in a new one."""
    for name, length in (("first", 20), ("other", 18)):
        stage.add(name, length)
    for _ in range(3):
        stage.step([Move("first"), Move("other")])
    if other_ended:
        stage.finish("other")
    prompt = stage.requests["first"].token_ids[: NUM_CACHED + 1]
    stage.add_behind("behind", "first", NUM_CACHED, [*prompt, *stage.script.prompt("behind", 6)])
    for _ in range(4):
        yield stage.advance([Move("behind"), Move("first")])


@check("full")
def long_texts(subject: Subject) -> None:
    """A text may be as long as the target allows: drafts go on, and are those of a fresh prefill of the same tokens."""
    limit = min(subject.target.info.max_model_len, MOST_TOKENS)
    fix = "size tables by target.max_model_len, which bind is given; keep as many of a text's last tokens at any time"
    stage, fresh = (subject.stage(max_num_seqs=1, max_model_len=limit) for _ in range(2))
    stage.add("long", max(limit - NUM_LAST, 1))
    chunks = [[Move("long", num_tokens=CHUNK, num_accepted=1)]] * (limit // CHUNK + NUM_LAST // 8)
    *_, shown = with_fix(_steps(stage, *chunks), fix)
    subject.need_whole_prefill()
    again = fresh.prefill_of(stage.requests["long"], "again")
    require_same(shown, again, ("long", "again"), stage, ("this history", "a fresh prefill of the same tokens"), fix)


@_as_fresh_prefill(own_state=True, anew=True)
def reused_ids(stage: Stage) -> Iterator[Shown]:
    """An id may come back for another request, or with the same prompt: nothing of the first one is left."""
    for text, length in (("text 0", 18), ("text 1", 12), ("text 0", 18)):
        stage.add("same id", stage.script.prompt(text, length))
        yield from _steps(stage, [Move("same id")], [Move("same id")])
        stage.finish("same id")


@_as_fresh_prefill(own_state=True)
def reused_slots(stage: Stage) -> Iterator[Shown]:
    """A slot changes hands between two steps, by an end or a preemption: its new owner has nothing of the old one."""
    stage.add("first", 25)
    yield from _steps(stage, [Move("first")], [Move("first")])
    stage.preempt("first")
    stage.add("second", 7, SHORT)
    while "second" in stage.requests:
        yield from _steps(stage, [Move("second")])
    yield from _steps(stage, [Move("first")], [Move("first")])
    stage.finish("first")
    stage.add("third", 3)
    yield from _steps(stage, [Move("third")], [Move("third")])


@_as_fresh_prefill()
def any_schedule(stage: Stage) -> Iterator[Shown]:
    """Whatever a scheduler does (reorder, condense, skip, preempt, abort, cut prompts), the same holds."""
    yield from wander(stage, 30)


@check("standard")
def state_released(subject: Subject) -> None:
    """What it keeps of a request it drops in `on_finish`: afterwards the request's id is found nowhere in it."""
    stage = subject.stage()
    for shown in lockstep(stage, num_steps=3):
        names = shown.view.request_ids
    for name in names:
        stage.finish(name)
    proposer = stage.host.proposer
    left = [name for name in names if holds(proposer, name)]
    if left:
        state = "self._state.pop(request.request_id, None)"
        if isinstance(proposer, HostProposer) and holds(proposer._tokens, left[0]):
            state = "super().on_finish(request), which drops the tokens that the base keeps"
        raise Violation(
            expected="no trace of a request that ended",
            found=f"the proposer still holds {', '.join(map(repr, left))}",
            fix=f"def on_finish(self, request): {state}",
        )
