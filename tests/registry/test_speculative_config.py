import copy
from pathlib import Path

import pytest

from specdec.core.config.speculative_config import SpeculativeConfig
from specdec.sdk import ConfigError

GIVEN = {"method": "some", "num_speculative_tokens": 3}


def refused(value):
    with pytest.raises(ConfigError) as info:
        SpeculativeConfig.parse(value)
    return info.value


def test_json_text_mapping_and_instance_give_the_same_config():
    config = SpeculativeConfig.parse(GIVEN)
    assert SpeculativeConfig.parse('{"method": "some", "num_speculative_tokens": 3}') == config
    assert SpeculativeConfig.parse(config) is config


def test_defaults_are_greedy_drafts_standard_rejection_and_raising():
    config = SpeculativeConfig.parse(GIVEN)
    assert (config.draft_sample_method, config.rejection_sample_method) == ("greedy", "standard")
    assert (config.on_proposer_error, config.proposer_config, config.moe_backend) == ("raise", {}, None)


def test_text_that_is_not_json_names_line_and_column():
    error = refused('{"method":\n some}')
    assert error.code == "SD-E130"
    assert "line 2, column 2" in str(error)
    assert "single quotes" in str(error)


@pytest.mark.parametrize("text", ["", "[1]", "3", "null", '"some"'])
def test_text_that_is_no_object_is_refused(text):
    assert refused(text).code in ("SD-E130", "SD-E132")


def test_repeated_json_key_is_refused_instead_of_losing_one():
    error = refused('{"method": "a", "num_speculative_tokens": 2, "method": "b"}')
    assert error.code == "SD-E130"
    assert "method" in str(error)


@pytest.mark.parametrize("value", [3, None, ["method"]])
def test_other_types_are_refused(value):
    error = refused(value)
    assert error.code == "SD-E132"
    assert type(value).__name__ in str(error)


@pytest.mark.parametrize("k", [0, -1, True, "3", 1.0, 2.5])
def test_num_speculative_tokens_must_be_a_positive_integer(k):
    error = refused(GIVEN | {"num_speculative_tokens": k})
    assert error.code == "SD-E132"
    assert f"found {k!r}" in str(error)


def test_config_without_method_and_model_is_refused():
    error = refused({"num_speculative_tokens": 3})
    assert error.code == "SD-E133"
    assert "names no proposer" in str(error)


def test_synthetic_acceptance_needs_its_rate_and_the_rate_its_rule():
    for half in ({"rejection_sample_method": "synthetic"}, {"synthetic_acceptance_rate": 0.5}):
        assert "give both" in str(refused(GIVEN | half))


def test_every_wrong_key_is_named_in_one_error():
    text = str(refused(GIVEN | {"method": 3, "draft_sample_method": "argmax", "proposer_config": [1]}))
    assert all(key in text for key in ("method", "draft_sample_method", "proposer_config"))


def test_model_may_be_a_path_object():
    assert SpeculativeConfig.parse({"model": Path("/a/b"), "num_speculative_tokens": 1}).model == "/a/b"


def test_other_top_level_keys_are_kept_for_the_options():
    assert SpeculativeConfig.parse(GIVEN | {"window": 4}).unclaimed == {"window": 4}


@pytest.mark.parametrize(
    "derive",
    [
        lambda config: config.replace(num_speculative_tokens=0),
        lambda config: config.model_copy(update={"num_speculative_tokens": 0}),
        lambda config: SpeculativeConfig.model_validate(GIVEN | {"num_speculative_tokens": 0}),
        lambda config: SpeculativeConfig(**GIVEN | {"num_speculative_tokens": 0}),
    ],
    ids=["replace", "model_copy", "model_validate", "constructor"],
)
def test_derived_config_is_validated_again(derive):
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        derive(SpeculativeConfig.parse(GIVEN))


def test_replace_keeps_every_other_key():
    config = SpeculativeConfig.parse(GIVEN | {"window": 4, "dtype": "float32"})
    changed = config.replace(num_speculative_tokens=5)
    assert changed.num_speculative_tokens == 5
    assert (changed.dtype, changed.unclaimed) == ("float32", {"window": 4})
    assert config.num_speculative_tokens == 3


def test_copies_are_equal():
    config = SpeculativeConfig.parse(GIVEN | {"window": 4})
    assert config.model_copy() == copy.deepcopy(config) == config
    assert config.model_copy(update={"window": 5}).unclaimed == {"window": 5}
