"""One model of transformers under several calls, and under `torch.compile`."""

from __future__ import annotations

from threading import Thread, current_thread, main_thread

import pytest
import torch
from adapter_proposers import NotesCalls
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM
from transformers.generation import LogitsProcessor, LogitsProcessorList

from specdec.adapters.transformers import speculative
from specdec.sdk import ConfigError
from specdec.sdk.errors import RequestError
from specdec.sdk.packaged import packaged

EAGLE3 = {"model": "tiny/eagle3", "num_speculative_tokens": 4}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
GREEDY = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}


@pytest.fixture
def own():
    """A model that nobody else has."""
    return loaded("tiny")


def loaded(name):
    model = AutoModelForCausalLM.from_pretrained(packaged(name), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def two_ranks():
    """This process as one of two."""
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    distributed.destroy_process_group()


def test_weights_that_several_processes_share_are_refused_because_these_take_different_numbers_of_steps(own, two_ranks):
    decoding = speculative(own, NGRAM)
    ids = torch.tensor([[1, 2, 3]])
    assert own.generate(ids, custom_generate=decoding, **GREEDY).shape[1] > 3
    own._is_fsdp_managed_module = True  # as transformers marks it
    with pytest.raises(RequestError, match=r"SD-E197(?s:.*)2 processes"):
        own.generate(ids, custom_generate=decoding, **GREEDY)


class Meanwhile(LogitsProcessor):
    """Runs something else between a pass and the next one."""

    def __init__(self, run):
        self.run, self.times = run, 0

    def __call__(self, input_ids, scores):
        self.times += 1
        if self.times == 3:
            self.run()
        return scores


def in_a_thread(run):
    """Run it elsewhere, and raise here what it raises."""
    raised = []

    def watched():
        try:
            run()
        except Exception as error:
            raised.append(error)

    thread = Thread(target=watched)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def test_calls_of_two_threads_read_their_own_states(own, prompts):
    first, second = prompts[0], prompts[1]
    alone = [speculative(own, EAGLE3) for _ in range(2)]
    texts = [
        own.generate(ids, custom_generate=each, **GREEDY) for ids, each in zip((first, second), alone, strict=True)
    ]
    one, other = speculative(own, EAGLE3), speculative(own, EAGLE3)
    found = []

    def interrupt(module, args, output):
        """In the middle of a pass, the other thread runs its whole call."""
        if current_thread() is main_thread() and not found:
            found.append(None)
            in_a_thread(lambda: found.append(own.generate(second, custom_generate=other, **GREEDY)))

    handle = own.get_decoder().register_forward_hook(interrupt)
    found.insert(0, own.generate(first, custom_generate=one, **GREEDY))
    handle.remove()
    assert torch.equal(found[0], texts[0])
    assert torch.equal(found[2], texts[1])
    assert [each.metrics.acceptance for each in (one, other)] == [each.metrics.acceptance for each in alone]


def test_a_processor_that_runs_the_model_changes_no_states(own, prompts):
    quiet, disturbed = speculative(own, EAGLE3), speculative(own, EAGLE3)
    own.generate(prompts[0], custom_generate=quiet, **GREEDY)
    running = LogitsProcessorList([Meanwhile(lambda: own(prompts[1]))])
    own.generate(prompts[0], custom_generate=disturbed, logits_processor=running, **GREEDY)
    assert disturbed.metrics.acceptance == quiet.metrics.acceptance


def test_a_second_call_with_the_same_decoding_is_refused_while_one_runs(own, prompts):
    decoding = speculative(own, NGRAM)
    text = own.generate(prompts[0], **GREEDY)

    def again():
        with pytest.raises(RequestError, match=r"SD-E197 [^$]*a call while another one runs"):
            own.generate(prompts[1], custom_generate=decoding, **GREEDY)

    processors = LogitsProcessorList([Meanwhile(lambda: in_a_thread(again))])
    found = own.generate(prompts[0], custom_generate=decoding, logits_processor=processors, **GREEDY)
    assert torch.equal(found, text)
    assert torch.equal(own.generate(prompts[0], custom_generate=decoding, **GREEDY), text)


def test_a_proposer_is_asked_for_figures_between_two_calls_and_is_closed_once(own, prompts):
    decoding = speculative(own, {"method": "adapter_proposers:NotesCalls", "num_speculative_tokens": 2})
    calls, shown = NotesCalls.calls, []
    calls.clear()
    processors = LogitsProcessorList(
        [Meanwhile(lambda: in_a_thread(lambda: shown.append(decoding.proposer_figures())))]
    )
    own.generate(prompts[0], custom_generate=decoding, logits_processor=processors, **GREEDY)
    assert (shown, {*calls}) == ([{}], {"propose"})
    assert [*decoding.proposer_figures().values()] == [len(calls)]
    for _ in range(2):
        decoding.close()
    with pytest.raises(RequestError, match="SD-E169"):
        own.generate(prompts[0], custom_generate=decoding, **GREEDY)
    decoding.proposer_figures()
    assert [name for name in calls if name != "propose"] == ["metrics", "metrics", "close"]


def test_a_second_call_on_layers_with_states_is_refused_while_one_runs(prompts):
    hybrid = loaded("tiny/hybrid")
    text = hybrid.generate(prompts[0], **GREEDY)
    one, other = speculative(hybrid, NGRAM), speculative(hybrid, NGRAM)

    def meanwhile():
        with pytest.raises(ConfigError, match=r"SD-E198 [^$]*one call of `generate` at a time"):
            hybrid.generate(prompts[1], custom_generate=other, **GREEDY)

    processors = LogitsProcessorList([Meanwhile(lambda: in_a_thread(meanwhile))])
    assert torch.equal(hybrid.generate(prompts[0], custom_generate=one, logits_processor=processors, **GREEDY), text)
    assert torch.equal(hybrid.generate(prompts[0], custom_generate=other, **GREEDY), text)


@pytest.mark.parametrize("config", [NGRAM, EAGLE3])
def test_a_compiled_module_is_drafted_for_as_the_model_inside(own, prompts, config):
    compiled = torch.compile(own, backend="eager")
    decoding = speculative(compiled, config)
    found = compiled.generate(prompts[0], custom_generate=decoding, **GREEDY)
    assert torch.equal(found, own.generate(prompts[0], **GREEDY))
    assert decoding.metrics.acceptance.num_accepted_tokens > 0


def compile_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")


def compile_in_place(model):
    model.compile(backend="eager")


def compile_a_layer(model):
    model.get_decoder().layers[1].compile(backend="eager")


@pytest.mark.parametrize("compile_part", [compile_forward, compile_in_place, compile_a_layer])
def test_states_of_compiled_layers_are_refused_before_and_after_the_drafter_was_loaded(own, prompts, compile_part):
    early = speculative(own, EAGLE3)
    compile_part(own)
    with pytest.raises(ConfigError, match=r"SD-E198 this model's layers run compiled"):
        speculative(own, EAGLE3)
    with pytest.raises(ConfigError, match=r"SD-E198 this model's layers run compiled"):
        own.generate(prompts[0], custom_generate=early, **GREEDY)


@pytest.mark.full
def test_layers_with_states_are_refused_where_they_run_compiled():
    hybrid = loaded("tiny/hybrid")
    compile_in_place(hybrid)
    with pytest.raises(ConfigError, match=r"SD-E198 this model's layers run compiled"):
        speculative(hybrid, NGRAM)


@pytest.mark.full
def test_proposers_that_read_tokens_draft_for_a_compiled_model(own, prompts):
    text = own.generate(prompts[0], **GREEDY)
    compile_forward(own)
    decoding = speculative(own, NGRAM)
    assert torch.equal(own.generate(prompts[0], custom_generate=decoding, **GREEDY), text)
    assert decoding.metrics.acceptance.num_accepted_tokens > 0
