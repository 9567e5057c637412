"""Structured output: of the form that was asked for, the same text with any drafts, and bad input refused by name."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter

import pytest
import torch
from engine_helpers import counter, make_llm, run
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import LLM, SamplingParams
from specdec.core.engine.assembly import parts_of
from specdec.core.engine.grammars import Grammars as EngineGrammars
from specdec.core.registry import PluginSettings
from specdec.core.request.grammar import RequestGrammar, unpacked
from specdec.core.request.request import FinishReason, Request
from specdec.plugins.xgrammar import XGrammarBackend
from specdec.sdk import ConfigError, HostProposer, Needs, Refusal, SpecdecError
from specdec.sdk.errors import RequestError
from specdec.sdk.extensions import Grammars
from specdec.sdk.structured_outputs import StructuredOutputs, Vocabulary

CALL = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "arguments": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 30]}},
            "required": ["city", "days"],
        },
    },
    "required": ["name", "arguments"],
}
ASKED = {
    "json": {"json": CALL, "disable_any_whitespace": True},
    "regex": {"regex": "[a-c]{2}(, [0-9]{1,3}){3}"},
    "choice": {"choice": ["yes", 'no "way"', "perhaps"]},
    "grammar": {"grammar": 'root ::= "(" root ")" | "x"'},
    "json_object": {"json_object": True},
}
PROPOSERS = {
    "plain": None,
    "forced": {"method": "forced", "num_speculative_tokens": 8},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "trees": {"method": "ngram", "num_speculative_tokens": 4, "max_nodes": 8},
    "head": {"method": "eagle3", "model": "tiny/eagle3", "num_speculative_tokens": 3},
    "model": {"method": "draft_model", "model": "tiny/draft", "num_speculative_tokens": 3},
}
PROMPTS = ["def main(", "import os\n", "class A:\n    ", "x = "]


def drafting(name, **settings):
    return LLM("tiny", speculative_config=PROPOSERS[name], max_model_len=512, **settings)


def has_its_form(kind, text):
    match kind:
        case "json":
            call = json.loads(text)
            arguments = call["arguments"]
            return len(call["name"]) <= 8 and arguments["city"] in ("Paris", "Rome") and arguments["days"] in (1, 2, 30)
        case "regex":
            return re.fullmatch(ASKED["regex"]["regex"], text) is not None
        case "choice":
            return text in ASKED["choice"]["choice"]
        case "grammar":
            depth = text.index("x")
            return text == "(" * depth + "x" + ")" * depth
        case _:
            return isinstance(json.loads(text), dict)


def texts(llm, asked, **params):
    each = [SamplingParams(seed=seed, structured_outputs=asked, **params) for seed in range(len(PROMPTS))]
    return [(output.outputs[0].text, output.outputs[0].finish_reason) for output in llm.generate(PROMPTS, each)]


@pytest.fixture(scope="module")
def plain_texts():
    with drafting("plain") as llm:
        return {
            (kind, temperature): texts(llm, asked, temperature=temperature, max_tokens=80)
            for kind, asked in ASKED.items()
            for temperature in (0.0, 1.0)
        }


@pytest.mark.slow
def test_what_ends_has_the_form_that_was_asked_for(plain_texts):
    ended = Counter()
    for (kind, _), found in plain_texts.items():
        for text, reason in found:
            assert reason in ("stop", "length")
            if reason == "stop":
                assert has_its_form(kind, text), (kind, text)
                ended[kind] += 1
    assert set(ended) == set(ASKED)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PROPOSERS if name != "plain"])
def test_the_text_is_plain_decodings_with_any_drafts(plain_texts, name):
    with drafting(name) as llm:
        for (kind, temperature), expected in plain_texts.items():
            assert texts(llm, ASKED[kind], temperature=temperature, max_tokens=80) == expected, kind
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0


def test_a_rate_of_acceptance_accepts_no_draft_that_the_grammar_refuses():
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rate": 1.0}
    with LLM("tiny", speculative_config=PROPOSERS["model"] | synthetic, max_model_len=512) as llm:
        found = texts(llm, ASKED["json"], temperature=1.0, max_tokens=80)
    assert {reason for _, reason in found} <= {"stop", "length"}
    assert all(has_its_form("json", text) for text, reason in found if reason == "stop")


@pytest.mark.slow
def test_rows_that_are_taken_back_and_prompts_in_chunks_change_nothing(plain_texts):
    expected = plain_texts["json", 1.0]
    with drafting("ngram", num_kv_blocks=12, block_size=8, max_num_batched_tokens=7) as llm:
        assert texts(llm, ASKED["json"], temperature=1.0, max_tokens=80) == expected
        assert counter(llm, "num_preemptions") > 0


def test_each_of_n_outputs_has_a_place_of_its_own():
    with drafting("forced") as llm:
        params = SamplingParams(n=4, seed=3, max_tokens=80, structured_outputs=ASKED["json"])
        outputs = llm.generate("call(", params)[0].outputs
    assert all(has_its_form("json", each.text) for each in outputs if each.finish_reason == "stop")
    assert len({each.text for each in outputs}) > 1


def test_free_requests_beside_it_are_what_they_are_alone():
    free = SamplingParams(temperature=0, max_tokens=24)
    with drafting("ngram") as llm:
        alone = llm.generate(PROMPTS[0], free)[0].outputs[0].text
        asked = SamplingParams(temperature=0, max_tokens=24, structured_outputs=ASKED["json"])
        together = llm.generate([PROMPTS[0], PROMPTS[1]], [free, asked])
    assert together[0].outputs[0].text == alone


def test_log_probabilities_are_those_under_the_grammar():
    with drafting("ngram") as llm:
        params = SamplingParams(
            temperature=0, max_tokens=8, logprobs=20, structured_outputs={"choice": ["0", "1", "2"]}
        )
        (output,) = llm.generate("x = ", params)[0].outputs
    assert sum(math.exp(value) for value in output.logprobs[0].values()) == pytest.approx(1, abs=1e-5)


def test_a_finished_grammar_ends_the_text_before_min_tokens():
    with drafting("ngram") as llm:
        params = SamplingParams(temperature=0, max_tokens=20, min_tokens=10, structured_outputs={"choice": ["yes"]})
        (output,) = llm.generate("x", params)[0].outputs
        assert (output.text, output.finish_reason) == ("yes", "stop")
        params = SamplingParams(temperature=0, max_tokens=40, min_tokens=20, structured_outputs={"regex": "(ab)+"})
        (output,) = llm.generate("x", params)[0].outputs
        assert len(output.token_ids) >= 20


def test_a_stop_token_is_taken_before_min_tokens_where_the_grammar_allows_no_other(tokenizer):
    stops = [token for token in range(len(tokenizer)) if re.fullmatch("[AB]+", tokenizer.decode([token]))]
    asked = {"regex": "[AB]{90}"}
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=stops, structured_outputs=asked)
    with drafting("ngram") as llm:
        for min_tokens in (0, 1, 5):
            [output] = llm.generate("x", params.replace(min_tokens=min_tokens))[0].outputs
            assert len(output.token_ids) == min_tokens + 1
            assert (output.finish_reason, output.stop_reason) == ("stop", output.token_ids[-1])
        short = params.replace(min_tokens=5, structured_outputs={"choice": ["A", "B"]})
        [output] = llm.generate("x", short)[0].outputs
        assert (output.text in "AB", output.finish_reason) == (True, "stop"), "it ends with the grammar"
        assert counter(llm, "bad_logits_rows") == 0


def test_what_follows_an_end_that_is_ignored_is_free():
    with drafting("ngram") as llm:
        params = SamplingParams(max_tokens=20, ignore_eos=True, structured_outputs={"choice": ["yes"]})
        (output,) = llm.generate("x", params)[0].outputs
    assert output.text.startswith("yes")
    assert (len(output.token_ids), output.finish_reason) == (20, "length")


def request_under(tokenizer, asked, ends):
    vocabulary = Vocabulary(tokenizer, len(tokenizer), ends)
    grammar = RequestGrammar(XGrammarBackend(vocabulary).compile(StructuredOutputs(**asked)).start(), vocabulary)
    params = SamplingParams(max_tokens=50)
    return Request("a", [1], params, 0, 51, ends, detokenizer=None, grammar=grammar)


def test_a_model_without_an_end_of_sequence_stops_where_nothing_may_follow(tokenizer):
    request = request_under(tokenizer, {"choice": ["yes"]}, frozenset())
    token_ids = tokenizer.encode("yes", add_special_tokens=False)
    assert request.commit(token_ids) == len(token_ids)
    assert request.finish_reason is FinishReason.STOP


def test_what_was_sampled_behind_an_accepted_draft_that_nothing_may_follow_is_left_out(tokenizer):
    request = request_under(tokenizer, {"choice": ["yes"]}, frozenset())
    token_ids = tokenizer.encode("yes", add_special_tokens=False)
    assert (request.grammar.masks(token_ids)[-1] == -1).all(), "nothing is barred where no token is taken"
    assert request.commit([*token_ids, 0]) == len(token_ids)
    assert request.output_token_ids == token_ids
    assert request.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_without_an_end_of_sequence_drafts_change_nothing_where_the_text_is_complete(
    target_path, tmp_path, temperature
):
    shutil.copytree(target_path, tmp_path, dirs_exist_ok=True)
    for file in ("config.json", "generation_config.json"):
        (tmp_path / file).write_text(json.dumps(json.loads((tmp_path / file).read_text()) | {"eos_token_id": None}))
    params = SamplingParams(temperature=temperature, seed=4, structured_outputs={"choice": ["no", "none of it"]})
    outputs = []
    for method in (None, "forced"):
        asked = method and {"method": method, "num_speculative_tokens": 6}
        llm = LLM(str(tmp_path), speculative_config=asked, max_model_len=256)
        [output] = llm.generate(["Answer: "], params.replace(max_tokens=40))
        outputs.append((output.outputs[0].token_ids, output.outputs[0].finish_reason))
        assert counter(llm, "bad_logits_rows") == 0
    assert outputs[0] == outputs[1]
    assert outputs[0][1] == "stop"


def test_a_token_that_the_grammar_refuses_ends_its_request_as_an_error(tokenizer):
    request = request_under(tokenizer, {"choice": ["yes"]}, frozenset([tokenizer.eos_token_id]))
    wrong = tokenizer.encode("0", add_special_tokens=False)
    assert request.commit(wrong) == 1
    assert request.finish_reason is FinishReason.ERROR


def test_special_tokens_are_barred_but_those_that_end_the_text(tokenizer):
    ends = frozenset([tokenizer.eos_token_id])
    grammar = request_under(tokenizer, {"regex": ".*"}, ends).grammar
    special = set(tokenizer.all_special_ids)
    assert special - ends
    allowed = grammar.allowed([], len(tokenizer))
    assert set(allowed.nonzero().flatten().tolist()) & special == ends


class Failing:
    """A backend that fails with a long text."""

    def compile(self, asked):
        raise KeyError("x" * 10_000)


def test_a_backend_that_fails_is_named_and_its_words_are_cut(tokenizer):
    grammars = EngineGrammars("mine", Vocabulary(tokenizer, len(tokenizer), frozenset()), PluginSettings())
    grammars.backend = Failing()
    with pytest.raises(RequestError, match="KeyError") as caught:
        grammars.start(StructuredOutputs(regex="a" * 10_000), "7")
    assert caught.value.code == "SD-E341"
    assert len(str(caught.value)) < 1500


class Panic(BaseException):
    """As a library in Rust raises it."""


class FailingAt:
    """Backend, grammar and state in one, which fails in one of its calls."""

    has_ended = may_end = False

    def __init__(self, call, error):
        self.call, self.error = call, error

    def answer(self, call, answer):
        if call == self.call:
            raise self.error
        return answer

    def compile(self, asked):
        return self.answer("compile", self)

    def start(self):
        return self.answer("start", self)

    def fill(self, words):
        self.answer("fill", None)


@pytest.mark.parametrize("error", [ValueError("it broke"), Panic("it broke")], ids=["error", "panic"])
@pytest.mark.parametrize("call", ["compile", "start", "fill"])
def test_a_backend_that_fails_before_the_first_token_refuses_the_request(call, error, tokenizer):
    vocabulary = Vocabulary(tokenizer, len(tokenizer), frozenset())
    grammars = EngineGrammars("mine", vocabulary, PluginSettings(), most_seconds=2)
    grammars.backend = FailingAt(call, error)
    with pytest.raises(RequestError, match=r"SD-E341(.|\n)*cannot be compiled(.|\n)*it broke"):
        grammars.start(StructuredOutputs(regex="a"), "7")


class FailingLater:
    """A backend whose states count the calls of one kind, and raise in the last that is allowed."""

    def __init__(self, backend, call, error, allowed):
        self.backend, self.call, self.error, self.allowed = backend, call, error, allowed

    def compile(self, asked):
        return FailingLater(self.backend.compile(asked), self.call, self.error, self.allowed)

    def start(self):
        return FailingLater(self.backend.start(), self.call, self.error, self.allowed)

    def __getattr__(self, name):
        if name == self.call:
            self.allowed -= 1
            if self.allowed <= 0:
                raise self.error
        return getattr(self.backend, name)


@pytest.mark.parametrize(
    ("name", "call", "error"),
    [
        ("plain", "has_ended", Panic("it broke")),
        ("plain", "accept", ValueError("it broke")),
        ("plain", "fill", Panic("it broke")),
        ("forced", "accept", ValueError("it broke")),
        ("forced", "fill", ValueError("it broke")),
        ("forced", "rollback", ValueError("it broke")),
        ("forced", "forced", Panic("it broke")),
    ],
)
def test_a_backend_that_fails_in_the_middle_of_a_text_ends_that_request_alone(name, call, error, caplog):
    asked = SamplingParams(max_tokens=24, seed=1, structured_outputs={"regex": "[a-c]{6}(, [0-9]{1,3}){9}"})
    others = PROMPTS[:2], [asked, SamplingParams(max_tokens=24, seed=2)]
    with drafting(name) as llm:
        alone = [each.outputs[0].token_ids for each in llm.generate(*others)]
        grammars = parts_of(llm.engine).grammars
        works, grammars.backend = (
            grammars.backend,
            FailingLater(grammars.backend, call, error, 4 if call == "rollback" else 9),
        )
        failing = llm.engine.get_request(llm.engine.add_request(PROMPTS[2], asked, "the one"))
        grammars.backend = works
        assert [each.outputs[0].token_ids for each in llm.generate(*others)] == alone
        run(llm.engine)
    assert failing.finish_reason is FinishReason.ERROR
    assert 0 < failing.num_output_tokens < 24
    assert re.fullmatch("[a-c]{0,6}[0-9, ]*", failing.detokenizer.text(finished=True)), "nothing is put out unmasked"
    [said] = [record.getMessage() for record in caplog.records if "SD-W344" in record.getMessage()]
    assert "'the one'" in said
    assert "it broke" in said


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=["interrupt", "exit"])
def test_what_a_signal_raises_within_a_backend_is_no_failure_of_it(error, tokenizer):
    grammar = RequestGrammar(FailingAt("fill", error), Vocabulary(tokenizer, len(tokenizer), frozenset()))
    told = []
    grammar.on_failure = told.append
    with pytest.raises(type(error)):
        grammar.masks([])
    assert not told


def test_a_proposer_that_reads_grammars_is_refused_elsewhere():
    with pytest.raises(Refusal, match="grammar@1"):
        LLM("tiny", speculative_config=PROPOSERS["forced"] | {"isolation": "process"})


BAD = [
    ({"regex": "(["}, "SD-E341"),
    ({"json": "{nope"}, "SD-E341"),
    ({"json": {"type": "nonsense"}}, "SD-E341"),
    ({"grammar": "root ::= absent"}, "SD-E341"),
    ({"structural_tag": {"a": 1}}, "SD-E341"),
    ({"json": {"type": "string"}, "whitespace_pattern": " "}, "SD-E341"),
    ({"regex": "a", "choice": ["a"]}, "SD-E132"),
    ({"choice": ["a", ""]}, "SD-E132"),
    ({}, "SD-E132"),
    ({"regx": "a"}, "SD-E131"),
]


def test_bad_input_is_refused_by_name_and_the_engine_goes_on():
    nested = {"type": "string"}
    for _ in range(200):
        nested = {"type": "array", "items": nested}
    with drafting("ngram") as llm:
        for asked, code in [*BAD, ({"json": nested}, "SD-E341"), ({"regex": "a" * (1 << 21)}, "SD-E341")]:
            with pytest.raises(SpecdecError) as caught:
                llm.generate("x", SamplingParams(structured_outputs=asked))
            assert caught.value.code == code, asked
        assert llm.generate("x", SamplingParams(max_tokens=3, structured_outputs={"regex": "aaa"}))[0].outputs[0].text


def test_a_backend_that_nobody_offers_is_named_with_those_that_there_are():
    with LLM("tiny", structured_outputs_backend="xgramar") as llm, pytest.raises(ConfigError) as caught:
        llm.generate("x", SamplingParams(structured_outputs={"regex": "a"}))
    assert "xgrammar" in str(caught.value)


def test_a_target_without_a_tokenizer_says_so(target_path, tmp_path):
    for file in target_path.iterdir():
        if not file.name.startswith(("tokenizer", "chat")):
            (tmp_path / file.name).symlink_to(file)
    with LLM(tmp_path) as llm, pytest.raises(RequestError) as caught:
        llm.generate([[1, 2]], SamplingParams(structured_outputs={"regex": "a"}, detokenize=False))
    assert caught.value.code == "SD-E340"


class Reads(HostProposer):
    """Compares what it is told of a request's grammar with what the text says."""

    needs = Needs(history=True, extensions=(Grammars(),))
    seen = []  # noqa: RUF012

    def __init__(self, config):
        """No options."""

    def bind(self, target, services):
        self.services = services

    def draft(self, request, tokens, k):
        allowed = self.services.allowed(request.request_id)
        forced = self.services.forced(request.request_id)
        if allowed is None:
            assert forced == ""
            return []
        token = int(allowed.nonzero()[0])
        behind = self.services.allowed(request.request_id, [token])
        none = self.services.allowed(request.request_id, [int((~allowed).nonzero()[0])])
        self.seen.append((bool(allowed.any()), bool(none.any()), forced, behind.shape))
        return [token]


