"""A DFlash checkpoint's tensors under one layout's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdec.sdk import Services, TargetInfo
from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.errors import CheckpointError
from specdec.sdk.model_proposer import DraftVocabulary, Weights

from .checkpoint import MASK_EMBEDDING_FILE, DFlashSpec
from .variants import refuse_tensors_of_others

_FUSED = ".qkv_proj.weight"
_TURNED = re.compile(r"self_attn\.[qk]_(proj|norm)\.")


def open_weights(checkpoint: Checkpoint, services: Services, spec: DFlashSpec) -> Weights:
    """The tensors that make up the network. Raises CheckpointError: SD-E146, SD-E174 for another member's tensors."""
    tensors = services.load_tensors(checkpoint.directory)
    refuse_tensors_of_others(tensors, spec.member, checkpoint)
    tensors = _split_fused(tensors, spec)
    if spec.turns_neighbours:
        tensors |= _turned_by_halves(tensors, spec.decoder["head_dim"])
    weights = Weights(tensors, checkpoint.directory)
    for old, new in {"model.": "", "encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}.items():
        weights.rename(old, new)
    weights.drop("t2d", "verifier_*", "confidence_head.*")  # for training alone, and for sizing what is verified
    return weights


def mapped_ids(checkpoint: Checkpoint, spec: DFlashSpec, target: TargetInfo) -> tuple[int, ...] | None:
    """The target id of each draft id, None if they are the same; dense distributions are declared with it.

    Raises CheckpointError: SD-E172 if a smaller vocabulary has no map, SD-E173 if its map does not fit.
    """
    if spec.draft_vocab_size == target.vocab_size and "d2t" not in checkpoint.shapes:
        return None
    vocabulary = DraftVocabulary.from_offsets(checkpoint.tensor("d2t"), target.vocab_size)
    return None if vocabulary is None else tuple(vocabulary.target_ids.tolist())


def mask_embedding(checkpoint: Checkpoint, spec: DFlashSpec, width: int) -> Tensor:
    """The embedding [width] that stands in the mask token's row. Raises CheckpointError: SD-E146, SD-E175."""
    file = checkpoint.directory / MASK_EMBEDDING_FILE
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file makes the reader raise
        raise CheckpointError("SD-E146", f"cannot read {file}", {"because": error}) from error
    found = saved if isinstance(saved, Mapping) else {"embedding": saved}
    embedding, token_id = found.get("embedding"), found.get("mask_token_id")
    if not isinstance(embedding, Tensor) or embedding.numel() != width:
        shape = list(embedding.shape) if isinstance(embedding, Tensor) else type(embedding).__name__
        facts = {"file": file, "expected": f"an embedding [{width}]", "found": shape}
        raise CheckpointError("SD-E175", "the draft checkpoint's mask embedding has another shape", facts)
    if token_id is not None and spec.mask_token_id is not None and int(token_id) != spec.mask_token_id:
        facts = {"file": file, "expected": f"mask_token_id {spec.mask_token_id}", "found": token_id}
        raise CheckpointError("SD-E171", "the draft checkpoint's mask embedding is for another token", facts)
    return embedding.flatten()


def mask_token_id(checkpoint: Checkpoint, spec: DFlashSpec, tokenizer: Any) -> int:
    """The mask token's id, stated or looked up by its name. Raises CheckpointError SD-E170 for an unknown name."""
    if spec.mask_token_id is not None:
        return spec.mask_token_id
    known: dict[str, int] = {} if tokenizer is None else tokenizer.get_vocab()
    if spec.mask_token not in known:
        facts = {
            "field": "mask_token_id",
            "file": checkpoint.config_file,
            "mask_token": f"{spec.mask_token!r} is no token of the target's tokenizer",
        }
        raise CheckpointError("SD-E170", "the draft checkpoint's configuration has no 'mask_token_id'", facts)
    return known[spec.mask_token]


def _split_fused(tensors: Mapping[str, Tensor], spec: DFlashSpec) -> dict[str, Tensor]:
    """Projections that some publishers store as one matrix, query rows first."""
    heads, kv_heads = spec.decoder["num_attention_heads"], spec.decoder["num_key_value_heads"]
    sizes = [each * spec.decoder["head_dim"] for each in (heads, kv_heads, kv_heads)]
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(_FUSED) and len(tensor) == sum(sizes):
            stem = name.removesuffix(_FUSED)
            parts = zip("qkv", torch.split(tensor, sizes), strict=True)
            split |= {f"{stem}.{letter}_proj.weight": part for letter, part in parts}
        else:
            split[name] = tensor
    return split


def _turned_by_halves(tensors: Mapping[str, Tensor], head_dim: int) -> dict[str, Tensor]:
    """Queries and keys with another order in each head, for layers whose rotary pairs lie half a head apart.

    Pairs that were neighbours come to lie so. The products of queries and keys stay what they were.
    """
    order = torch.arange(head_dim).view(-1, 2).T.flatten()  # 0, 2, 4, ..., 1, 3, 5, ...
    turned = {name: each for name, each in tensors.items() if _TURNED.search(name) and len(each) % head_dim == 0}
    return {name: each.reshape(-1, head_dim, *each.shape[1:])[:, order].flatten(0, 1) for name, each in turned.items()}
