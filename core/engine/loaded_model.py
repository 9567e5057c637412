"""A target as it was loaded: in the form that is served, and proved to compute there what it should."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..cache.block_pool import BlockPool
from ..device_memory import spare_memory
from ..model.inference_form import freeze_tables, prepare, stored_quantization
from ..model.model_support import longest_length
from ..model.target import Target, TargetModel
from ..model.target_proof import TargetProof, is_wanted
from ..model.text_equality import TextEquality
from ..model.tokenizer import eos_token_ids, load_tokenizer
from .paged_cache import PagedCache
from .threads import Threads

if TYPE_CHECKING:
    from .plan import Plan


@dataclass(frozen=True)
class LoadedModel:
    """What is loaded from a target's checkpoint, and what follows from its size and layers."""

    target: TargetModel
    tokenizer: Any
    eos_token_ids: frozenset[int]
    threads: Threads
    text_equality: TextEquality

    @classmethod
    def load(cls, plan: Plan) -> LoadedModel:
        """Raises ConfigError, UnsupportedModelError."""
        config, profile = plan.config, plan.profile
        trusts = config.trust_remote_code
        tokenizer = load_tokenizer(config.tokenizer, plan.path, trust_remote_code=trusts)
        target = TargetModel.load(
            plan.path, plan.hf_config, plan.dtype, profile.device, config.moe_backend, trust_remote_code=trusts
        )
        freeze_tables(target.model, plan.info.max_model_len)
        _prepare(target, plan)
        threads = profile.threads(config.num_threads, target.model)
        text_equality = profile.text_equality(target.dtype).of_target(target, profile.backend)
        if plan.speculation and plan.speculation.is_lossless:
            text_equality.tell()
        ends = eos_token_ids(target.model.generation_config, target.config).intersection(range(plan.info.vocab_size))
        return cls(target, tokenizer, ends, threads, text_equality)

    def served(self, plan: Plan, cache: PagedCache, passes: Any) -> Target:
        """The target in the form that steps call: compiled where that was asked for, captured where that is possible.

        Raises ConfigError SD-E261 where compiling was asked for that layers with a state do not take.
        """
        if plan.compiler is not None:
            with self.threads.used():  # the compiler builds their number in
                plan.compiler.compile_target(self.target, cache.kv, plan.profile.backend)
        if passes is None:
            return self.target
        num_nodes = plan.width if plan.draws_trees else 0
        target: Target = passes.target(self.target, cache.kv, cache.addressing, plan.width, num_nodes)
        return target


def _prepare(target: TargetModel, plan: Plan) -> None:
    """Bring the weights into the form that is served, and prove what they compute there.

    Quantised weights are compared with themselves. Raises UnsupportedModelError SD-E189, ConfigError SD-E192.
    """
    quantization = plan.config.quantization
    longest = longest_length(plan.info.config, target.config.attribute_map)
    quantised = quantization is not None or bool(stored_quantization(plan.hf_config))
    proofs = partial(TargetProof, target, longest, quantised=quantised)
    wanted = is_wanted(target, plan.config.prove_target)
    proof = proofs() if wanted and quantization is None else None
    room, head = spare_memory(target.device), target.model.get_output_embeddings()
    prepare(target.model, quantization, plan.profile.backend, keep=head, room=room, drop=True)
    if target.mixers is not None:
        target.mixers.exchange(plan.profile.backend.recurrences())
    if wanted:
        _prove(proof or proofs(), target, plan)


def _prove(proof: TargetProof, target: TargetModel, plan: Plan) -> None:
    """Prove the target in a cache that holds just the proof's requests."""
    info = replace(plan.info, max_num_seqs=proof.num_requests)
    num_blocks = info.max_num_seqs * -(-proof.num_tokens // info.block_size)
    pool = BlockPool(num_blocks, info.block_size, region_size=num_blocks)
    cache = PagedCache.build(plan.profile, info, target, pool, info.max_num_seqs * proof.num_tokens, lookahead=0)
    proof.check(cache.kv, cache.addressing)
