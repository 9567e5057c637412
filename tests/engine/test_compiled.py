"""A compiled target generates what it generates as it is; where it cannot be compiled it says so and goes on."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
from engine_helpers import GREEDY, counter, make_llm, tokens
from inside import proposer_of, target_of
from torch import nn
from torch._inductor import config as inductor_config
from transformers import AutoModelForCausalLM, Qwen3Config

from specdec import SamplingParams
from specdec.core.cache.addressing import CacheView
from specdec.core.cache.kv_cache import KVCache, LayerShape
from specdec.core.kernels.attention import Span, SpanBatch
from specdec.core.kernels.attention_spec import AttentionSpec
from specdec.core.kernels.compiled import MOST_COMPILED, CompiledFunction
from specdec.core.kernels.cpu.backend import NativeBackend
from specdec.core.kernels.cpu.layers import NativeLinear
from specdec.core.model.attention import CONTEXT

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
by_onednn = pytest.mark.skipif(
    bool(torch.cpu.get_capabilities().get("amx_bf16")), reason="oneDNN multiplies bfloat16 on this processor"
)
WIDTH = 512
HEADER = Path(sysconfig.get_path("include"), "Python.h")
needs_a_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or not HEADER.is_file(), reason="torch.compile needs g++ and the headers of Python"
)


def compile_network(network, kept=None):
    network.forward = CompiledFunction(network.forward, kept)
    return network.forward


def saved_model(path, seed):
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
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def own_prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(128, (length,), generator=generator).tolist() for length in (5, 73, 30)]


def generated(llm, prompts):
    return tokens(llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY))


@pytest.mark.full
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
        decoder = target_of(llm).model.get_decoder()
        assert type(decoder.layers[0].mlp.up_proj.group.product) is NativeLinear
        run = target_of(llm).run
        assert (isinstance(run, CompiledFunction) and run.is_compiled) == compiles
        at_start = run.num_compiled if compiles else 0
        assert generated(llm, own_prompts) == expected
        assert generated(llm, own_prompts[:1]) == expected[:1]
        assert not compiles or run.num_compiled == at_start
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
        seen[compiles] = [shown.hidden for step in proposer_of(llm).steps for shown in step]
    for uncompiled, compiled in zip(seen[False], seen[True], strict=True):
        torch.testing.assert_close(compiled, uncompiled, rtol=1e-4, atol=1e-4)


@pytest.mark.full
@needs_a_compiler
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=by_onednn)])
def test_compiled_logits_do_not_depend_on_what_is_computed_beside_them(model_path, own_prompts, dtype):
    """One token and many are compiled apart; neither may skip a rounding that the other does."""
    settings = {"model": model_path, "max_model_len": 256, "dtype": dtype, "torch_compile": True}
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=1)
    prompts = [{"prompt_token_ids": prompt} for prompt in own_prompts]
    found = []
    for llm in (make_llm(max_num_seqs=1, **settings), make_llm("ngram", k=3, **settings)):
        outputs = [each.outputs[0] for each in llm.generate(prompts, params)]
        found.append([(list(output.token_ids), output.logprobs) for output in outputs])
    assert found[0] == found[1]


@pytest.mark.full
def test_without_a_compiler_the_target_runs_as_it_is(model_path, own_prompts, caplog, monkeypatch, tmp_path):
    caplog.set_level("INFO", "specdec")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with inductor_config.patch({"cpp.cxx": ("/nowhere/c++",)}):
        llm = make_llm(model=model_path, max_model_len=256, torch_compile=True)
    (warning,) = (
        record.message for record in caplog.records if record.name == "specdec" and record.levelname == "WARNING"
    )
    assert warning.startswith("SD-W303 ")
    assert "/nowhere/c++" in warning
    assert "compiled the target" not in caplog.text
    assert generated(llm, own_prompts) == generated(make_llm(model=model_path, max_model_len=256), own_prompts)


@pytest.mark.full
@needs_a_compiler
def test_two_compiled_models_keep_apart(model_path, own_prompts, tmp_path):
    """Same modelling code, other weights and other hooks: nothing of the first may serve the second."""
    other_path = saved_model(tmp_path, seed=1)
    first = make_llm(model=model_path, max_model_len=256, torch_compile=True)
    options = {"hidden_states": (1,)}
    second = make_llm("Recorder", k=2, options=options, torch_compile=True, model=other_path, max_model_len=256)
    expected = generated(make_llm(model=other_path, max_model_len=256), own_prompts)
    plain = generated(make_llm(model=model_path, max_model_len=256), own_prompts)
    assert expected != plain
    assert generated(second, own_prompts) == expected
    assert generated(first, own_prompts) == plain
    assert proposer_of(second).steps[-1][0].hidden.shape[1] == WIDTH


class Scaled(nn.Module):
    """Keeps what it multiplied, as a hook would."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.kept = {}

    def forward(self, rows, scale=1.0, *, more=()):
        self.kept["rows"] = rows.sin()
        for each in more:
            rows = rows + each
        return {"out": self.linear(rows) * scale}


