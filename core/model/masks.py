"""What the masks of a model would say: asked of its own functions once, because attention here makes no mask.

Most layers hand their window on to attention; of others only the mask knows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface

ASKING_NAME = "specdec_asking"
"""The attention implementation under which models make `Limits` for masks."""

LIMITS = "specdec_limits"
"""The keyword argument of attention layers that says what only their mask would say: window and chunk."""

_NEAR = 0, 1, 2, 3
"""Positions at which a mask without a size of its own is looked at."""


@dataclass(frozen=True)
class Limits:
    """Which of the keys before it a query sees."""

    window: int | None = None  # as in `AttentionSpec`
    chunk: int | None = None
    is_served: bool = True  # False: the mask is of another kind


MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Any]  # of batch, head, query and key


def limits_of_mask(*, mask_function: MaskFunction, device: Any, local_size: int | None = None, **_: Any) -> Limits:
    """transformers' mask interface: what the mask says, in the place of a mask.

    mask_function: whether a query sees a key. local_size: of windows or chunks. None means that it has neither.
    """
    offered = [Limits()] if local_size is None else [Limits(window=local_size), Limits(chunk=local_size)]
    near = _NEAR if local_size is None else (0, 1, local_size - 1, local_size, local_size + 1, 2 * local_size)
    places = [torch.tensor(position, device=device) for position in near]
    seen = [[bool(mask_function(places[0], places[0], query, key)) for key in places] for query in places]
    for limits in offered:
        if seen == [[_is_seen(limits, query, key) for key in near] for query in near]:
            return limits
    return Limits(is_served=False)


def _is_seen(limits: Limits, query: int, key: int) -> bool:
    inside = limits.window is None or key > query - limits.window
    return key <= query and inside and (limits.chunk is None or key // limits.chunk == query // limits.chunk)


AttentionMaskInterface.register(ASKING_NAME, limits_of_mask)


def hand_on(limits: Limits, module: nn.Module) -> None:
    """Have an attention module say from now on what its mask would say."""
    module.register_forward_pre_hook(partial(_add_limits, (limits.window, limits.chunk)), with_kwargs=True)


def _add_limits(
    limits: tuple[int | None, int | None], module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, named | {LIMITS: limits}
