"""A compiled target generates what it generates as it is; where it cannot be compiled it says so and goes on."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
from engine_helpers import GREEDY, counter, make_llm, proposer_of, tokens
from transformers import AutoModelForCausalLM, Qwen3Config

from specdec import LLM
from specdec.core.kernels.linear import PackedLinear
from specdec.core.runner.compiled import CompiledForward

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
WIDTH = 512
HEADER = Path(sysconfig.get_path("include"), "Python.h")
needs_a_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or not HEADER.is_file(), reason="torch.compile needs g++ and the headers of Python"
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """Two layers, so that it compiles in seconds, wide enough for packed products."""
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=WIDTH,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        initializer_range=0.1,  # far from ties
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def own_prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(128, (length,), generator=generator).tolist() for length in (5, 73, 30)]


def generated(llm, prompts):
    return tokens(llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY))


@needs_a_compiler
def test_compiled_target_computes_what_it_computes_as_it_is(model_path, own_prompts):
    """Tokens and hidden states of passes of one, few and many tokens, with drafts; compiled at the start only."""
    plain = make_llm(model=model_path, max_model_len=256)
    expected = generated(plain, own_prompts)
    sequences = [[*prompt, *output] for prompt, output in zip(own_prompts, expected, strict=True)]
    options = {"sequences": sequences, "hidden_states": (0, 1, "final")}
    seen = {}
    for compiles in (False, True):
        llm = make_llm("Recorder", k=3, options=options, model=model_path, max_model_len=256, torch_compile=compiles)
        decoder = llm.engine.parts.target.model.get_decoder()
        assert type(decoder.layers[0].mlp.up_proj.group.product) is PackedLinear
        assert (isinstance(decoder.forward, CompiledForward) and decoder.forward.is_compiled) == compiles
        with torch.compiler.set_stance("fail_on_recompile"):
            assert generated(llm, own_prompts) == expected
            assert generated(llm, own_prompts[:1]) == expected[:1]
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
        seen[compiles] = [shown.hidden for step in proposer_of(llm).steps for shown in step]
    for uncompiled, compiled in zip(seen[False], seen[True], strict=True):
        torch.testing.assert_close(compiled, uncompiled, rtol=1e-4, atol=1e-4)


@pytest.mark.full
@needs_a_compiler
@pytest.mark.parametrize("drafter", ["draft", "eagle3", "dflash", "medusa"])
def test_first_party_drafters_of_a_compiled_target(drafter, target_path, prompts, truth):
    config = {"model": str(target_path.parent / drafter), "num_speculative_tokens": 3}
    llm = LLM("tiny", speculative_config=config, torch_compile=True, max_model_len=512)
    assert generated(llm, prompts) == truth


def test_without_a_compiler_the_target_runs_as_it_is(model_path, own_prompts, caplog, monkeypatch, tmp_path):
    caplog.set_level("INFO", "specdec")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("/nowhere/c++",))
    llm = make_llm(model=model_path, max_model_len=256, torch_compile=True)
    (warning,) = (
        record.message for record in caplog.records if record.name == "specdec" and record.levelname == "WARNING"
    )
    assert warning.startswith("SD-W303 ")
    assert "/nowhere/c++" in warning
    assert "compiled the target" not in caplog.text
    assert generated(llm, own_prompts) == generated(make_llm(model=model_path, max_model_len=256), own_prompts)


@needs_a_compiler
def test_two_compiled_models_keep_apart(model_path, own_prompts):
    """Same modelling code, other layers and other hooks: nothing of the first may serve the second."""
    first = make_llm(model=model_path, max_model_len=256, torch_compile=True)
    narrow = {"model": model_path, "max_model_len": 256, "quantization": "int8_weight_only"}
    options = {"hidden_states": (1,)}
    second = make_llm("Recorder", k=2, options=options, torch_compile=True, **narrow)
    expected = generated(make_llm(**narrow), own_prompts)
    plain = generated(make_llm(model=model_path, max_model_len=256), own_prompts)
    assert expected != plain
    assert generated(second, own_prompts) == expected
    assert generated(first, own_prompts) == plain
    assert proposer_of(second).steps[-1][0].hidden.shape[1] == WIDTH
