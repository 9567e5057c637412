"""What proposer authors import in their tests: fakes that need no engine, and the conformance kit.

    class TestMine(ProposerConformance):
        proposer = MyProposer

Names are loaded on first use: the fakes need torch alone, the kit the whole engine.
"""

from __future__ import annotations

if __name__ != "specdec.testing":
    raise ImportError(f"import specdec.testing, not {__name__}: one file under two names makes two of every class")

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .calls import Watch
    from .fakes import FakeDraftKV, FakeRandom, FakeServices, fake_target_info, step_view
    from .report import CheckResult, Level, Violation
    from .run import check_proposer
    from .suite import ProposerConformance

__all__ = [
    "CheckResult",
    "FakeDraftKV",
    "FakeRandom",
    "FakeServices",
    "Level",
    "ProposerConformance",
    "Violation",
    "Watch",
    "check_proposer",
    "fake_target_info",
    "step_view",
]

_HOMES = {
    "CheckResult": ".report",
    "FakeDraftKV": ".fakes",
    "FakeRandom": ".fakes",
    "FakeServices": ".fakes",
    "Level": ".report",
    "ProposerConformance": ".suite",
    "Violation": ".report",
    "Watch": ".calls",
    "check_proposer": ".run",
    "fake_target_info": ".fakes",
    "step_view": ".fakes",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
