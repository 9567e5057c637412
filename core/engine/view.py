"""What may be known of an engine from outside of the core, and stays what it is while the engine runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specdec.sdk.types import TargetInfo

from ..proposing.proposer_host import ProposerHost
from ..registry.hooks import HookPlugins

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(frozen=True)
class EngineView:
    """The target, its device and its proposer."""

    info: TargetInfo
    device: torch.device
    num_threads: int  # of the host
    num_kv_blocks: int
    eos_token_ids: frozenset[int]
    host: ProposerHost | None  # None: it decodes plainly
    hooks: HookPlugins  # `add` lets an object of this process listen

    @classmethod
    def of(cls, engine: Engine) -> EngineView:
        """The view of a running engine."""
        parts = engine.parts
        return cls(
            info=parts.info,
            device=parts.target.device,
            num_threads=parts.threads.count,
            num_kv_blocks=parts.scheduler.pool.num_blocks,
            eos_token_ids=parts.eos_token_ids,
            host=parts.host,
            hooks=parts.hooks,
        )
