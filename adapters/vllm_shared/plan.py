"""What vLLM is about to run: which plans a proposer cannot live in, and the target as proposers are told of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specdec.core.host import Withheld, locate_model
from specdec.sdk.errors import Refusal
from specdec.sdk.extensions import KNOWN, Ahead, DraftKV, Grammars
from specdec.sdk.needs import Needs
from specdec.sdk.ranges import MOST_NODES
from specdec.sdk.types import TargetInfo

from ..withheld import withheld
from . import refused_drafts
from .followed_grammars import unfollowed

BLOCK_SIZE = 16
"""Of the draft KV's own blocks: vLLM's are its own."""


def refuse_plan(config: Any) -> None:
    """Raise Refusal for a vLLM configuration in which no proposer can run through this adapter."""
    parallel, model, speculative = config.parallel_config, config.model_config, config.speculative_config
    if parallel.pipeline_parallel_size > 1:
        reason = (
            "vLLM 0.32's V1 runner fails with drafts and pipeline parallelism, its own n-grams included; in V2 "
            "the last stage alone drafts, and it has neither the embedding nor the other stages' states"
        )
        raise Refusal(reason, "pipeline_parallel_size=1, with tensor parallelism")
    if parallel.data_parallel_size > 1 and model.is_moe:
        reason = "data-parallel ranks of a mixture of experts step together, and drafting there was not tried"
        raise Refusal(
            reason, "one engine per replica behind a router; ranks of a dense target each draft for themselves"
        )
    if model.is_hybrid or model.is_attention_free:
        reason = (
            "layers of the target keep a state, and where a step without drafts follows accepted ones, vLLM goes on "
            "with a stale one (vllm #39273, #40738, #40831, #52942)"
        )
        raise Refusal(reason, "specdec.LLM, or transformers' `generate`")
    if model.enable_prompt_embeds:
        raise Refusal("prompts may be embeddings, which have no token ids to draft from", "enable_prompt_embeds=False")
    if speculative.rejection_sample_method != "standard":
        method = speculative.rejection_sample_method
        raise Refusal(f'rejection_sample_method is "{method}", which was not tried', '"standard"')


def withheld_by(config: Any) -> Withheld:
    """Extensions that this vLLM configuration does not have."""
    cache = "vLLM's cache is laid out for its own attention, and its layers run over that"
    found = withheld("vLLM", cache, torch.device(str(config.device_config.device)))
    del found[Grammars.id]
    if (why := unfollowed(config)) is not None:
        found[Grammars.id] = why
    if config.kv_transfer_config is not None:
        reason = "prompts that another engine computed are never shown to it"
        found[DraftKV.id] = reason, "no KV connector, or a proposer without a network"
    return found


def refuse_needs(needs: Needs, config: Any) -> None:
    """Raise Refusal for needs that this vLLM configuration cannot meet."""
    if needs.placement == "device" and config.model_config.enable_sleep_mode:
        reason = "sleep at level 2 throws away what it has on the GPU, and vLLM reloads the target's weights alone"
        raise Refusal(reason, "enable_sleep_mode=False, or a proposer that runs on the host, such as ngram")
    if needs.whole_prompt:
        refuse_cached_prompts("it has to see whole prompts (whole_prompt)", config)
        if config.kv_transfer_config is not None:
            reason = "it has to see whole prompts (whole_prompt), and a KV connector brings those of another engine"
            raise Refusal(reason, "no KV connector, or a proposer without whole_prompt")


def refuse_for_v1(needs: Needs, config: Any) -> None:
    """Raise Refusal for what the V1 runner alone cannot do."""
    if config.scheduler_config.async_scheduling:
        reason = "drafts are made from the tokens of the step before, which async scheduling has not got on the host"
        raise Refusal(reason, "async_scheduling=False")
    if refused_drafts.must_stay(config) and not refused_drafts.stay(config):
        reason = "vLLM would cut drawn drafts by a grammar, which is a bias, and has not loaded what stops that"
        raise Refusal(reason, 'VLLM_PLUGINS with "specdec" in it or unset, or draft_sample_method="greedy"')
    if needs.extension(DraftKV) is not None:
        refuse_cached_prompts("it keeps KV of its own", config)


def refuse_cached_prompts(why: str, config: Any) -> None:
    """Raise Refusal where prompts may begin behind a cached prefix. why: the proposer cannot draft there."""
    if config.cache_config.enable_prefix_caching:
        reason = f"{why}, and vLLM's prefix cache skips positions that it then never sees"
        raise Refusal(reason, "enable_prefix_caching=False")


def describe_target(config: Any) -> TargetInfo:
    """The facts of vLLM's target that proposers are told."""
    model = config.model_config
    directory = Path(locate_model(model.model))
    return TargetInfo(
        model=model.model,
        checkpoint_dir=directory if directory.is_dir() else None,
        config=model.hf_text_config.to_dict(),
        vocab_size=model.get_vocab_size(),
        hidden_size=model.get_hidden_size(),
        num_layers=model.get_total_num_hidden_layers(),
        num_kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(config.device_config.device),
        max_model_len=model.max_model_len,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        block_size=BLOCK_SIZE,
        extensions=frozenset(KNOWN) - {Ahead.id},
        max_nodes=MOST_NODES,
    )
