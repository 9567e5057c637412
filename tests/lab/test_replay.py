"""A replay gives the drafts, accepted counts and text of a live run, for every packaged proposer."""

import importlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from recordings import live_steps, make, settings, shared
from transformers import PreTrainedConfig

from specdec.core.rejection.types import DistributionKind, DraftDistributions, DraftRows
from specdec.lab.recording import Recording
from specdec.lab.recording.probabilities import distribution_of
from specdec.lab.recording.settings import RecordSettings
from specdec.lab.replay.assembly import tokenizer_of
from specdec.lab.replay.caches import Caches
from specdec.lab.replay.clock import Moment, ProposeClock
from specdec.lab.replay.expected import ExpectedAcceptance
from specdec.lab.replay.result import Replays
from specdec.lab.replay.run import replay
from specdec.lab.replay.stand_in import require_same_model
from specdec.lab.replay.watch import Watch, places_of, stamps
from specdec.sdk import ConfigError, Refusal

PROPOSERS = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 6},
    "draft_model": {"method": "draft_model", "model": "tiny/draft", "num_speculative_tokens": 3},
    "pard": {"model": "tiny/pard", "num_speculative_tokens": 4},
    "eagle": {"model": "tiny/eagle", "num_speculative_tokens": 3},
    "eagle3": {"model": "tiny/eagle3", "num_speculative_tokens": 3},
    "dflash": {"model": "tiny/dflash", "num_speculative_tokens": 5},
    "dspark": {"model": "tiny/dspark", "num_speculative_tokens": 3},
    "medusa": {"model": "tiny/medusa"},
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
}
TREES = {
    f"{name} tree": {**PROPOSERS[name], "num_speculative_tokens": depth, "max_nodes": 12}
    for name, depth in {"ngram": 4, "suffix": 6, "eagle3": 4, "dflash": 5, "medusa": 3}.items()
}
PROPOSERS |= TREES
LATER = {"transformers_version": "99.0", "of_later_versions": None}
QUICK = ("ngram", "draft_model", "eagle3")  # a token reader, a network of its own, a head
SAMPLED = [pytest.param(name, 0.8, marks=() if name in QUICK else pytest.mark.full) for name in PROPOSERS]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "temperature"), [*((name, 0.0) for name in PROPOSERS), *SAMPLED])
def test_steps_of_a_replay_are_those_of_a_live_run(name, temperature):
    recording = shared(temperature)
    replayed = replay(recording, PROPOSERS[name])
    steps, engine = live_steps(recording, PROPOSERS[name])
    assert replayed.steps == steps
    assert replayed.acceptance == engine.metrics.acceptance
    assert replayed.acceptance.num_draft_tokens > 0
    assert replayed.outputs == {each.request_id: each.token_ids for each in recording}


def test_trees_are_replayed_branch_by_branch():
    replayed = replay(shared(), TREES["suffix tree"])
    steps, engine = live_steps(shared(), TREES["suffix tree"])
    assert replayed.steps == steps
    assert replayed.acceptance == engine.metrics.acceptance
    trees = [step.parents for each in steps.values() for step in each if step.parents]
    assert any(list(parents) != list(range(-1, len(parents) - 1)) for parents in trees)


def test_what_a_recording_cannot_answer_is_refused_by_name():
    drawn = {"model": "tiny/medusa", "max_nodes": 8, "draft_sample_method": "probabilistic"}
    with pytest.raises(Refusal):
        replay(shared(0.8), drawn)
    method = "specdec.plugins.token_recycling:TokenRecyclingProposer"
    with pytest.raises(ConfigError, match="the target's most likely tokens") as caught:
        replay(shared(), {"method": method})
    assert caught.value.code == "SD-E249"