def test_a_proposer_reads_what_is_allowed_and_forced():
    Reads.seen.clear()
    with make_llm(f"{__name__}:Reads", k=2) as llm:
        asked = SamplingParams(temperature=0, max_tokens=12, structured_outputs={"regex": "ab+c"})
        llm.generate(["x", "y"], [asked, SamplingParams(max_tokens=4)])
        seen = Reads.seen
    assert seen
    expected = (parts_of(llm.engine).plan.info.vocab_size,)
    assert all(some and not none and shape == expected for some, none, _, shape in seen)


@pytest.fixture(scope="module")
def backend(tokenizer):
    return XGrammarBackend(Vocabulary(tokenizer, len(tokenizer), frozenset([tokenizer.eos_token_id])))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_masks_of_trees_are_those_of_each_path_alone(backend, tokenizer, data):
    """Against a state that walks the path from its beginning."""
    vocabulary = Vocabulary(tokenizer, len(tokenizer), frozenset([tokenizer.eos_token_id]))
    compiled = backend.compile(StructuredOutputs(regex="(a|b)(b|c)*d?"))
    usual = [tokenizer.encode(text, add_special_tokens=False)[0] for text in "abcdx"] + [tokenizer.eos_token_id]
    drafts = data.draw(st.lists(st.sampled_from(usual), max_size=7))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(len(drafts))]
    grammar = RequestGrammar(compiled.start(), vocabulary)
    found = unpacked(grammar.masks(drafts, parents), vocabulary.size)
    again = unpacked(grammar.masks(drafts, parents), vocabulary.size)
    assert torch.equal(found, again)  # nothing was left behind
    for place in range(len(drafts) + 1):
        path, node = [], place - 1
        while node >= 0:
            path, node = [drafts[node], *path], parents[node]
        state = compiled.start()
        if all(not state.has_ended and state.accept(token) for token in path) and not state.has_ended:
            words = torch.zeros(vocabulary.num_words, dtype=torch.int32)
            state.fill(words)
            assert torch.equal(found[place], unpacked(words[None], vocabulary.size)[0])
        else:
            assert bool(found[place].all())


