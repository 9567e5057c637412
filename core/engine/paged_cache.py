"""A target's KV in blocks: who has which, how a pass finds them, and the storage."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.sdk.types import TargetInfo

from ..cache.addressing import Addressing
from ..cache.block_pool import BlockPool
from ..cache.kv_cache import KVCache
from ..cache.state_store import StateStore
from ..model.target import TargetModel
from ..runner.scheduler import Scheduler
from .device import DeviceProfile


@dataclass(frozen=True)
class PagedCache:
    """What passes over one target share."""

    scheduler: Scheduler
    addressing: Addressing
    kv: KVCache

    @property
    def num_blocks(self) -> int:
        """Of the pool."""
        return self.scheduler.pool.num_blocks

    @classmethod
    def build(
        cls,
        profile: DeviceProfile,
        info: TargetInfo,
        target: TargetModel,
        pool: BlockPool,
        most: int,
        lookahead: int,
        num_drafts: int = 0,
    ) -> PagedCache:
        """most: tokens of a pass.

        lookahead: positions past a request's newest token that a draft pass writes. num_drafts: the most of a request.
        """
        states = (
            StateStore(target.mixers.layouts, info.max_num_seqs, num_drafts, target.device) if target.mixers else None
        )
        scheduler = Scheduler(pool, info.max_num_seqs, most, lookahead, states)
        addressing = profile.addressing(scheduler, info, lookahead)
        num_blocks = pool.num_blocks + addressing.num_pad_blocks
        kv = KVCache(target.layer_shapes, num_blocks, pool.block_size, target.dtype, target.device, states)
        return cls(scheduler, addressing, kv)
