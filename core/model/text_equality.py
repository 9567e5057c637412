"""Whether text with drafts is plain decoding's token for token, or follows its distribution only.

The distribution is the target's in any case. Token for token takes more: a token's logits must be the same bits
whatever is computed beside it, and most libraries round by how many rows they are given.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from specdec.sdk.errors import message

from ..kernels.backend import Backend

if TYPE_CHECKING:
    from .target import TargetModel

logger = logging.getLogger("specdec")

Level = Literal["bits", "ties", "distribution"]

HOLDS: dict[Level, str] = {
    "bits": "greedy text, and seeded text with one-hot drafts, is plain decoding's token for token",
    "ties": "greedy text, and seeded text with one-hot drafts, is plain decoding's but for ties within rounding",
    "distribution": "text follows the target's distribution; token for token it may part from plain decoding's",
}


@dataclass(frozen=True)
class TextEquality:
    """What is promised of a dtype, a device and the kernels that compute there."""

    level: Level
    because: str
    fix: str | None = None  # what would promise more

    @classmethod
    def of_cpu(cls, dtype: torch.dtype, backend: Backend) -> TextEquality:
        """The promise for a model whose every layer the backend can compute."""
        if dtype == torch.float16:
            return cls("distribution", "PyTorch computes float16, and its rounding depends on the batch", _DTYPES)
        if not backend.is_batch_invariant:
            level: Level = "ties" if dtype == torch.float32 else "distribution"
            return cls(level, "PyTorch's kernels compute, and their rounding depends on the batch", _KERNELS)
        if dtype == torch.bfloat16 and torch.cpu.get_capabilities().get("amx_bf16"):
            return cls("distribution", "oneDNN multiplies bfloat16 on this processor", 'dtype="float32"')
        return cls("bits", "our kernels compute a row alike whatever is beside it")

    def of_target(self, target: TargetModel, backend: Backend) -> TextEquality:
        """What is left of a machine's promise for a model in the form in which it runs."""
        if self.level == "distribution":
            return self
        others = dict(_computed_by_others(target.model, backend))
        wide = target.dtype == torch.float32 and all(dtype == torch.float32 for dtype in others.values())
        level: Level = "ties" if wide else "distribution"
        if not backend.is_batch_invariant:
            return replace(self, level=level)
        shapes = {(layer.key_dim, layer.value_dim) for layer in target.layer_shapes if layer.num_kv_heads}
        if not all(backend.serves_heads(target.dtype, *sizes) for sizes in shapes):
            sizes = " and ".join(str(size) for size in sorted({size for shape in shapes for size in shape}))
            return TextEquality(level, f"PyTorch attends, with heads of size {sizes}")
        return TextEquality(level, f"PyTorch computes {next(iter(others))}") if others else self

    @property
    def sentence(self) -> str:
        """What holds, and why."""
        return f"{HOLDS[self.level]} ({self.because})"

    def tell(self) -> None:
        """Say once, at the start of an engine with a proposer, which promise holds."""
        if self.level != "distribution":
            logger.info("%s", self.sentence)
            return
        facts = {"because": self.because, "holds": "every token has the target's distribution, as always"}
        facts |= {"fix": self.fix} if self.fix else {}
        logger.warning("%s", message("SD-W305", "text may part from plain decoding's at near ties", facts))


ON_A_GPU = TextEquality("distribution", "on a GPU rounding depends on the batch")
_DTYPES = 'dtype="float32" or "bfloat16"'
_KERNELS = 'install gcc and leave cpu_kernels at "auto"'


def _computed_by_others(model: Any, backend: Backend) -> Iterator[tuple[str, torch.dtype | None]]:
    """Every module with matrices that the backend does not multiply by; None for matrices in a form of their own."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or backend.serves(module):
            continue
        for each in chain(module.parameters(recurse=False), module.buffers(recurse=False)):
            if each.dim() >= 2:
                yield f"{name} ({type(module).__name__})", each.dtype if type(each) in (nn.Parameter, Tensor) else None