def chances(model, compiled, vocabulary, prompt):
    """Every text of a finite grammar with its probability under the target, by enumeration."""
    found: Counter[tuple[int, ...]] = Counter()

    def walk(path, share):
        state = compiled.start()
        for token in path:
            assert state.accept(token)
        if state.has_ended:
            found[tuple(path)] += share
            return
        words = torch.zeros(vocabulary.num_words, dtype=torch.int32)
        state.fill(words)
        allowed = unpacked(words[None], vocabulary.size)[0]
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *path]])).logits[0, -1].double()
        probs = logits.masked_fill(~allowed, -math.inf).softmax(0)
        for token in allowed.nonzero().flatten().tolist():
            walk([*path, token], share * float(probs[token]))

    walk([], 1.0)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("follow", [False, True], ids=["blind", "following"])
@pytest.mark.parametrize("rule", ["standard", "block"])
def test_drawn_drafts_follow_the_distribution_under_the_grammar(rule, follow, backend, tokenizer, reference_model):
    """A chi-square test with fixed seeds, of drafts that are drawn under the grammar or know nothing of it."""
    vocabulary = Vocabulary(tokenizer, len(tokenizer), frozenset([tokenizer.eos_token_id]))
    asked = StructuredOutputs(regex="[ab][abc]")
    prompt, num = tokenizer.encode("x = "), 1500
    truth = chances(reference_model, backend.compile(asked), vocabulary, prompt)
    config = PROPOSERS["model"] | {"draft_sample_method": "probabilistic", "rejection_sample_method": rule}
    config["proposer_config"] = {"follow_grammars": follow}
    with LLM("tiny", speculative_config=config, max_model_len=64) as llm:
        params = [SamplingParams(seed=seed, max_tokens=4, structured_outputs=asked) for seed in range(num)]
        outputs = llm.generate([{"prompt_token_ids": prompt}] * num, params)
        assert counter(llm, "spec_decode_num_draft_tokens") > num / 2
    counts = Counter(tuple(output.outputs[0].token_ids) for output in outputs)
    assert set(counts) <= set(truth)
    likely = [text for text, share in truth.items() if share * num >= 5]
    rest = 1 - sum(truth[text] for text in likely)
    statistic = sum((counts[text] - num * truth[text]) ** 2 / (num * truth[text]) for text in likely)
    others = num - sum(counts[text] for text in likely)
    statistic += (others - num * rest) ** 2 / (num * rest) if rest * num > 1 else 0
    freedom = len(likely)
    assert statistic < freedom + 4 * math.sqrt(2 * freedom), (statistic, freedom)


