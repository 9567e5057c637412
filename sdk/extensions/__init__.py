"""What a proposer may ask for beyond the core. Each extension has a name and a number of its own.

    needs = Needs(history=True, extensions=(Trees(), TargetTokens(top_k=8)))

Importing it loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import Extension
from ..errors import did_you_mean
from .ahead import MOST_OUTCOMES, Ahead, AheadMethods
from .draft_kv import AttentionMode, DraftKV, DraftKVServices, DraftKVStore
from .grammars import Grammars, GrammarServices
from .graphs import Graphs, GraphServices
from .metrics import Metrics, MetricsMethods
from .networks import Networks, NetworkServices
from .new_weights import NewWeights, NewWeightsMethods
from .state import State, StateMethods
from .target_kv import TargetKV, TargetKVReader, TargetKVServices
from .target_layers import LayerRunner, TargetLayers, TargetLayersServices
from .target_tokens import RejectedTokens, TargetTokens
from .trees import Trees

__all__ = [
    "MOST_OUTCOMES",
    "Ahead",
    "AheadMethods",
    "AttentionMode",
    "DraftKV",
    "DraftKVServices",
    "DraftKVStore",
    "Extension",
    "GrammarServices",
    "Grammars",
    "GraphServices",
    "Graphs",
    "LayerRunner",
    "Metrics",
    "MetricsMethods",
    "NetworkServices",
    "Networks",
    "NewWeights",
    "NewWeightsMethods",
    "RejectedTokens",
    "State",
    "StateMethods",
    "TargetKV",
    "TargetKVReader",
    "TargetKVServices",
    "TargetLayers",
    "TargetLayersServices",
    "TargetTokens",
    "Trees",
]

KNOWN: Mapping[str, type[Extension]] = {
    each.id: each
    for each in (
        Trees,
        TargetTokens,
        TargetKV,
        TargetLayers,
        DraftKV,
        Graphs,
        Networks,
        State,
        NewWeights,
        Metrics,
        Ahead,
        Grammars,
    )
}
"""The extensions of this SDK by id."""


def as_extension(asked: object) -> Extension:
    """What an entry of `Needs.extensions` asks for: an extension, its id, or what JSON made of it.

    Raises ValueError for anything else, and ConfigError for its settings.
    """
    if isinstance(asked, Extension):
        return asked
    if isinstance(asked, type) and issubclass(asked, Extension):
        raise ValueError(f"{asked.__name__} is a class: write {asked.__name__}()")
    if isinstance(asked, str):
        return _known(asked)()
    if isinstance(asked, Mapping) and isinstance(asked.get("id"), str):
        settings: dict[str, Any] = {name: value for name, value in asked.items() if name != "id"}
        return _known(asked["id"])(**settings)
    raise ValueError("an extension is asked for as Trees() or 'trees@1'")


def as_json(asked: Extension) -> dict[str, Any]:
    """The form of an extension that `as_extension` reads."""
    return {"id": asked.id, **asked.model_dump(mode="json")}


def _known(id_: str) -> type[Extension]:
    if id_ in KNOWN:
        return KNOWN[id_]
    name, _, number = id_.partition("@")
    mine = next((each for each in KNOWN.values() if each.name == name), None)
    if mine is None:
        meant = did_you_mean(id_, KNOWN)
        hint = f"did you mean {meant!r}?" if meant else f"there are {', '.join(KNOWN)}"
        raise ValueError(f"no extension is called {id_!r}: {hint}")
    if number.isdecimal() and int(number) > mine.version:
        raise ValueError(f"this SDK has {mine.id}, and {id_!r} is newer: upgrade specdec-sdk, or ask for {mine.id!r}")
    raise ValueError(f"{id_!r} has no number that this SDK has: ask for {mine.id!r}")
