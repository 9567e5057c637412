"""Adapters of low rank for the tiny target in the files of PEFT, and what they draft, computed by transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from plugin_helpers import TargetStates
from safetensors.torch import save_file
from torch import Tensor

V, RANK, ALPHA = 4096, 4, 16
CONFIG = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
SIZES = {  # in, out
    "self_attn.q_proj": (256, 256),
    "self_attn.v_proj": (256, 128),
    "self_attn.o_proj": (256, 256),
    "mlp.up_proj": (256, 640),
    "mlp.down_proj": (640, 256),
}


@dataclass
class Lora:
    """An adapter: its configuration and its tensors, by published names."""

    config: dict[str, Any] = field(default_factory=lambda: dict(CONFIG))
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def save(self, path: Path) -> Path:
        path.mkdir(parents=True)
        (path / "adapter_config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, path / "adapter_model.safetensors")
        return path

    def changed(self, tensors: dict[str, Tensor | None] | None = None, **config: Any) -> Lora:
        """With other tensors and other fields; None takes one away."""
        kept = {name: each for name, each in (self.tensors | (tensors or {})).items() if each is not None}
        return Lora({key: value for key, value in (self.config | config).items() if value is not None}, kept)

    @contextmanager
    def on(self, target: TargetStates, first_row: int):
        """Rows from `first_row` on of the target's passes run with the adapter."""

        def add(down: Tensor, up: Tensor, module, args, output):
            term = args[0] @ down.T @ up.T * (ALPHA / RANK)
            return output + term * (torch.arange(term.shape[1]) >= first_row)[:, None]

        handles = []
        for name in self.tensors:
            if name.endswith("lora_A.weight"):
                layer = target.model.get_submodule(
                    name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                )
                pair = self.tensors[name], self.tensors[name.replace("lora_A", "lora_B")]
                handles.append(layer.register_forward_hook(partial(add, *pair)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def logits(self, target: TargetStates, committed: Sequence[int], k: int, noise: Sequence[int]) -> Tensor:
        """Of K drafts [K, V]: one pass over all of the text and rows of noise, which alone have the adapter."""
        ids = torch.tensor([[*committed, *noise]])
        with self.on(target, len(committed)):
            return target.model(ids, use_cache=False).logits[0, -k:]


def lora(scale: float = 1.0, layers: Sequence[int] = range(8), names: Sequence[str] = tuple(SIZES)) -> Lora:
    """Random matrices that change the drafts."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for layer in layers:
        for name in names:
            inputs, outputs = SIZES[name]
            stem = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) / inputs**0.5
            tensors[f"{stem}.lora_B.weight"] = scale * torch.randn(outputs, RANK, generator=generator) / RANK
    return Lora(CONFIG | {"target_modules": [name.rpartition(".")[2] for name in names]}, tensors)
