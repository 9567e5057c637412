"""`specdec export`: what another engine is told."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdec.adapters.export import in_transformers
from specdec.adapters.export.asked import Asked
from specdec.cli._app import build_app
from specdec.core.registry import PluginSettings
from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.errors import PluginLoadError
from specdec.sdk.packaged import packaged


def export(engine, config, *flags, model="tiny"):
    config = config if isinstance(config, str) else json.dumps(config)
    return CliRunner().invoke(build_app(), ["export", model, "--engine", engine, "-sc", config, *flags])


def handed_over(engine, config, **others):
    done = export(engine, config, "--json", **others)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def vllm(config, **others):
    answer = handed_over("vllm", config, **others)
    words = shlex.split(answer["text"])
    assert words[:2] == ["vllm", "serve"]
    flags = dict(zip(words[3::2], words[4::2], strict=False))
    for flag, name in [("--speculative-config", "speculative_config"), ("--additional-config", "additional_config")]:
        assert json.loads(flags.get(flag, "null")) == answer["settings"].get(name)
    return answer


@pytest.mark.parametrize(
    ("method", "name", "k"),
    [("draft_model", "draft", 4), ("eagle", "eagle", 3), ("eagle3", "eagle3", 4), ("dflash", "dflash", 4)],
)
def test_a_checkpoint_that_vllm_runs_itself_is_handed_over_with_its_method(method, name, k):
    answer = vllm({"model": f"tiny/{name}", "num_speculative_tokens": k, "draft_sample_method": "probabilistic"})
    assert answer["route"] == "native"
    assert answer["settings"] == {
        "speculative_config": {
            "method": method,
            "model": str(packaged(f"tiny/{name}")),
            "num_speculative_tokens": k,
            "draft_sample_method": "probabilistic",
        }
    }
    assert shlex.split(answer["text"])[2] == str(packaged("tiny"))
    assert answer["dropped"] == {}


def test_options_that_vllm_has_survive_and_others_are_dropped_with_a_reason():
    suffix = {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_tree_depth": 16, "dtype": "float32"}
    answer = vllm(suffix | {"proposer_config": {"suffix_decoding_min_token_prob": 0.2}, "on_proposer_error": "disable"})
    assert answer["settings"]["speculative_config"] == {
        "method": "suffix",
        "num_speculative_tokens": 4,
        "suffix_decoding_max_tree_depth": 16,
        "suffix_decoding_min_token_prob": 0.2,
    }
    assert set(answer["dropped"]) == {"dtype", "on_proposer_error"}
    done = export("vllm", suffix)
    assert "dropped  dtype: vLLM runs a drafter in the target's dtype" in done.stderr
    assert "dropped" not in done.stdout
    quiet = export("vllm", suffix, "--quiet")
    assert "dropped" in quiet.stderr
    assert "note" not in quiet.stderr


def test_keys_of_vllms_that_ask_for_what_is_so_already_are_handed_back():
    drafter = {"method": "ngram", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1, "enforce_eager": False}
    answer = vllm(drafter)
    assert answer["settings"]["speculative_config"] == drafter
    assert answer["dropped"] == {}


def test_what_vllm_lacks_goes_through_the_adapter_with_all_its_keys():
    config = {"model": "tiny/medusa", "num_speculative_tokens": 2, "on_proposer_error": "skip_step", "dtype": "float32"}
    answer = vllm(config)
    assert answer["route"] == "adapter"
    assert answer["dropped"] == {}
    assert "V2 model runner" in answer["notes"][0]
    assert answer["settings"] == {
        "speculative_config": {"model": "specdec.adapters.vllm.medusa", "num_speculative_tokens": 2},
        "additional_config": {
            "specdec": {"model": str(packaged("tiny/medusa")), "on_proposer_error": "skip_step", "dtype": "float32"}
        },
    }


@pytest.mark.parametrize("config", [{"method": "adapter_proposers:Silent"}, {"model": "adapter_proposers.Silent"}])
def test_a_class_path_is_named_in_the_adapters_settings(config):
    answer = vllm(config | {"num_speculative_tokens": 2, "proposer_config": {}})
    assert answer["route"] == "adapter"
    assert answer["settings"]["speculative_config"]["model"] == "specdec.adapters.vllm.Configured"
    assert answer["settings"]["additional_config"]["specdec"]["method"] == "adapter_proposers:Silent"


def test_a_class_written_for_vllm_goes_back_as_it_is():
    config = {"model": "foreign_classes.Lookup", "num_speculative_tokens": 2, "proposer_config": {"how": "well"}}
    answer = vllm(config)
    assert answer["route"] == "native"
    assert answer["settings"] == {
        "speculative_config": {"model": "foreign_classes.Lookup", "num_speculative_tokens": 2},
        "additional_config": {"how": "well"},
    }


def test_a_drafter_that_drafts_in_one_pass_is_marked_for_vllm(tmp_path):
    shutil.copytree(packaged("tiny/eagle3"), tmp_path / "drafter")
    path = tmp_path / "drafter" / "config.json"
    path.write_text(json.dumps(dict(Checkpoint.open(path.parent).config) | {"speculators_model_type": "peagle"}))
    answer = vllm({"model": str(path.parent), "num_speculative_tokens": 3})
    assert answer["settings"]["speculative_config"]["parallel_drafting"] is True


def test_a_class_without_a_draft_length_is_refused_because_vllm_asks_for_one():
    done = export("vllm", {"method": "adapter_proposers:Silent"})
    assert done.exit_code == 2
    assert "SD-E133" in done.output


def test_a_target_is_read_from_a_drafter_that_names_it():
    target = Path(shlex.split(vllm("{}", model="tiny/eagle3")["text"])[2])
    assert target.resolve() == packaged("tiny").resolve()


def test_the_lines_for_transformers_are_python_and_generate(capsys):
    done = export("transformers", {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4})
    assert done.exit_code == 0
    assert "'prompt_lookup_max': 4" in done.stdout
    exec(compile(done.stdout, "lines", "exec"), {})
    assert capsys.readouterr().out.startswith("def main(")


def test_an_unknown_engine_is_a_usage_error():
    assert export("other", {"method": "ngram", "num_speculative_tokens": 1}).exit_code == 2


def test_a_class_that_is_no_proposer_is_not_handed_over():
    with pytest.raises(PluginLoadError, match="SD-E110"):
        Asked.read("tiny", {"method": "collections:OrderedDict", "num_speculative_tokens": 3}, PluginSettings())


@pytest.mark.parametrize(("config", "has_model"), [({"model": "tiny/eagle3"}, True), ({"method": "ngram"}, False)])
def test_the_checkpoint_is_named_for_transformers_where_there_is_one(config, has_model):
    asked = Asked.read("tiny", {**config, "num_speculative_tokens": 3}, PluginSettings())
    told = in_transformers.hand_over(asked).settings["speculative_config"]
    assert told.get("model") == (asked.resolved.model if has_model else None)
    assert (asked.resolved.model is not None) == has_model
