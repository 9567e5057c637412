"""Layers as a GPU runs them: as many kernels as said here, and what transformers computes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from device_steps import give_cpu
from emulated_cuda.engine import rms_norm
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import AutoConfig, AutoModelForCausalLM

from specdec import LLM, SamplingParams
from specdec.core.cache.kv_cache import KVCache, LayerShape
from specdec.core.kernels.cpu.backend import CpuBackend
from specdec.core.kernels.cuda import rms_norm as norms
from specdec.core.kernels.cuda.addressing import DeviceAddressing
from specdec.core.kernels.cuda.block_table import BlockTable
from specdec.core.kernels.cuda.paged_view import PagedView
from specdec.core.kernels.cuda.triton_backend import TritonBackend
from specdec.core.model.attention import ATTENTION_NAME, attention_arguments
from specdec.core.model.inference_form import prepare

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
NO_LAUNCH = ("empty", "detach", "_unsafe_view", "resize", "lift_fresh", "scalar_tensor")


class Launches(TorchDispatchMode):
    """Counts the operators that launch a kernel on a device; views and empty tensors do not."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        is_view = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
        if not is_view and not name.startswith(NO_LAUNCH):
            self.found[name] += 1
        return func(*args, **kwargs or {})

    def as_kernels(self, function, count):
        """A function that launches so many kernels, by its plain form."""

        def counted(*args):
            self.found[function.__name__] += count
            with _disable_current_modes():
                return function(*args)

        return counted


@pytest.fixture(autouse=True)
def plain_norms(monkeypatch):
    """No kernel is interpreted: the tests of kernels compare them with this form."""
    monkeypatch.setattr(norms, "rms_norm", rms_norm)


@pytest.fixture
def launches(monkeypatch, plain_norms):
    counts = Launches()
    attend = counts.as_kernels(CpuBackend.attend_pages, 2)  # over ranges of keys, and their join
    monkeypatch.setattr(CpuBackend, "attend_pages", staticmethod(attend))
    monkeypatch.setattr(norms, "rms_norm", counts.as_kernels(rms_norm, 1))
    return counts


def model_of(name, num_layers, dtype=torch.bfloat16, **others):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, vocab_size=32, num_hidden_layers=num_layers, **SHAPE | others)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.requires_grad_(False)


def decode(model, num_tokens=3):
    """Logits of one request's first tokens over an empty cache, addressed by table."""
    config, device = model.config, torch.device("cpu")
    shape = LayerShape(config.num_key_value_heads, config.head_dim, config.head_dim)
    cache = KVCache([shape] * config.num_hidden_layers, 3, 4, model.dtype, device)
    table = BlockTable(1, 2, 2, device)
    table.blocks[0] = torch.tensor([1, 0])
    view = PagedView(cache, table, *(torch.tensor(each) for each in ([0], [0], [0, num_tokens])), num_tokens)
    tokens = torch.arange(num_tokens)[None]
    return model(input_ids=tokens, position_ids=tokens, use_cache=False, **attention_arguments(view)).logits, cache


def launches_of_a_layer(name, launches, *, prepared):
    found = []
    for num_layers in (1, 2):
        model = model_of(name, num_layers)
        if prepared:
            prepare(model, None, TritonBackend())
        launches.found.clear()
        with launches:
            decode(model)
        found.append(launches.found.copy())
    return found[1] - found[0]


@pytest.mark.parametrize(("name", "plain", "num_norms"), [("llama", 41, 2), ("qwen3", 57, 4)])
def test_kernels_of_a_layer_in_a_captured_step(name, plain, num_norms, launches):
    """Products of queries, keys and values are one, and so are a gate and what it gates; a norm is one of eight."""
    assert launches_of_a_layer(name, launches, prepared=False).total() == plain
    found = launches_of_a_layer(name, launches, prepared=True)
    assert (found["rms_norm"], found["mm"], found["attend_pages"]) == (num_norms, 4, 2)
    assert found.total() == plain - 7 * num_norms - 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mixtral", "granite", "phi3", "glm4"])
def test_prepared_layers_compute_and_store_what_they_did(name, dtype):
    """To the last bit but for joined products, which a CPU rounds another way in fp32 only."""
    others = {"num_local_experts": 4} if name == "mixtral" else {"pad_token_id": 0} if name in ("phi3", "glm4") else {}
    model = model_of(name, 2, dtype, **others)
    expected, plain_cache = decode(model)
    prepare(model, None, TritonBackend())
    found, cache = decode(model)
    near = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
    torch.testing.assert_close(found, expected, atol=near, rtol=near)
    for ours, theirs in zip([*cache.keys, *cache.values], [*plain_cache.keys, *plain_cache.values], strict=True):
        torch.testing.assert_close(ours, theirs, atol=near, rtol=near)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_everything_but_joined_products_keeps_every_bit(name, dtype):
    model = model_of(name, 2, dtype)
    expected, plain_cache = decode(model)
    TritonBackend().lay_out(model, room=None, drop=True)
    found, cache = decode(model)
    assert torch.equal(found, expected)
    stored, plain_stored = cache.keys + cache.values, plain_cache.keys + plain_cache.values
    assert all(torch.equal(*pair) for pair in zip(stored, plain_stored, strict=True))


@pytest.fixture
def as_a_gpu(monkeypatch):
    give_cpu(monkeypatch, TritonBackend(), addressing=DeviceAddressing, passes=None)


@pytest.mark.parametrize("name", [None, "eagle3", "draft"])
def test_an_engine_over_prepared_layers_generates_what_it_did(name, as_a_gpu, prompts, truth, target_path):
    speculation = name and {"model": f"tiny/{name}", "num_speculative_tokens": 3}
    with LLM(target_path, speculative_config=speculation, max_model_len=256, prove_target=True) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts[:3]], GREEDY)
    for output, expected in zip(outputs, truth[:3], strict=True):
        assert list(output.outputs[0].token_ids) == list(expected[: GREEDY.max_tokens])