def test_a_request_that_ends_at_a_token_accepts_what_a_live_run_accepts_past_it(tmp_path, monkeypatch):
    texts = [request.token_ids for request in shared()]
    ends = tuple({token_ids[12] for token_ids in texts})
    sampling = settings().sampling.replace(stop_token_ids=ends)
    monkeypatch.setattr(RecordSettings, "sampling", property(lambda self: sampling))
    recording = make(tmp_path / "x")
    assert {each.finish_reason for each in recording} == {"stop"}
    for request, text in zip(recording, texts, strict=True):
        assert (*request.token_ids, *request.past_token_ids) == text[: len(request.token_ids) + 16]
    replayed = replay(recording, PROPOSERS["draft_model"])
    steps, engine = live_steps(recording, PROPOSERS["draft_model"])
    assert replayed.steps == steps
    assert replayed.acceptance == engine.metrics.acceptance


@pytest.mark.slow
def test_each_replay_begins_with_the_saved_state_and_leaves_it_alone(tmp_path):
    config = PROPOSERS["suffix"] | {"state_dir": str(tmp_path / "state")}
    cold = replay(shared(), config)
    assert not (tmp_path / "state").exists()
    live_steps(shared(), config)[1].close()
    before = sorted(tmp_path.rglob("*"))
    first, second = replay(shared(), config), replay(shared(), config)
    assert sorted(tmp_path.rglob("*")) == before
    assert first.steps == second.steps
    assert first.acceptance.num_accepted_tokens > cold.acceptance.num_accepted_tokens
    with pytest.raises(ConfigError, match="SD-E179"):
        replay(shared(), PROPOSERS["ngram"] | {"state_dir": str(tmp_path / "state")})


def test_a_replay_without_a_proposer_is_plain_decoding():
    recording = shared()
    plain = replay(recording, None)
    assert plain.acceptance.tokens_per_target_step == 1
    assert plain.outputs == {each.request_id: each.token_ids for each in recording}


def test_hidden_states_that_were_not_recorded_are_named_with_the_option(tmp_path):
    recording = make(tmp_path / "x", num_prompts=1, output_len=2)
    with pytest.raises(ConfigError, match=r"(?s)eagle3.*--hidden-states 2,4,5") as raised:
        replay(recording, PROPOSERS["eagle3"])
    assert raised.value.code == "SD-E249"


def test_a_rule_under_which_the_text_depends_on_drafts_is_refused():
    for rule in ("block", "typical"):
        with pytest.raises(ConfigError, match=rule) as raised:
            replay(shared(), PROPOSERS["ngram"] | {"rejection_sample_method": rule})
        assert raised.value.code == "SD-E251"


def test_another_model_is_refused():
    with pytest.raises(ConfigError, match="of another model") as raised:
        replay(shared(), PROPOSERS["eagle"], model="tiny/draft")
    assert raised.value.code == "SD-E246"


def test_the_recorded_checkpoint_is_recognised():
    manifest = shared().manifest
    require_same_model(manifest, Path(manifest.target["checkpoint_dir"]))


def test_a_checkpoint_that_has_moved_is_the_recorded_one_also_for_a_later_transformers(tmp_path, monkeypatch):
    recorded = shared()
    shutil.copytree(recorded.manifest.target["checkpoint_dir"], tmp_path / "moved")
    as_now = PreTrainedConfig.to_dict
    monkeypatch.setattr(PreTrainedConfig, "to_dict", lambda self: as_now(self) | LATER)
    require_same_model(recorded.manifest, tmp_path / "moved")
    changed = json.loads((tmp_path / "moved" / "config.json").read_text()) | {"rms_norm_eps": 0.5}
    (tmp_path / "moved" / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ConfigError, match="SD-E246"):
        require_same_model(recorded.manifest, tmp_path / "moved")


def test_a_checkpoint_with_code_of_its_own_is_refused_and_nobody_is_asked(tmp_path, monkeypatch):
    own = {"model_type": "frobnicate", "auto_map": {"AutoConfig": "configuration_x.X"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    asked = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "n")
    with pytest.raises(ConfigError, match="SD-E143"):
        require_same_model(shared().manifest, tmp_path)
    assert asked == []


def test_a_recorded_tokenizer_with_code_of_its_own_is_read_without_it_and_nobody_is_asked(tmp_path, monkeypatch):
    shutil.copytree(shared().folder / "tokenizer", tmp_path / "tokenizer")
    file = tmp_path / "tokenizer" / "tokenizer_config.json"
    config = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    asked = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "n")
    tokenizer = tokenizer_of(Recording(tmp_path, shared().manifest))
    assert [tokenizer.decode(each.token_ids) for each in shared()] == [each.text for each in shared()]
    assert asked == []


