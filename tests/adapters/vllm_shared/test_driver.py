"""The proposer's life under another engine's steps: rows, lifecycle, counts, limits, misuse, distributions."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch

from specdec.adapters.vllm_shared import watch
from specdec.adapters.vllm_shared.driver import Driver
from specdec.adapters.vllm_shared.engine_step import EngineStep, boundaries
from specdec.adapters.vllm_shared.rows import RequestRows
from specdec.adapters.vllm_shared.workers_page import VARIABLE, WorkersPage
from specdec.adapters.vllm_v1.step import read_step
from specdec.core.proposing.speculation import Speculation
from specdec.core.registry import PluginSettings
from specdec.core.registry.hooks import load_hooks
from specdec.sdk import DistributionKind, Draft, DraftDistribution, HostProposer, Needs, Phase, ProposerError, hookimpl
from specdec.sdk.extensions import DraftKV, Metrics, TargetTokens, Trees
from specdec.testing.fakes import fake_target_info

V, K = 64, 3


class Counting(HostProposer):
    """Drafts the numbers that follow the newest token, and remembers what it was told."""

    needs = Needs(history=True, state="per_request", sampling=("temperature", "top_k"))

    def __init__(self, config):
        super().__init__(config)
        self.told = []
        self.steps = []

    def on_start(self, request):
        self.told.append(("start", request.request_id, request.slot, request.generation))

    def on_preempt(self, request):
        self.told.append(("preempt", request.request_id, request.slot))

    def on_finish(self, request):
        self.told.append(("finish", request.request_id))
        super().on_finish(request)

    def observe(self, step):
        self.steps.append(step)

    def draft(self, request, tokens, k):
        return [(tokens[-1] + 1 + i) % V for i in range(k)]


class Bad:
    """Returns or raises what the test put into `answer`."""

    answer = None

    def __init__(self, config):
        pass

    def propose(self, step):
        answer = type(self).answer
        if isinstance(answer, Exception):
            raise answer
        return answer


class FailsNow(Counting):
    """Raises while `now` says so, and holds it against the engine if it is shown a request that it was not told of."""

    now = False

    def observe(self, step):
        started = [told[1] for told in self.told if told[0] == "start"]
        ended = [told[1] for told in self.told if told[0] == "finish"]
        assert set(step.request_ids) <= set(started) - set(ended)
        super().observe(step)

    def draft(self, request, tokens, k):
        if type(self).now:
            raise RuntimeError("on purpose")
        return super().draft(request, tokens, k)


class WithDistribution:
    """Drafts 1, 2, .. with a dense distribution that differs per request."""

    needs = Needs(distributions=("dense",))

    def __init__(self, config):
        pass

    def propose(self, step):
        ids = torch.arange(1, K + 1).expand(len(step), K)
        probs = torch.zeros(len(step), K, V)
        probs[:, :, 1 : K + 1] = 0.25
        for b, request_id in enumerate(step.request_ids):
            probs[b, :, 10 + int(request_id)] += 0.25
        kind = torch.full((len(step),), DistributionKind.DENSE_PROBS, dtype=torch.uint8)
        return Draft(ids, step.budget, distribution=DraftDistribution(kind=kind, probs=probs))


class Reading:
    """Reads hidden states."""

    needs = Needs(hidden_states=(2, "final", 0))

    def __init__(self, config):
        pass

    def propose(self, step):
        return Draft.from_lists([()] * len(step), K)


class Branching:
    """Drafts two paths of which the second is longer, in 8 nodes, and remembers which were accepted."""

    needs = Needs(extensions=(Trees(),))
    path = (22, 23, 24, 25)  # nodes 0, 2, 3, 4

    def __init__(self, config):
        self.accepted = []

    def observe(self, step):
        self.accepted.append(step.accepted_nodes[:, :4].tolist())

    def propose(self, step):
        nodes = [(-1, 22), (-1, 21), (0, 23), (2, 24), (3, 25)]
        return Draft.from_trees([nodes] * len(step), step.width)


class Embedding(Counting):
    """As a head that reads the target's embeddings."""

    needs = Needs(history=True, hidden_states=(0,))


class TextNetwork(Counting):
    """As a draft model, which reads tokens."""

    needs = Needs(history=True, extensions=(DraftKV(num_layers=1, num_heads=1, head_dim=8),))


class Head(Counting):
    """As a head that reads states of the target's layers."""

    needs = Needs(history=True, hidden_states=(2,), extensions=TextNetwork.needs.extensions)


