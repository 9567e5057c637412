"""Comparisons: what is varied, how rows come out, live and on a recording."""

from math import ceil

import numpy as np
import pytest

from specdec.cli._compare_view import _between, _difference
from specdec.core.config.engine_config import EngineConfig
from specdec.core.registry import PluginSettings
from specdec.core.request.metrics import RequestMetrics
from specdec.lab.comparison import Sweep, run_compare, run_compare_recorded, variants
from specdec.lab.comparison.table import Measured, comparison_facts
from specdec.lab.notebook import Result
from specdec.lab.progress import NoProgress
from specdec.lab.recording.recorder import record
from specdec.lab.recording.settings import RecordSettings
from specdec.lab.report.content import difference_sections
from specdec.lab.run import BenchSettings, RunSettings, run_bench
from specdec.sdk import ConfigError

ENGINE = EngineConfig(model="tiny", max_num_seqs=1)
SMALL = {"engine": ENGINE, "num_prompts": 3, "output_len": 16, "repeat": 1, "warmup": 0}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def run(asked, sweeps=(), sort="tokens_per_target_step"):
    return run_compare(RunSettings(**SMALL), variants(asked, sweeps), PluginSettings(), NoProgress(), sort)


@pytest.fixture(scope="module")
def live():
    return run([NGRAM, {"method": "suffix", "num_speculative_tokens": 2}])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings") / "x"
    record(RecordSettings(engine=ENGINE, num_prompts=3, output_len=16), PluginSettings(), folder, NoProgress())
    return folder


def test_a_sweep_is_a_range_or_a_list_of_values():
    assert Sweep.parse("num_speculative_tokens=2..4") == Sweep("num_speculative_tokens", (2, 3, 4))
    assert Sweep.parse("draft_sample_method=greedy,probabilistic").values == ("greedy", "probabilistic")
    assert Sweep.parse("x=1,0.5,true").values == (1, 0.5, True)


@pytest.mark.parametrize("text", ["", "K", "K=", "=1..3", "K=5..2", "K=1..9999"])
def test_a_sweep_that_cannot_be_read_is_refused(text):
    with pytest.raises(ConfigError, match="SD-E253"):
        Sweep.parse(text)


def test_every_combination_has_a_label_of_its_own():
    found = variants([{"method": "ngram"}, '{"method": "ngram"}'], [Sweep("num_speculative_tokens", (1, 2))])
    assert [each.label for each in found] == ["ngram K=1", "ngram K=2", "ngram K=1 (2)", "ngram K=2 (2)"]
    with pytest.raises(ConfigError, match="SD-E254"):
        variants([], [])
    with pytest.raises(ConfigError, match="SD-E253"):
        variants([NGRAM], [Sweep("a", (1,)), Sweep("a", (2,))])


def test_checkpoints_of_one_method_are_told_apart_by_their_names():
    asked = [{"method": "eagle", "model": f"heads/{name}", "num_speculative_tokens": 3} for name in ("old", "new")]
    assert [each.label for each in variants([*asked, NGRAM], [])] == ["eagle old K=3", "eagle new K=3", "ngram K=3"]
    assert [each.label for each in variants(asked[:1], [Sweep("max_nodes", (8,))])] == ["eagle K=3 max_nodes=8"]


def test_an_option_is_swept_by_its_name_or_below_proposer_config():
    def asked(settings, key):
        return variants([{"method": "ngram"} | settings], [Sweep.parse(f"{key}=2,3")])

    beside = [{"method": "ngram", "prompt_lookup_min": value} for value in (2, 3)]
    below = [{"method": "ngram", "proposer_config": {"prompt_lookup_min": value}} for value in (2, 3)]
    dotted = "proposer_config.prompt_lookup_min"
    assert [each.speculative_config for each in asked({}, "prompt_lookup_min")] == beside
    assert [each.speculative_config for each in asked({}, dotted)] == below
    assert [each.label for each in asked({}, dotted)] == ["ngram prompt_lookup_min=2", "ngram prompt_lookup_min=3"]
    for key in ("prompt_lookup_min", dotted):  # an option stays where it stands
        assert [each.speculative_config for each in asked({"prompt_lookup_min": 1}, key)] == beside
        set_below = {"proposer_config": {"prompt_lookup_min": 1}}
        assert [each.speculative_config for each in asked(set_below, key)] == below
    with pytest.raises(ConfigError, match="SD-E253"):
        variants([NGRAM], [Sweep("a", (1,)), Sweep("proposer_config.a", (2,))])


def counts(*steps):
    metrics = RequestMetrics()
    for drafted, accepted in steps:
        metrics.record(drafted, accepted, accepted + 1)
    return metrics


