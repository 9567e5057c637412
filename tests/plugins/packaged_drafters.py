"""Every packaged drafter, with its shipped checkpoint or one that is made for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gemma4_checkpoints
import make_eagle
from hydra_checkpoints import hydra
from lora_checkpoints import lora
from make_dspark import deepspec
from make_walks import dflash2, domino, lilicorr, xpress
from mlp_checkpoints import mlp
from mtp_checkpoints import NEXTN, Several, tiny_module, tiny_target
from other_tokenizers import fewer_tokens
from pard_checkpoints import pard2
from plugin_helpers import TargetStates
from replaying import tiny_truth


@dataclass(frozen=True)
class Asked:
    """What a user would write, and the target."""

    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    target: str = "tiny"

    @property
    def speculative(self) -> dict[str, Any]:
        """As `speculative_config`."""
        key = "model" if "/" in self.method else "method"
        return {key: self.method} | self.settings


Ask = Callable[[Path, TargetStates], Asked]


def shipped(path: str) -> Ask:
    return lambda folder, target: Asked(f"tiny/{path}")


def named(method: str, **settings: Any) -> Ask:
    return lambda folder, target: Asked(method, settings)


def made(method: str, make: Callable[[Path], Any], **settings: Any) -> Ask:
    """A checkpoint that needs no target."""
    return lambda folder, target: Asked(method, settings | {"model": str(_path_of(make(folder / "draft")))})


def fitted(method: str, make: Callable[..., Any]) -> Ask:
    """A checkpoint whose heads are fitted to texts of the target."""
    return lambda folder, target: Asked(method, {"model": str(make(target, tiny_truth()[4:7]).save(folder / "draft"))})


def _path_of(checkpoint: Any) -> Path:
    return checkpoint if isinstance(checkpoint, Path) else checkpoint.save().path


def several_modules(folder: Path, _: TargetStates) -> Asked:
    modules = Several([tiny_module(seed) for seed in range(3)])
    return Asked("mtp", target=str(tiny_target(folder / "target", modules.tensors(NEXTN, 8))))


def gemma4(folder: Path, _: TargetStates) -> Asked:
    target = gemma4_checkpoints.make_target()
    texts = [gemma4_checkpoints.generate(target, prompt, 24) for prompt in gemma4_checkpoints.PROMPTS]
    target.save_pretrained(folder / "target")
    gemma4_checkpoints.make_assistant(target, texts, ordered=True).save_pretrained(folder / "draft")
    return Asked("gemma4_assistant", {"model": str(folder / "draft")}, str(folder / "target"))


def uno(folder: Path, _: TargetStates) -> Asked:
    return Asked("uno", {"model": str(lora().save(folder / "draft"))})


fewer = partial(fewer_tokens, num_kept=2000)
DRAFTERS: dict[str, Ask] = {
    "ngram": named("ngram"),
    "suffix": named("suffix"),
    "token_recycling": named("token_recycling"),
    "draft_model": shipped("draft"),
    "eagle": shipped("eagle"),
    "eagle3": shipped("eagle3"),
    "dflash": shipped("dflash"),
    "dspark": shipped("dspark"),
    "medusa": shipped("medusa"),
    "mtp": named("mtp"),
    "mtp, three modules": several_modules,
    "P-EAGLE": made("eagle3", make_eagle.peagle),
    "EAGLE-3 with latent attention": made("eagle3", make_eagle.latent),
    "PARD": shipped("pard"),
    "PARD-2": made("draft_model", pard2),
    "intersection": made("draft_model", fewer, proposer_config={"vocabulary": "intersection"}),
    "reencode": made("draft_model", fewer, proposer_config={"vocabulary": "reencode"}),
    "DSpark, DeepSpec's layout": made("dspark", deepspec),
    "DSpark, gated": made("dspark", partial(deepspec, kind="gated", confidence="outputs")),
    "DSpark, recurrent": made("dspark", partial(deepspec, kind="rnn", confidence="none")),
    "DFlash2": made("dflash", dflash2),
    "Domino": made("dflash", domino),
    "XPress": made("dflash", xpress),
    "LiLiCorr": made("dflash", lilicorr),
    "hydra": fitted("hydra", hydra),
    "mlp_speculator": fitted("mlp_speculator", mlp),
    "layer_skip": named("layer_skip", proposer_config={"exit_layer": 6}),
    "gemma4_assistant": gemma4,
    "uno": uno,
}
