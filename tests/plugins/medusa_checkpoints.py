"""Small Medusa heads for the tiny target, and writers of each publisher's layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from plugin_helpers import TargetStates
from replaying import Forced, InDeviceForm, Recording
from safetensors.torch import save_file
from torch import Tensor

from specdec.plugins.medusa.proposer import MedusaProposer


class ForcedMedusa(Forced, MedusaProposer):
    pass


class ForcedInDeviceForm(InDeviceForm, ForcedMedusa):
    pass


class RecordingMedusa(Recording, MedusaProposer):
    pass


@dataclass(frozen=True)
class Heads:
    """The weights, under nobody's names."""

    layers: list[list[tuple[Tensor, Tensor | None]]]  # per head and layer: weight [H, H], bias [H]
    outputs: list[Tensor]  # per head: [D, H]
    token_map: Tensor | None = None  # [D] target ids

    @property
    def num_layers(self) -> int:
        return len(self.layers[0])

    def logits(self, head: int, hidden: Tensor) -> Tensor:
        """[D] for a final hidden state [H], in plain torch."""
        for weight, bias in self.layers[head]:
            z = weight @ hidden + (0 if bias is None else bias)
            hidden = hidden + z / (1 + torch.exp(-z))
        return self.outputs[head] @ hidden

    def draft(self, head: int, hidden: Tensor) -> int:
        """The target id that a head thinks likeliest."""
        best = int(self.logits(head, hidden).argmax())
        return best if self.token_map is None else int(self.token_map[best])


def fitted_heads(
    target: TargetStates, text: Sequence[int], num_heads: int, *, num_layers: int = 1, bias: bool = True
) -> Heads:
    """Heads whose output is the target's on a linear guess of its later state, so that some drafts are accepted."""
    generator = torch.Generator().manual_seed(0)
    final = target.of(text)["final"]
    width = final.shape[1]

    def small(*shape: int) -> Tensor:
        return 0.02 * torch.randn(*shape, generator=generator)

    layers = [
        [(small(width, width), small(width) if bias else None) for _ in range(num_layers)] for _ in range(num_heads)
    ]
    outputs = []
    for ahead in range(1, num_heads + 1):
        now, later = final[:-ahead], final[ahead:]
        guess = torch.linalg.solve(now.T @ now + 10 * torch.eye(width), now.T @ later)
        outputs.append((target.head.detach() @ guess.T).contiguous())
    return Heads(layers, outputs)


def truncated(heads: Heads, chosen: Sequence[int]) -> Heads:
    """The same heads over some of the vocabulary, in the order given."""
    ids = torch.tensor(chosen)
    return replace(heads, outputs=[output[ids].contiguous() for output in heads.outputs], token_map=ids)


def save_fasterdecoding(directory: Path, heads: Heads, *, stated_heads: int | None = None, prefix: str = "") -> Path:
    """medusa_lm_head.pt with `{head}.{layer}.linear.*` and `{head}.{L}.weight`."""
    tensors: dict[str, Tensor] = {}
    for head, layers in enumerate(heads.layers):
        for index, (weight, bias) in enumerate(layers):
            tensors[f"{prefix}{head}.{index}.linear.weight"] = weight
            tensors |= {} if bias is None else {f"{prefix}{head}.{index}.linear.bias": bias}
        tensors[f"{prefix}{head}.{heads.num_layers}.weight"] = heads.outputs[head]
    config = {"medusa_num_heads": stated_heads or len(heads.layers), "medusa_num_layers": heads.num_layers}
    write_config(directory, config | {"base_model_name_or_path": "tiny"})
    torch.save(tensors, directory / "medusa_lm_head.pt")
    return directory


def save_vllm(directory: Path, heads: Heads, *, prefix: str = "", original_lm_head: bool = False) -> Path:
    """model.safetensors with `blocks.{i}.layers.{j}.*` and `lm_heads.{i}.weight` or one `lm_head.weight`."""
    tensors: dict[str, Tensor] = {}
    for head, layers in enumerate(heads.layers):
        for index, (weight, bias) in enumerate(layers):
            tensors[f"{prefix}blocks.{head}.layers.{index}.weight"] = weight
            tensors |= {} if bias is None else {f"{prefix}blocks.{head}.layers.{index}.bias": bias}
        tensors[f"{prefix}lm_head.weight" if original_lm_head else f"{prefix}lm_heads.{head}.weight"] = heads.outputs[
            head
        ]
    tensors |= {} if heads.token_map is None else {f"{prefix}token_map": heads.token_map}
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": heads.outputs[0].shape[1],
        "vocab_size": 4096,
        "num_heads": len(heads.layers),
        "num_hidden_layers": heads.num_layers,
        "truncated_vocab_size": len(heads.outputs[0]),
        "medusa_fc_bias": heads.layers[0][0][1] is not None,
        "original_lm_head": original_lm_head,
    }
    write_config(directory, config)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def write_config(directory: Path, config: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