def rows_of(sort, **several):
    measured = [Measured(label, {}, units, [[2.0, 2.0, 2.0]]) for label, units in several.items()]
    return comparison_facts(measured, ["a", "a", "b"], [4.0, 5.0, 6.0], sort)


def test_rows_are_sorted_and_say_how_far_they_are_from_the_best():
    good, bad = [counts((2, 2), (2, 2))] * 3, [counts((2, 0), (2, 1))] * 3
    rows = rows_of("tokens_per_target_step", bad=bad, good=good)
    assert [row["label"] for row in rows] == ["good", "bad"]
    assert rows[0]["difference_to_best"] == 0
    assert rows[1]["difference_to_best"] == pytest.approx(1.5 - 3)
    assert rows[1]["difference_to_best_interval"] == pytest.approx((-1.5, -1.5))
    assert rows[0]["speedup"] == pytest.approx(15 / 6)
    assert rows[0]["by_category"]["b"]["speedup"] == 3


def test_texts_of_other_lengths_are_compared_by_the_time_for_a_token():
    units, seconds = [counts((2, 2))] * 2 + [counts((2, 0))], [[2.0, 2.1, 1.9], [2.2, 2.0, 1.8]]
    measured, plain = [Measured("x", {}, units, seconds)], [4.0, 5.0, 6.0]

    def row(plain_tokens):
        return comparison_facts(measured, ["a", "a", "b"], plain, "speedup", plain_tokens=plain_tokens)[0]

    alike, longer, uneven = row([3, 3, 1]), row([6, 6, 2]), row([1, 6, 7])
    assert alike == row(None)
    assert longer["speedup"] == alike["speedup"] / 2
    assert longer["speedup_interval"] == pytest.approx([each / 2 for each in alike["speedup_interval"]])
    assert uneven["speedup"] == pytest.approx(uneven["tokens_per_second"] / (14 / 15.0))
    assert uneven["by_category"]["b"]["speedup"] == pytest.approx(6 / 1.85 / 7)
    assert np.ptp(np.log(uneven["speedup_interval"])) > np.ptp(np.log(alike["speedup_interval"]))
    assert uneven["break_even_tokens_per_step"] == pytest.approx(uneven["tokens_per_target_step"] / uneven["speedup"])


def test_a_proposer_that_never_drafts_has_an_acceptance_length_of_1_in_its_difference_too():
    drafting, idle = [counts((2, 2), (2, 1))] * 3, [counts((0, 0))] * 3
    best, other = rows_of("mean_acceptance_length", drafting=drafting, idle=idle)
    assert (best["mean_acceptance_length"], other["mean_acceptance_length"]) == (2.5, 1)
    assert other["difference_to_best"] == 1 - 2.5


def test_a_rate_and_its_differences_are_in_percent_and_percentage_points():
    good, bad = [counts((10, each)) for each in (10, 10, 6)], [counts((10, each)) for each in (4, 5, 6)]
    rows = rows_of("draft_acceptance_rate", good=good, bad=bad)
    assert rows[0]["draft_acceptance_rate_interval"][1] == 1
    assert _between("draft_acceptance_rate", rows[0]).endswith("-100.0)")
    assert _difference("draft_acceptance_rate", rows[1]).startswith("-36.7 pp (-")
    run = {"model": "m", "sort": "draft_acceptance_rate"}
    [section] = difference_sections({"rows": rows, "configuration": run}, "here")
    assert section["rows"][1][1] == "-36.7 pp"
    html = Result(rows=rows, configuration=run, environment={})._repr_html_()
    assert "<td>-36.7 pp (-" in html


def test_a_row_says_what_tells_5_percent_apart():
    units, seconds = [counts((2, 1))] * 4, [[2.0, 2.1, 1.9, 2.2], [2.1, 2.0, 2.0, 2.1]]
    slower = [[each * 1.2 + 0.1 * (place % 2) for place, each in enumerate(repeat)] for repeat in seconds]
    measured = [Measured("slow", {}, units, slower), Measured("fast", {}, units, seconds)]
    fast, slow = comparison_facts(measured, ["a"] * 4, [4.0] * 4, "speedup")
    assert fast["to_tell_apart"] is None
    assert slow["to_tell_apart"]["share"] == 0.05
    assert slow["to_tell_apart"]["num_prompts"] >= 3
    assert slow["to_tell_apart"]["repeat"] >= 2
    assert fast["seconds"] == pytest.approx(8.2)
    _, several = comparison_facts(measured, ["a"] * 4, [4.0] * 4, "speedup", prompts_per_unit=2.5)
    assert several["to_tell_apart"] == slow["to_tell_apart"] | {
        "num_prompts": ceil(2.5 * slow["to_tell_apart"]["num_prompts"])
    }