class Listener:
    """Keeps what it is shown of verification."""

    def __init__(self):
        self.steps = []

    @hookimpl
    def on_verified(self, step):
        self.steps.append(step)


def make_driver(cls, policy="disable", sample="greedy", k=K, listener=None, retry_after_steps=0, **info):
    target = fake_target_info(**info)
    config = {"method": f"{__name__}:{cls.__name__}", "num_speculative_tokens": k, "on_proposer_error": policy}
    settings = PluginSettings()
    hooks = load_hooks(settings)
    if listener is not None:
        hooks.add(listener, "listener")
    asked = config | {"draft_sample_method": sample}
    speculation = Speculation.prepare(asked, target, settings, hooks)
    embed = torch.nn.Embedding(V, 16)
    model = SimpleNamespace(get_input_embeddings=lambda: embed, get_output_embeddings=lambda: torch.nn.Identity())
    layers = SimpleNamespace(model=model, device=torch.device("cpu"), dtype=torch.float32)
    lookahead = speculation.lookahead if speculation.loaded.needs.extension(DraftKV) else None
    rows = RequestRows.with_blocks(target, lookahead)
    driver = Driver(speculation, hooks.observers, layers, None, rows, retry_after_steps=retry_after_steps)
    driver.lay_out()
    return driver


class Engine:
    """vLLM's side: requests, what they have computed, and steps over any of them in any order."""

    def __init__(self, driver):
        self.driver = driver
        self.proposer = driver._host.proposer
        self.states, self.tokens, self.computed, self.drafts = {}, {}, {}, {}

    def add(self, name, prompt, images=(), **params):
        values = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": None, "max_tokens": 50}
        values |= {"extra_args": None}
        values |= {"min_tokens": 0, "stop_token_ids": [], "eos_token_id": None} | params
        sampling = SimpleNamespace(**values)
        self.states[name] = SimpleNamespace(prompt_token_ids=prompt, sampling_params=sampling, mm_features=list(images))
        self.tokens[name], self.computed[name], self.drafts[name] = list(prompt), 0, []

    def step(self, outputs, *, finished=(), preempted=(), chunk=None, logits=None, hidden=None):
        """outputs: name -> output tokens, in the order of the batch; [] computes `chunk` tokens of the prompt."""
        for name in preempted:
            self.computed[name], self.drafts[name] = 0, []
        self.driver.begin_step(finished, preempted)
        counts, verified, ids, positions, starts = {}, {}, [], [], []
        for name, out in outputs.items():
            start, drafts = self.computed[name], self.drafts[name] if out else []
            rows = self.tokens[name][start : None if out else start + chunk] + drafts
            starts.append(start)
            counts[name] = len(rows)
            ids += rows
            positions += range(start, start + len(rows))
            if drafts:
                verified[name] = drafts
            self.tokens[name] += out
            self.computed[name] = len(self.tokens[name]) - 1 if out else start + chunk
        step = EngineStep(
            request_ids=tuple(outputs),
            states=self.states,
            starts=starts,
            num_tokens=counts,
            drafts=verified,
            input_ids=torch.tensor(ids, dtype=torch.int32),
            input_positions=torch.tensor(positions),
            hidden=() if hidden is None else (hidden,),
            num_draft_tokens=K,
            logits=logits,
            first_rows=[*accumulate([1 + len(verified.get(name, ())) for name in outputs], initial=0)][:-1],
        )
        drafts = self.driver.propose(step, list(outputs.values()))
        self.drafts |= dict(zip(outputs, drafts, strict=True))
        return dict(zip(outputs, drafts, strict=True))


@pytest.fixture
def engine():
    return Engine(make_driver(Counting))


def test_rows_are_stable_while_the_batch_is_reordered_and_requests_skip_steps(engine):
    for name in "abc":
        engine.add(name, [1, 2, 3])
    engine.step({"a": [4], "b": [5], "c": [6]})
    engine.step({"c": [7], "a": [5]})
    engine.step({"b": [6], "c": [8], "a": [6]})
    rows = [dict(zip(step.request_ids, step.slots.tolist(), strict=True)) for step in engine.proposer.steps]
    assert rows == [{"a": 0, "b": 1, "c": 2}, {"c": 2, "a": 0}, {"b": 1, "c": 2, "a": 0}]
    lengths = [step.committed_length.tolist() for step in engine.proposer.steps]
    assert lengths == [[4, 4, 4], [5, 5], [5, 6, 6]]
    assert [step.accepted_nodes for step in engine.proposer.steps] == [None] * 3, "it drafts no trees"


