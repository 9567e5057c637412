"""Each key of vLLM's speculative_config is offered, is so already, or is refused by name with the way here."""

import json

import importlib_metadata
import pytest
from inside import plugin_of

from specdec import LLM
from specdec.adapters.foreign import recognise
from specdec.adapters.foreign.vllm_keys import offered_keys, vllm_keys
from specdec.core.config.speculative_config import SpeculativeConfig
from specdec.core.registry import HookPlugins, ResolvedProposer, load_proposer
from specdec.sdk import ConfigError, StrictModel
from specdec.sdk.errors import PluginId

# The fields of SpeculativeConfig in vLLM 0.32.0.
FIELDS = """
    enforce_eager num_speculative_tokens model method draft_tensor_parallel_size tensor_parallel_size quantization
    moe_backend attention_backend kv_cache_dtype max_model_len revision code_revision index_share_for_mtp_iteration
    disable_padded_drafter_batch disable_eagle_block_drop use_local_argmax_reduction use_heterogeneous_vocab
    prompt_lookup_max prompt_lookup_min parallel_drafting target_model_config target_parallel_config
    num_speculative_tokens_per_batch_size draft_model_config draft_parallel_config suffix_decoding_max_tree_depth
    suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob draft_load_config
    rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification
    draft_sample_method dspark_draft_topk"""
OLDER = ["tokenizer", "disable_by_batch_size", "speculative_token_tree"]


class Plain:
    def __init__(self, config): ...
    def propose(self, step): ...


class Declares(Plain):
    class Options(StrictModel):
        revision: str = "main"
        enforce_eager: bool = False


@pytest.fixture
def load(target):
    def load(cls, **values):
        config = SpeculativeConfig.parse({"method": "mine", "num_speculative_tokens": 4} | values)
        hooks = HookPlugins()
        hooks.add(recognise, "specdec")
        return load_proposer(ResolvedProposer(PluginId("mine", "mine:Mine"), cls, None, hooks), config, target)

    return load


@pytest.fixture
def refused(load):
    def refused(cls, **values):
        with pytest.raises(ConfigError) as info:
            load(cls, **values)
        return info.value

    return refused


def test_every_key_of_vllm_has_one_answer():
    assert sorted([*offered_keys(), *vllm_keys()]) == sorted([*FIELDS.split(), *OLDER])


def test_what_is_said_to_be_offered_is():
    entries = importlib_metadata.distribution("specdec-sdk").entry_points.select(group="specdec.proposers")
    options = {key for entry in entries for key in getattr(entry.load(), "Options", StrictModel).model_fields}
    assert set(offered_keys()) <= SpeculativeConfig.model_fields.keys() | options
    assert not vllm_keys().keys() & SpeculativeConfig.model_fields.keys()


@pytest.mark.parametrize("key", sorted(vllm_keys()))
def test_a_key_that_is_not_offered_is_refused_with_the_reason_and_the_way_here(refused, key):
    error = refused(Plain, **{key: "something"})
    assert error.code == "SD-E131"
    told = error.facts[key]
    assert told == f"a key of vLLM's: {vllm_keys()[key].reason}. Here: {vllm_keys()[key].here}"
    assert "did you mean" not in told


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, known in vllm_keys().items() for value in (None, *known.same)]
)
def test_a_value_that_asks_for_what_is_so_already_is_accepted(load, key, value):
    assert load(Plain, **{key: value}).config.options is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("enforce_eager", True),
        ("tensor_parallel_size", 1),
        ("tensor_parallel_size", True),
        ("parallel_drafting", True),
        ("draft_tensor_parallel_size", "1"),
    ],
)
def test_another_value_of_such_a_key_is_refused(refused, key, value):
    assert refused(Plain, **{key: value}).code == "SD-E131"


def test_a_proposer_that_declares_a_key_keeps_it(load):
    options = load(Declares, revision="v2", enforce_eager=True).config.options
    assert (options.revision, options.enforce_eager) == ("v2", True)


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("strict", 'an older word of vLLM\'s. Use \'standard\' with "draft_sample_method": "greedy"'),
        ("probabilistic", 'an older word of vLLM\'s. Use \'standard\' with "draft_sample_method": "probabilistic"'),
        ("fly", "entropy-gated acceptance is lossy, and not offered. Use 'standard'"),
    ],
)
def test_rejection_methods_of_vllm_are_refused_with_the_way_here(method, told):
    with pytest.raises(ConfigError, match=f"SD-E132 rejection_sample_method is '{method}'") as error:
        LLM("tiny", speculative_config={"method": "ngram", "rejection_sample_method": method})
    assert error.value.facts["because"] == told


@pytest.mark.parametrize("model", ["tiny/dflash", "tiny/medusa"])
def test_parallel_drafting_is_so_already_where_all_tokens_are_drafted_in_one_pass(model):
    text = json.dumps({"model": model, "parallel_drafting": True, "disable_padded_drafter_batch": True})
    with LLM("tiny", speculative_config=text, max_model_len=64) as llm:
        assert plugin_of(llm).name == model.removeprefix("tiny/")
    with pytest.raises(ConfigError, match="SD-E132 proposer_config"):
        LLM("tiny", speculative_config={"model": model, "parallel_drafting": False})
