"""SGLang's `sglang.srt.plugins` entry point, called in each of its processes. Other algorithms stay as they are."""

from __future__ import annotations

from functools import cache
from typing import Any

NAME = "SPECDEC"
STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"


@cache
def register() -> None:
    """Register the algorithm, once in a process. SGLang logs what this raises, and knows no such algorithm then."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from .algorithm import Algorithm

    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=Algorithm)(_worker)
    HookRegistry.register(STATE, _report, HookType.AFTER)


def _worker(server_args: Any) -> type:
    from .worker import Worker

    return Worker


def _report(answer: Any, scheduler: Any, *_: object) -> Any:
    """What `/server_info` says of a scheduler, and what the proposer does there."""
    from .worker import Worker

    if isinstance(scheduler.draft_worker, Worker):
        answer.internal_state["specdec"] = scheduler.draft_worker.drafting.report()
    return answer