def test_of_a_tree_vllm_gets_as_much_of_the_best_path_as_it_verifies_and_the_nodes_are_told():
    engine = Engine(make_driver(Branching, "raise", k=8))
    engine.add("a", [1])
    engine.add("b", [1])
    drafts = engine.step({"a": [20], "b": [20]})
    assert drafts == {"a": list(Branching.path[:K]), "b": list(Branching.path[:K])}
    engine.step({"b": [22, 23, 7], "a": [9]})
    assert engine.proposer.accepted == [[[-1] * 4] * 2, [[0, 2, -1, -1], [-1] * 4]]


def test_drafts_stand_in_the_order_of_the_batch_as_python_ints(engine):
    engine.add("a", [1])
    engine.add("b", [1])
    drafts = engine.step({"b": [20], "a": [10]})
    assert drafts == {"b": [21, 22, 23], "a": [11, 12, 13]}
    assert {type(token) for ids in drafts.values() for token in ids} == {int}


def test_listeners_see_the_rows_that_gave_each_token_also_beside_a_chunk_of_a_prompt():
    listener = Listener()
    engine = Engine(make_driver(Counting, listener=listener))
    engine.add("a", [1, 2])
    engine.step({"a": [10]}, logits=torch.rand(1, V))
    engine.add("b", [1, 2, 3])
    engine.step({"b": [], "a": [11, 12, 40]}, chunk=2, logits=torch.rand(1 + 4, V))
    engine.step({"b": [9]})
    (first,), (second,) = (step.requests for step in listener.steps)
    assert (first.logits_rows, first.position, list(first.token_ids)) == ([0], 2, [10])
    assert (second.logits_rows, second.position, list(second.token_ids)) == ([1, 2, 3], 3, [11, 12, 40])
    assert (list(second.draft_token_ids), second.num_accepted) == ([11, 12, 13], 2)


def test_accepted_counts_and_kept_rows_are_those_of_the_step(engine):
    engine.add("a", [1, 2])
    engine.step({"a": [10]})
    engine.step({"a": [11, 12, 40]})  # two of [11, 12, 13] accepted
    step = engine.proposer.steps[-1]
    assert (step.num_drafted.tolist(), step.num_accepted.tolist(), step.phase.tolist()) == ([3], [2], [Phase.DECODE])
    assert step.kept.token_ids.tolist() == [10, 11, 12]
    assert step.kept.next_token_ids.tolist() == [11, 12, 40]
    assert step.kept.positions.tolist() == [2, 3, 4]
    assert step.history.token_ids(0) == [1, 2, 10, 11, 12, 40]
    assert engine.driver.metrics.acceptance.as_dict()["num_accepted_draft_tokens"] == 2


@pytest.mark.parametrize(
    ("proposer", "drafts"), [(Counting, [11, 12, 13]), (Head, [11, 12, 13]), (Embedding, []), (TextNetwork, [])]
)
def test_a_prompt_with_an_image_has_drafts_from_those_that_can_read_it(proposer, drafts, caplog):
    engine = Engine(make_driver(proposer))
    engine.add("a", [1, 2, 3], images=["cat"])
    engine.add("b", [1, 2, 3])
    hidden = torch.rand(6, engine.driver._info.hidden_size)
    found = engine.step({"a": [10], "b": [10]}, hidden=hidden)
    assert found == {"a": drafts, "b": [11, 12, 13]}
    assert ("SD-W281" in caplog.text) == (not drafts)


def test_a_prompt_in_chunks_is_shown_in_chunks_and_drafted_for_when_it_is_done(engine):
    engine.add("a", list(range(1, 8)))
    assert engine.step({"a": []}, chunk=4) == {"a": []}
    assert engine.step({"a": [30]}) == {"a": [31, 32, 33]}
    first, second = engine.proposer.steps
    assert (first.phase.tolist(), second.phase.tolist()) == ([Phase.PREFILL], [Phase.PREFILL_DONE])
    assert (first.kept.token_ids.tolist(), first.kept.next_token_ids.tolist()) == ([1, 2, 3, 4], [2, 3, 4, 5])
    assert second.kept.positions.tolist() == [4, 5, 6]


