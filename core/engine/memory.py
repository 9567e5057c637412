"""How much memory there is, and how much of it the KV cache gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from specdec.sdk.errors import ConfigError
from specdec.sdk.needs import Needs
from specdec.sdk.types import TargetInfo

from ..config.engine_config import EngineConfig
from ..device_memory import CudaMemory, free_memory, spare_memory
from ..model.target import TargetModel

if TYPE_CHECKING:
    from .plan import Plan


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


def require_memory(what: str, count: int, bytes_each: int, device: torch.device) -> None:
    """Raise ConfigError SD-E178 where what the user asked for cannot be allocated, before anything is."""
    free = free_memory(device)
    if count * bytes_each > free:
        facts = {
            "asked": f"{count} {what}",
            "needed": f"{count * bytes_each} bytes, {bytes_each} for each",
            "available": f"{free} bytes on {device}",
            "fix": f"at most {free // bytes_each}",
        }
        raise ConfigError("SD-E178", f"there is not enough memory for {what}", facts)


def bytes_per_row(config: EngineConfig, info: TargetInfo, needs: Needs | None) -> int:
    """What each request that may run takes before it does: places in tables, and the history that a proposer reads."""
    blocks = -(-info.max_model_len // config.block_size)
    return 8 * (ROW_RECORDS + blocks + (info.max_model_len if needs and needs.history else 0))


def quarter_of_free(config: EngineConfig, target: TargetModel, num_captured: int = 0) -> int:
    """Untouched pages cost a CPU nothing."""
    return spare_memory(target.device)


def left_by_a_step(
    config: EngineConfig,
    target: TargetModel,
    num_captured: int = 0,
    memory: Callable[[torch.device], CudaMemory] = CudaMemory,
) -> int:
    """The share of a device that the user gives, less what is there now, the largest step, and what is captured.

    A drafter is bound before: its weights and its drafts' distributions count as there. Captured passes keep memory of
    their own, which a pass over as many tokens (`num_captured`) is the measure of.
    """
    device = memory(target.device)
    num_rows = min(config.max_num_batched_tokens, config.max_num_seqs * ROWS_PER_REQUEST)
    peak = device.peak(lambda: target.dummy_pass(config.max_num_batched_tokens, num_rows))
    if num_captured:
        captured = device.peak(lambda: target.dummy_pass(num_captured, num_captured))
        peak += captured - device.peak(lambda: None)
    return int(config.gpu_memory_utilization * device.total()) - peak


ROW_RECORDS = 16
"""Numbers that the engine's books hold of each row, its queues and generations counted in."""

ROWS_PER_REQUEST = 8
"""Rows of logits that a step is sized for: more drafts than are common."""
