"""Whether what a proposer returned is a draft for the step: form first, then values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from specdec.sdk.errors import PluginId, ProposerError
from specdec.sdk.extensions import Trees
from specdec.sdk.needs import DistributionForm, Needs
from specdec.sdk.types import DistributionKind, Draft, DraftDistribution, StepView

from .draft_table import CheckedDraft, DraftReport, distribution_width, measure, target_to_draft
from .tree_check import by_node, tree_error
from .view_guard import is_due

_KINDS: dict[DistributionForm, frozenset[DistributionKind]] = {
    "one_hot": frozenset({DistributionKind.ONE_HOT}),
    "dense": frozenset({DistributionKind.ONE_HOT, DistributionKind.DENSE_PROBS, DistributionKind.DENSE_LOGITS}),
    "sparse": frozenset({DistributionKind.ONE_HOT, DistributionKind.SPARSE}),
}
_TENSORS: dict[int, tuple[str, ...]] = {
    DistributionKind.DENSE_PROBS: ("probs",),
    DistributionKind.DENSE_LOGITS: ("logits",),
    DistributionKind.SPARSE: ("sparse_ids", "sparse_probs"),
}
"""The fields of `DraftDistribution` that rows of a kind have."""
_ROWS = "one row per request, in the order of step.request_ids; K is step.width"
_WIDTH = "\na distribution is as wide as Needs.draft_vocabulary, else as the target's"
_INTEGERS = frozenset({torch.int64, torch.int32})
_Held = TypeVar("_Held", Draft, DraftDistribution)
SUM_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}


class DraftChecker:
    """Checks the drafts of one proposer.

    Raises ProposerError SD-E200 .. SD-E206, SD-E290 .. SD-E293, naming it.
    """

    def __init__(
        self,
        plugin: PluginId,
        needs: Needs,
        vocab_size: int,
        device: torch.device,
        *,
        read_late: bool = False,
        max_depth: int | None = None,
    ) -> None:
        """read_late: whether lengths and ids are read with the outcome of verification, for `check_reports`.

        max_depth: the most nodes on a path of a tree. None means any number.
        """
        self._plugin = plugin
        self._needs = needs
        self._vocab_size = vocab_size
        self._read_late = read_late
        self._device = device if needs.placement == "device" else torch.device("cpu")
        self._draws_trees, self._max_depth = needs.extension(Trees) is not None, max_depth
        self._on_host = self._device.type == "cpu"
        self._sees_kinds = self._on_host and not read_late
        self._num_distributions, self._was_wrong = 0, False
        vocabulary = needs.draft_vocabulary
        self._t2d = None if vocabulary is None else target_to_draft(vocabulary, vocab_size, self._device)

    def check(self, draft: object, step: StepView, budgets: Sequence[int]) -> CheckedDraft:
        """The draft, checked as far as it can be read now.

        `budgets` are the step's, one per request, from the engine rather than from a view that may have been changed.
        """
        draft = self._checked_form(draft, step)
        kinds, due = self._checked_kinds(draft.distribution, step)
        if self._read_late and draft.parents is None:  # trees are read at once
            if due:
                self._check_sums(draft, step.request_ids)
            numbers = measure(draft, kinds, self._t2d, self._vocab_size)
            return CheckedDraft(budgets, [None] * len(budgets), numbers, draft.distribution, kinds)
        nodes = draft if draft.parents is None else by_node(draft)
        reports = self._read(nodes, kinds)
        self.check_reports(step.request_ids, budgets, reports, nodes)
        if due:
            self._check_sums(nodes, step.request_ids)
        return CheckedDraft.read(reports, draft.distribution)

    def check_reports(
        self,
        request_ids: Sequence[str],
        budgets: Sequence[int],
        reports: Sequence[DraftReport],
        draft: Draft | None = None,
    ) -> None:
        """Lengths, trees and ids, and whether the distributions can have drawn them.

        draft: None where it is gone by now.
        """
        self._check_lengths([each.length for each in reports], request_ids, budgets)
        if draft is not None and draft.parents is not None:
            replacement = draft.distribution is not None and draft.distribution.replacement
            wrong = tree_error(reports, request_ids, self._max_depth, replacement=replacement)
            if wrong is not None:
                raise self._error(*wrong)
        self._check_ids([each.token_ids[: each.length] for each in reports], request_ids)
        for b, each in enumerate(reports):
            if each.num_usable < each.length:
                if draft is not None:
                    self._check_sums(draft, request_ids)  # a tensor that is no distribution at all gets that error
                raise self._impossible(request_ids[b], b, each, None if draft is None else draft.distribution)

    def _checked_form(self, draft: object, step: StepView) -> Draft:
        if not isinstance(draft, Draft):
            facts = {
                "expected": "specdec.sdk.Draft",
                "found": "None" if draft is None else f"{type(draft).__module__}.{type(draft).__qualname__}",
                "fix": "return Draft(token_ids, lengths), or Draft.from_lists(lists, step.width)",
            }
            raise self._error("SD-E200", "propose returned no Draft", facts)
        draft = _plain(draft)
        if isinstance(draft.distribution, DraftDistribution):
            distribution = _plain(draft.distribution)
            draft = draft if distribution is draft.distribution else replace(draft, distribution=distribution)
        width = step.width
        self._check_form("token_ids", draft.token_ids, (len(step), width), _INTEGERS)
        self._check_form("lengths", draft.lengths, (len(step),), _INTEGERS)
        if draft.parents is not None:
            if not self._draws_trees:
                fix = "needs = Needs(extensions=(Trees(), ...)), or leave parents out"
                raise self._error("SD-E290", "a draft has parents, and trees were not asked for", {"fix": fix})
            self._check_form("parents", draft.parents, (len(step), width), _INTEGERS)
        return draft

    def _check_form(self, field: str, found: object, shape: tuple[int, ...], dtypes: Set[torch.dtype]) -> None:
        if not isinstance(found, Tensor):
            facts = {"expected": f"tensor {shape}", "found": f"{type(found).__module__}.{type(found).__qualname__}"}
            facts["fix"] = "torch.as_tensor(...); DraftDistribution.kind says which of its tensors a row has"
            raise self._error("SD-E201", f"Draft.{field} is no tensor", facts)
        if found.shape == shape and found.dtype in dtypes and self._lies_right(found):
            return
        transposed = "   looks transposed" if len(shape) == 2 and tuple(found.shape) == shape[::-1] else ""
        kind = next(each for each in (torch.int64, torch.float32, torch.uint8) if each in dtypes)
        width = _WIDTH if len(shape) > 2 else ""
        said = (
            ("shape", found.shape == shape, shape, f"{tuple(found.shape)}{transposed}", _ROWS + width),
            ("dtype", found.dtype in dtypes, " or ".join(sorted(map(str, dtypes))), found.dtype, f"{field}.to({kind})"),
            ("device", self._lies_right(found), self._device, found.device, f'{field}.to("{self._device}")'),
        )
        wrong = [(label, expected, had, fix) for label, right, expected, had, fix in said if not right]
        facts = {label: f"expected {expected}, found {had}" for label, expected, had, _ in wrong}
        facts["fix"] = "\n".join(fix for *_, fix in wrong)
        raise self._error("SD-E201", f"Draft.{field} has the wrong form", facts)

    def _lies_right(self, found: Tensor) -> bool:
        if self._on_host:
            return found.is_cpu
        return found.device.type == self._device.type  # a device's name costs a host more than all else that it checks

    def _check_lengths(self, lengths: Sequence[int], request_ids: Sequence[str], budgets: Sequence[int]) -> None:
        for b, (length, budget) in enumerate(zip(lengths, budgets, strict=True)):
            if not 0 <= length <= budget:
                raise self._error(
                    "SD-E202",
                    "a draft is longer than its budget" if length > 0 else "a draft has a negative length",
                    {
                        "request": f"{request_ids[b]!r}, row {b} of the step",
                        "expected": f"0 .. {budget}",
                        "found": length,
                        "fix": "draft at most step.budget[b] tokens; a budget of 0 asks for none",
                    },
                )

    def _check_ids(self, token_ids: Sequence[Sequence[int]], request_ids: Sequence[str]) -> None:
        every = list(chain.from_iterable(token_ids))
        if not every or 0 <= min(every) <= max(every) < self._vocab_size:
            return
        places = [(b, position, token) for b, ids in enumerate(token_ids) for position, token in enumerate(ids)]
        b, position, bad = next(each for each in places if not 0 <= each[2] < self._vocab_size)
        raise self._error(
            "SD-E203",
            "a draft token id lies outside the target's vocabulary",
            {
                "request": f"{request_ids[b]!r}, row {b} of the step, draft position {position}",
                "expected": f"0 .. {self._vocab_size - 1}",
                "found": bad,
                "fix": "put padding behind lengths[b]; map ids of a smaller draft vocabulary to the target's",
            },
        )

    def _checked_kinds(self, distribution: DraftDistribution | None, step: StepView) -> tuple[frozenset[int], bool]:
        """The kinds that its rows may have, besides one-hot, and whether sums are to be checked.

        The tensors of these kinds have the right form.
        """
        if distribution is None:
            return frozenset(), False
        if not isinstance(distribution, DraftDistribution):
            facts = {"expected": "specdec.sdk.DraftDistribution, or None", "found": type(distribution).__name__}
            raise self._error("SD-E204", "Draft.distribution is no DraftDistribution", facts)
        shape = (len(step), step.width)
        self._check_form("distribution.kind", distribution.kind, shape[:1], {torch.uint8})
        self._num_distributions += 1
        due = self._sees_kinds or self._was_wrong or is_due(self._num_distributions)  # a look at a device waits for it
        kinds = self._kinds_of(distribution) if due else frozenset()
        if not self._sees_kinds:
            kinds |= self._possible_kinds(distribution)
        form = (*shape, distribution_width(self._needs, self._vocab_size))
        for kind in kinds:
            for name in _TENSORS[kind]:
                dtypes = {torch.int64} if name == "sparse_ids" else set(SUM_TOLERANCE)
                self._check_form(f"distribution.{name}", vars(distribution)[name], form, dtypes)
        return kinds, due

    def _impossible(
        self, request_id: str, b: int, report: DraftReport, distribution: DraftDistribution | None
    ) -> ProposerError:
        """The error for a token that the distribution reported for it cannot have drawn."""
        position = report.num_usable
        facts: dict[str, object] = {
            "request": f"{request_id!r}, row {b} of the step, draft position {position}",
            "drafted": report.token_ids[position],
        }
        if report.kind == DistributionKind.SPARSE and distribution and distribution.sparse_ids is not None:
            ids = distribution.sparse_ids[b, position].tolist()
            facts["sparse ids"] = ", ".join(map(str, ids[:8])) + (f" and {len(ids) - 8} more" if ids[8:] else "")
        facts |= {
            "expected": f"for it a probability above 0, or a finite logit; sparse ids in -1 .. {self._vocab_size - 1}",
            "fix": "report what the token was drawn from, in target ids; tag the row DistributionKind.ONE_HOT "
            "where there is no distribution",
            "why": "verification with a wrong distribution silently changes what is generated",
        }
        return self._error("SD-E206", "a drafted token cannot come from its reported distribution", facts)

    def _check_sums(self, draft: Draft, request_ids: Sequence[str]) -> None:
        distribution = draft.distribution
        assert distribution is not None, "there is one to check"
        drafted = torch.arange(draft.token_ids.shape[1], device=self._device) < draft.lengths[:, None]
        for kind, values, facts_of in (
            (DistributionKind.DENSE_PROBS, distribution.probs, _amiss_in_probabilities),
            (DistributionKind.SPARSE, distribution.sparse_probs, _amiss_in_probabilities),
            (DistributionKind.DENSE_LOGITS, distribution.logits, _amiss_in_logits),
        ):
            if values is None:
                continue
            facts = facts_of(values, drafted & (distribution.kind == kind)[:, None], request_ids)
            if facts is not None:
                self._was_wrong = True
                facts["why"] = "verification with a wrong distribution silently changes what is generated"
                raise self._error("SD-E205", "a reported draft distribution is not a probability distribution", facts)

    def _kinds_of(self, distribution: DraftDistribution) -> frozenset[int]:
        """The tags of its rows; waits for them."""
        kinds: frozenset[int] = frozenset(distribution.kind.tolist())
        undeclared = kinds - _KINDS[self._needs.stored_form]
        if undeclared:
            names = {int(kind): kind.name for kind in DistributionKind}
            found = ", ".join(names.get(kind, str(kind)) for kind in sorted(undeclared))
            raise self._error(
                "SD-E204",
                "a draft distribution has a form that was not declared",
                {
                    "declared": f"Needs.distributions = {self._needs.distributions!r}",
                    "found": found,
                    "fix": "declare the form in Needs(distributions=...), or tag the row DistributionKind.ONE_HOT",
                },
            )
        return kinds - {DistributionKind.ONE_HOT}

    def _possible_kinds(self, distribution: DraftDistribution) -> frozenset[int]:
        """The declared tags that the distribution brings tensors for; rows with any other count as one-hot."""
        brought = [kind for kind, (name, *_) in _TENSORS.items() if vars(distribution)[name] is not None]
        return _KINDS[self._needs.stored_form].intersection(brought)

    def _read(self, draft: Draft, kinds: frozenset[int]) -> list[DraftReport]:
        """Read one report per request. A device is waited for once."""
        if kinds or not self._on_host:
            numbers = measure(draft, kinds, self._t2d, self._vocab_size).tolist()
            return [DraftReport.parse(each, draft.token_ids.shape[1]) for each in numbers]
        parents = [None] * len(draft.lengths) if draft.parents is None else draft.parents.tolist()
        rows = zip(draft.lengths.tolist(), draft.token_ids.tolist(), parents, strict=True)  # a tenth of the time
        return [DraftReport(length, length, DistributionKind.ONE_HOT, ids, tree) for length, ids, tree in rows]

    def _error(self, code: str, summary: str, facts: Mapping[str, object]) -> ProposerError:
        return ProposerError(code, summary, facts, plugin=self._plugin)


def _plain(held: _Held) -> _Held:
    """Replace subclasses of Tensor, whose `tolist` may answer something else, and tensors with a gradient, which the
    engine's cannot take in, by plain tensors of the same memory.
    """
    tensors = {name: each for name, each in vars(held).items() if isinstance(each, Tensor)}
    odd = {name: each for name, each in tensors.items() if type(each) is not Tensor or each.requires_grad}
    plain: dict[str, Any] = {name: Tensor.as_subclass(each.detach(), Tensor) for name, each in odd.items()}
    return replace(held, **plain) if plain else held


def _amiss_in_probabilities(probs: Tensor, used: Tensor, request_ids: Sequence[str]) -> dict[str, object] | None:
    """What is wrong with the worst row of probs [B, K, V], of those in use [B, K]; None: nothing."""
    tolerance = SUM_TOLERANCE[probs.dtype]
    sums = probs.sum(dim=-1, dtype=torch.promote_types(probs.dtype, torch.float32))
    least = probs.amin(dim=-1)
    right = ((sums - 1).abs() <= tolerance) & (least >= 0)
    if bool((right | ~used).all()):
        return None
    off = (sums - 1).abs().maximum(-least).nan_to_num(nan=torch.inf, posinf=torch.inf).where(used, -1.0)
    b, position = divmod(int(off.argmax()), off.shape[1])
    num_bad = int((~probs[b, position].isfinite()).sum())
    return {
        "worst": f"request {request_ids[b]!r}, draft position {position}: sum {float(sums[b, position]):.4f}, "
        f"least entry {float(least[b, position]):.4g}, {num_bad} not finite",
        "expected": f"sum 1 (tolerance {tolerance:g} for {probs.dtype}), no entry below 0",
        "likely": "a division by 0, or an overflow in half precision"
        if num_bad
        else "a filter was applied without renormalising, or these are logits",
    }


def _amiss_in_logits(logits: Tensor, used: Tensor, request_ids: Sequence[str]) -> dict[str, object] | None:
    """The same of logits [B, K, V]."""
    largest = logits.amax(dim=-1)  # NaN if one is
    wrong = ~largest.isfinite() & used
    if not bool(wrong.any()):
        return None
    b, position = wrong.nonzero()[0].tolist()
    return {
        "first": f"request {request_ids[b]!r}, draft position {position}: the largest logit is {largest[b, position]}",
        "expected": "logits that are numbers or -inf, and one of them finite",
        "likely": "an overflow in half precision, or a mask that leaves no token",
    }