def test_a_preempted_request_comes_back_with_the_tokens_that_the_scheduler_knew(engine):
    """Asynchronous scheduling gives up those of the step that was under way."""
    engine.add("a", [1, 2])
    engine.step({"a": [10]})
    engine.step({"a": [11, 40]})
    engine.driver.begin_step((), {"a"})
    engine.tokens["a"], engine.computed["a"], engine.drafts["a"] = [1, 2, 10], 0, []
    engine.driver.resume("a", [1, 2, 10])
    engine.step({"a": [12]})
    step = engine.proposer.steps[-1]
    assert step.committed_length.tolist() == [4]
    assert step.history.token_ids(0) == [1, 2, 10, 12]
    engine.driver.resume("unknown", [1])


def test_a_step_from_another_position_than_the_one_that_follows_stops_drafting(engine, caplog):
    engine.add("a", [1, 2])
    assert engine.step({"a": [10]}) == {"a": [11, 12, 13]}
    expected = SimpleNamespace(request_ids=("a",), starts=[2])
    engine.driver.check(expected)
    assert not caplog.records
    engine.driver.check(SimpleNamespace(request_ids=("a", "unknown"), starts=[3, 7]))
    engine.driver.check(expected)
    (record,) = caplog.records
    assert "SD-W239" in record.getMessage()
    assert engine.step({"a": [11]}) == {"a": []}


def test_a_request_may_ask_for_fewer_drafts_or_none(engine, caplog):
    for name, asked in {
        "few": {"num_speculative_tokens": 1},
        "none": {"speculative": False},
        "bad": {"sped": 1},
    }.items():
        engine.add(name, [1, 2], extra_args={"specdec": asked})
    assert engine.step({"few": [10], "none": [20], "bad": [30]}) == {"few": [11], "none": [], "bad": []}
    (record,) = caplog.records
    assert "sped" in record.getMessage()


def test_what_a_request_asks_for_may_be_json_as_over_http(engine, caplog):
    for name, asked in {
        "few": '{"num_speculative_tokens": 1}',
        "none": '{"speculative": false}',
        "no json": "{num_speculative_tokens: 1}",
        "no mapping": "[1]",
        "deep": "[" * 100_000,
        "wrong": '{"num_speculative_tokens": "many"}',
    }.items():
        engine.add(name, [1, 2], extra_args={"specdec": asked})
    names = ["few", "none", "no json", "no mapping"]
    drafts = engine.step({name: [10] for name in names})
    assert drafts == {"few": [11], "none": [], "no json": [], "no mapping": []}
    engine.step({}, finished=names)
    assert engine.step({"deep": [10], "wrong": [10]}) == {"deep": [], "wrong": []}
    for name, record in zip(["no json", "no mapping", "deep", "wrong"], caplog.records, strict=True):
        assert record.getMessage().startswith(f"SD-E270 request '{name}':")
        assert "no drafts for this request" in record.getMessage()
        assert "pydantic" not in record.getMessage()


def test_a_preempted_request_comes_back_in_a_new_generation_from_position_0(engine):
    engine.add("a", [1, 2])
    engine.add("b", [3])
    engine.step({"a": [10], "b": [20]})
    engine.step({"b": [21]}, preempted={"a"})
    engine.step({"b": [22], "a": [11]})
    assert engine.proposer.told == [("start", "a", 0, 1), ("start", "b", 1, 1), ("preempt", "a", 0)]
    last = engine.proposer.steps[-1]
    assert dict(zip(last.request_ids, last.generation.tolist(), strict=True)) == {"b": 1, "a": 2}
    assert last.kept.kept_start.tolist() == [2, 0]
    assert last.num_drafted.tolist() == [3, 0]


def test_a_request_that_is_preempted_without_a_row_or_unknown_changes_nothing(engine):
    engine.add("a", [1, 2, 3])
    engine.step({"a": [10]})
    engine.driver.begin_step((), ["a", "nobody"])
    engine.driver.begin_step((), ["a"])
    assert [told[0] for told in engine.proposer.told] == ["start", "preempt"]


class Warmed(Counting):
    """Remembers that it was warmed up."""

    def warmup(self):
        self.told.append("warm-up")


def test_a_proposer_warms_up_once_before_it_is_asked_for_drafts():
    assert make_driver(Warmed)._host.proposer.told == ["warm-up"]


