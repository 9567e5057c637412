"""How much memory there is, and how much of it the KV cache gets."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specdec.sdk.errors import ConfigError
from specdec.sdk.needs import Needs
from specdec.sdk.types import TargetInfo

from ..config.engine_config import EngineConfig
from ..device_memory import CudaMemory, free_memory
from ..model.target import TargetModel


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
