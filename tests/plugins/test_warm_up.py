"""Everything that requests need compiled is compiled before the first of them: by the engine, by drafters' warm-up."""

from __future__ import annotations

import random
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
from inside import proposer_of
from plugin_helpers import TINY
from transformers import AutoModelForCausalLM, Qwen3Config

from specdec import LLM, SamplingParams
from specdec.plugins.draft_model.proposer import DraftModelProposer
from specdec.plugins.eagle.proposer import Eagle3Proposer
from specdec.plugins.medusa.proposer import MedusaProposer
from specdec.plugins.suffix.proposer import SuffixProposer
from specdec.sdk.combinators import Adaptive, Chain

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
HEADER = Path(sysconfig.get_path("include"), "Python.h")
needs_a_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or not HEADER.is_file(), reason="torch.compile needs g++ and the headers of Python"
)
ROWS, CHUNK = 8, 24  # requests and tokens of a step
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


class Watched(DraftModelProposer):
    """Counts what it is shown."""

    num_observed = 0

    def observe(self, step):
        self.num_observed += 1
        super().observe(step)


class Strict(DraftModelProposer):
    """Knows the requests that started, and no others."""

    def bind(self, target, services):
        super().bind(target, services)
        self.started = set()

    def on_start(self, request):
        self.started.add(request.request_id)

    def observe(self, step):
        if not self.started.issuperset(step.request_ids):
            raise KeyError(step.request_ids)
        super().observe(step)


class SuffixThenEagle(Chain):
    parts = (SuffixProposer, Eagle3Proposer)


class AdaptiveMedusa(Adaptive):
    parts = (MedusaProposer,)


@pytest.fixture
def compiled(monkeypatch):
    """The programs that the compiler was asked for. It is left out: they run as they were traced."""
    return spied(monkeypatch, lambda program, inputs, options: program)


@pytest.fixture
def really_compiled(monkeypatch):
    return spied(monkeypatch, torch._inductor.compile)


def spied(monkeypatch, compiler):
    programs = []

    def compile_program(program, inputs, options):
        programs.append(program)
        return compiler(program, inputs, options=options)

    monkeypatch.setattr("torch._inductor.compile", compile_program)
    return programs


@pytest.fixture(scope="module")
def small_path(tmp_path_factory):
    """One layer, so that it is traced in no time; it is its own draft model."""
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("small")
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def engine(model, speculative, **settings):
    config = None if speculative is None else {"num_speculative_tokens": 3} | speculative
    settings = {"max_model_len": 256, "max_num_seqs": ROWS, "max_num_batched_tokens": CHUNK} | settings
    return LLM(model, speculative_config=config, **settings)


def own_draft(path, proposer):
    return {"method": f"{__name__}:{proposer}", "model": str(path)}


def packaged(name, **others):
    return {"model": str(TINY / name)} | others


def texts_of(llm):
    """Greedy texts of mixed traffic: prompts of one token and of several chunks, requests that end at different times,
    sampled ones among them, and drafts that may be shorter; one request, as many as rows, and more."""
    chance, texts = random.Random(0), []
    for count in (1, 1, 1, ROWS, ROWS + 3):
        prompts = [chance.choices(range(5, 128), k=chance.choice((1, 2, 9, 2 * CHUNK))) for _ in range(count)]
        mixed = [
            SamplingParams(
                temperature=chance.choice((0, 0.8)),
                max_tokens=chance.choice((1, 2, 4, 9)),
                num_speculative_tokens=chance.choice((None, None, 1, 2)),
                ignore_eos=True,
                seed=index,
            )
            for index in range(count)
        ]
        for params in (mixed, GREEDY):
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        texts.append([list(output.outputs[0].token_ids) for output in outputs])
    return texts


def compiles_at_start_only(model, speculative, programs, caplog):
    caplog.set_level("INFO", "specdec")
    llm = engine(model, speculative, torch_compile=True)
    at_start = len(programs)
    assert at_start > (0 if speculative is None else 3), "of the drafter too"
    texts = texts_of(llm)
    assert len(programs) == at_start, "nothing is left for requests"
    assert "SD-W303" not in caplog.text, "every pass was compiled"
    assert "is compiled while" not in caplog.text
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("max_num_seqs", [pytest.param(1, marks=pytest.mark.full), ROWS])
def test_forms_are_made_at_the_start_only(max_num_seqs, small_path, compiled):
    llm = engine(small_path, own_draft(small_path, "Watched"), torch_compile=True, max_num_seqs=max_num_seqs)
    at_start = len(compiled)
    assert llm.engine.metrics.counts == engine(small_path, None).engine.metrics.counts, "no requests"
    assert texts_of(llm) == texts_of(engine(small_path, None))
    assert len(compiled) == at_start == {1: 7, ROWS: 10}[max_num_seqs]


@pytest.mark.full
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_forms_of_trees_are_made_at_the_start_too(method, small_path, compiled, caplog):
    speculative = {"method": "draft_model", "model": str(small_path), "max_nodes": 6}
    texts = compiles_at_start_only(small_path, speculative | {"draft_sample_method": method}, compiled, caplog)
    assert texts == texts_of(engine(small_path, None))


def test_without_compilation_nothing_is_warmed_up(small_path):
    llm = engine(small_path, own_draft(small_path, "Watched"))
    assert proposer_of(llm).num_observed == 0


@pytest.mark.full
def test_a_drafter_that_refuses_made_up_steps_is_compiled_later(small_path, compiled, caplog):
    caplog.set_level("INFO", "specdec")
    llm = engine(small_path, own_draft(small_path, "Strict"), torch_compile=True)
    assert "Strict is compiled while requests run, as its warm-up raised KeyError" in caplog.text
    at_start = len(compiled)
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], GREEDY)
    assert len(compiled) > at_start


@pytest.mark.full
@needs_a_compiler
@pytest.mark.parametrize(
    "speculative",
    [
        None,
        packaged("eagle"),
        packaged("eagle3"),
        packaged("eagle3", draft_sample_method="probabilistic"),
        packaged("dflash"),
        packaged("draft"),
        packaged("medusa"),
        {"method": "mtp"},
        {"method": f"{__name__}:SuffixThenEagle", "proposer_config": {"eagle3": packaged("eagle3")}},
        packaged("medusa", method=f"{__name__}:AdaptiveMedusa"),
    ],
    ids=["plain", "eagle", "eagle3", "sampled", "dflash", "draft", "medusa", "mtp", "chain", "adaptive"],
)
def test_compiled_at_the_start_only(speculative, really_compiled, caplog):
    texts = compiles_at_start_only("tiny", speculative, really_compiled, caplog)
    assert texts == texts_of(engine("tiny", None))
