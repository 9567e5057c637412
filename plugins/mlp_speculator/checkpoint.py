"""An MLP speculator's configuration and tensors, as foundation-model-stack writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.sdk import Refusal, TargetInfo
from specdec.sdk.checkpoint import Checkpoint, require_target, unusable

PREFIX = "speculator."
"""Of every tensor's name in most files."""

_PARTS = ("emb", "proj", "ln", "head")
_TENSOR = re.compile(r"(emb|proj|ln|head)\.(\d+)\.(weight|bias)")


@dataclass(frozen=True, kw_only=True)
class MlpSpec:
    """What the stages are made of. Stage i drafts the token i + 1 places after the newest."""

    num_stages: int
    hidden_size: int  # of the target's state, which the first stage reads
    width: int  # of a stage
    vocab_size: int
    scales_input: bool
    stored: Mapping[str, int]  # for each part how many are stored; the last one serves the stages behind it

    @classmethod
    def read(cls, checkpoint: Checkpoint, target: TargetInfo) -> MlpSpec:
        """Read config.json and the tensors' names.

        Raises Refusal for speculators of another target and for Arctic's; CheckpointError: SD-E146, SD-E170 .. SD-E172.
        """
        arctic = [name for name in checkpoint.get("architectures", list, []) if "Arctic" in str(name)]
        if arctic:
            reason = f"{arctic[0]} is not implemented: its stages have other parts than IBM's"
            raise Refusal(reason, "an MLPSpeculatorPreTrainedModel")
        hidden_size, vocab_size = checkpoint.get("emb_dim", int), checkpoint.get("vocab_size", int)
        require_target(target, hidden_size=hidden_size, vocab_size=vocab_size)
        num_stages = checkpoint.get("n_predict", int)
        return cls(
            num_stages=num_stages,
            hidden_size=hidden_size,
            width=checkpoint.get("inner_dim", int, 0) or hidden_size,
            vocab_size=vocab_size,
            scales_input=checkpoint.get("scale_input", bool, False),
            stored=_stored(checkpoint, num_stages),
        )


def _stored(checkpoint: Checkpoint, num_stages: int) -> dict[str, int]:
    """How many of each part make up the network.

    With `tie_weights` one serves all stages, but the first projection, which reads another width. Heads may stay apart.
    """
    if not checkpoint.get("tie_weights", bool, False):
        return dict.fromkeys(_PARTS, num_stages)
    heads = sum(name.removeprefix(PREFIX).startswith("head.") for name in checkpoint.shapes)
    return {"emb": 1, "proj": min(2, num_stages), "ln": 1, "head": num_stages if heads > 1 else 1}


def our_tensors(
    tensors: Mapping[str, Tensor], spec: MlpSpec, num_stages: int, checkpoint: Checkpoint
) -> dict[str, Tensor]:
    """The tensors of the first stages. Copies of what is tied are left out.

    Raises CheckpointError SD-E171 where a tensor that the configuration says is tied differs from what it repeats.
    """
    ours = {}
    for stored, tensor in tensors.items():
        name = stored.removeprefix(PREFIX)
        found = _TENSOR.fullmatch(name)
        last = spec.stored[found[1]] - 1 if found else 0
        if found is None or int(found[2]) <= min(last, num_stages - 1):
            ours[name] = tensor
        elif int(found[2]) > last and not _repeats(tensor, tensors, stored, name, f"{found[1]}.{last}.{found[3]}"):
            raise unusable(checkpoint, "tie_weights", f"{name} like {found[1]}.{last}", "other values")
    return ours


def _repeats(tensor: Tensor, tensors: Mapping[str, Tensor], stored: str, name: str, first: str) -> bool:
    original = tensors.get(stored.removesuffix(name) + first)
    return original is not None and torch.equal(tensor, original)
