"""What a request may ask for, how it ends, and that a bad one is refused by name without touching the others."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from engine_helpers import GREEDY, assert_same_tokens, counter, difference, make_llm, run, tokens
from inside import listen, pool_of, scheduler_of

from specdec import LLM, SamplingParams
from specdec.sdk import ConfigError, Refusal, SpecdecError, hookimpl
from specdec.sdk.errors import RequestError

EOS = 4080
VOCAB_SIZE = 4096


@pytest.fixture(scope="module")
def llm():
    return make_llm(max_model_len=256, num_kv_blocks=14)


@pytest.fixture(scope="module")
def ngram():
    return make_llm("ngram")


def ids(prompt):
    return {"prompt_token_ids": prompt}


def one(llm, prompt, params=GREEDY, **changes):
    """The first output of one prompt."""
    return llm.generate(ids(prompt), params.replace(**changes))[0].outputs[0]


# -- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "culprits"),
    [
        ({"model": "no-such-model"}, ["'no-such-model'"]),
        ({"model": "/no/such/folder"}, ["'/no/such/folder'"]),
        ({"max_num_seq": 4}, ["max_num_seq", "did you mean 'max_num_seqs'?"]),
        ({"max_num_seqs": 0}, ["max_num_seqs", "0"]),
        ({"max_num_seqs": "many"}, ["max_num_seqs", "'many'"]),
        ({"max_num_batched_tokens": 0}, ["max_num_batched_tokens"]),
        ({"block_size": -1}, ["block_size", "-1"]),
        ({"max_model_len": 5000}, ["max_model_len", "5000", "4096"]),
        ({"dtype": "float8"}, ["dtype", "'float8'"]),
        ({"device": "tpu"}, ["device", "'tpu'"]),
        ({"device": "cuda:0"}, ["cuda:0"]),
        ({"kv_cache_memory_gib": 1e-9}, ["one block"]),
        ({"seed": -1}, ["seed", "-1"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_unusable_settings_are_named(settings, culprits):
    if settings.get("device") == "cuda:0" and torch.cuda.is_available():
        pytest.skip("this machine has the device")
    with pytest.raises(ConfigError) as caught:
        make_llm(**settings)
    assert all(culprit in str(caught.value) for culprit in culprits)


def test_a_word_that_is_far_from_all_is_called_unknown():
    """Another engine's name for something else is no typo, and would lead astray."""
    with pytest.raises(ConfigError, match="allowed_token_ids  unknown"):
        SamplingParams(allowed_token_ids=[1])


def test_a_value_of_the_wrong_type_is_told_by_its_field_alone():
    with pytest.raises(ConfigError, match="SD-E132") as caught:
        LLM(None)
    assert set(caught.value.facts) == {"model.str", "model"}