@pytest.mark.slow
def test_a_live_comparison_of_four_prompts_at_a_time_asks_for_prompts():
    asked = variants([NGRAM, NGRAM | {"num_speculative_tokens": 1}], [])
    engine = ENGINE.replace(max_num_seqs=4)
    settings = RunSettings(**SMALL | {"engine": engine, "num_prompts": 0, "check_equal": "off"})
    found = run_compare(settings, asked, PluginSettings(), NoProgress(), "tokens_per_target_step")
    needed = found["rows"][1]["to_tell_apart"]["num_prompts"]
    assert needed % 4 == 0
    assert needed >= 4 * 6


@pytest.mark.full
def test_what_is_alike_is_not_told_apart_from_the_best_of_several():
    random = np.random.default_rng(0)

    def compared(number, num_repeats, num_units):
        times = {f"p{each}": random.normal(2.0, 0.02, (num_repeats, num_units)) for each in range(number)}
        measured = [Measured(label, {}, [counts((1, 1))] * num_units, each) for label, each in times.items()]
        return comparison_facts(measured, ["a"] * num_units, [4.0] * num_units, "speedup")

    held = dict.fromkeys(((2, 3, 12), (6, 3, 12), (32, 1, 40)), 0)
    for number in held:
        for _ in range(60):
            rows = compared(*number)[1:]
            held[number] += all(low <= 0 <= high for low, high in (row["difference_to_best_interval"] for row in rows))
    assert min(held.values()) >= 55


def test_the_pareto_front_is_what_nothing_else_beats_in_both():
    rows = rows_of(
        "speedup",
        few=[counts((1, 1))] * 3,
        wasteful=[counts((4, 1))] * 3,
        many=[counts((4, 3))] * 3,
    )
    assert {row["label"]: row["is_on_pareto_front"] for row in rows} == {"few": True, "wasteful": False, "many": True}


def test_a_row_says_how_many_rows_of_a_step_would_just_pay():
    [row] = rows_of("speedup", many=[counts((4, 3))] * 3)
    plain, per_row = 15 / 12, (2 - 15 / 12) / 4
    assert row["rows_per_step"] == 5
    assert plain + (row["break_even_rows_per_step"] - 1) * per_row == pytest.approx(4 * plain)


@pytest.mark.slow
def test_a_live_comparison_counts_what_a_benchmark_counts(live):
    settings = BenchSettings(**SMALL, speculative_config=NGRAM, baseline="off")
    alone = run_bench(settings, PluginSettings(), NoProgress())
    row = next(row for row in live["rows"] if row["label"] == "ngram K=3")
    for key in ("num_target_steps", "num_drafts", "num_accepted_tokens", "acceptance_per_position"):
        assert row[key] == alone[key]
    assert row["requests"] == alone["requests"]
    assert row["outputs_equal"] is True
    assert live["baseline"]["seconds"] > 0


@pytest.mark.slow
def test_a_comparison_on_a_recording_has_the_counts_of_a_live_one(live, recorded):
    asked = variants([NGRAM, {"method": "suffix", "num_speculative_tokens": 2}], [])
    found = run_compare_recorded(recorded, asked, PluginSettings(), NoProgress(), "tokens_per_target_step")
    assert [row["label"] for row in found["rows"]] == [row["label"] for row in live["rows"]]
    for mine, theirs in zip(found["rows"], live["rows"], strict=True):
        keys = ("num_target_steps", "num_draft_tokens", "num_accepted_tokens", "difference_to_best")
        assert {key: mine[key] for key in keys} == {key: theirs[key] for key in keys}
        steps = [each["per_step_draft_token_ids"] for each in mine["requests"]]
        assert steps == [each["per_step_draft_token_ids"] for each in theirs["requests"]]


@pytest.mark.parametrize("chunk", [None, 8])
def test_times_on_a_recording_are_those_that_a_replay_predicts(recorded, chunk):
    from specdec.lab.recording import Recording
    from specdec.lab.replay.rows import plain_seconds, predicted_seconds
    from specdec.lab.replay.run import replay

    recording = Recording.open(recorded)
    if chunk is not None:
        engine = recording.manifest.engine | {"max_num_batched_tokens": chunk}
        recording = Recording(recorded, recording.manifest.replace(engine=engine))
        assert min(len(each.prompt_token_ids) for each in recording) > chunk
    replayed = replay(recording, NGRAM)
    each = predicted_seconds(recording, replayed)
    assert sum(each) == pytest.approx(replayed.predicted_seconds(recording))
    plain = replay(recording, None).predicted_seconds(recording)
    assert sum(plain_seconds(recording, PluginSettings())) == pytest.approx(plain)
