"""A target that is loaded, in the form in which it is served, and proved to compute what it computed before."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..cache.block_pool import BlockPool
from ..device_memory import spare_memory
from ..model.inference_form import prepare
from ..model.model_support import longest_length
from ..model.quantization import is_stored_quantised
from ..model.target import TargetModel
from ..model.target_proof import TargetProof, is_wanted
from ..model.text_equality import TextEquality
from ..model.tokenizer import load_tokenizer
from .paged_cache import PagedCache
from .plan import Plan
from .threads import Threads


@dataclass(frozen=True)
class LoadedModel:
    """What is loaded from a target's checkpoint, and what follows from its size and layers."""

    target: TargetModel
    tokenizer: Any
    threads: Threads
    text_equality: TextEquality


def load_model(plan: Plan) -> LoadedModel:
    """Raises ConfigError, UnsupportedModelError."""
    config, profile = plan.config, plan.profile
    trusts = config.trust_remote_code
    tokenizer = load_tokenizer(config.tokenizer, plan.path, trust_remote_code=trusts)
    target = TargetModel.load(
        plan.path, plan.hf_config, plan.dtype, profile.device, config.moe_backend, trust_remote_code=trusts
    )
    _prepare(target, plan)
    threads = profile.threads(config.num_threads, target.model)
    text_equality = profile.text_equality(target.dtype).of_target(target, profile.backend)
    if plan.speculation and plan.speculation.is_lossless:
        text_equality.tell()
    return LoadedModel(target, tokenizer, threads, text_equality)


def _prepare(target: TargetModel, plan: Plan) -> None:
    """Bring the weights into the form that is served, and prove what they compute there.

    Quantised weights are compared with themselves. Raises UnsupportedModelError SD-E189, ConfigError SD-E192.
    """
    quantization = plan.config.quantization
    longest = longest_length(plan.info.config, target.config.attribute_map)
    quantised = quantization is not None or is_stored_quantised(plan.hf_config)
    proofs = partial(TargetProof, target, longest, quantised=quantised)
    wanted = is_wanted(target, plan.config.prove_target)
    proof = proofs() if wanted and quantization is None else None
    room, head = spare_memory(target.device), target.model.get_output_embeddings()
    prepare(target.model, quantization, plan.profile.backend, keep=head, room=room, drop=True)
    if wanted:
        _prove(proof or proofs(), target, plan)


def _prove(proof: TargetProof, target: TargetModel, plan: Plan) -> None:
    """In a cache that is as small as the pass."""
    info = replace(plan.info, max_num_seqs=proof.num_requests)
    num_blocks = info.max_num_seqs * -(-proof.num_tokens // info.block_size)
    pool = BlockPool(num_blocks, info.block_size, region_size=num_blocks)
    cache = PagedCache.build(plan.profile, info, target, pool, info.max_num_seqs * proof.num_tokens, lookahead=0)
    proof.check(cache.kv, cache.addressing)
