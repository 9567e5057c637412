"""Whether an engine records its steps."""

from __future__ import annotations

import logging

from specdec.sdk.errors import ConfigError, message

from ..model.target import TargetModel
from ..runner.graphs import Graphs
from .device import DeviceProfile

logger = logging.getLogger("specdec")


def graphs_of(asked: bool | None, profile: DeviceProfile, target: TargetModel, max_num_seqs: int) -> Graphs | None:
    """None where none are wanted or can be made. Raises ConfigError SD-E147, SD-E234 if they were asked for there."""
    if asked is False:
        return None
    if profile.recorder is None:
        if asked:
            raise ConfigError("SD-E147", f"cuda_graphs were asked for, and device {str(profile.device)!r} has none")
        return None
    if target.waits_for_experts:
        _refuse_recording(asked)
        return None
    return Graphs(profile.recorder(profile.device), max_num_seqs, required=asked is True)


def _refuse_recording(asked: bool | None) -> None:
    """Raises ConfigError SD-E234 if it was asked for; warns else."""
    what, facts = (
        "a step with moe_backend='eager' cannot be recorded",
        {
            "because": "it waits for the device in every layer, to read which experts are wanted",
            "fix": "leave moe_backend out, or set grouped_mm or batched_mm",
        },
    )
    if asked:
        raise ConfigError("SD-E234", what, facts)
    logger.warning("%s", message("SD-W306", what, facts | {"so": "each of its kernels is launched, more slowly"}))
