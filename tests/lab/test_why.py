"""What is said of rejected tokens, held against the recording and against hand-made steps."""

import math

import pytest

from specdec.core.config.engine_config import EngineConfig
from specdec.core.registry import PluginSettings
from specdec.lab.comparison import variants
from specdec.lab.measure import Step
from specdec.lab.progress import NoProgress
from specdec.lab.recording import Recording
from specdec.lab.recording.recorder import record
from specdec.lab.recording.settings import RecordSettings
from specdec.lab.why import Choices, Traced, View, misses_of, run_why, why_facts
from specdec.lab.why.summary import token_class
from specdec.sdk import ConfigError

DRAFT = {"model": "assets/tiny/draft", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings") / "x"
    engine = EngineConfig(model="tiny", max_num_seqs=1)
    record(
        RecordSettings(engine=engine, num_prompts=3, output_len=32, measure_cost=False),
        PluginSettings(),
        folder,
        NoProgress(),
    )
    return folder


def why(folder, asked):
    return run_why(folder, variants([asked], []), PluginSettings(), NoProgress())["rows"][0]


@pytest.fixture(scope="module")
def suffix(recorded):
    return why(recorded, {"method": "suffix", "num_speculative_tokens": 3})


@pytest.fixture(scope="module")
def draft(recorded, request):
    return why(recorded, DRAFT | {"model": str(request.config.rootpath / DRAFT["model"])})


def traced(**changes):
    """Three steps: a plain one, one whose second draft is wrong, one that is right as far as the text goes."""
    values = {
        "prompt_id": "p",
        "category": "c",
        "prompt_token_ids": [1, 2],
        "token_ids": [5, 6, 7, 8, 9],
        "steps": [Step((), 0, 1), Step((6, 70, 8), 1, 2), Step((8, 9, 10), 2, 2)],
        "target": lambda place: View([(7, 0.5), (70, 0.25)], 1.5) if place == 2 else None,
        "proposer": lambda step, position: (
            Choices((70, 7, 71), (0.6, 0.3, 0.1)) if (step, position) == (1, 1) else None
        ),
    }
    return Traced(**values | changes)


def test_a_miss_says_what_both_thought_of_it():
    (miss,) = misses_of(traced())
    assert (miss["step"], miss["position"], miss["text_position"], miss["context_length"]) == (1, 1, 2, 4)
    assert (miss["draft_token_id"], miss["target_token_id"], miss["num_lost"]) == (70, 7, 2)
    assert (miss["target_rank"], miss["target_probability"], miss["entropy"]) == (2, 0.25, 1.5)
    assert (miss["draft_probability"], miss["second_choice"], miss["second_choice_right"]) == (0.6, 7, True)
    assert miss["caught_by_width_2"] is miss["caught_by_width_3"] is True


def test_what_nobody_reported_is_unknown():
    (miss,) = misses_of(traced(target=lambda place: None, proposer=lambda step, position: None))
    unknown = ("target_rank", "target_probability", "target_top", "draft_probability", "second_choice")
    assert {miss[key] for key in (*unknown, "second_choice_right", "caught_by_width_2", "caught_by_width_3")} == {None}
    facts = why_facts([traced(proposer=lambda step, position: None)], {})
    assert facts["trees"] == {
        "misses": 1,
        "known_for_width_2": 0,
        "caught_by_width_2": None,
        "known_for_width_3": 0,
        "caught_by_width_3": None,
    }


def test_too_few_known_choices_leave_a_wider_tree_unknown():
    (miss,) = misses_of(traced(proposer=lambda step, position: Choices((70, 71), None)))
    assert (miss["caught_by_width_2"], miss["caught_by_width_3"]) == (False, None)
    assert miss["draft_probability"] is None


def test_only_tokens_that_were_reached_are_tried():
    by_position = why_facts([traced()], {})["summary"]["position"]
    assert {position: (tally["tried"], tally["accepted"]) for position, tally in by_position.items()} == {
        "1": (2, 2),
        "2": (2, 1),
    }
    assert why_facts([traced()], {})["losses"]["lost_to_late_misses"] == 2


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (" the", "word start"),
        ("ing", "word, continued"),
        (" 12", "number"),
        ("):", "punctuation"),
        ("\n  ", "line break"),
        ("  ", "blanks"),
        (None, "unknown"),
    ],
)
def test_tokens_have_classes(text, kind):
    assert token_class(text) == kind


