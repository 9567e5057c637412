"""Standard: what it declares is what it does, in both directions."""

from __future__ import annotations

from specdec.sdk.extensions import DraftKV, Extension, TargetKV, TargetLayers, TargetTokens, Trees
from specdec.sdk.needs import Needs

from ..compare import require_same_steps
from ..report import NotApplicable, Violation
from ..schedules import lockstep
from ..subject import Subject
from .check import check

EVERYTHING = {
    "history": True,
    "hidden_states": ("final",),
    "sampling": ("temperature", "top_k", "top_p", "min_p"),
}

NOTHING_DRAFTED = "it drafts nothing on the texts of this check"


def _declared(needs: Needs) -> set[str]:
    """The optional things of the contract, by the names under which reading them is recorded."""
    tokens = needs.extension(TargetTokens)
    return {
        *(["history"] if needs.history else []),
        *(["kept.hidden"] if needs.hidden_states else []),
        *(f"sampling.{name}" for name in needs.sampling),
        *(["kept.top_ids"] if tokens else []),
        *(["rejected.top_ids"] if tokens and tokens.rejected else []),
        *(each.name for each in (DraftKV, TargetKV, TargetLayers) if needs.extension(each)),
    }


def _with_tokens(needs: Needs) -> tuple[Extension | str, ...]:
    """What it asks for, and the target's most likely tokens: after rejected drafts too, where drafts are chains."""
    own, others = (
        needs.extension(TargetTokens),
        [each for each in needs.extensions if not isinstance(each, TargetTokens)],
    )
    rejected = needs.extension(Trees) is None or (own is not None and own.rejected)
    return (*others, TargetTokens(top_k=own.top_k if own else 4, rejected=rejected))


@check("standard")
def needs_are_enough(subject: Subject) -> None:
    """It reads nothing that it did not declare: with everything on offer it drafts what it drafts without."""
    subject.need_determinism()
    declared = dict(subject.needs)
    extra = {name: value for name, value in EVERYTHING.items() if not declared[name]}
    extra["extensions"] = _with_tokens(subject.needs)
    generous = subject.stage(shown=extra)
    undeclared = "needs = Needs(history=True, hidden_states=..., sampling=(...)): declare every field that you read"
    offered = list(lockstep(generous))
    read = sorted(generous.uses.reads & _declared(Needs(**(declared | extra))) - _declared(subject.needs))
    stage = subject.stage()
    try:
        given = list(lockstep(stage))
    except Violation as violation:
        raise Violation(
            expected="drafts from what it declared",
            found=f"it fails without {', '.join(read)}, which it reads: {violation.facts['found']}",
            where=violation.facts["where"],
            fix=undeclared,
            cause=violation.cause,
        ) from violation
    what = ("the declared fields", f"{', '.join(read) or 'more fields'} as well")
    require_same_steps(given, offered, stage, what, undeclared)


@check("standard")
def needs_are_used(subject: Subject) -> None:
    """It reads what it declares: the engine computes, stores and copies everything that is declared."""
    declared: set[str] = set()
    reads: set[str] = set()
    drafts = False
    for stage in subject.stages():
        for shown in lockstep(stage):
            drafts |= any(shown.drafts)
        declared |= _declared(stage.needs)
        reads |= stage.uses.reads
    unused = declared - reads
    if unused and not drafts:
        raise NotApplicable(f"{NOTHING_DRAFTED}, and may read {', '.join(sorted(unused))} where it drafts")
    if unused:
        raise Violation(
            expected=f"that it reads {', '.join(sorted(declared))}, as declared",
            found=f"never read: {', '.join(sorted(unused))}",
            fix="take out of Needs what is not read",
        )


@check("standard")
def declared_distribution_is_reported(subject: Subject) -> None:
    """A proposer that declares a draft distribution reports it for sampled requests: the engine holds memory for it."""
    subject.need_distribution()
    drafts = False
    for shown in lockstep(subject.stage(probabilistic=True)):
        drafts |= any(shown.drafts)
        if shown.distribution is not None and bool(shown.distribution.kind.any()):
            return
    if not drafts:
        raise NotApplicable(NOTHING_DRAFTED)
    declared = subject.load(probabilistic=True).needs.distributions
    raise Violation(
        expected=f"drafts with a distribution, as Needs(distributions={declared!r}) says",
        found="with draft_sample_method=probabilistic every row of every draft is one-hot",
        fix="Draft(..., distribution=DraftDistribution(...)), or take distribution out of Needs",
    )


@check("standard")
def lengths_as_declared(subject: Subject) -> None:
    """No draft is shorter than the min_draft_tokens that `Needs` declares."""
    needs = subject.needs
    for shown in lockstep(subject.stage()):
        lengths = [len(draft) for draft in shown.drafts if draft]
        if any(length < needs.min_draft_tokens for length in lengths):
            raise Violation(
                expected=f"lengths as Needs(min_draft_tokens={needs.min_draft_tokens}) says",
                found=f"lengths {lengths} for budgets {shown.budgets}",
                where=shown.where,
                fix="declare min_draft_tokens as it is",
            )
