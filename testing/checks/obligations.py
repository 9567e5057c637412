"""Standard: what every proposer owes an engine, whatever it drafts, and what no engine promises it."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from specdec.sdk.errors import SpecdecDeprecationWarning, SpecdecError
from specdec.sdk.needs import Needs, needs_of

from ..compare import first_difference, require_same, require_same_steps, with_fix
from ..moves import Shown
from ..report import NotApplicable, Violation
from ..schedules import lockstep
from ..stage import Stage
from ..subject import Subject
from .check import check


@check("standard")
def idle_steps(subject: Subject) -> None:
    """A step may have no requests, and a dummy step changes no state: drafts are what they are without such steps."""
    fix = (
        "let loops and tensors be empty: max(..., default=0), and no .max() of step.budget;\n"
        "learn nothing where step.dummy is True, and return a draft of the step's form"
    )
    subject.need_determinism()
    what = ("steps alone", "idle steps between them")
    for stage, idle in subject.pairs():
        require_same_steps(lockstep(stage, 6), with_fix(_with_idle_steps(idle), fix), stage, what, fix)


def _with_idle_steps(stage: Stage) -> Iterator[Shown]:
    for shown in lockstep(stage, 6):
        yield shown
        stage.idle(dummy=False)
        stage.idle(dummy=True)
        if stage.needs.placement == "device":
            stage.idle_with(1)


@check("standard")
def metrics_between_steps(subject: Subject) -> None:
    """What `metrics` tells between steps can be shown, and asking changes no draft."""
    if "metrics" not in subject.load().methods:
        raise NotApplicable("it has no metrics")
    fix = "return a mapping of names to finite numbers, and change nothing: nobody says how often it is asked"
    stages = [subject.stage() for _ in range(2)]
    for one, other in zip(lockstep(stages[0]), with_fix(_asking(stages[1]), fix), strict=True):
        for name in one.view.request_ids if subject.needs.deterministic else ():
            require_same(one, other, name, stages[0], ("no question", "questions between steps"), fix)


def _asking(stage: Stage) -> Iterator[Shown]:
    for shown in lockstep(stage):
        yield shown
        stage.ask_metrics()


@check("standard")
def services_within_calls(subject: Subject) -> None:
    """It uses services within a call of the engine only, and on that call's thread. Its own threads end by `close`."""
    before = threading.enumerate()
    stage = subject.stage()
    for _ in lockstep(stage):
        pass
    stage.close()
    if stage.uses.astray:
        raise Violation(
            expected="services used within a call of the engine, on its thread",
            found=f"used on another thread, or after the call: {', '.join(sorted(set(stage.uses.astray)))}",
            fix="call services in bind, warmup, observe and propose; hand a thread of your own copies of tensors",
        )
    left = [each.name for each in threading.enumerate() if each not in before and not each.daemon]
    if left:
        raise Violation(
            expected="no thread that keeps the process from ending after close",
            found=f"alive: {', '.join(left)}",
            fix="end each thread in close, and join it there; or make it with daemon=True",
        )


@check("standard")
def same_calls_on_every_rank(subject: Subject) -> None:
    """Two instances that see the same steps call services that are collectives in the same order, with equal shapes."""
    ranks = [subject.stage() for _ in range(2)]
    for one, _ in zip(*map(lockstep, ranks), strict=True):
        first, second = (stage.uses.collectives for stage in ranks)
        if first != second:
            at, here, there = first_difference(first, second)
            raise Violation(
                expected="the same calls of embed and lm_head from two instances, as from the ranks of one model",
                found=f"call {at} of the one is {here}, of the other {there}",
                where=one.where,
                fix="decide about a call by what every rank has alike, never by a clock, a process, a random number of "
                "your own or a counter of instances",
            )


@check("standard")
def needs_are_pure(subject: Subject) -> None:
    """`needs` is a function of its arguments: it is called again and again, also with facts that came as JSON."""
    loaded, info = subject.load(), subject.target.info
    copy = replace(info, config=json.loads(json.dumps(dict(info.config))))
    found = [needs_of(loaded.cls, loaded.config, facts) for facts in (info, info, copy)]
    _require_equal_needs(found[0], found[1:], "another call")


@check("standard")
def options_are_json(subject: Subject) -> None:
    """Its options, and those of a request, survive JSON: they go to other processes, and `needs` is the same there."""
    loaded = subject.load()
    if loaded.request_options is not None:
        _as_json(loaded.request_options())
    options = loaded.config.options
    if options is not None:
        there = loaded.config.replace(options=_as_json(options))
        _require_equal_needs(loaded.needs, [needs_of(loaded.cls, there, subject.target.info)], "options from JSON")


def _as_json(options: BaseModel) -> BaseModel:
    """A copy through JSON. Raises Violation if it is another."""
    name = type(options).__qualname__
    try:
        copy = type(options).model_validate_json(options.model_dump_json(by_alias=True, round_trip=True))
    except (PydanticSerializationError, ValidationError, SpecdecError) as error:
        found = str(error)
    else:
        found = "" if copy == options else f"{copy!r} from {options!r}"
    if found:
        raise Violation(
            expected=f"an equal copy of {name} through JSON",
            found=found,
            fix="put plain values into it: numbers, texts, tuples of them; make the rest in __init__",
            cause="options that are no JSON",
        )
    return copy


def _require_equal_needs(first: Needs, others: list[Needs], what: str) -> None:
    for other in others:
        changed = [key for key, value in dict(first).items() if dict(other)[key] != value]
        if changed:
            named = ", ".join(f"{key}={dict(first)[key]!r} and {dict(other)[key]!r}" for key in changed)
            raise Violation(
                expected="equal needs from equal arguments",
                found=f"from one call and from {what}: {named}",
                fix="let needs(config, target) read its arguments alone, and change nothing",
            )


@check("full")
def class_is_importable(subject: Subject) -> None:
    """Its class is found by its module and name, so that another process can make one."""
    if not subject.is_importable:
        raise Violation(
            expected="a class at the top of a module, under its own name",
            found=f"nothing, or another object, at {subject.label}",
            fix="define it at the top of a module of your package; a subclass with `parts` in the place of Chain.of",
        )


@check("full")
def nothing_deprecated(subject: Subject) -> None:
    """Nothing is used that goes in a later version of the contract."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SpecdecDeprecationWarning)
        for _ in lockstep(subject.stage()):
            pass
    for each in caught:
        if isinstance(each.message, SpecdecDeprecationWarning):
            raise Violation(
                expected="nothing that is deprecated",
                found=str(each.message),
                where=f"{each.filename}:{each.lineno}",
                fix=f"use {each.message.instead}",
            )
