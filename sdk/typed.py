"""Decorators by which a type checker checks a class that has no base: one for each method or extension that it has.

    from specdec.sdk import typed

    @typed.proposer
    @typed.observe
    class Mine: ...

Each returns the class as it is. The protocols are for annotations. A class below `ProposerBase` needs neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .extensions import AheadMethods, MetricsMethods, NewWeightsMethods, StateMethods

if TYPE_CHECKING:
    from .config import ProposerConfig
    from .proposer_protocol import Proposer
    from .services import Services
    from .types import RequestView, StepView, TargetInfo

__all__ = [
    "SupportsBind",
    "SupportsClose",
    "SupportsObserve",
    "SupportsOnFinish",
    "SupportsOnPreempt",
    "SupportsOnStart",
    "SupportsWarmup",
    "ahead",
    "bind",
    "close",
    "metrics",
    "new_weights",
    "observe",
    "on_finish",
    "on_preempt",
    "on_start",
    "proposer",
    "state",
    "warmup",
]


class SupportsBind(Protocol):
    """Has `ProposerBase.bind`."""

    def bind(self, target: TargetInfo, services: Services, /) -> None:
        """The method of `ProposerBase`."""
        ...


class SupportsWarmup(Protocol):
    """Has `ProposerBase.warmup`."""

    def warmup(self) -> None:
        """The method of `ProposerBase`."""
        ...


class SupportsOnStart(Protocol):
    """Has `ProposerBase.on_start`."""

    def on_start(self, request: RequestView, /) -> None:
        """The method of `ProposerBase`."""
        ...


class SupportsObserve(Protocol):
    """Has `ProposerBase.observe`."""

    def observe(self, step: StepView, /) -> None:
        """The method of `ProposerBase`."""
        ...


class SupportsOnPreempt(Protocol):
    """Has `ProposerBase.on_preempt`."""

    def on_preempt(self, request: RequestView, /) -> None:
        """The method of `ProposerBase`."""
        ...


class SupportsOnFinish(Protocol):
    """Has `ProposerBase.on_finish`."""

    def on_finish(self, request: RequestView, /) -> None:
        """The method of `ProposerBase`."""
        ...


class SupportsClose(Protocol):
    """Has `ProposerBase.close`."""

    def close(self) -> None:
        """The method of `ProposerBase`."""
        ...


AnyProposer = TypeVar("AnyProposer", bound="Callable[[ProposerConfig[Any]], Proposer]")
HasBind = TypeVar("HasBind", bound=SupportsBind)
HasWarmup = TypeVar("HasWarmup", bound=SupportsWarmup)
HasOnStart = TypeVar("HasOnStart", bound=SupportsOnStart)
HasObserve = TypeVar("HasObserve", bound=SupportsObserve)
HasOnPreempt = TypeVar("HasOnPreempt", bound=SupportsOnPreempt)
HasOnFinish = TypeVar("HasOnFinish", bound=SupportsOnFinish)
HasClose = TypeVar("HasClose", bound=SupportsClose)
HasAhead = TypeVar("HasAhead", bound=AheadMethods)
HasMetrics = TypeVar("HasMetrics", bound=MetricsMethods)
HasNewWeights = TypeVar("HasNewWeights", bound=NewWeightsMethods)
HasState = TypeVar("HasState", bound=StateMethods)


def proposer(cls: AnyProposer) -> AnyProposer:
    """The class is constructed with a ProposerConfig, and its `propose` takes a StepView and returns a Draft."""
    return cls


def bind(cls: type[HasBind]) -> type[HasBind]:
    """Check that the class's `bind` is that of `ProposerBase`."""
    return cls


def warmup(cls: type[HasWarmup]) -> type[HasWarmup]:
    """Check that the class's `warmup` is that of `ProposerBase`."""
    return cls


def on_start(cls: type[HasOnStart]) -> type[HasOnStart]:
    """Check that the class's `on_start` is that of `ProposerBase`."""
    return cls


def observe(cls: type[HasObserve]) -> type[HasObserve]:
    """Check that the class's `observe` is that of `ProposerBase`."""
    return cls


def on_preempt(cls: type[HasOnPreempt]) -> type[HasOnPreempt]:
    """Check that the class's `on_preempt` is that of `ProposerBase`."""
    return cls


def on_finish(cls: type[HasOnFinish]) -> type[HasOnFinish]:
    """Check that the class's `on_finish` is that of `ProposerBase`."""
    return cls


def close(cls: type[HasClose]) -> type[HasClose]:
    """Check that the class's `close` is that of `ProposerBase`."""
    return cls


def ahead(cls: type[HasAhead]) -> type[HasAhead]:
    """It has the methods of the extension `Ahead`."""
    return cls


def metrics(cls: type[HasMetrics]) -> type[HasMetrics]:
    """Check that the class has the methods of the extension `Metrics`."""
    return cls


def new_weights(cls: type[HasNewWeights]) -> type[HasNewWeights]:
    """Check that the class has the methods of the extension `NewWeights`."""
    return cls


def state(cls: type[HasState]) -> type[HasState]:
    """Check that the class has the methods of the extension `State`."""
    return cls
