"""Whether a proposer wrote to the step view that it only borrows."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from specdec.sdk.types import StepView

MOST_ENTRIES = 2**16
"""Of a tensor on the host that is copied; a larger one (a long history) is watched by its version counter."""


class Snapshot:
    """A view's tensors as they are now. Those on a device are not copied: to compare them would wait for it."""

    def __init__(self, step: StepView) -> None:
        self._kept = [(field, tensor, _copy(tensor)) for field, tensor in tensors_of(step)]

    def changes(self) -> list[str]:
        """The tensors that are different now, "step.kept.positions: ..."; what became of each."""
        found = ((field, _change(tensor, copy)) for field, tensor, copy in self._kept)
        return [f"{field}: {change}" for field, change in found if change]


def tensors_of(step: StepView) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a view, with their names."""
    held = vars(step)  # without the properties that watch what is read
    parts = {name: vars(held[name]) if held[name] else {} for name in ("kept", "sampling", "rejected")}
    records = {"": held} | {f"{name}.": record for name, record in parts.items()}
    for prefix, record in records.items():
        for name, value in record.items():
            if isinstance(value, Tensor):
                yield f"step.{prefix}{name}", value
    for place, state in enumerate(parts["kept"]["hidden"]):
        yield f"step.kept.hidden[{place}]", state


def _copy(tensor: Tensor) -> Tensor | int | None:
    """Copy a tensor, or remember its version. None means neither, because tensors made in inference mode have no
    version counter.
    """
    if tensor.device.type == "cpu" and tensor.numel() <= MOST_ENTRIES:
        return tensor.clone()
    return None if tensor.is_inference() else tensor._version


def _change(tensor: Tensor, copy: Tensor | int | None) -> str | None:
    if not isinstance(copy, Tensor):
        return None if copy is None or tensor._version == copy else "written to"
    if tensor.shape != copy.shape:
        return f"shape {tuple(copy.shape)} -> {tuple(tensor.shape)}"
    different = tensor.ne(copy) & ~(tensor.isnan() & copy.isnan())
    if not bool(different.any()):
        return None
    places = different.nonzero()
    first = tuple(places[0].tolist())
    entry = ", ".join(map(str, first))
    count = "1 entry" if len(places) == 1 else f"{len(places)} entries, the first"
    return f"{count} at [{entry}]: {copy[first].item():g} -> {tensor[first].item():g}"


def is_due(number: int) -> bool:
    """Whether the `number`-th (from 1) of many like things is looked at closely: the first 16, then one of 256."""
    return number <= 16 or number % 256 == 0