def test_weights_of_a_target_that_is_gone_are_named(tmp_path):
    recording = shared()
    gone = recording.manifest.target | {"checkpoint_dir": str(tmp_path / "gone")}
    moved = Recording(recording.folder, recording.manifest.replace(model=str(tmp_path / "gone"), target=gone))
    assert replay(moved, PROPOSERS["ngram"]).steps == replay(recording, PROPOSERS["ngram"]).steps
    assert replay(moved, PROPOSERS["draft_model"]).steps == replay(recording, PROPOSERS["draft_model"]).steps
    with pytest.raises(ConfigError, match=r"(?s)embedding and head.*--model") as raised:
        replay(moved, PROPOSERS["eagle"])
    assert raised.value.code == "SD-E249"


def test_expected_acceptance_is_the_sum_of_minima_within_its_bounds():
    """Against the sum over the whole vocabulary, from the recorded logits."""
    recording = shared(0.8, full_logits=True)
    request = next(iter(recording))
    p = distribution_of(recording.logits(request.request_id), settings(temperature=0.8).sampling)[:1].double()
    q = torch.rand(1, 1, p.shape[1], generator=torch.Generator().manual_seed(0)).pow(8).double()
    q[0, 0, request.token_ids[0]] += q.sum()
    q /= q.sum()
    exact = float(torch.minimum(p[0], q[0, 0]).sum())
    kind = torch.tensor([DistributionKind.DENSE_PROBS], dtype=torch.uint8)
    drafts = DraftRows(
        torch.tensor([[request.token_ids[0]]]), torch.tensor([1]), DraftDistributions(kind, draft_probs=q)
    )
    expected = ExpectedAcceptance(recording.manifest.top_m)
    expected.record(drafts, [(request, 0)], [1])
    ((lower, upper),) = expected.rates()
    assert lower <= exact <= upper + 1e-6
    assert upper - lower <= float(request.tail_mass[0]) + 1e-6
    assert lower < upper


def test_drawn_drafts_report_bounds_of_what_is_expected():
    asked = PROPOSERS["draft_model"] | {"draft_sample_method": "probabilistic"}
    replays = Replays.of(shared(0.8), [asked])
    (facts,) = replays.facts
    assert replays.found[0].target.endswith("DraftModelProposer")
    lower, upper = facts["expected_tokens_per_step"]
    assert 1 < lower <= upper <= 4
    assert all(low <= high for low, high in facts["expected_acceptance_per_position"])
    assert json.dumps(facts)


def test_greedy_drafts_have_no_expectation():
    (facts,) = Replays.of(shared(), [PROPOSERS["draft_model"] | {"draft_sample_method": "probabilistic"}]).facts
    assert facts["expected_tokens_per_step"] is None


def with_a_second_per_step():
    """The shared recording, of whose target a step costs a second whatever it computes."""
    recording = shared()
    cost = recording.manifest.cost.replace(rows=(1, 1000), seconds=(1.0, 1.0))
    return Recording(recording.folder, recording.manifest.replace(cost=cost))


def test_predictions_come_from_the_recorded_cost():
    known = with_a_second_per_step()
    (facts,) = Replays.of(known, [PROPOSERS["ngram"]]).facts
    plain, replayed = replay(known, None), replay(known, PROPOSERS["ngram"])
    assert facts["predicted_plain_seconds"] == len(plain.step_rows)
    assert facts["predicted_seconds"] == pytest.approx(len(replayed.step_rows) + facts["live_propose_seconds"])
    assert facts["predicted_speedup"] == facts["predicted_plain_seconds"] / facts["predicted_seconds"]
    assert facts["propose_seconds"] > 0


def moment(wall, processor, num_waits=0):
    return Moment(wall, processor, num_waits)


