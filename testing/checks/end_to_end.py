"""The real engine on a real target: what is generated does not depend on the proposer."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specdec.sdk.errors import SpecdecError
from specdec.sdk.saved_state import MANIFEST, Manifest

from ..compare import first_difference, require_same
from ..moves import Move
from ..report import NotApplicable, Violation, cause_of
from ..schedules import lockstep
from ..stage import Stage
from ..subject import Subject
from ..worlds import GREEDY, generate
from .check import check

ROOMY = {"max_num_seqs": 6, "max_model_len": 256}
ONE_AT_A_TIME = {"max_num_seqs": 1, "max_model_len": 256}
IN_CHUNKS = {"max_num_seqs": 3, "max_model_len": 256, "max_num_batched_tokens": 16}
BLOCK_SIZE = 8


@check("standard")
def greedy_equality(subject: Subject) -> None:
    """At temperature 0 the engine generates with this proposer, token for token, what it generates without one."""
    _require_equal(subject, ROOMY)


@check("full")
def greedy_equality_under_pressure(subject: Subject) -> None:
    """The same one request at a time, with prompts in chunks, and where requests are preempted for lack of blocks."""
    longest = len(subject.target.prompts[-1]) + GREEDY.max_tokens + subject.needs.lookahead
    scarce = {"block_size": BLOCK_SIZE, "num_kv_blocks": -(-longest // BLOCK_SIZE) + 1, "max_model_len": 256}
    for settings in (ONE_AT_A_TIME, IN_CHUNKS, scarce):
        _require_equal(subject, settings)


def _require_equal(subject: Subject, settings: dict[str, Any]) -> None:
    target = subject.target
    with subject.llm(**settings) as llm:
        outputs = generate(llm, target.prompts)
        llm.engine.check_integrity()
        num_asked = llm.engine.metrics.counts["proposer_propose_calls"]
    if not num_asked:
        raise Violation(
            expected="that it is asked for drafts", found="it never was", fix="declare a smaller min_draft_tokens"
        )
    for number, (found, expected) in enumerate(zip(outputs, target.outputs, strict=True)):
        if found != expected:
            at, one, other = first_difference(found, expected)
            raise Violation(
                expected="the tokens of plain decoding",
                found=f"output token {at} is {one} instead of {other}",
                where=f"prompt {number} of {len(outputs)}, LLM({subject.target_model!r}, {settings})",
                fix="change nothing that belongs to the engine: no weight of the target, no global setting of torch",
            )


@check("standard")
def saved_state(subject: Subject) -> None:
    """What `save` writes, at any time, `load` reads again. It gives the same drafts in a new instance."""
    methods = subject.load().methods & {"save", "load"}
    if not methods:
        raise NotApplicable("it keeps no state: it does not ask for Needs(extensions=(State(),)), with save and load")
    if len(methods) == 1:
        (only,) = methods
        raise Violation(expected="save and load, or neither", found=f"{only} alone", fix="write the other one")
    first = subject.stage()
    _loaded_again(first, subject, "before the first request")
    names: tuple[str, ...] = ()
    for shown in lockstep(first):
        names = shown.view.request_ids
    _loaded_again(first, subject, "while requests run")
    for name in names:
        first.finish(name)
    stages = (first, _loaded_again(first, subject, "after the last request"))
    subject.need_determinism()
    for stage in stages:
        stage.add("next", first.script.prompt(names[0], 24))
    for _ in range(4):
        one, other = (stage.advance([Move("next")]) for stage in stages)
        fix = "save everything that drafts are made from, and load all of it"
        require_same(one, other, "next", first, ("the instance that saved", "one that loaded"), fix)


def _loaded_again(stage: Stage, subject: Subject, when: str) -> Stage:
    """A new instance with what this one saved."""
    new = subject.stage()
    try:
        with TemporaryDirectory() as folder:
            stage.host.save(Path(folder))
            _require_nothing_beside(Path(folder))
            new.host.load(Path(folder))
    except SpecdecError as error:
        raise Violation(
            expected=f"that what it saves {when} is written and read",
            found=str(error),
            fix="write below path, an empty directory, whatever is known by then; an engine saves whenever it is asked "
            "to and when it closes, also if no request came",
            cause=cause_of(error),
        ) from error
    return new


def _require_nothing_beside(folder: Path) -> None:
    beside = {each.name for each in folder.iterdir()} - {MANIFEST, Manifest.read(folder).directory}
    if beside:
        raise Violation(
            expected="nothing written but below path",
            found=f"beside it: {', '.join(sorted(beside))}",
            fix="write below path, the directory that save is given: load is given a copy of it and of nothing else",
        )