def test_requests_that_end_are_finished_once_and_at_once_where_tokens_say_so(engine):
    engine.add("length", [1], max_tokens=2)
    engine.add("stop", [1], stop_token_ids=[9])
    engine.add("text", [1])
    engine.step({"length": [2], "stop": [3], "text": [4]})
    assert engine.step({"length": [5], "stop": [9], "text": [5]}) == {"length": [], "stop": [], "text": [6, 7, 8]}
    assert engine.proposer.told[3:] == [("finish", "length"), ("finish", "stop")]
    engine.add("next", [1])
    engine.step({"next": [2]}, finished={"length", "stop", "text"})
    assert engine.proposer.told[5:] == [("finish", "text"), ("start", "next", 0, 2)]


def test_a_request_aborted_while_preempted_is_finished(engine):
    engine.add("a", [1])
    engine.add("b", [1])
    engine.step({"a": [2], "b": [2]})
    engine.step({"b": [3]}, preempted={"a"})
    engine.step({"b": [4]}, finished={"a"})
    assert engine.proposer.told[-1] == ("finish", "a")


def test_drafts_end_with_what_the_request_can_still_use():
    engine = Engine(make_driver(Counting, max_model_len=8))
    engine.add("short", [1], max_tokens=3)
    engine.add("long", [1, 2, 3, 4, 5])
    assert engine.step({"short": [2], "long": [6]}) == {"short": [3], "long": [7]}
    assert engine.step({"short": [3], "long": [7]}) == {"short": [], "long": []}


def test_sampling_parameters_are_those_of_each_request(engine):
    engine.add("a", [1], temperature=0.5, top_k=7)
    engine.add("b", [1])
    engine.step({"b": [2], "a": [2]})
    sampling = engine.proposer.steps[-1].sampling
    assert (sampling.temperature.tolist(), sampling.top_k.tolist()) == ([0.0, 0.5], [0, 7])


MISUSE = {
    "longer than K": (Draft(torch.zeros(1, K + 2, dtype=torch.int64), torch.tensor([K + 2])), "SD-E201"),
    "longer than the budget": (Draft(torch.zeros(1, K, dtype=torch.int64), torch.tensor([K + 2])), "SD-E202"),
    "an id outside the vocabulary": (Draft(torch.full((1, K), V), torch.tensor([K])), "SD-E203"),
    "a negative id": (Draft(torch.full((1, K), -1), torch.tensor([K])), "SD-E203"),
    "lists": ([[1, 2, 3]], "SD-E200"),
    "nothing": (None, "SD-E200"),
    "too few rows": (Draft.from_lists([], K), "SD-E201"),
    "an exception": (KeyError("x"), "SD-E210"),
}


@pytest.mark.parametrize("misuse", MISUSE)
def test_misuse_costs_drafts_and_nothing_else(misuse):
    Bad.answer, code = MISUSE[misuse]
    engine = Engine(make_driver(Bad))
    engine.add("a", [1])
    for token in range(2, 8):
        assert engine.step({"a": [token]}) == {"a": []}
    counted = engine.driver.metrics
    assert counted.proposer_errors == {code: 3}, "the default policy stops asking after three"
    assert counted.counts["proposer_propose_calls"] == 3


def test_raise_stops_the_step_with_the_proposers_name():
    Bad.answer = None
    engine = Engine(make_driver(Bad, policy="raise"))
    engine.add("a", [1])
    with pytest.raises(ProposerError, match="Bad"):
        engine.step({"a": [2]})


def test_distributions_follow_their_requests_through_skipped_steps_and_other_orders():
    engine = Engine(make_driver(WithDistribution, sample="probabilistic"))
    for name in ("0", "1", "2"):
        engine.add(name, [1], temperature=1.0)
    engine.step({"0": [2], "1": [2], "2": [2]})
    q = engine.driver.dense_rows_of(("2", "0"), [[1, 2], [1]])
    assert q[:, 10:13].tolist() == [[0, 0, 0.25], [0, 0, 0.25], [0.25, 0, 0]]
    engine.step({"2": [3], "0": [3]})
    q = engine.driver.dense_rows_of(("1", "2"), [[1, 2, 3], [1]])
    assert q[:, 10:13].tolist() == [[0, 0.25, 0]] * 3 + [[0, 0, 0.25]]
    assert engine.driver.dense_rows_of(("1",), [[1]]) is None, "consumed once"


