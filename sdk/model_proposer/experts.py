"""Experts as published, one by one, and as transformers computes with them, joined."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def joined_experts(tensors: Mapping[str, Tensor], wanted: Collection[str]) -> dict[str, Tensor]:
    """The tensors, with experts joined where `wanted` has the joined names.

    Of E experts of inner width m on states of width H: gate_up_proj [E, 2m, H], the gate first; down_proj [E, H, m].
    A set that is not complete stays as it is, to be reported as missing.
    """
    found = {name: match for name in tensors if (match := _EXPERT.fullmatch(name))}
    joined = {name: tensor for name, tensor in tensors.items() if name not in found}
    for stem in sorted({match[1] for match in found.values()}):
        own = {(int(match[2]), match[3]): tensors[name] for name, match in found.items() if match[1] == stem}
        count = 1 + max(expert for expert, _ in own)
        if f"{stem}.gate_up_proj" in wanted and len(own) == 3 * count:
            pairs = [torch.cat([own[expert, "gate_proj"], own[expert, "up_proj"]]) for expert in range(count)]
            joined[f"{stem}.gate_up_proj"] = torch.stack(pairs)
            joined[f"{stem}.down_proj"] = torch.stack([own[expert, "down_proj"] for expert in range(count)])
        else:
            joined |= {name: tensors[name] for name, match in found.items() if match[1] == stem}
    return joined
