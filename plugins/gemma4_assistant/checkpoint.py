"""What an assistant's config.json says, held against the target that it is to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.sdk import Refusal, TargetInfo
from specdec.sdk.checkpoint import Checkpoint, require_target
from specdec.sdk.errors import CheckpointError

_GLOBAL_HEAD_DIM = 512  # of transformers' configuration, where none is stated
_WORKS = "the assistant of this target"


@dataclass(frozen=True, kw_only=True)
class OrderedHead:
    """How the vocabulary is divided: only tokens of the best clusters get logits."""

    num_centroids: int
    top_k: int


@dataclass(frozen=True, kw_only=True)
class AssistantSpec:
    """What the network is, and which layers of the target it reads."""

    decoder: Mapping[str, Any]  # the configuration of its layers
    width: int  # of the target's embeddings and states
    hidden_size: int
    vocab_size: int
    softcap: float | None
    ordered: OrderedHead | None  # None means that every token gets a logit
    sources: tuple[int, ...]  # the target's layer that each of its own reads

    @classmethod
    def read(cls, checkpoint: Checkpoint, target: TargetInfo) -> AssistantSpec:
        """Raises Refusal if it is for another target; CheckpointError: SD-E170, SD-E171, SD-E175."""
        decoder = checkpoint.get("text_config", dict)
        width = checkpoint.get("backbone_hidden_size", int, 1536)
        vocab_size = checkpoint.get("text_config.vocab_size", int)
        num_layers = checkpoint.get("text_config.num_hidden_layers", int)
        kinds = checkpoint.get("text_config.layer_types", list)
        require_target(target, _WORKS, hidden_size=width, vocab_size=vocab_size)
        sources = _sources(kinds, target.config)
        for layer, source in enumerate(sources):
            _check_heads(_heads(decoder, kinds, layer), _heads(target.config, target.config["layer_types"], source))
        return cls(
            decoder={"model_type": "gemma4_text", **decoder, "num_kv_shared_layers": num_layers},
            width=width,
            hidden_size=checkpoint.get("text_config.hidden_size", int),
            vocab_size=vocab_size,
            softcap=checkpoint.get("text_config.final_logit_softcapping", (int, float), None),
            ordered=_ordered(checkpoint, vocab_size),
            sources=sources,
        )


def _ordered(checkpoint: Checkpoint, vocab_size: int) -> OrderedHead | None:
    if not checkpoint.get("use_ordered_embeddings", bool, False):
        return None
    num_centroids = checkpoint.get("num_centroids", int, 2048)
    top_k = checkpoint.get("centroid_intermediate_top_k", int, 32)
    if vocab_size % num_centroids or not 0 < top_k <= num_centroids:
        facts = {"expected": "num_centroids that divide the vocabulary, and as many of them chosen at most"}
        facts["found"] = f"vocabulary {vocab_size}, num_centroids {num_centroids}, chosen {top_k}"
        raise CheckpointError("SD-E175", "the assistant's clusters do not fit its vocabulary", facts)
    return OrderedHead(num_centroids=num_centroids, top_k=top_k)


def _sources(kinds: Sequence[str], target: Mapping[str, Any]) -> tuple[int, ...]:
    """For each kind, the last layer of the target that computes keys and values of its own. Raises Refusal."""
    stated = list(target.get("layer_types") or ())
    own = stated[: len(stated) - (target.get("num_kv_shared_layers") or 0)]
    last = {kind: number for number, kind in enumerate(own)}
    missing = sorted(set(kinds) - set(last))
    if missing:
        reason = f"the assistant reads layers of the kinds {', '.join(missing)}, and the target states none of them"
        raise Refusal(reason, "the Gemma 4 model that the assistant was made for, as the target")
    return tuple(last[kind] for kind in kinds)


@dataclass(frozen=True)
class _Heads:
    """The numbers of heads of a layer, and their size."""

    queries: int
    keys: int
    size: int


def _heads(config: Mapping[str, Any], kinds: Sequence[str], layer: int) -> _Heads:
    """Read a layer's heads: layer by layer as transformers writes them, or as published for layers with
    full attention.
    """
    own: Mapping[str, Any] = {}
    by_layer = config.get("per_layer_config")
    if by_layer is not None:
        number = str(layer).zfill(9)  # some are written as "05"
        own = next((each for name, each in by_layer.items() if str(name).zfill(9) == number), {})
    elif kinds[layer] == "full_attention":
        keys = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        own = {"head_dim": config.get("global_head_dim") or _GLOBAL_HEAD_DIM, "num_key_value_heads": keys}
    keys = own.get("num_key_value_heads") or config["num_key_value_heads"]
    return _Heads(config["num_attention_heads"], keys, own.get("head_dim") or config["head_dim"])


def _check_heads(own: _Heads, source: _Heads) -> None:
    """Keys are read as the target stores them, so their sizes agree, and query heads share the target's key heads."""
    if own.size != source.size:
        reason = f"it was made for a target whose head size is {own.size}, and this target's is {source.size}"
        raise Refusal(reason, _WORKS)
    if own.queries % source.keys:
        reason = f"the assistant has {own.queries} heads, which cannot share the {source.keys} of the target's keys"
        raise Refusal(reason, _WORKS)
