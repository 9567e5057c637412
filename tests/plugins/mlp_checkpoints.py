"""MLP speculators for the tiny target, written as published, and their drafts computed in plain torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from plugin_helpers import TargetStates
from replaying import Forced, InDeviceForm, Recording
from safetensors.torch import save_file
from torch import Tensor

from specdec.plugins.mlp_speculator.proposer import MlpSpeculatorProposer

H, V, WIDTH, NUM_STAGES = 256, 4096, 96, 3
CONFIG = {
    "architectures": ["MLPSpeculatorPreTrainedModel"],
    "model_type": "mlp_speculator",
    "emb_dim": H,
    "inner_dim": WIDTH,
    "n_predict": NUM_STAGES,
    "n_candidates": 5,
    "top_k_tokens_per_head": [5, 4, 3],
    "tie_weights": False,
    "scale_input": False,
    "vocab_size": V,
}


class ForcedMlp(Forced, MlpSpeculatorProposer):
    pass


class ForcedInDeviceForm(InDeviceForm, ForcedMlp):
    pass


class RecordingMlp(Recording, MlpSpeculatorProposer):
    pass


@dataclass
class Mlp:
    """A checkpoint: its configuration and its tensors, by published names without the prefix."""

    config: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    prefix: str = "speculator."

    def save(self, path: Path) -> Path:
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(self.config))
        stored = {self.prefix + name: tensor.clone().contiguous() for name, tensor in self.tensors.items()}
        save_file(stored, path / "model.safetensors")
        return path

    def changed(self, tensors: dict[str, Tensor | None] | None = None, **config: Any) -> Mlp:
        """With other tensors and other fields; None takes one away."""
        kept = {name: each for name, each in (self.tensors | (tensors or {})).items() if each is not None}
        stated = {key: value for key, value in (self.config | config).items() if value is not None}
        return Mlp(stated, kept, self.prefix)

    def part(self, name: str, stage: int) -> Tensor:
        """A stage's, or the last one stored before it."""
        part, kind = name.split(".")
        return next(
            self.tensors[f"{part}.{i}.{kind}"] for i in range(stage, -1, -1) if f"{part}.{i}.{kind}" in self.tensors
        )

    @torch.no_grad()
    def rollout(
        self, committed: list[int], k: int, target: TargetStates, drafted: list[int] | None = None
    ) -> tuple[list[int], Tensor]:
        """K draft tokens (those given, else the likeliest) and the logits [K, V] of each."""
        state = target.of(committed[:-1])["final"][-1]
        if self.config["scale_input"]:
            state = state / (state.square().mean() + 1e-6).sqrt() / 2**0.5
        tokens, logits = [committed[-1]], []
        for stage in range(k):
            state = self.stage(stage, state, tokens[-1])
            logits.append(self.part("head.weight", stage) @ state)
            tokens.append(int(logits[-1].argmax()) if drafted is None else drafted[stage])
        return tokens[1:], torch.stack(logits)

    def stage(self, stage: int, state: Tensor, token: int) -> Tensor:
        """The state behind a stage."""
        state_weight = 0.5 ** (0.5 / self.config["n_predict"])
        width = len(self.part("ln.weight", 0))
        token_weight = ((1 - state_weight**2) * width / 2) ** 0.5
        mixed = state_weight * (self.part("proj.weight", stage) @ state)
        mixed = (mixed + token_weight * self.part("emb.weight", stage)[token]) / state_weight
        normed = mixed / (mixed.square().mean() + 1e-6).sqrt()
        shifted = self.part("ln.weight", stage) * normed + self.part("ln.bias", stage)
        return shifted * 0.5 * (1 + torch.erf(shifted / 2**0.5))

    def draft(self, target: TargetStates) -> Any:
        """What is drafted greedily after committed tokens."""
        return lambda committed, k: self.rollout(committed, k, target)[0]


def mlp(target: TargetStates, texts: Sequence[list[int]], *, tied: bool = False, **config: Any) -> Mlp:
    """Random stages, their heads fitted to texts that they are tried on, so that some drafts are accepted."""
    generator = torch.Generator().manual_seed(0)
    made = Mlp(CONFIG | {"tie_weights": tied} | config)
    for stage in range(NUM_STAGES):
        inputs = WIDTH if stage else H
        parts = {
            "emb": {"weight": torch.randn(V, WIDTH, generator=generator)},
            "proj": {"weight": torch.randn(WIDTH, inputs, generator=generator) / inputs**0.5},
            "ln": {
                "weight": 1 + 0.1 * torch.randn(WIDTH, generator=generator),
                "bias": 0.1 * torch.randn(WIDTH, generator=generator),
            },
        }
        shared = {"emb", "ln"} | ({"proj"} if stage > 1 else set())
        for part, own in parts.items():
            if not (tied and stage and part in shared):
                made.tensors |= {f"{part}.{stage}.{kind}": tensor for kind, tensor in own.items()}
        made.tensors[f"head.{stage}.weight"] = fitted(made, stage, target, texts)
    return made


@torch.no_grad()
def fitted(made: Mlp, stage: int, target: TargetStates, texts: Sequence[list[int]]) -> Tensor:
    """A head [V, WIDTH] that maps a stage's states to the token that follows in texts."""
    made.tensors[f"head.{stage}.weight"] = torch.zeros(V, WIDTH)
    states, wanted = [], []
    for text in texts:
        finals = target.of(text)["final"]
        for place in range(1, len(text) - stage - 1, 2):
            state = finals[place - 1]
            if made.config["scale_input"]:
                state = state / (state.square().mean() + 1e-6).sqrt() / 2**0.5
            for each in range(stage + 1):
                state = made.stage(each, state, text[place + each])
            states.append(state)
            wanted.append(text[place + stage + 1])
    x, y = torch.stack(states), torch.nn.functional.one_hot(torch.tensor(wanted), V).float()
    return 40 * torch.linalg.solve(x.T @ x + 0.1 * torch.eye(WIDTH), x.T @ y).T.contiguous()
