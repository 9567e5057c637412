"""What the adapter for SGLang does with requests as SGLang has them. The real one runs in `in_sglang`."""

from __future__ import annotations

import array
import gc
import json
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from engine_source import edit, write_engine
from everywhere import RepeatLast, Witness
from pydantic import field_validator

from specdec.adapters.sglang import compatibility
from specdec.adapters.sglang.chains import as_chains
from specdec.adapters.sglang.compatibility import MEMBERS, PARAMETERS, TRIED_VERSIONS
from specdec.adapters.sglang.drafting import Drafting, as_request
from specdec.core.host import EngineConfig, SpeculativeConfig, target_info
from specdec.sdk import Needs, StrictModel
from specdec.sdk.errors import PluginLoadError
from specdec.sdk.extensions import Metrics


class Req:
    """The fields of SGLang's Req that are read."""

    def __init__(self, rid, prompt, **sampling):
        self.rid, self.origin_input_ids_unpadded = rid, array.array("q", prompt)
        self.output_ids = array.array("q")
        self.eos_token_ids, self.multimodal_inputs, self.finished_reason = {2}, None, None
        given = {
            "temperature": 1.0,
            "top_k": 1,
            "top_p": 1.0,
            "min_p": 0.0,
            "stop_token_ids": None,
            "ignore_eos": False,
        }
        given |= {"ignore_eos": False, "max_new_tokens": 20, "min_new_tokens": 0, "custom_params": None}
        self.sampling_params = SimpleNamespace(**given | sampling)
        if isinstance(self.sampling_params.custom_params, dict):  # as SGLang does, for its own processors
            self.sampling_params.custom_params = self.sampling_params.custom_params | {"__req__": self}


class Told(Witness):
    """Keeps what it was told last, for all its objects."""

    ends: ClassVar[list] = []

    def on_finish(self, request):
        super().on_finish(request)
        self.ends.append((request.request_id, request.end.reason, request.end.output_token_ids))


class Shown(RepeatLast):
    """Keeps which positions it was shown of each request, for all its objects."""

    positions: ClassVar[dict] = {}

    def observe(self, step):
        starts, counts = step.kept.kept_start.tolist(), step.kept.num_kept.tolist()
        for name, start, count in zip(step.request_ids, starts, counts, strict=True):
            self.positions.setdefault(name, []).append([*range(start, start + count)])


class Counts(RepeatLast):
    """Publishes how often it drafted."""

    needs = Needs(history=True, extensions=(Metrics(),))
    num_drafted = 0

    def draft(self, request, tokens, k):
        self.num_drafted += 1
        return super().draft(request, tokens, k)

    def metrics(self):
        return {"drafted": self.num_drafted}


class Slips(RepeatLast):
    """A validator of its author's raises what it should not."""

    class RequestOptions(StrictModel):
        corpus: str = "default"

        @field_validator("corpus")
        @classmethod
        def known(cls, value):
            return {"default": "default"}[value]


class Fails(RepeatLast):
    def draft(self, request, tokens, k):
        raise RuntimeError("on purpose")


@pytest.fixture
def drafting(model):
    def make(method, **config):
        asked = {"method": method, "num_speculative_tokens": 3, "on_proposer_error": "disable"} | config
        settings = EngineConfig(model="target", max_model_len=64, max_num_seqs=2)
        info = target_info(settings, "target", model.config, model.dtype, model.device)
        return Drafting(SpeculativeConfig.parse(json.dumps(asked)), info, None)

    return make


@pytest.fixture
def told(drafting):
    Told.events.clear()
    Told.ends.clear()
    return drafting(f"{__name__}:Told")


def test_what_fills_a_row_follows_nothing():
    ids, sees = as_chains([7, 8], [[1, 2], []], 4)
    assert ids.reshape(2, 4).tolist() == [[7, 1, 2, 0], [8, 0, 0, 0]]
    first, second = sees.reshape(2, 4, 4).astype(int).tolist()
    assert first == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]
    assert second == np.eye(4, dtype=int).tolist()
    assert as_chains([7], [[1, 2]], 6)[0].tolist() == [7, 1, 2, 0, 0, 0]