@pytest.mark.full
@needs_a_compiler
def test_a_network_is_compiled_for_one_row_and_for_any_number():
    torch.manual_seed(0)
    network, plain = Scaled(), Scaled()
    plain.load_state_dict(network.state_dict())
    forward = compile_network(network, network.kept)
    with torch.inference_mode():
        for num_rows in (5, 1, 2, 3, 16, 17, 1, 40):
            wide = torch.randn(num_rows + 3, 32)
            for rows in (wide[3:, :16].contiguous(), wide[3:, :16], wide[3:].view(-1, 16)):
                torch.testing.assert_close(network(rows)["out"], plain(rows)["out"])
                torch.testing.assert_close(network.kept["rows"], plain.kept["rows"])
    assert forward.is_compiled
    assert forward.num_compiled == 2, "one row, and many"


@pytest.mark.slow
@needs_a_compiler
def test_what_is_no_tensor_is_part_of_what_is_compiled():
    torch.manual_seed(0)
    network, plain = Scaled(), Scaled()
    plain.load_state_dict(network.state_dict())
    forward, rows = compile_network(network), torch.randn(3, 16)
    with torch.inference_mode():
        for scale, more in ((1.0, ()), (2.0, ()), (2, ()), (True, ()), (1.0, (rows,)), (1.0, (rows, rows))):
            torch.testing.assert_close(network(rows, scale, more=more)["out"], plain(rows, scale, more=more)["out"])
    assert forward.num_compiled == 6


@pytest.mark.slow
@needs_a_compiler
def test_a_function_takes_in_the_networks_that_it_calls():
    torch.manual_seed(0)
    network, plain = Scaled(), Scaled()
    plain.load_state_dict(network.state_dict())
    inner = compile_network(network)

    def function_with(called):
        def summed(rows, named):
            output = called(rows)["out"]
            return output.sum(dim=-1), [output.float() * named["factor"], None]

        return summed

    compiled, expected = CompiledFunction(function_with(network)), function_with(plain)
    with torch.inference_mode():
        for num_rows in (5, 2, 7):
            arguments = torch.randn(num_rows, 16), {"factor": torch.tensor(2.0)}
            torch.testing.assert_close(compiled(*arguments), expected(*arguments))
        assert (compiled.num_compiled, inner.num_compiled) == (1, 0)
        network(torch.randn(3, 16))
    assert inner.num_compiled == 1, "by itself it is compiled as well"


class Chooses(nn.Module):
    def forward(self, rows):
        return rows.exp() if rows.sum() > 0 else rows.log()


class Slices(nn.Module):
    def forward(self, rows):
        return rows[0][rows[1]]


@pytest.mark.parametrize(
    ("network", "argument", "because"),
    [(Chooses(), torch.ones(3, 3), "DataDependent"), (Slices(), (torch.ones(3, 16), slice(1, 3)), "type slice")],
    ids=["a branch on a value", "an object"],
)
def test_what_cannot_be_compiled_runs_as_it_is(network, argument, because, caplog):
    caplog.set_level("WARNING", "specdec")
    forward = compile_network(network)
    for _ in range(2):
        assert torch.equal(network(argument), type(network).forward(network, argument))
    (warning,) = (record.message for record in caplog.records if record.name == "specdec")
    assert warning.startswith("SD-W303 ")
    assert because in warning
    assert not forward.is_compiled


class Echo(nn.Module):
    def forward(self, rows, number):
        return rows + number


@pytest.mark.full
@needs_a_compiler
def test_a_number_that_varies_ends_compilation(caplog):
    caplog.set_level("WARNING", "specdec")
    network = Echo()
    forward, rows = compile_network(network), torch.ones(2, 2)
    for number in range(MOST_COMPILED + 2):
        assert torch.equal(network(rows, number), rows + number)
    assert [record.message.count("16 ways") for record in caplog.records if "SD-W303" in record.message] == [1]
    assert not forward.is_compiled


class Attending(nn.Module):
    def forward(self, heads, **attention):
        return attention[CONTEXT].attend(0, heads, heads, heads, AttentionSpec(0.125)) + 1


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_network_that_does_not_fit_its_cache_stays_as_it_is(dtype):
    """Compiled attention knows where the cache lies, not what it stores."""
    cpu = torch.device("cpu")
    cache = KVCache([LayerShape(1, 64, 64)], 1, 16, torch.float32, cpu)
    view = CacheView(cache, SpanBatch((Span(0, 2, 2, slice(0, 2), cpu),)), NativeBackend.load("native"))
    network, heads = Attending(), torch.randn(2, 1, 64).to(dtype)
    forward = compile_network(network)
    with torch.inference_mode():
        if dtype == cache.dtype:
            torch.testing.assert_close(network(heads, **{CONTEXT: view}), Attending()(heads, **{CONTEXT: view}))
        else:
            with pytest.raises(RuntimeError):
                network(heads, **{CONTEXT: view})
    assert forward.is_compiled == (dtype == cache.dtype)