def test_requests_that_are_aborted_or_left_out_hold_nothing():
    with drafting("forced") as llm:
        engine = llm.engine
        asked = SamplingParams(max_tokens=40, structured_outputs=ASKED["json"])
        names = [engine.add_request("x", asked) for _ in range(3)]
        engine.step()
        engine.abort(names[1])
        run(engine)
        assert all(parts_of(llm.engine).grammars.of(name) is None for name in names)


def test_a_chain_of_the_most_drafts_is_masked(tokenizer, backend):
    vocabulary = Vocabulary(tokenizer, len(tokenizer), frozenset([tokenizer.eos_token_id]))
    [token] = tokenizer.encode("a", add_special_tokens=False)
    grammar = RequestGrammar(backend.compile(StructuredOutputs(regex="a*")).start(), vocabulary)
    masks = unpacked(grammar.masks([token] * 1024), vocabulary.size)
    assert torch.equal(masks, masks[:1].expand_as(masks))
    assert grammar.may_end, "the state came back"


def test_a_tokenizer_may_have_special_tokens_beyond_the_model(tokenizer):
    size = tokenizer.eos_token_id // 32 * 32
    assert max(tokenizer.all_special_ids) >= size
    state = XGrammarBackend(Vocabulary(tokenizer, size, frozenset())).compile(StructuredOutputs(regex="a+")).start()
    assert state.accept(*tokenizer.encode("a", add_special_tokens=False))


