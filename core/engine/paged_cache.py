"""A target's KV in blocks: who has which, how a pass finds them, and the storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec.sdk.errors import ConfigError
from specdec.sdk.types import TargetInfo

from ..cache.addressing import Addressing
from ..cache.block_pool import BlockPool
from ..cache.kv_cache import KVCache
from ..cache.state_store import StateStore
from ..config.engine_config import EngineConfig
from ..model.target import TargetModel
from ..runner.scheduler import Scheduler
from .device import DeviceProfile
from .memory import require_memory

if TYPE_CHECKING:
    from .plan import Plan


@dataclass(frozen=True)
class PagedCache:
    """What passes over one target share."""

    scheduler: Scheduler
    addressing: Addressing
    kv: KVCache

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


def num_kv_blocks(plan: Plan, target: TargetModel) -> int:
    """The number asked for; else what all rows can use, within the memory that is given or left. Draft KV and states
    are included.
    """
    config = plan.config
    states = _state_bytes(config, target, plan.width)
    usable = config.max_num_seqs * -(-(plan.info.max_model_len + plan.lookahead) // config.block_size)
    per_block = config.block_size * sum(shape.bytes_per_token(target.dtype) for shape in target.layer_shapes)
    per_block += plan.speculation.admission.draft_kv_bytes_per_block if plan.speculation else 0
    per_block = max(per_block, 1)  # layers that keep a state alone have nothing in blocks
    if config.num_kv_blocks is not None:
        require_memory("num_kv_blocks", config.num_kv_blocks, per_block, target.device)
        return config.num_kv_blocks
    if config.kv_cache_memory_gib is not None:
        budget = int(config.kv_cache_memory_gib * 2**30)
    else:
        budget = plan.profile.kv_budget(config, target, plan.num_captured_tokens) - states
    affordable = budget // per_block
    if affordable < 1:
        facts = {"budget": f"{budget} bytes", "one block": f"{per_block} bytes"}
        raise ConfigError("SD-E150", "the KV cache budget does not hold one block", facts)
    if config.kv_cache_memory_gib is not None:
        require_memory("blocks in kv_cache_memory_gib", min(usable, affordable), per_block, target.device)
    return min(usable, affordable)


def _state_bytes(config: EngineConfig, target: TargetModel, num_drafts: int) -> int:
    """What the layers that keep a state take for all rows, nobody's included. Raises ConfigError SD-E178."""
    if target.mixers is None:
        return 0
    per_row = sum(layout.bytes_per_row(num_drafts) for layout in target.mixers.layouts)
    require_memory("max_num_seqs with a state each", config.max_num_seqs, per_row, target.device)
    return (config.max_num_seqs + 1) * per_row
