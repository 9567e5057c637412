"""PARD-2: a draft model whose embeddings have a term of the target's hidden states (AMD-AGI/PARD, pard2_infer.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from specdec.sdk import Refusal, TargetInfo
from specdec.sdk.checkpoint import Checkpoint, read_tensors
from specdec.sdk.errors import CheckpointError
from specdec.sdk.model_proposer import load_module

FILE = "warp_model.bin"
_LAYERS = "pard2_target_layers"
_WIDTHS = ("pard2_target_dim", "pard_target_dim")
_SCALES = ("pard2_scale", "pard_scale", "feat_scale")
_USUAL_SCALE = 0.02


@dataclass(frozen=True, kw_only=True)
class Pard2Spec:
    """What the term is made of."""

    hidden_states: tuple[int | Literal["final"], ...]  # in the order in which they are concatenated
    scale: float
    has_bias: bool

    @classmethod
    def read(cls, checkpoint: Checkpoint, target: TargetInfo) -> Pard2Spec | None:
        """Read config.json. None means that the model reads tokens only.

        Raises Refusal if the layers are not the target's or a term is stored that the configuration does not mention;
        CheckpointError: SD-E170, SD-E171.
        """
        if not checkpoint.get("pard2", bool, False) and checkpoint.get("spd_type", str, "") != "pard2":
            if (checkpoint.directory / FILE).is_file():
                reason = f"it has a {FILE}, as PARD-2 models do, and its configuration does not say that it is one"
                raise Refusal(reason, f'"pard2": true in {checkpoint.config_file}, or the model without that file')
            return None
        layers = checkpoint.get(_LAYERS, list)
        if not layers or any(type(each) is not int or not 0 <= each <= target.num_layers for each in layers):
            reason = f"its {_LAYERS} {layers} are not all among 0 .. {target.num_layers}, the target's"
            raise Refusal(reason, "a checkpoint trained for this target")
        spec = cls(
            hidden_states=tuple("final" if each == target.num_layers else each for each in layers),
            scale=float(_first(checkpoint, _SCALES, (int, float), _USUAL_SCALE)),
            has_bias=checkpoint.get("pard2_proj_bias", bool, False),
        )
        width = len(layers) * target.hidden_size
        stated = _first(checkpoint, _WIDTHS, int, width)
        if stated != width:
            reason = f"it was trained on {stated} features, and {len(layers)} hidden states of the target have {width}"
            raise Refusal(reason, "a checkpoint trained for this target")
        return spec


class TargetTerm(nn.Module):
    """What is added to the embedding of row t: the scaled projection of the target's hidden states at t - 1."""

    def __init__(self, spec: Pard2Spec, target_width: int, width: int) -> None:
        super().__init__()
        self.target_proj = nn.Linear(len(spec.hidden_states) * target_width, width, bias=spec.has_bias)
        self._scale = spec.scale

    def load(self, checkpoint: Checkpoint) -> None:
        """Fill it, on the host. Raises CheckpointError: SD-E146, SD-E172, SD-E174, SD-E175."""
        file = checkpoint.directory / FILE
        if not file.is_file():
            facts = {"looked for": file, "fix": "download the checkpoint again, with this file"}
            raise CheckpointError(
                "SD-E146", f"a PARD-2 checkpoint has its projection in {FILE}, which is missing", facts
            )
        load_module(self, read_tensors(file, ("",)), file)

    def forward(self, hidden: Tensor) -> Tensor:
        """[M, h] of the target's hidden states [M, L*H]."""
        term: Tensor = self._scale * self.target_proj(hidden)
        return term


def _first(checkpoint: Checkpoint, names: tuple[str, ...], kind: type | tuple[type, ...], default: float) -> float:
    """The value of the first of several names that the configuration has."""
    found = (checkpoint.get(name, kind, None) for name in names)
    return next((each for each in found if each is not None), default)
