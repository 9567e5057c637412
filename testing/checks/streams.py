"""Full, on a CUDA device: what a proposer enqueues there is ordered on the stream that was current."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from specdec import LLM
from specdec.core.host import CheckedDraft, parts_of, tensors_of
from specdec.sdk import StepView

from ..report import NotApplicable, Violation
from ..subject import Subject
from ..worlds import generate
from .check import check

ON_A_DEVICE = {"device": "cuda", "dtype": "float32", "max_num_seqs": 6, "max_model_len": 256, "cuda_graphs": False}
CYCLES = 20_000_000  # for which a late stream waits: some ten milliseconds

Seen = list[list[list[int]]]  # of each step, the numbers of each draft


@check("full")
def streams(subject: Subject) -> None:
    """Device work of `propose` is ordered on the stream that was current, whichever it is and however late it is."""
    if not torch.cuda.is_available():
        raise NotApplicable("torch finds no CUDA device")
    if subject.load(info=replace(subject.target.info, device="cuda")).needs.placement != "device":
        raise NotApplicable('it drafts on the host (Needs.placement is not "device")')
    subject.need_determinism()
    on_time, late = _drafts(subject, late=False), _drafts(subject, late=True)
    if not on_time:
        raise NotApplicable("its drafts lie on the host when it returns")
    for number, (expected, found) in enumerate(zip(on_time, late, strict=False)):
        if found != expected:
            raise Violation(
                expected="the drafts of a stream that is on time",
                found=f"{found} instead of {expected}, as length, kind and token ids",
                where=f"draft {number} of an engine on a stream of its own, whose tensors come late",
                fix="enqueue on torch.cuda.current_stream(). A stream of your own waits for it before it reads, and it "
                "waits for yours before you return",
            )


def _drafts(subject: Subject, *, late: bool) -> Seen:
    stream = torch.cuda.Stream() if late else torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream), subject.llm(**ON_A_DEVICE) as llm, _watched(llm, late=late) as seen:
        generate(llm, subject.target.prompts)
    return [checked.tolist() for checked in seen]


@contextmanager
def _watched(llm: LLM, *, late: bool) -> Iterator[list[torch.Tensor]]:
    """The numbers of each draft, copied on the current stream at once. late: tensors of views get their values late."""
    host: Any = parts_of(llm.engine).host
    seen: list[torch.Tensor] = []
    draft = host.draft

    def watched(step: StepView, budgets: Sequence[int]) -> CheckedDraft | None:
        if late:
            _delay(step)
        checked: CheckedDraft | None = draft(step, budgets)
        if checked is not None and checked.numbers is not None:
            seen.append(checked.numbers.clone())
        return checked

    host.draft = watched
    yield seen
    del host.draft


@torch.inference_mode()
def _delay(step: StepView) -> None:
    """What is read before the stream comes to it is 0."""
    given = [each for _, each in tensors_of(step) if each.is_cuda and each.is_contiguous()]
    values = [each.clone() for each in given]
    for each in given:
        each.zero_()
    torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
    for each, value in zip(given, values, strict=True):
        each.copy_(value)
