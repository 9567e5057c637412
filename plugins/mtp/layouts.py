"""How publishers name the tensors of a multi-token-prediction module, and in what their forward passes differ."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

Recycled = Literal["normed", "block"]


@dataclass(frozen=True, kw_only=True)
class MtpLayout:
    """Names of one publisher's tensors. `{index}` stands for the number of a module."""

    name: str
    prefix: str  # of everything that belongs to a module
    parts: Mapping[str, str]  # our name of each part: the published one, behind the prefix
    layer: str = ""  # prefix of the decoder layer's tensors, behind the prefix
    hidden_first: bool = False  # the projection reads [hidden; embedding] instead of [embedding; hidden]
    recycled: Recycled = "normed"  # the output that the next step reads: after the final norm, or the block's own
    is_alone: bool = False  # its checkpoint holds nothing else: an embedding or a head in there is the module's

    def modules(self, names: Collection[str]) -> list[int]:
        """The numbers of the modules among the tensors of a checkpoint, in increasing order."""
        projection = _pattern(self.prefix + self.parts["projection"] + ".weight")
        found = [match for each in names if (match := projection.fullmatch(each))]
        if found and not projection.groups:  # one projection for all modules: their layers are numbered
            layer = _pattern(self.prefix + self.layer)
            found = [match for each in names if (match := layer.match(each))]
        return sorted({int(match[1]) for match in found})

    @property
    def shares_projection(self) -> bool:
        """Whether there is one projection for all modules: how further modules are run is then nowhere stated."""
        return "{index}" not in self.prefix + self.parts["projection"]

    def has_experts(self, names: Collection[str], index: int) -> bool:
        """Whether the layer of a module has experts."""
        layer = (self.prefix + self.layer).format(index=index)
        return any(name.startswith(layer) and ".experts." in name for name in names)

    def prefixes(self, index: int) -> tuple[str, ...]:
        """What to read of the checkpoint."""
        return ("",) if self.is_alone else (self.prefix.format(index=index),)

    def renames(self, index: int) -> dict[str, str]:
        """Our prefix for every published one, to be applied in this order."""
        ours = {f"{published}.": f"{part}." for part, published in self.parts.items()} | {self.layer: "layer."}
        return {(self.prefix + published).format(index=index): part for published, part in ours.items()}

    def further_modules(self) -> tuple[str, ...]:
        """Patterns of the names that remain of further modules when the one in use is renamed."""
        behind = (self.layer, *(f"{published}." for published in self.parts.values()))
        return tuple((self.prefix + each).replace("{index}", "*") + "*" for each in behind if "{index}" in each)


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{index\}", r"(\d+)"))


_NEXTN_PARTS = {
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "projection": "eh_proj",
    "final_norm": "shared_head.norm",
    "lm_head": "shared_head.head",
    "embed_tokens": "embed_tokens",
}
_NAMED_BY_INPUT = {
    "embedding_norm": "token_layernorm",
    "hidden_norm": "hidden_layernorm",
    "projection": "input_proj",
    "final_norm": "final_layernorm",
}

LAYOUTS = (
    MtpLayout(name="DeepSeek", prefix="model.layers.{index}.", parts=_NEXTN_PARTS),
    MtpLayout(name="MiMo", prefix="model.mtp_layers.{index}.", parts=_NAMED_BY_INPUT, hidden_first=True),
    MtpLayout(
        name="Qwen",
        prefix="mtp.",
        parts={
            "embedding_norm": "pre_fc_norm_embedding",
            "hidden_norm": "pre_fc_norm_hidden",
            "projection": "fc",
            "final_norm": "norm",
            "embed_tokens": "embed_tokens",
            "lm_head": "lm_head",
        },
        layer="layers.{index}.",
    ),
    MtpLayout(
        name="Ernie",
        prefix="model.mtp_",
        parts={
            "embedding_norm": "emb_norm.{index}",
            "hidden_norm": "hidden_norm.{index}",
            "projection": "linear_proj.{index}",
        },
        layer="block.{index}.",
        recycled="block",
    ),
    MtpLayout(name="speculators", prefix="mtp_layers.{index}.", parts=_NAMED_BY_INPUT, is_alone=True),
)

BLOCK_RECYCLING_TYPES = frozenset({"glm4_moe", "glm4_moe_lite"})
"""Model types that share DeepSeek's names but feed the block's output back before the final norm."""

UNSERVED = {
    r"model\.layers\.\d+\.transformer\..*": (
        "Step-3.5 (model.layers.*.transformer)",
        "readers disagree whether a module hands its state on before its norm or behind it",
    ),
    r"(language_model\.)?model\.mtp\.layers\.\d+\.transformer_layer\..*": (
        "MiniMax-M3 (*.transformer_layer)",
        "its norms add one to their weights, and the first token of a text is read as zeros",
    ),
    r"model\.mtp\.(chain_norm|layers\.\d+\.(input_proj|transformer_block))\..*": (
        "Inkling (*.input_proj)",
        "it reads embeddings behind a norm of the target's",
    ),
    r"model\.mtp\.layers\.\d+\..*": (
        "MiMo-V2 or LongCat (model.mtp.layers.*)",
        "its layers have parts that no type of layer here has",
    ),
    r"mtp\.layers\.\d+\.(enorm|hnorm|eh_proj)\..*": (
        "Nemotron-H (mtp.layers.*.eh_proj)",
        "a module is several layers, with its norms around all of them",
    ),
    r"(pre|post)_projection\.weight": (
        "Gemma-4 assistant (pre_projection)",
        'it reads the target\'s own keys and values, and "method": "gemma4_assistant" runs it',
    ),
    r"mtp\.\d+\..*": ("DeepSeek-V4 (mtp.*)", "its layers have hyper-connections, like the target's own"),
}
"""Layouts that are known and not implemented: their names, and why."""


def find_modules(names: Collection[str]) -> tuple[MtpLayout, list[int]] | None:
    """The layout and the numbers of the modules among a checkpoint's tensors."""
    for layout in LAYOUTS:
        numbers = layout.modules(names)
        if numbers:
            return layout, numbers
    return None


def unserved_layout(names: Collection[str]) -> tuple[str, str] | None:
    """The known layout, not implemented, that a checkpoint's tensors have, and why."""
    for pattern, told in UNSERVED.items():
        if any(re.fullmatch(pattern, each) for each in names):
            return told
    return None