def test_a_request_is_committed_as_sglang_says_and_told_as_it_ends(told):
    req = Req("a", [5, 6])
    req.output_ids.append(7)
    assert told.propose([req]) == [[7, 7, 7]]
    req.output_ids.extend([7, 9])  # one draft was accepted
    assert told.propose([req]) == [[9, 9, 9]]
    req.output_ids.extend([9, 9, 9, 2])  # all of them
    req.finished_reason = SimpleNamespace(to_json=lambda: {"type": "stop"})
    told.finish("a")
    report = told.report()
    assert (report["num_draft_tokens"], report["num_accepted_draft_tokens"]) == (6, 4)
    assert report["errors"] == {}
    assert report["proposer"].endswith("Told")
    assert Told.ends == [("a", "stop", [7, 7, 9, 9, 9, 9, 2])]
    told.finish("a")  # not known any more


def test_requests_that_are_taken_back_are_preempted_and_come_again(told):
    a, b = Req("a", [5, 6]), Req("b", [4])
    for req in (a, b):
        req.output_ids.append(7)
    told.propose([a, b])
    a.output_ids.extend([7, 8])
    assert told.propose([a]) == [[8, 8, 8]], "b was taken back"
    b.output_ids.append(3)
    a.output_ids.append(8)
    assert told.propose([b, a]) == [[3, 3, 3], [8, 8, 8]]
    assert told.report()["errors"] == {}
    assert Told.events["preempt"] == 1
    assert Told.events["start"] == 2


def test_a_request_that_comes_again_is_shown_from_its_first_token_on(drafting):
    Shown.positions.clear()
    shown = drafting(f"{__name__}:Shown")
    a, b = Req("a", [5, 6]), Req("b", [4])
    for req in (a, b):
        req.output_ids.append(7)
    shown.propose([a, b])
    b.output_ids.append(7)
    shown.propose([b])  # the request in the first row was taken back
    a.output_ids.append(3)
    b.output_ids.append(3)
    shown.propose([a, b])
    assert Shown.positions == {"a": [[0, 1], [0, 1, 2]], "b": [[0], [1], [2]]}


@pytest.mark.parametrize("custom_params", [None, {}])
def test_a_request_that_was_aborted_while_it_was_taken_back_ends_with_the_next_step(told, custom_params):
    a, b, c = Req("a", [5, 6]), Req("b", [4], custom_params=custom_params), Req("c", [3])
    for req in (a, b, c):
        req.output_ids.append(7)
    told.propose([a, b])
    a.output_ids.append(7)
    told.propose([a])
    del b, req
    gc.collect()
    a.output_ids.append(7)
    told.propose([a, c])
    assert Told.ends == [("b", "abort", [7])]


def test_another_request_under_the_name_of_one_that_was_taken_back_begins_anew(told):
    first, other = Req("a", [5, 6]), Req("b", [4])
    for req in (first, other):
        req.output_ids.append(7)
    told.propose([first, other])
    other.output_ids.append(7)
    told.propose([other])
    second = Req("a", [8])
    second.output_ids.append(9)
    assert told.propose([second]) == [[9, 9, 9]]
    assert Told.ends == [("a", "abort", [7])]
    assert told.report()["errors"] == {}


def test_a_request_near_its_end_gets_no_more_drafts_than_it_can_use(told):
    req = Req("a", [5, 6], max_new_tokens=3)
    req.output_ids.append(7)
    assert told.propose([req]) == [[7]]


def test_what_comes_behind_the_end_of_a_request_is_not_its_text(told):
    req = Req("a", [5, 6], max_new_tokens=2)
    req.output_ids.extend([7, 7])
    assert told.propose([req]) == [[]]
    req.output_ids.append(9)  # of a pass that was under way
    assert told.propose([req]) == [[]]
    told.finish("a")
    assert Told.ends == [("a", "length", [7, 7])]