def test_every_sum_counts_every_token(suffix):
    reached = sum(suffix["drafted_per_position"])
    for kinds in suffix["summary"].values():
        assert sum(tally["accepted"] for tally in kinds.values()) == suffix["num_accepted_tokens"]
        assert sum(tally["tried"] for tally in kinds.values()) <= reached
    lost = suffix["losses"]["lost_to_first_token_misses"] + suffix["losses"]["lost_to_late_misses"]
    misses = [miss for request in suffix["requests"] for miss in request["misses"]]
    assert lost == sum(miss["num_lost"] for miss in misses) > 0
    assert sum(map(sum, suffix["position_entropy"]["accepted"])) == suffix["num_accepted_tokens"]
    costs = [each["lost_draft_tokens"] for each in suffix["costliest_contexts"]]
    assert costs == sorted(costs, reverse=True)
    assert len(costs) <= 20


def test_ranks_and_probabilities_are_those_of_the_recording(suffix, recorded):
    recording = {request.request_id: request for request in Recording.open(recorded)}
    for row in suffix["requests"]:
        request = recording[row["prompt_id"]]
        for miss in row["misses"]:
            place = miss["text_position"]
            assert request.token_ids[place] == miss["target_token_id"] != miss["draft_token_id"]
            assert miss["entropy"] == pytest.approx(float(request.entropy[place]))
            if miss["target_rank"]:
                rank = miss["target_rank"] - 1
                assert int(request.top_ids[place, rank]) == miss["draft_token_id"]
                assert miss["target_probability"] == pytest.approx(math.exp(request.top_logprobs[place, rank]))


def test_a_proposer_without_distributions_leaves_trees_unknown(suffix):
    assert suffix["proposer_distributions"] == "not reported"
    assert suffix["trees"]["caught_by_width_2"] is None


@pytest.mark.slow
def test_a_drafter_is_asked_for_its_second_choices(draft):
    """A greedy draft is the likeliest token of the distribution that was found for its place."""
    assert draft["proposer_distributions"] == "reported by further replays"
    misses = [miss for request in draft["requests"] for miss in request["misses"]]
    known = [miss for miss in misses if miss["second_choice"] is not None]
    assert len(known) > len(misses) / 2
    assert 0 < draft["trees"]["caught_by_width_2"] <= draft["trees"]["caught_by_width_3"]
    sure = [miss for miss in known if miss["second_probability"] is not None and miss["draft_probability"] is not None]
    assert sure
    assert all(miss["draft_probability"] >= miss["second_probability"] for miss in sure)
    assert all(miss["second_choice"] != miss["draft_token_id"] for miss in known)


def test_a_recording_without_probabilities_is_refused(recorded, tmp_path):
    (tmp_path / "x").mkdir()
    for path in recorded.iterdir():
        if path.is_file():
            (tmp_path / "x" / path.name).write_bytes(path.read_bytes())
    manifest = Recording.open(recorded).manifest.replace(top_m=0)
    manifest.write(tmp_path / "x")
    with pytest.raises(ConfigError, match="SD-E257"):
        why(tmp_path / "x", {"method": "suffix"})


def test_only_ranges_are_ordered_as_numbers():
    """A superscript two counts as a digit, and is no number that Python reads."""
    facts = why_facts([traced(category=name) for name in ("²", "10", "2")], {})["summary"]
    assert list(facts["category"]) == ["²", "10", "2"]
    assert list(facts["position"]) == ["1", "2"]
    assert list(facts["entropy"])[-1] == "unknown"