def test_greedy_batches_keep_no_distributions():
    engine = Engine(make_driver(WithDistribution, sample="probabilistic"))
    engine.add("0", [1])
    engine.step({"0": [2]})
    assert engine.driver.dense_rows_of(("0",), [[1, 2, 3]]) is None


def test_hidden_states_come_in_the_order_of_the_needs():
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=["a"], num_computed_tokens_cpu=torch.tensor([5, 9, 9]).numpy()),
        requests={},
        input_ids=SimpleNamespace(gpu=torch.arange(4, dtype=torch.int32)),
        positions=torch.arange(4),
        get_model=lambda: SimpleNamespace(embed_input_ids=lambda ids: ids[:, None] + 10.0),
    )
    scheduled = SimpleNamespace(
        total_num_scheduled_tokens=2,
        num_scheduled_tokens={"a": 2},
        scheduled_spec_decode_tokens={},
        num_spec_tokens_to_schedule=K,
    )
    final, between = torch.full((4, 1), 9.0), [torch.full((4, 1), 2.0)]
    step = read_step(runner, scheduled, final, between, Reading.needs)
    assert step.starts == [5], "vLLM's table has rows for more requests"
    assert boundaries(Reading.needs) == (2,)
    assert torch.cat(step.hidden, dim=-1).tolist() == [[2, 9, 10], [2, 9, 11]]
    assert (step.token_ids.tolist(), step.token_ids.dtype) == ([0, 1], torch.int64)
    assert step.positions.tolist() == [0, 1], "vLLM's buffers are longer than the step"


def test_a_first_step_that_vllm_fills_up_verified_no_drafts():
    """Its scheduler has as many tokens of such a request computed as of others: -1 stands for each that is none."""
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=["old", "new"], num_computed_tokens_cpu=torch.tensor([5, 0]).numpy()),
        requests={},
        input_ids=SimpleNamespace(gpu=torch.arange(6, dtype=torch.int32)),
        positions=torch.arange(6),
        get_model=lambda: SimpleNamespace(embed_input_ids=None),
    )
    scheduled = SimpleNamespace(
        total_num_scheduled_tokens=6,
        num_scheduled_tokens={"old": 2, "new": 1 + K},
        scheduled_spec_decode_tokens={"old": [7], "new": [-1] * K},
        num_spec_tokens_to_schedule=K,
    )
    step = read_step(runner, scheduled, torch.zeros(6, 1), None, Counting.needs, torch.zeros(3 + K, V))
    assert step.drafts == {"old": [7], "new": []}
    assert step.first_rows == [0, 2], "the logits have a row for each"


def enabled(driver):
    (value,) = re.findall(r"^specdec:proposer_enabled\{.*\} (.*)$", driver.published(), flags=re.MULTILINE)
    return float(value)


class Telling(Counting):
    """Tells figures, and on which threads it was asked."""

    needs = Needs(extensions=(Metrics(),))

    def metrics(self):
        self.told.append(threading.get_ident())
        return {"steps": len(self.steps)}


def test_a_reader_of_figures_sees_the_last_answer_and_the_proposer_is_asked_between_steps():
    engine = Engine(make_driver(Telling))
    engine.add("a", [1, 2])
    pages = []
    with ThreadPoolExecutor(1) as reader:
        for token in range(3):
            engine.step({"a": [10 + token]})
            pages.append(reader.submit(engine.driver.published).result())
    steps = [re.findall(r"^specdec:proposer_telling_steps\{.*\} (.*)$", page, flags=re.MULTILINE) for page in pages]
    assert steps == [[], ["1.0"], ["2.0"]]
    assert [each for each in engine.proposer.told if isinstance(each, int)] == [threading.get_ident()] * 2


def test_a_closed_worker_leaves_no_page_behind_though_one_was_being_written(monkeypatch, tmp_path):
    monkeypatch.setattr(watch, "PERIOD", 0.001)
    driver, page, inside = make_driver(Counting), WorkersPage.of({VARIABLE: str(tmp_path)}), threading.Event()

    def slowly():
        inside.set()
        time.sleep(0.05)
        return driver.published()

    driver._watch.each_time(partial(page.write, slowly))
    driver._watch.start()
    driver.at_close(page.remove)
    assert inside.wait(60)
    driver.close()
    for thread in threading.enumerate():
        if thread.name == "specdec-watch":
            thread.join()
    assert list(tmp_path.iterdir()) == []


class Likely(Counting):
    """Is shown the likeliest tokens of each place."""

    needs = Needs(history=True, state="per_request", extensions=(TargetTokens(top_k=3),))