def test_time_in_which_others_ran_is_none_of_the_proposers():
    begin = moment(10.0, 1.0)
    assert begin.displaced_until(moment(10.5, 1.2)) == pytest.approx(0.3)
    assert begin.displaced_until(moment(10.5, 1.5)) == 0
    assert begin.displaced_until(moment(10.5, 1.2, num_waits=1)) == 0  # it waited by itself: for a disk, or a network
    assert moment(10.0, 1.0, None).displaced_until(moment(10.5, 1.2, None)) == 0


def test_the_clock_leaves_out_what_fits_into_proposing(monkeypatch):
    stages, readings = {"propose": 1.0}, iter([(0.0, 0.0), (0.5, 0.2), (1.0, 0.3), (2.0, 0.4)])
    monkeypatch.setattr(Moment, "now", lambda: moment(*next(readings)))
    clock = ProposeClock(stages)
    clock.on_verified(None)
    stages["propose"] += 0.4
    assert clock.step_ended() == pytest.approx(0.4 - 0.3)
    clock.on_verified(None)
    stages["propose"] += 0.4
    assert clock.step_ended() == pytest.approx(0.4)  # others took 0.9, so not while it proposed
    assert (clock.wall, clock.displaced) == (pytest.approx(0.8), pytest.approx(0.3))
    assert clock.step_ended() == 0


def test_what_full_caches_save_is_the_difference_of_medians():
    caches = Caches()
    assert caches.seconds_saved == 0
    caches.pass_of_target()  # the first step empties them
    caches.proposed(3.0)
    assert caches.seconds_saved == 0
    caches._spent = float("inf")
    for seconds in (1.0, 1.5, 9.0):
        caches.pass_of_target()
        caches.proposed(seconds)
    assert caches.seconds_saved == 1.5


def test_a_prediction_adds_what_full_caches_saved():
    recording = with_a_second_per_step()
    replayed = replay(recording, PROPOSERS["ngram"])
    slower = replace(replayed, seconds_saved=replayed.seconds_saved + 2.0)
    difference = slower.predicted_seconds(recording) - replayed.predicted_seconds(recording)
    assert difference == pytest.approx(2.0 * len(replayed.step_rows))


def test_a_changed_proposer_is_read_anew(tmp_path, monkeypatch):
    source = (
        "from specdec.sdk import Draft\n"
        "class Repeats:\n"
        "    def __init__(self, config):\n"
        "        pass\n"
        "    def propose(self, step):\n"
        "        tokens = step.newest_token[:, None].expand(-1, step.width)\n"
        "        return Draft(tokens, step.budget.clamp(max=LIMIT))\n"
    )
    path = tmp_path / "watched_proposer.py"
    path.write_text(source.replace("LIMIT", "1"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    asked = {"method": "watched_proposer:Repeats", "num_speculative_tokens": 3}
    counts, errors = [], []

    def run():
        replayed = replay(shared(), asked)
        counts.append(max(len(step.draft_token_ids) for steps in replayed.steps.values() for step in steps))
        return [replayed.target]

    watch = Watch(run, errors.append)
    watch._modules = ("watched_proposer",)
    run()
    places = places_of(watch._modules)
    before = stamps(places)
    path.write_text(source.replace("LIMIT", "2") + "\n")
    assert stamps(places) != before
    watch.again()
    path.write_text("def broken(:\n")
    watch.again()
    path.write_text(source.replace("LIMIT", "3"))
    watch.again()
    assert counts == [1, 2, 3]
    assert len(errors) == 1


def test_an_edit_of_a_package_during_a_run_is_noticed_when_the_run_is_over(tmp_path, monkeypatch):
    package = tmp_path / "watched_package"
    package.mkdir()
    (package / "__init__.py").write_text("LIMIT = 1\n")
    (package / "module.py").write_text("from . import LIMIT\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr("specdec.lab.replay.watch.POLL_SECONDS", -1)  # a wait raises ValueError
    seen = []

    def run():
        seen.append(importlib.import_module("watched_package.module").LIMIT)
        if len(seen) == 3:
            raise KeyboardInterrupt
        (package / "__init__.py").write_text(f"LIMIT = {'1' * (len(seen) + 1)}\n")
        return ["watched_package.module:X"]

    with pytest.raises(KeyboardInterrupt):
        Watch(run, lambda error: None).forever()
    assert seen == [1, 11, 111]