@pytest.mark.parametrize(
    ("values", "culprits"),
    [
        ({"temprature": 1}, ["temprature", "did you mean 'temperature'?"]),
        ({"max_tokens": 0}, ["max_tokens", "found 0"]),
        ({"max_tokens": "many"}, ["max_tokens", "'many'"]),
        ({"temperature": -0.1}, ["temperature", "-0.1"]),
        ({"temperature": float("nan")}, ["temperature", "nan"]),
        ({"temperature": float("inf")}, ["temperature", "inf"]),
        ({"top_p": 0.0}, ["top_p"]),
        ({"top_p": 1.1}, ["top_p"]),
        ({"top_k": -2}, ["top_k", "-2"]),
        ({"min_p": 1.5}, ["min_p"]),
        ({"n": 0}, ["n"]),
        ({"seed": 2**63}, ["seed"]),
        ({"stop": ["x", ""]}, ["stop", "empty text"]),
        ({"stop_token_ids": [-1]}, ["stop_token_ids"]),
        ({"min_tokens": 9, "max_tokens": 8}, ["min_tokens (9)", "max_tokens (8)"]),
        ({"repetition_penalty": 0}, ["repetition_penalty"]),
        ({"frequency_penalty": 3}, ["frequency_penalty"]),
        ({"logprobs": 21}, ["logprobs"]),
        ({"logit_bias": {5: float("nan")}}, ["logit_bias"]),
        ({"logit_bias": {5: float("inf")}}, ["logit_bias"]),
        ({"num_speculative_tokens": -1}, ["num_speculative_tokens"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_unusable_sampling_parameters_are_named(values, culprits):
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**values)
    assert all(culprit in str(caught.value) for culprit in culprits)


@pytest.mark.parametrize(
    ("prompt", "params", "culprits"),
    [
        ([], GREEDY, ["empty prompt"]),
        ("", GREEDY, ["empty prompt"]),
        ([1, -1], GREEDY, ["prompt", "-1", "0 .. 4095"]),
        ([1, VOCAB_SIZE], GREEDY, ["prompt", "4096"]),
        ([1] * 256, GREEDY, ["256", "max_model_len"]),
        ([1] * 300, GREEDY, ["300", "max_model_len"]),
        ([1] * 200, GREEDY.replace(max_tokens=50), ["250", "KV cache", "224"]),
        ([1, 2.5], GREEDY, ["list of token ids"]),
        (["a", "b"], GREEDY, ["list of token ids"]),
        ([True, 1], GREEDY, ["list of token ids"]),
        (7, GREEDY, ["int"]),
        (None, GREEDY, ["NoneType"]),
        ({"text": "a"}, GREEDY, ["'text'"]),
        ({"prompt": "a", "prompt_token_ids": [1]}, GREEDY, ["one key"]),
        ([1], GREEDY.replace(stop_token_ids=[VOCAB_SIZE]), ["stop_token_ids", "4096"]),
        ([1], GREEDY.replace(logit_bias={-1: 1.0}), ["logit_bias", "-1"]),
        ([1], GREEDY.replace(stop="x", detokenize=False), ["stop", "detokenize"]),
    ],
    ids=lambda value: repr(value)[:20] if not isinstance(value, SamplingParams) else "",
)
def test_an_unusable_request_is_named_and_touches_nobody(prompt, params, culprits, llm, prompts, truth):
    engine = llm.engine
    engine.add_request(prompts[2], GREEDY.replace(max_tokens=5), "good")
    with pytest.raises(RequestError) as caught:
        engine.add_request(prompt, params, "bad")
    assert "'bad'" in str(caught.value)
    assert all(culprit in str(caught.value) for culprit in culprits), str(caught.value)
    assert list(run(engine)) == ["good"]
    engine.check_integrity()


def test_a_request_id_in_use_is_refused_and_free_again_afterwards(llm, prompts):
    llm.engine.add_request(prompts[3], GREEDY.replace(max_tokens=2), "twice")
    with pytest.raises(RequestError, match="'twice' is in use"):
        llm.engine.add_request(prompts[3], GREEDY, "twice")
    assert len(run(llm.engine)) == 1
    llm.engine.add_request(prompts[3], GREEDY.replace(max_tokens=2), "twice")
    assert len(run(llm.engine)) == 1


@pytest.mark.parametrize("name", [5, b"a", ("a",), ["a"]], ids=ascii)
def test_a_request_id_that_is_no_text_is_refused(name, llm, prompts):
    with pytest.raises(RequestError, match=r"SD-E151.*is no text"):
        llm.engine.add_request(prompts[3], GREEDY, name)
    assert not llm.engine.has_unfinished_requests


def test_a_request_of_an_engine_that_asks_for_several_outputs_is_refused(llm, prompts):
    with pytest.raises(RequestError, match=r"(?s)SD-E345.*n=2.*LLM\.generate"):
        llm.engine.add_request(prompts[3], GREEDY.replace(n=2, temperature=1.0))
    assert not llm.engine.has_unfinished_requests


def test_ids_that_the_engine_gives_never_meet_ids_that_the_user_gave(prompts):
    engine = make_llm().engine
    names = [engine.add_request(prompts[3], GREEDY, name) for name in ("1", None, None, "5", None, None)]
    assert len(set(names)) == 6


def test_one_bad_prompt_of_several_leaves_nothing_queued(llm, prompts):
    with pytest.raises(RequestError, match="max_model_len"):
        llm.generate([ids(prompts[3]), ids([1] * 300)], GREEDY)
    assert not llm.engine.has_unfinished_requests
    assert not [*scheduler_of(llm).waiting, *scheduler_of(llm).running]


def test_a_prompt_that_cannot_be_served_leaves_nothing_queued_of_those_before_it(llm, prompts):
    with pytest.raises(RequestError, match="SD-E156"):
        llm.generate([ids(prompts[3]), ids([VOCAB_SIZE])], SamplingParams(n=2, seed=3))
    assert not llm.engine.has_unfinished_requests


def test_as_many_parameters_as_prompts(llm, prompts):
    with pytest.raises(ConfigError, match="one SamplingParams per prompt"):
        llm.generate([ids(prompts[3])] * 3, [GREEDY] * 2)


@pytest.mark.parametrize("params", [{"temperature": 0}, [{"temperature": 0}], "greedy", [None]])
def test_parameters_of_another_type_are_refused_by_name(params, llm, prompts):
    with pytest.raises(ConfigError, match="SamplingParams"):
        llm.generate([ids(prompts[3])], params)
    assert not llm.engine.has_unfinished_requests


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([]) == []


def test_prompts_come_as_text_ids_or_mappings(llm, tokenizer):
    text = "import os\n"
    token_ids = tokenizer(text)["input_ids"]
    params = GREEDY.replace(max_tokens=3)
    forms = [text, token_ids, {"prompt": text}, {"prompt_token_ids": token_ids}]
    outputs = [llm.generate(form, params)[0] for form in forms] + llm.generate(forms, params)
    assert {output.prompt_token_ids for output in outputs} == {tuple(token_ids)}
    assert len({output.outputs[0].token_ids for output in outputs}) == 1
    assert [output.prompt for output in outputs[:4]] == [text, None, text, None]


@pytest.fixture(scope="module")
def copied_target(target_path, tmp_path_factory):
    """Makes a copy of the target without some files and with another generation configuration."""

    def copy(name, without=(), **generation_config):
        folder = tmp_path_factory.mktemp(name)
        for file in target_path.iterdir():
            if file.name not in without:
                shutil.copy(file, folder)
        if generation_config:
            (folder / "generation_config.json").write_text(json.dumps(generation_config))
        return folder

    return copy


def test_without_a_tokenizer_ids_work_and_text_is_refused(copied_target, prompts, truth):
    tokenizer_files = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    llm = make_llm(model=copied_target("bare", tokenizer_files))
    assert llm.get_tokenizer() is None
    output = one(llm, prompts[0], max_tokens=8)
    assert list(output.token_ids) == truth[0][:8]
    assert output.text == ""
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate("text", GREEDY)
    with pytest.raises(RequestError, match="stop texts"):
        llm.generate(ids(prompts[0]), GREEDY.replace(stop="x"))
    with pytest.raises(RequestError, match="chat template"):
        llm.chat([{"role": "user", "content": "hi"}])
    assert not llm.engine.has_unfinished_requests


# -- how a request ends ------------------------------------------------------------------------------------------


def known(sequences, k=7):
    """An engine whose drafts are all right."""
    return make_llm("Scripted", k=k, options={"sequences": sequences})


@pytest.fixture(scope="module")
def drafting(sequences):
    return known(sequences)


@pytest.mark.parametrize("max_tokens", [1, 2, 8, 9, 17])
def test_max_tokens_is_exact(max_tokens, drafting, prompts, truth):
    output = one(drafting, prompts[0], max_tokens=max_tokens)
    assert list(output.token_ids) == truth[0][:max_tokens]
    assert (output.finish_reason, output.stop_reason) == ("length", None)


@pytest.mark.parametrize("room", [1, 2, 9, 16])
def test_max_model_len_is_exact(room, prompts, truth, sequences):
    llm = make_llm("Scripted", k=7, options={"sequences": sequences}, max_model_len=len(prompts[0]) + room)
    output = one(llm, prompts[0])
    assert list(output.token_ids) == truth[0][:room]
    assert output.finish_reason == "length"
    assert one(llm, prompts[0], max_tokens=None).token_ids == output.token_ids, "None: as many as fit"


@pytest.mark.parametrize("at", range(0, 14, 3))
def test_a_stop_token_ends_inside_accepted_drafts(at, drafting, prompts, truth, tokenizer):
    stop = truth[0][at]
    output = one(drafting, prompts[0], stop_token_ids=[stop])
    assert list(output.token_ids) == truth[0][: truth[0].index(stop) + 1]
    assert output.text == text_of(tokenizer, output.token_ids[:-1]), "the stop token is no part of the text"
    including = one(drafting, prompts[0], stop_token_ids=[stop], include_stop_str_in_output=True)
    assert including.text == text_of(tokenizer, output.token_ids), "unless that is asked for"
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("k", [2, 7])
def test_end_of_sequence_ends_inside_accepted_drafts(k, copied_target, prompts, truth, sequences):
    eos = truth[0][5]
    end = truth[0].index(eos)
    target = copied_target("eos", eos_token_id=[eos, EOS])
    llm = make_llm("Scripted", k=k, options={"sequences": sequences}, model=target)
    output = one(llm, prompts[0], ignore_eos=False)
    assert list(output.token_ids) == truth[0][: end + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    ignoring = one(llm, prompts[0], ignore_eos=True)
    assert (list(ignoring.token_ids), ignoring.finish_reason) == (truth[0], "length")
    metrics = output.spec_decode_metrics
    assert metrics["tokens_per_target_step"] == (end + 1) / metrics["num_target_steps"]


def test_min_tokens_holds_back_end_of_sequence_and_stop_tokens(drafting, prompts, truth):
    biased = GREEDY.replace(ignore_eos=False, logit_bias={EOS: 100.0})
    assert list(one(drafting, prompts[0], biased).token_ids) == [EOS]
    output = one(drafting, prompts[0], biased, min_tokens=5)
    assert list(output.token_ids) == [*truth[0][:5], EOS]
    stop = truth[0][2]
    held = one(drafting, prompts[0], stop_token_ids=[stop], min_tokens=20)
    assert len(held.token_ids) > 20
    assert stop not in held.token_ids[:20]
    full = one(drafting, prompts[0], biased, min_tokens=12, max_tokens=12)
    assert (len(full.token_ids), full.finish_reason) == (12, "length")


def test_min_tokens_gives_the_same_with_and_without_drafts(llm, drafting, prompts, truth):
    params = GREEDY.replace(stop_token_ids=truth[0][4:6], min_tokens=11, max_tokens=30)
    assert one(llm, prompts[0], params).token_ids == one(drafting, prompts[0], params).token_ids


def text_of(tokenizer, token_ids):
    return tokenizer.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("width", [1, 3, 9])
@pytest.mark.parametrize("start", [0, 11, 40])
def test_a_stop_text_ends_before_itself_across_token_borders(start, width, drafting, prompts, truth, tokenizer):
    text = text_of(tokenizer, truth[0])
    stop = text[start : start + width]
    output = one(drafting, prompts[0], stop=[stop, "\x00never"])
    assert output.text == text[: text.find(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    least = next(n for n in range(len(truth[0]) + 1) if stop in text_of(tokenizer, truth[0][:n]))
    assert list(output.token_ids) == truth[0][:least]
    including = one(drafting, prompts[0], stop=[stop], include_stop_str_in_output=True)
    assert including.text == text[: text.find(stop) + width]


def test_the_first_of_several_stop_texts_wins(drafting, prompts, truth, tokenizer):
    text = text_of(tokenizer, truth[0])
    output = one(drafting, prompts[0], stop=[text[30:33], text[12:15]])
    first = min(text.find(text[30:33]), text.find(text[12:15]))
    assert output.text == text[:first]


def test_a_stop_text_before_min_tokens_does_not_end(drafting, prompts, truth, tokenizer):
    text = text_of(tokenizer, truth[0])
    output = one(drafting, prompts[0], stop=text[:4], min_tokens=6)
    assert len(output.token_ids) > 6


def test_a_stop_text_before_min_tokens_does_not_end_beside_a_longer_one(drafting, prompts, truth, tokenizer):
    short = text_of(tokenizer, truth[0][:6])[-2:]
    alone = one(drafting, prompts[0], stop=short, min_tokens=6)
    beside = one(drafting, prompts[0], stop=[short, "\0never" * 9], min_tokens=6)
    assert len(beside.token_ids) > 7
    assert (beside.token_ids, beside.text) == (alone.token_ids, alone.text)


def test_the_text_is_the_decoded_tokens(drafting, prompts, truth, tokenizer):
    assert one(drafting, prompts[0]).text == text_of(tokenizer, truth[0])
    assert one(drafting, prompts[0], detokenize=False).text == ""


# -- streaming and abort -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_at", [None, 25])
def test_streamed_pieces_are_the_text_and_the_tokens(stop_at, drafting, prompts, truth, tokenizer):
    text = text_of(tokenizer, truth[0])
    stop = () if stop_at is None else (text[stop_at : stop_at + 8],)
    params = GREEDY.replace(stop=stop)
    output = one(drafting, prompts[0], params)
    updates = list(drafting.stream(ids(prompts[0]), params))
    assert "".join(update.text for update in updates) == output.text
    assert [token for update in updates for token in update.token_ids] == list(output.token_ids)
    assert [update.finish_reason for update in updates] == [None] * (len(updates) - 1) + [output.finish_reason]
    for update in updates:
        num_kept = min(update.num_accepted, len(update.token_ids))  # an end may cut inside the accepted ones
        assert update.token_ids[:num_kept] == update.draft_token_ids[:num_kept]


def test_no_beginning_of_a_stop_text_is_ever_streamed(drafting, prompts, truth, tokenizer):
    text = text_of(tokenizer, truth[0])
    stop = text[20:32]
    end, shown = text.find(stop), ""
    for update in drafting.stream(ids(prompts[0]), GREEDY.replace(stop=stop)):
        shown += update.text
        assert text[:end].startswith(shown)
    assert shown == text[:end]


def test_a_held_back_ending_is_streamed_in_the_end(drafting, prompts, truth, tokenizer):
    text = text_of(tokenizer, truth[0][:10])
    params = GREEDY.replace(max_tokens=10, stop=text[-3:] + "\x00")
    assert "".join(update.text for update in drafting.stream(ids(prompts[0]), params)) == text


def test_several_prompts_and_outputs_are_told_apart_in_a_stream(drafting, prompts):
    params = SamplingParams(seed=3, n=2, max_tokens=6, ignore_eos=True)
    asked = [ids(prompts[0]), ids(prompts[2])]
    expected = drafting.generate(asked, params)
    texts = {}
    for update in drafting.stream(asked, params):
        key = (update.request_id, update.index)
        texts[key] = texts.get(key, "") + update.text
    assert sorted(texts.values()) == sorted(each.text for output in expected for each in output.outputs)
    assert {index for _, index in texts} == {0, 1}


def test_closing_a_stream_aborts_what_runs(drafting, prompts):
    stream = drafting.stream([ids(prompts[0]), ids(prompts[1])], GREEDY)
    next(stream)
    assert drafting.engine.has_unfinished_requests
    stream.close()
    assert not drafting.engine.has_unfinished_requests
    assert not [*scheduler_of(drafting).waiting, *scheduler_of(drafting).running]
    drafting.engine.check_integrity()


def test_other_requests_run_on_while_a_stream_is_open(drafting, prompts, truth):
    """Whoever steps the engine advances everybody; nobody loses tokens or breaks over a stranger's request."""
    stream = drafting.stream(ids(prompts[0]), GREEDY)
    first = next(stream)
    assert tokens(drafting.generate(ids(prompts[1]), GREEDY)) == [truth[1]]
    rest = list(stream)
    assert [token for update in [first, *rest] for token in update.token_ids] == truth[0]
    assert rest[-1].finish_reason == "length"


def test_two_streams_take_turns(drafting, prompts, truth):
    streams = {index: drafting.stream(ids(prompts[index]), GREEDY) for index in (0, 1)}
    found = {0: [], 1: []}
    while streams:
        for index, stream in list(streams.items()):
            update = next(stream, None)
            if update is None:
                del streams[index]
            else:
                found[index] += update.token_ids
    assert found == {0: truth[0], 1: truth[1]}


@pytest.mark.slow
def test_an_aborted_request_keeps_its_tokens_and_the_others_go_on(prompts, truth, sequences):
    engine = make_llm("Scripted", options={"sequences": sequences}, max_num_seqs=2).engine
    for index in range(3):
        engine.add_request(prompts[index], GREEDY, str(index))
    engine.step()
    engine.step()
    running, waiting = engine.abort("0"), engine.abort("2")
    assert running.finish_reason.value == waiting.finish_reason.value == "abort"
    assert running.output_token_ids == truth[0][: len(running.output_token_ids)] != []
    assert waiting.output_token_ids == []
    assert engine.abort("0") is None
    assert engine.abort("never heard of") is None
    assert run(engine)["1"].output_token_ids == truth[1]


def test_a_preempted_request_can_be_aborted(prompts, truth):
    llm = make_llm(num_kv_blocks=22)
    engine = llm.engine
    for index in range(2):
        engine.add_request(prompts[index], GREEDY, str(index))
    while counter(llm, "num_preemptions") == 0 and engine.has_unfinished_requests:
        engine.step()
    (waiting,) = scheduler_of(engine).waiting
    assert waiting.request_id == "1"
    assert engine.abort("1").output_token_ids == truth[1][: len(waiting.output_token_ids)]
    assert run(engine)["0"].output_token_ids == truth[0]
    assert pool_of(engine).num_free == 22


def test_a_prompt_aborted_while_it_is_generated_gives_what_there_is(prompts, truth):
    llm = make_llm()
    stream = llm.stream(ids(prompts[0]), GREEDY)
    updates = [next(stream) for _ in range(3)]
    llm.abort(updates[0].request_id)
    rest = list(stream)
    assert [(update.token_ids, update.finish_reason) for update in rest] == [((), "abort")]
    assert [token for update in updates for token in update.token_ids] == truth[0][:3]
    assert not llm.engine.has_unfinished_requests


def test_an_abort_that_comes_too_late_ends_no_other_request_of_the_same_id(prompts, truth):
    """It is aborted while its last step runs, and its id is in use again when that is carried out."""
    engine = make_llm().engine

    class Retries:
        @hookimpl
        def on_verified(self, step):
            if not late.finish_reason:
                engine.abort("x")

        @hookimpl
        def on_request_finished(self, request, metrics):
            if len(request.end.output_token_ids) == 2:
                engine.add_request(prompts[1], GREEDY.replace(max_tokens=5), "x")

    engine.add_request(prompts[0], GREEDY.replace(max_tokens=2), "x")
    late = engine.get_request("x")
    engine.step()
    listen(engine, Retries())
    engine.step()
    assert late.finish_reason.value == "length"
    assert run(engine)["x"].output_token_ids == truth[1][:5]


def test_outputs_of_a_prompt_that_was_not_queued_whole_are_not_left_behind(prompts, monkeypatch):
    llm = make_llm()
    add, added = llm.engine.add_request, []

    def interrupted(*args):
        if len(added) == 2:
            raise KeyboardInterrupt
        added.append(add(*args))
        return added[-1]

    monkeypatch.setattr(llm.engine, "add_request", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(ids(prompts[0]), GREEDY.replace(n=4))
    assert len(added) == 2
    assert not llm.engine.has_unfinished_requests


def test_a_stream_shows_nothing_of_a_request_that_gets_the_id_of_one_that_ended(prompts, truth):
    llm = make_llm()
    several = [{"prompt_token_ids": prompt} for prompt in prompts[:2]]
    stream = llm.stream(several, [GREEDY.replace(max_tokens=1), GREEDY.replace(max_tokens=6)])
    first = next(stream)
    llm.engine.add_request(prompts[2], GREEDY.replace(max_tokens=4), first.request_id)
    shown = [first, *stream]
    assert [each.token_ids for each in shown if each.request_id == first.request_id] == [tuple(truth[0][:1])]


class Listener:
    """Counts what observers are told."""

    def __init__(self):
        self.events = []
        self.num_committed = 0

    @hookimpl
    def on_request_start(self, request):
        self.events.append(("start", request.request_id))

    @hookimpl
    def on_request_finished(self, request, metrics):
        self.events.append(("finished", request.request_id))

    @hookimpl
    def on_step(self, stats):
        self.num_committed += stats.num_committed_tokens


def test_observers_hear_of_every_started_request_once_and_of_every_token(prompts):
    engine, listener = make_llm(max_num_seqs=2).engine, Listener()
    listen(engine, listener)
    for index in range(3):
        engine.add_request(prompts[index], GREEDY.replace(max_tokens=4), str(index))
    engine.step()
    aborted = [engine.abort("1"), engine.abort("2")]  # one runs, one never started
    finished = run(engine)
    assert listener.events == [("start", "0"), ("start", "1"), ("finished", "1"), ("finished", "0")]
    assert listener.num_committed == sum(request.num_output_tokens for request in [*aborted, *finished.values()])


def test_a_closed_engine_takes_no_requests(prompts):
    llm = make_llm()
    llm.engine.add_request(prompts[0], GREEDY, "running")
    llm.close()
    assert not llm.engine.has_unfinished_requests
    with pytest.raises(SpecdecError, match="closed"):
        llm.generate(ids(prompts[0]), GREEDY)


def test_a_closed_engine_asks_nothing_of_its_proposer(tmp_path):
    llm = make_llm("Scripted")
    llm.close()
    for call in (
        lambda: llm.update_proposer_weights({}),
        lambda: llm.save_proposer_state(tmp_path),
        lambda: llm.load_proposer_state(tmp_path),
    ):
        with pytest.raises(RequestError, match="SD-E169"):
            call()


# -- what is sampled ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 3])
def test_logprobs_are_those_of_a_plain_forward(count, drafting, prompts, truth, reference_model):
    output = one(drafting, prompts[0], logprobs=count, max_tokens=20)
    with torch.inference_mode():
        logits = reference_model(torch.tensor([[*prompts[0], *truth[0][:20]]])).logits[0]
    expected = logits[len(prompts[0]) - 1 : -1].log_softmax(-1)
    assert len(output.logprobs) == 20
    for token_id, found, row in zip(output.token_ids, output.logprobs, expected, strict=True):
        assert found.keys() == {token_id, *row.topk(count).indices.tolist()}
        for each, logprob in found.items():
            assert logprob == pytest.approx(float(row[each]), abs=1e-4)


def test_logprobs_are_of_the_tokens_kept_where_a_stop_cuts(drafting, prompts, truth):
    output = one(drafting, prompts[0], logprobs=0, stop_token_ids=[truth[0][9]])
    assert [list(each) for each in output.logprobs] == [[token_id] for token_id in output.token_ids]
    assert output.cumulative_logprob == pytest.approx(sum(value for each in output.logprobs for value in each.values()))
    plain = one(drafting, prompts[0])
    assert (plain.logprobs, plain.cumulative_logprob) == (None, None)


def naive_greedy(model, prompt, params, count):
    """Plain decoding, one full forward per token, with bias and penalties written out."""
    output = []
    for _ in range(count):
        with torch.no_grad():
            row = model(torch.tensor([[*prompt, *output]])).logits[0, -1]
        for token_id, bias in (params.logit_bias or {}).items():
            row[token_id] += bias
        for token_id in {*prompt, *output}:
            factor = params.repetition_penalty
            row[token_id] = row[token_id] / factor if row[token_id] > 0 else row[token_id] * factor
        for token_id in set(output):
            row[token_id] -= params.frequency_penalty * output.count(token_id) + params.presence_penalty
        output.append(int(row.argmax()))
    return output


ADJUSTMENTS = {
    "repetition": {"repetition_penalty": 1.3},
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": 1.5},
    "negative": {"repetition_penalty": 0.9, "presence_penalty": -0.5},
    "all": {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.3},
}


@pytest.mark.parametrize("name", ADJUSTMENTS)
def test_penalties_equal_plain_decoding_with_and_without_drafts(name, llm, ngram, prompts, reference_model):
    prompt, params = prompts[5], GREEDY.replace(max_tokens=24, **ADJUSTMENTS[name])
    expected = naive_greedy(reference_model, prompt, params, 24)
    wrong = make_llm("Scripted", options={"sequences": [[*prompt, *expected]], "wrong_every": 4})
    for engine in (llm, ngram, wrong):
        (found,) = tokens(engine.generate(ids(prompt), params))
        assert found == expected, difference(found, expected, prompt, reference_model)
    assert counter(wrong, "spec_decode_num_accepted_tokens") > 0


@pytest.mark.slow
def test_bias_equals_plain_decoding_with_and_without_drafts(llm, drafting, ngram, prompts, truth, reference_model):
    bias = {truth[0][0]: -100.0, truth[0][3]: -5.0, 17: 4.0}
    params = GREEDY.replace(max_tokens=24, logit_bias=bias)
    expected = naive_greedy(reference_model, prompts[0], params, 24)
    assert truth[0][0] not in expected
    for engine in (llm, drafting, ngram):
        assert_same_tokens(tokens(engine.generate(ids(prompts[0]), params)), [expected], prompts[:1], reference_model)


def test_adjustments_of_one_request_touch_no_other(ngram, prompts, truth, reference_model):
    params = [GREEDY, GREEDY.replace(logit_bias={truth[0][0]: -100.0}, repetition_penalty=1.5, logprobs=2), GREEDY]
    outputs = tokens(ngram.generate([ids(prompts[index]) for index in (0, 1, 2)], params))
    assert_same_tokens(outputs[::2], truth[0:3:2], prompts[0:3:2], reference_model)


# -- chat --------------------------------------------------------------------------------------------------------


def test_chat_goes_through_the_template(llm, tokenizer):
    messages = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "A stack."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    params = GREEDY.replace(max_tokens=2)
    (output,) = llm.chat(messages, params)
    assert output.prompt_token_ids == expected
    two = llm.chat([messages, messages[1:]], params)
    assert two[0].prompt_token_ids == expected != two[1].prompt_token_ids
    (open_ended,) = llm.chat(messages, params, add_generation_prompt=False)
    assert open_ended.prompt_token_ids == expected[: len(open_ended.prompt_token_ids)] != expected


def test_a_proposer_that_does_not_fit_is_refused():
    with pytest.raises(Refusal, match="no distribution of its drafts"):
        make_llm("ngram", speculative={"draft_sample_method": "probabilistic"})


# -- what is no prompt -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompts",
    [
        None,
        7,
        np.array([5, 6, 7]),
        np.array(3),
        torch.tensor([5, 6]),
        b"def main(",
        {5, 6},
        (each for each in "ab"),
        [None],
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("method", ["generate", "stream"])
def test_what_is_no_prompt_is_refused_by_its_type(method, prompts, llm):
    with pytest.raises(RequestError, match="SD-E152"):
        list(getattr(llm, method)(prompts, GREEDY))


@pytest.mark.parametrize("text", ["a\ud800b", "\udcff\udcfe", {"prompt": "\udfff"}], ids=ascii)
def test_text_that_cannot_be_encoded_is_refused(text, llm):
    with pytest.raises(RequestError, match="SD-E212"):
        llm.generate([text], GREEDY)
    assert not llm.engine.has_unfinished_requests


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        (None, "SD-E211"),
        ("a text", "SD-E211"),
        ([], "SD-E211"),
        ([[]], "SD-E211"),
        ([7], "SD-E211"),
        ([{"role": "user"}], "SD-E211"),
        ([{"content": "a"}], "SD-E211"),
        ([[{"role": "user", "content": "a"}], [{"role": "user"}]], "SD-E211"),
        ([{"role": "user", "content": "\ud800"}], "SD-E212"),
        ([{"role": "user", "content": [{"type": "text"}]}], "SD-E211"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "SD-E211"),
    ],
    ids=ascii,
)
def test_messages_that_are_no_conversation_are_refused(messages, code, llm):
    with pytest.raises(RequestError, match=code):
        llm.chat(messages, GREEDY)