def test_an_idle_step_has_no_row_of_likely_tokens():
    driver = make_driver(Likely, policy="raise")
    driver.idle()
    assert driver.metrics.proposer_errors == {}
    assert driver._host.views.idle().kept.top_ids.shape == (0, 3)


@pytest.mark.parametrize("cls", [Counting, WithDistribution, Reading, Branching, TextNetwork])
def test_an_idle_step_is_a_dummy_without_requests(cls):
    class Noting(cls):
        def propose(self, step):
            idle.append((step.dummy, len(step), [tuple(each.shape) for each in step.kept.hidden]))
            return super().propose(step)

    idle = []
    driver = make_driver(cls, policy="raise", k=8 if cls is Branching else K)
    driver._host.proposer.__class__ = Noting
    driver.idle()
    assert idle == [(True, 0, [(0, 16)] * len(cls.needs.hidden_states))]
    assert driver.metrics.proposer_errors == {}


@pytest.fixture
def failing(monkeypatch):
    """An engine whose proposer was switched off after three errors, and is asked again after four steps."""
    monkeypatch.setattr(FailsNow, "now", True)
    engine = Engine(make_driver(FailsNow, retry_after_steps=4))
    for name in ("ends", "stays", "moves"):
        engine.add(name, [1, 2])
    for token in range(3):
        engine.step({key: [10 + token] for key in ("ends", "stays", "moves")})
    assert enabled(engine.driver) == 0
    return engine


def test_a_proposer_that_was_switched_off_is_told_what_it_missed_and_asked_again(failing, monkeypatch, caplog):
    monkeypatch.setattr(FailsNow, "now", False)
    failing.step({"stays": [20], "moves": [20]}, finished=["ends"])
    failing.add("new", [1, 2])
    failing.add("passes", [1, 2])
    failing.step({"stays": [21], "new": [21], "passes": [21]}, preempted=["moves"])
    failing.step({"stays": [22], "new": [22]}, finished=["passes"])
    assert failing.proposer.told[3:] == [], "nothing is told to it while it is off"
    failing.step({"stays": [23], "new": [23]})
    assert enabled(failing.driver) == 0
    drafts = failing.step({"stays": [24], "new": [24], "moves": [24]})
    assert enabled(failing.driver) == 1
    assert drafts == {"stays": [], "new": [], "moves": []}, "it has not seen all of their tokens"
    told = [each[:2] for each in failing.proposer.told[3:]]
    assert told == [("finish", "ends"), ("preempt", "moves"), ("start", "new")], "passes came and went meanwhile"
    failing.add("later", [1])
    assert failing.step({"stays": [25], "later": [30]}) == {"stays": [], "later": [31, 32, 33]}
    failing.step({"stays": [26]}, preempted=["new"])
    assert failing.step({"new": [27]})["new"] == [28, 29, 30], "computed again, it was seen as a whole"
    assert "SD-W217" in caplog.text


def test_each_failure_after_a_pause_makes_the_next_one_twice_as_long_until_it_works(failing, monkeypatch, caplog):
    pauses = []
    for number in range(40):
        failing.add(f"r{number}", [1])
        failing.step({f"r{number}": [5]}, finished=[f"r{number - 1}"])
        if "SD-W217" in caplog.text:
            pauses.append(number)
            caplog.clear()
    assert [later - earlier for earlier, later in pairwise(pauses)] == [9, 17]
    monkeypatch.setattr(FailsNow, "now", False)
    for number in range(40, 140):
        failing.add(f"r{number}", [1])
        failing.step({f"r{number}": [5]}, finished=[f"r{number - 1}"])
    assert enabled(failing.driver) == 1
    monkeypatch.setattr(FailsNow, "now", True)
    for number in (140, 141):
        failing.add(f"r{number}", [1])
        failing.step({f"r{number}": [5]}, finished=[f"r{number - 1}"])
        assert enabled(failing.driver) == 1, "it worked for long enough: three errors as at the start"


def test_without_a_pause_it_stays_off(monkeypatch):
    monkeypatch.setattr(FailsNow, "now", True)
    engine = Engine(make_driver(FailsNow))
    engine.add("a", [1])
    for token in range(30):
        engine.step({"a": [token]})
    assert enabled(engine.driver) == 0
    assert engine.driver.metrics.counts["proposer_propose_calls"] == 3