LIST = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
ONES = {"type": "array", "minItems": 20_000, "items": {"const": 1}}


@pytest.mark.parametrize(
    ("asked", "unit"),
    [
        ({"json": ONES, "disable_any_whitespace": True}, "1,"),
        ({"json": LIST, "disable_any_whitespace": True}, '"next":{'),
        ({"grammar": 'root ::= "a" root'}, "a"),
        ({"regex": "(日本語){1000}"}, "日本語"),
    ],
)
def test_the_beginning_of_long_or_endless_forced_text_is_known(asked, unit, backend, tokenizer):
    state = backend.compile(StructuredOutputs(**asked)).start()
    forced = state.forced()
    assert 250 < len(forced.encode()) <= 256
    assert (unit * 256).startswith(forced.lstrip("[{"))
    assert all(state.accept(token) for token in tokenizer.encode(forced[:6], add_special_tokens=False))
    assert state.forced()[:50] == forced[6:56]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([*ASKED.values(), {"regex": "a.*"}, {"choice": ["é", "è", "日本x", "日本"]}]), st.data())
def test_forced_text_is_all_that_the_library_finds_wherever_the_text_goes(backend, tokenizer, asked, data):
    state, taken = backend.compile(StructuredOutputs(**asked)).start(), 0
    words = torch.zeros(-(-len(tokenizer) // 32), dtype=torch.int32)
    for _ in range(12):
        if state.has_ended or (taken and data.draw(st.booleans(), label="goes back")):
            num_back = data.draw(st.integers(1, taken), label="tokens")
            state.rollback(num_back)
            taken -= num_back
        try:
            assert state.forced() == state._matcher.find_jump_forward_string()
        except UnicodeDecodeError:
            assert state.forced() == "", "it begins within a character"
        state.fill(words)
        allowed = unpacked(words[None], len(tokenizer))[0].nonzero().flatten().tolist()
        assert state.accept(data.draw(st.sampled_from(allowed)))
        taken += 1


def test_no_text_is_forced_by_a_grammar_that_names_a_token(backend):
    parts = [{"type": "token", "token": 97}, {"type": "const_string", "value": "yes"}]
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": parts}}
    state = backend.compile(StructuredOutputs(structural_tag=tag)).start()
    assert state.forced() == ""
    assert state.accept(97)
    assert state.forced() == ""
    state.rollback(1)
    assert state.accept(97)
