"""A target's KV in blocks: who has which, how a pass finds them, and the storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec.sdk.types import TargetInfo

from ..cache.addressing import Addressing
from ..cache.block_pool import BlockPool
from ..cache.kv_cache import KVCache
from ..cache.state_store import StateStore
from ..model.target import TargetModel
from ..runner.scheduler import Scheduler
from .device import DeviceProfile
from .memory import num_kv_blocks

if TYPE_CHECKING:
    from .plan import Plan


@dataclass(frozen=True)
class PagedCache:
    """What passes over one target share."""

    scheduler: Scheduler
    addressing: Addressing
    kv: KVCache

    @property
    def num_blocks(self) -> int:
        """The number of blocks in the pool."""
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

    @classmethod
    def for_requests(cls, plan: Plan, target: TargetModel) -> PagedCache:
        """Make a cache as large as the configuration and the memory allow. Raises ConfigError SD-E150, SD-E178."""
        config, info, lookahead = plan.config, plan.info, plan.lookahead
        num_blocks = num_kv_blocks(plan, target)
        longest_request = -(-(info.max_model_len + lookahead) // config.block_size)
        pool = BlockPool(num_blocks, config.block_size, region_size=longest_request, known=plan.known_blocks())
        return cls.build(plan.profile, info, target, pool, config.max_num_batched_tokens, lookahead, plan.width)
