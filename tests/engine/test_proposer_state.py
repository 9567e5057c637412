"""Shared state of a proposer: saved and loaded as a whole, for the proposer that wrote it and nobody else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_helpers import GREEDY, make_llm
from inside import proposer_of

from specdec import LLM
from specdec.core.config.engine_config import EngineConfig
from specdec.core.registry import PluginSettings
from specdec.lab import run as bench_run
from specdec.lab.measure import merged_acceptance, take_turns
from specdec.lab.run import BenchSettings, run_bench
from specdec.sdk import ConfigError, ProposerError

SUFFIX = {"method": "suffix", "num_speculative_tokens": 5}


def suffix(**keys):
    return LLM("tiny", speculative_config=SUFFIX | keys, max_model_len=256, max_num_seqs=4)


def accepted(llm, prompt):
    (output,) = llm.generate([{"prompt_token_ids": prompt}], GREEDY)
    return output.outputs[0].spec_decode_metrics["num_accepted_draft_tokens"], list(output.outputs[0].token_ids)


def files(path):
    return {str(each.relative_to(path)): each.read_bytes() for each in Path(path).rglob("*") if each.is_file()}


@pytest.mark.parametrize("kind", [str, Path])
def test_state_is_carried_from_one_engine_to_another(kind, prompts, truth, tmp_path):
    with suffix() as first:
        cold, output = accepted(first, prompts[0])
        first.save_proposer_state(kind(tmp_path / "a" / "b"))
    with suffix() as second:
        second.load_proposer_state(kind(tmp_path / "a" / "b"))
        warm, again = accepted(second, prompts[0])
    assert warm > cold
    assert output == again == truth[0]


def test_a_state_dir_is_loaded_at_the_start_and_saved_at_close(prompts, tmp_path):
    found = []
    for _ in range(2):
        with suffix(state_dir=tmp_path / "state") as llm:
            found.append(accepted(llm, prompts[0])[0])
    assert found[1] > found[0]
    assert sorted(path.name.partition("-")[0] for path in (tmp_path / "state").iterdir()) == ["manifest.json", "state"]


def test_a_relative_state_dir_is_one_place_wherever_the_process_works_by_the_end(tmp_path, monkeypatch):
    for name in ("at the start", "at the end"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "at the start")
    with suffix(state_dir="state"):
        monkeypatch.chdir(tmp_path / "at the end")
    assert (tmp_path / "at the start" / "state" / "manifest.json").is_file()
    assert not list((tmp_path / "at the end").iterdir())


def test_a_save_that_fails_keeps_what_was_saved_before(prompts, tmp_path, monkeypatch):
    llm = suffix()
    accepted(llm, prompts[0])
    llm.save_proposer_state(tmp_path)
    before = files(tmp_path)

    def half(path, vocab_size):
        (path / "half").write_text("half")
        raise RuntimeError("the disk is gone")

    monkeypatch.setattr(proposer_of(llm)._corpora, "save", half)
    with pytest.raises(ProposerError, match="the disk is gone"):
        llm.save_proposer_state(tmp_path)
    assert files(tmp_path) == before


def test_a_failing_save_at_close_is_told_and_the_proposer_is_closed(sequences, tmp_path):
    options = {"where": "save", "sequences": sequences}
    llm = make_llm("Faulty", options=options, speculative={"state_dir": str(tmp_path)})
    with pytest.raises(ProposerError, match="save fails on purpose"):
        llm.close()
    assert proposer_of(llm).events[-1] == ("close", "")
    assert not files(tmp_path)


def manifest(path, **changes):
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"proposer": "specdec-plugin-x:mine", "version": "3.1"}, "specdec-plugin-x:mine 3.1"),
        ({"version": "9.0"}, "specdec-sdk:suffix 9.0"),
        ({"version": None}, "specdec-sdk:suffix"),
        ({"format": 2}, "another format"),
        ({"directory": "../.."}, "another format"),
        ({"directory": 7}, "directory"),
        ({"extra": 1}, "a key that nobody declares"),
    ],
)
def test_a_state_that_is_not_this_proposers_is_refused_before_weights_load(changes, words, tmp_path):
    suffix().save_proposer_state(tmp_path)
    manifest(tmp_path, **changes)
    with pytest.raises(ConfigError, match=rf"(?s)SD-E181.*{words}"):
        LLM("tiny", speculative_config=SUFFIX | {"state_dir": tmp_path})


@pytest.mark.parametrize("directory", ["..", "", ".", "photos", "../photos", "state-linked12"])
def test_a_manifest_changed_in_mid_run_has_close_remove_nothing(directory, prompts, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.png").write_text("mine")
    state = tmp_path / "state"
    llm = suffix(state_dir=state)
    llm.save_proposer_state(state)
    (state / "state-linked12").symlink_to(tmp_path / "photos")
    manifest(state, directory=directory)
    before = files(tmp_path)
    with pytest.raises(ConfigError, match="SD-E181"):
        llm.save_proposer_state(state)
    with pytest.raises(ConfigError, match="SD-E181"):
        llm.close()
    assert files(tmp_path) == before


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"format": 1}'])
def test_a_manifest_that_cannot_be_read_is_refused(text, tmp_path):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ConfigError, match="SD-E181"):
        suffix(state_dir=tmp_path)


def test_where_nothing_was_saved_or_can_be_is_refused(tmp_path):
    llm = suffix()
    with pytest.raises(ConfigError, match="SD-E181"):
        llm.load_proposer_state(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="SD-E181"):
        llm.save_proposer_state(tmp_path / "file")


@pytest.mark.parametrize("method", ["save_proposer_state", "load_proposer_state"])
@pytest.mark.parametrize("path", [None, 7, "", b"bytes", "a\0b"])
def test_what_is_no_path_is_refused_without_attribution(method, path):
    with pytest.raises(ConfigError, match="SD-E132") as caught:
        getattr(suffix(), method)(path)
    assert caught.value.plugin is None


@pytest.mark.parametrize("method", ["save_proposer_state", "load_proposer_state"])
def test_a_proposer_without_state_says_so(method, tmp_path):
    for llm in (make_llm(), make_llm("ngram")):
        with pytest.raises(ConfigError, match="SD-E179"):
            getattr(llm, method)(tmp_path)
    with pytest.raises(ConfigError, match=r"(?s)SD-E179.*specdec-sdk:ngram.*State.*save, load"):
        make_llm("ngram", speculative={"state_dir": str(tmp_path)})


class Silent:
    def stage(self, name, num_requests=0): ...

    def finished(self, request): ...


def bench(state_dir, monkeypatch):
    """Accepted draft tokens of each of two repeats."""
    kept = []
    monkeypatch.setattr(bench_run, "take_turns", lambda *args, **rest: kept.extend(take_turns(*args, **rest)) or kept)
    settings = BenchSettings(
        engine=EngineConfig(model="tiny", max_model_len=256),
        speculative_config=SUFFIX | {"state_dir": str(state_dir)},
        num_prompts=2,
        output_len=24,
        repeat=2,
        baseline="off",
    )
    run_bench(settings, PluginSettings(), Silent())
    return [merged_acceptance(passes).num_accepted_tokens for (passes,) in kept]


@pytest.mark.slow
def test_a_benchmark_begins_each_repeat_with_the_saved_state_and_leaves_it_alone(prompts, tmp_path, monkeypatch):
    cold = bench(tmp_path / "none", monkeypatch)
    assert not (tmp_path / "none").exists()
    with suffix(state_dir=tmp_path / "warm") as llm:
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY)
    before = files(tmp_path)
    warm = bench(tmp_path / "warm", monkeypatch)
    assert files(tmp_path) == before
    assert cold[0] == cold[1]
    assert warm[0] == warm[1] > cold[0]
