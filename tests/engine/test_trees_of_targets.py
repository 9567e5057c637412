"""Trees are verified by every kind of attention that serves chains: text and cache are those of plain decoding."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import tokens
from inside import target_of
from scripts.small_models import small_config, small_model
from test_compiled import needs_a_compiler

from specdec import LLM, SamplingParams
from specdec.sdk import Refusal

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
KINDS = {  # windows are of 8 tokens, and texts have 60
    "windows": "mistral",
    "windows and full attention in turn": "gemma3_text",
    "windows and sinks": "gpt_oss",
    "chunks": "llama4_text",
    "compressed keys (MLA)": "deepseek_v3",
    "experts": "qwen3_moe",
    "keys that layers share": "gemma3n_text",
    "positions that are learned": "gpt2",
}
QUICK = {"windows and sinks", "compressed keys (MLA)"}


@pytest.fixture
def generated(tmp_path):
    """Text of a small model of a type, plain and by trees, and the engine of the latter."""

    def run(model_type, **settings):
        model = small_model(small_config(model_type))
        model.save_pretrained(tmp_path)
        settings |= {"max_model_len": 96}
        prompts = [torch.randint(1, 128, (length,)).tolist() for length in (20, 9)]
        wanted = [{"prompt_token_ids": prompt} for prompt in prompts]
        plain = tokens(LLM(tmp_path, **settings).generate(wanted, GREEDY))
        texts = [prompt + text for prompt, text in zip(prompts, plain, strict=True)]
        config = {"model": "scripts.half_garbage.HalfGarbageTree", "num_speculative_tokens": 9, "texts": texts}
        llm = LLM(tmp_path, **settings, speculative_config=config)
        drafted = tokens(llm.generate(wanted, GREEDY))
        return plain, drafted, llm

    torch.manual_seed(3)
    return run


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_text_is_that_of_plain_decoding(generated, kind):
    plain, drafted, llm = generated(KINDS[kind])
    assert drafted == plain
    acceptance = llm.engine.metrics.acceptance
    assert acceptance.num_accepted_tokens > 1.5 * acceptance.num_drafts, "most trees are right for two tokens and more"


@needs_a_compiler
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_a_compiled_target_verifies_trees(generated):
    plain, drafted, llm = generated("qwen3", torch_compile=True)
    assert target_of(llm).run.is_compiled
    assert drafted == plain
    acceptance = llm.engine.metrics.acceptance
    assert acceptance.num_accepted_tokens > 1.5 * acceptance.num_drafts


def test_a_target_whose_layers_keep_a_state_refuses_trees(generated):
    with pytest.raises(Refusal, match="keep a state, which has one successor"):
        generated("qwen3_next")