def test_its_own_figures_are_those_of_now(drafting):
    counts = drafting(f"{__name__}:Counts")
    req = Req("a", [5, 6])
    for drafted in (1, 2):
        req.output_ids.append(7)
        counts.propose([req])
        assert counts.report()["figures"] == {"proposer_counts_drafted": drafted}


def test_a_failing_proposer_is_asked_no_more_after_three_errors(drafting):
    failing = drafting(f"{__name__}:Fails")
    req = Req("a", [5, 6])
    for _ in range(5):
        req.output_ids.append(7)
        other = Req(f"b{len(req.output_ids)}", [4])
        other.output_ids.append(3)
        assert failing.propose([req, other]) == [[], []]
    report = failing.report()
    assert report["enabled"] is False
    assert sum(report["errors"].values()) == report["propose_calls"] == 3


@pytest.mark.parametrize(
    ("custom_params", "drafts"),
    [
        ({"specdec": {"num_speculative_tokens": 1}}, [7]),
        ({"specdec": {"speculative": False}}, []),
        ({"specdec": {"unknown": 1}}, []),
        ([1], []),
        ("text", []),
        ({"of others": 1}, [7, 7, 7]),
    ],
)
def test_a_request_says_how_many_drafts_it_wants(told, custom_params, drafts):
    req = Req("a", [5, 6], custom_params=custom_params)
    req.output_ids.append(7)
    assert told.propose([req]) == [drafts]


def test_a_slip_of_its_author_costs_the_request_that_made_it_show_its_drafts_alone(drafting, caplog):
    good, bad = Req("good", [5]), Req("bad", [6], custom_params={"specdec": {"corpus": "other"}})
    for req in (good, bad):
        req.output_ids.append(7)
    assert drafting(f"{__name__}:Slips").propose([good, bad]) == [[7, 7, 7], []]
    assert "KeyError: 'other'" in caplog.text


def test_sampling_parameters_are_told_as_sglang_has_them(told):
    req = Req("a", [5], temperature=0.5, top_k=1 << 30, ignore_eos=True, stop_token_ids={9}, max_new_tokens=None)
    request = as_request(req, told._loaded, told._info)
    assert (request.params.temperature, request.params.top_k) == (0.5, 0)
    assert request.end_token_ids == {9}
    assert request.max_total_tokens == 64
    greedy = as_request(Req("b", [5]), told._loaded, told._info)
    assert greedy.params.greedy
    assert greedy.end_token_ids == {2}


@pytest.mark.parametrize(
    ("proposer", "reason"),
    [
        ("everywhere:EarlyExit", "hidden states"),
        ("everywhere:CacheReader", "SGLang's cache"),
        ("everywhere:KVWitness", "DraftKV was not tried"),
        ("token_recycling", "TargetTokens was not tried"),
    ],
)
def test_what_reads_more_than_tokens_is_refused(drafting, proposer, reason):
    with pytest.raises(PluginLoadError, match="SD-E121") as refused:
        drafting(proposer)
    assert reason in str(refused.value)


def test_other_signatures_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(compatibility, "folder_of", lambda package: write_engine(tmp_path, PARAMETERS, MEMBERS))
    monkeypatch.setattr(compatibility, "version", lambda package: TRIED_VERSIONS[-1])
    compatibility.check_sglang()
    monkeypatch.setattr(compatibility, "folder_of", lambda package: tmp_path)
    worker = "srt/speculative/ngram_worker.py"
    edit(tmp_path, worker, "_prepare_draft_tokens(self, batch", "_prepare_draft_tokens(self, batch, more")
    edit(tmp_path, worker, "def clear_cache_pool", "def clear_pool")
    edit(tmp_path, worker, "NgramCorpus: int", "from corpus import NgramCorpus as Corpus")
    with pytest.raises(PluginLoadError, match="SD-E195") as refused:
        compatibility.check_sglang()
    assert str(refused.value.facts["differs"]).splitlines() == [
        f"{worker}:NGRAMWorker.clear_cache_pool is gone",
        f"{worker}:NGRAMWorker._prepare_draft_tokens(self, batch, more), expected (self, batch)",
        f"{worker}: has no NgramCorpus",
    ]
