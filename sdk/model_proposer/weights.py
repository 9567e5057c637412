"""Moves a checkpoint's tensors into a network. Each is taken once, and missing or unused tensors raise errors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import CheckpointError

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


class Weights:
    """The tensors of one checkpoint by name."""

    def __init__(self, tensors: Mapping[str, Tensor], source: str | Path) -> None:
        """`source` names the checkpoint in errors."""
        self._tensors = dict(tensors)
        self._source = source

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def rename(self, old: str, new: str) -> None:
        """Rename every tensor whose name starts with `old`, so that several publishers' layouts become one.

        Raises CheckpointError SD-E174 if two tensors would have one name.
        """
        renamed: dict[str, Tensor] = {}
        for name, tensor in self._tensors.items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
            if name in renamed:
                facts = {"tensor": f"{name}, also as {old + name.removeprefix(new)}", "checkpoint": self._source}
                raise CheckpointError("SD-E174", "the draft checkpoint has a tensor under two names", facts)
            renamed[name] = tensor
        self._tensors = renamed

    def take(self, name: str, *shape: int) -> Tensor:
        """A required tensor.

        shape: its shape. -1 means any size.

        Raises CheckpointError: SD-E172 if it is missing, SD-E175 for another shape.
        """
        if name not in self._tensors:
            facts = {"tensor": f"{name} {list(shape)}", "checkpoint": self._source, "has": _listed(self._tensors)}
            raise CheckpointError("SD-E172", "the draft checkpoint lacks a tensor", facts)
        tensor = self._tensors.pop(name)
        if len(tensor.shape) != len(shape) or any(
            wanted not in (-1, found) for wanted, found in zip(shape, tensor.shape, strict=True)
        ):
            raise self._misshapen({name: (tuple(shape), tuple(tensor.shape))})
        return tensor

    def take_if_there(self, name: str, *shape: int) -> Tensor | None:
        """An optional tensor. None means that it is absent. Raises CheckpointError SD-E175 for another shape."""
        return self.take(name, *shape) if name in self._tensors else None

    def drop(self, *patterns: str) -> None:
        """Drop known tensors that the network does not use, by shell-style patterns."""
        self._tensors = {
            name: tensor
            for name, tensor in self._tensors.items()
            if not any(fnmatchcase(name, pattern) for pattern in patterns)
        }

    def fill(self, module: nn.Module, prefix: str = "") -> None:
        """Put the tensors below `prefix` into a module's parameters and buffers of the same names.

        Experts that are stored one by one are joined if the module keeps them joined. Tensors of the prefix without a
        place in the module stay, and `finish` reports them.

        Raises CheckpointError: SD-E172 if a tensor of the module is missing, SD-E175 for another shape.
        """
        places = dict(module.state_dict(keep_vars=True))
        self._tensors = joined_experts(self._tensors, {prefix + name for name in places})
        missing = {f"{prefix}{name} {list(place.shape)}" for name, place in places.items() if prefix + name not in self}
        if missing:
            facts = {"tensors": _listed(missing), "checkpoint": self._source, "has": _listed(self._tensors)}
            raise CheckpointError("SD-E172", "the draft checkpoint lacks tensors", facts)
        wrong = {
            prefix + name: (tuple(place.shape), tuple(self._tensors[prefix + name].shape))
            for name, place in places.items()
            if place.shape != self._tensors[prefix + name].shape
        }
        if wrong:
            raise self._misshapen(wrong)
        with torch.no_grad():
            for name, place in places.items():
                place.copy_(self._tensors.pop(prefix + name))

    def finish(self) -> None:
        """Raise CheckpointError SD-E174 if a tensor is left: the checkpoint is a variant that is not implemented."""
        if self._tensors:
            facts = {
                "tensors": _listed(self._tensors),
                "checkpoint": self._source,
                "why": "running the rest without them would draft with a network that was never trained",
            }
            raise CheckpointError("SD-E174", "the draft checkpoint has tensors that this proposer does not know", facts)

    def _misshapen(self, wrong: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> CheckpointError:
        facts: dict[str, object] = {
            name: f"expected {list(expected)}, found {list(found)}" for name, (expected, found) in wrong.items()
        }
        facts["checkpoint"] = self._source
        facts["fix"] = "use a checkpoint made for this target, with its own config.json"
        return CheckpointError(
            "SD-E175", "the draft checkpoint's tensors have other shapes than its configuration says", facts
        )


def load_module(module: nn.Module, tensors: Mapping[str, Tensor], source: str | Path) -> None:
    """Fill a module with exactly these tensors. Raises CheckpointError: SD-E172, SD-E174, SD-E175."""
    weights = Weights(tensors, source)
    weights.fill(module)
    weights.finish()


def expert_stems(names: Iterable[str]) -> set[str]:
    """What stands before the number in the names of experts that are stored one by one."""
    return {match[1] for name in names if (match := _EXPERT.fullmatch(name))}


def joined_experts(tensors: Mapping[str, Tensor], wanted: Collection[str]) -> dict[str, Tensor]:
    """The tensors, with experts joined where `wanted` has the joined names.

    Of E experts of inner width m on states of width H: gate_up_proj [E, 2m, H], the gate first; down_proj [E, H, m].
    A set that is not complete stays as it is, to be reported as missing.
    """
    found = {name: match for name in tensors if (match := _EXPERT.fullmatch(name))}
    joined = {name: tensor for name, tensor in tensors.items() if name not in found}
    for stem in sorted(expert_stems(found)):
        own = {(int(match[2]), match[3]): tensors[name] for name, match in found.items() if match[1] == stem}
        count = 1 + max(expert for expert, _ in own)
        if f"{stem}.gate_up_proj" in wanted and len(own) == 3 * count:
            pairs = [torch.cat([own[expert, "gate_proj"], own[expert, "up_proj"]]) for expert in range(count)]
            joined[f"{stem}.gate_up_proj"] = torch.stack(pairs)
            joined[f"{stem}.down_proj"] = torch.stack([own[expert, "down_proj"] for expert in range(count)])
        else:
            joined |= {name: tensors[name] for name, match in found.items() if match[1] == stem}
    return joined


def linear_of(weight: Tensor) -> nn.Linear:
    """A linear layer of a weight [out, in], without a bias."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:12]) + (f", and {len(names) - 12} more" if len(names) > 12 else "") or "none"
