"""Decorators by which a type checker checks a class that has no base: one for each method that the class has.

    from specdec.sdk import typed

    @typed.proposer
    @typed.observe
    class Mine: ...

Each returns the class as it is. The protocols are for annotations. A class below `ProposerBase` needs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from .config import ProposerConfig
    from .proposer_protocol import Proposer
    from .services import Services
    from .types import RequestView, StepView, TargetInfo


class SupportsBind(Protocol):
    """Has `ProposerBase.bind`."""

    def bind(self, target: TargetInfo, services: Services, /) -> None: ...


class SupportsWarmup(Protocol):
    """Has `ProposerBase.warmup`."""

    def warmup(self) -> None: ...


class SupportsOnStart(Protocol):
    """Has `ProposerBase.on_start`."""

    def on_start(self, request: RequestView, /) -> None: ...


class SupportsObserve(Protocol):
    """Has `ProposerBase.observe`."""

    def observe(self, step: StepView, /) -> None: ...


class SupportsOnPreempt(Protocol):
    """Has `ProposerBase.on_preempt`."""

    def on_preempt(self, request: RequestView, /) -> None: ...


class SupportsOnFinish(Protocol):
    """Has `ProposerBase.on_finish`."""

    def on_finish(self, request: RequestView, /) -> None: ...


class SupportsSave(Protocol):
    """Has `ProposerBase.save`."""

    def save(self, path: Path, /) -> None: ...


class SupportsLoad(Protocol):
    """Has `ProposerBase.load`."""

    def load(self, path: Path, /) -> None: ...


class SupportsUpdateWeights(Protocol):
    """Has `ProposerBase.update_weights`."""

    def update_weights(self, tensors: Mapping[str, Tensor], /) -> None: ...


class SupportsMetrics(Protocol):
    """Has `ProposerBase.metrics`."""

    def metrics(self) -> Mapping[str, float]: ...


class SupportsClose(Protocol):
    """Has `ProposerBase.close`."""

    def close(self) -> None: ...


AnyProposer = TypeVar("AnyProposer", bound="Callable[[ProposerConfig[Any]], Proposer]")
HasBind = TypeVar("HasBind", bound=SupportsBind)
HasWarmup = TypeVar("HasWarmup", bound=SupportsWarmup)
HasOnStart = TypeVar("HasOnStart", bound=SupportsOnStart)
HasObserve = TypeVar("HasObserve", bound=SupportsObserve)
HasOnPreempt = TypeVar("HasOnPreempt", bound=SupportsOnPreempt)
HasOnFinish = TypeVar("HasOnFinish", bound=SupportsOnFinish)
HasSave = TypeVar("HasSave", bound=SupportsSave)
HasLoad = TypeVar("HasLoad", bound=SupportsLoad)
HasUpdateWeights = TypeVar("HasUpdateWeights", bound=SupportsUpdateWeights)
HasMetrics = TypeVar("HasMetrics", bound=SupportsMetrics)
HasClose = TypeVar("HasClose", bound=SupportsClose)


def proposer(cls: AnyProposer) -> AnyProposer:
    """The class is constructed with a ProposerConfig, and its `propose` takes a StepView and returns a Draft."""
    return cls


def bind(cls: type[HasBind]) -> type[HasBind]:
    """Its `bind` is that of `ProposerBase`."""
    return cls


def warmup(cls: type[HasWarmup]) -> type[HasWarmup]:
    """Its `warmup` is that of `ProposerBase`."""
    return cls


def on_start(cls: type[HasOnStart]) -> type[HasOnStart]:
    """Its `on_start` is that of `ProposerBase`."""
    return cls


def observe(cls: type[HasObserve]) -> type[HasObserve]:
    """Its `observe` is that of `ProposerBase`."""
    return cls


def on_preempt(cls: type[HasOnPreempt]) -> type[HasOnPreempt]:
    """Its `on_preempt` is that of `ProposerBase`."""
    return cls


def on_finish(cls: type[HasOnFinish]) -> type[HasOnFinish]:
    """Its `on_finish` is that of `ProposerBase`."""
    return cls


def save(cls: type[HasSave]) -> type[HasSave]:
    """Its `save` is that of `ProposerBase`."""
    return cls


def load(cls: type[HasLoad]) -> type[HasLoad]:
    """Its `load` is that of `ProposerBase`."""
    return cls


def update_weights(cls: type[HasUpdateWeights]) -> type[HasUpdateWeights]:
    """Its `update_weights` is that of `ProposerBase`."""
    return cls


def metrics(cls: type[HasMetrics]) -> type[HasMetrics]:
    """Its `metrics` is that of `ProposerBase`."""
    return cls


def close(cls: type[HasClose]) -> type[HasClose]:
    """Its `close` is that of `ProposerBase`."""
    return cls
