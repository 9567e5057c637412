import dataclasses
from dataclasses import replace

import pytest

from specdec.core.proposing.admission import admit
from specdec.core.registry import LoadedProposer
from specdec.sdk import Needs, ProposerConfig, Refusal
from specdec.sdk.errors import PluginId
from specdec.sdk.extensions import DraftKV, Extension, State, TargetKV, TargetTokens, Trees

PLUGIN = PluginId("mine", "x_mod:Mine", "dist-x", "0.3.1")


def loaded(needs, k=4, method="probabilistic"):
    config = ProposerConfig(num_draft_tokens=k, draft_sample_method=method)
    return LoadedProposer(PLUGIN, object, config, needs, frozenset())


def refused(needs, target, **arguments):
    with pytest.raises(Refusal) as info:
        admit(loaded(needs, method="greedy"), target, **arguments)
    assert info.value.plugin == PLUGIN
    return str(info.value)


def test_two_forms_of_distribution_are_refused_as_this_engine_keeps_one(target):
    needs = Needs(distributions=("sparse", "dense"), sparse_top_m=4)
    assert "this engine keeps one" in refused(needs, target)


def test_cheapest_needs_cost_nothing(target):
    admission = admit(loaded(Needs(), method="greedy"), target)
    assert not any(dataclasses.astuple(admission))
    assert not admission.keeps_distribution


@pytest.mark.parametrize("placement", ["host", "device"])
def test_any_placement_runs_on_any_device(target, placement):
    assert admit(loaded(Needs(placement=placement), method="greedy"), target)


@pytest.mark.parametrize("extension", [Trees(), State(), "metrics@1", TargetTokens(top_k=3)])
def test_an_extension_that_is_not_offered_is_refused_with_the_way_to_choose(target, extension):
    (asked,) = Needs(extensions=(extension,)).extensions
    lacking = replace(target, extensions=target.extensions - {asked.id})
    text = refused(Needs(extensions=(extension,)), lacking)
    assert f"it asks for {asked.id}: this engine does not have it" in text
    assert f"{type(asked).__name__} only where target.extensions has {asked.id}" in text


def test_an_engine_says_why_it_does_not_offer_an_extension(target):
    lacking = replace(target, extensions=frozenset())
    why = {Trees.id: ("its verifier knows chains alone", "a proposer of chains")}
    with pytest.raises(Refusal, match=r"(?s)its verifier knows chains alone.*works +a proposer of chains"):
        admit(loaded(Needs(extensions=(Trees(),))), lacking, withheld=why)


def test_another_number_of_an_extension_is_refused_with_the_one_that_is_offered(target):
    class NewerTrees(Extension):
        name = "trees"
        version = 2

    assert "it asks for trees@2: this engine has trees@1" in refused(Needs(extensions=(NewerTrees(),)), target)


def test_more_nodes_than_the_engine_verifies_are_refused_with_the_most(target):
    asked = loaded(Needs(extensions=(Trees(),)), k=65)
    with pytest.raises(Refusal, match=r'(?s)its trees have 65 nodes, and 64 is the most.*"max_nodes": 64'):
        admit(replace(asked, config=asked.config.replace(max_nodes=65)), target)


def test_hidden_states_of_the_first_and_the_last_layer_are_admitted(target):
    assert not admit(loaded(Needs(hidden_states=(0, 6, "final")), method="greedy"), target).keeps_distribution


def test_hidden_states_beyond_the_last_layer_are_refused_with_the_range(target):
    text = refused(Needs(hidden_states=(2, 7)), target)
    assert "after layer 7" in text
    assert "0 .. 6" in text


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        ((1, 1000), ("draft id 1 to target id 1000", "0 .. 999")),
        ((-1, 4), ("target id -1", "0 .. 999")),
        ((4, 5, 4), ("3 entries for 2 different",)),
        ((), ("0 entries",)),
    ],
    ids=["too large", "negative", "not injective", "empty"],
)
def test_draft_vocabulary_must_map_into_the_targets(target, ids, told):
    text = refused(Needs(distributions=("dense",), draft_vocabulary=ids), target)
    assert all(fact in text for fact in told)


def test_probabilistic_drafts_need_a_distribution(target):
    with pytest.raises(Refusal) as info:
        admit(loaded(Needs()), target)
    assert "Needs.distributions is empty" in str(info.value)
    assert '"draft_sample_method": "greedy"' in str(info.value)


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        (Needs(distributions=("dense",)), 8 * 4 * 1000 * 4),
        (Needs(distributions=("dense",), draft_vocabulary=tuple(range(100))), 8 * 4 * 100 * 4),
        (Needs(distributions=("sparse",), sparse_top_m=16), 8 * 4 * 16 * 12),
    ],
    ids=["dense", "mapped", "sparse"],
)
def test_distribution_bytes_are_rows_times_length_times_width(target, needs, expected):
    assert admit(loaded(needs), target).distribution_bytes == expected


def test_greedy_drafts_keep_no_distribution(target):
    assert (
        admit(
            loaded(Needs(distributions=("dense",)), method="greedy"), target, distribution_budget_bytes=0
        ).distribution_bytes
        == 0
    )


@pytest.mark.parametrize(("dtype", "size"), [(None, 4), ("bfloat16", 2), ("float8_e4m3fn", 1)])
def test_draft_kv_is_counted_per_block(target, dtype, size):
    kv = DraftKV(num_layers=3, num_heads=2, head_dim=8, dtype=dtype)
    admission = admit(loaded(Needs(extensions=(kv,)), method="greedy"), target)
    assert admission.draft_kv_bytes_per_block == 2 * 3 * 2 * 8 * 16 * size


def test_unknown_draft_kv_dtype_is_refused_with_the_known_ones(target):
    text = refused(Needs(extensions=(DraftKV(num_layers=1, num_heads=1, head_dim=8, dtype="int3"),)), target)
    assert '"int3"' in text
    assert "bfloat16" in text


def test_distribution_over_the_budget_is_refused_with_what_fits(target):
    budget = 8 * 2 * 1000 * 4
    with pytest.raises(Refusal) as info:
        admit(loaded(Needs(distributions=("dense",))), target, distribution_budget_bytes=budget)
    for fact in ("8 rows x 4 drafts x 1000 ids", '"num_speculative_tokens": 2', "max_num_seqs=4", "sparse"):
        assert fact in str(info.value)
    assert (
        admit(loaded(Needs(distributions=("dense",)), k=2), target, distribution_budget_bytes=budget).distribution_bytes
        == budget
    )


def test_cost_is_logged(target, caplog):
    with caplog.at_level("INFO", logger="specdec"):
        admit(loaded(Needs(distributions=("dense",))), target)
    assert "draft distributions 0.1 MiB" in caplog.text
    assert "dist-x:mine" in caplog.text


def test_what_lies_within_the_target_is_taken_up_to_its_last(target):
    assert admit(loaded(Needs(extensions=(TargetTokens(top_k=target.vocab_size),)), method="greedy"), target)
    assert "there are 1000" in refused(Needs(extensions=(TargetTokens(top_k=target.vocab_size + 1),)), target)
    assert admit(loaded(Needs(extensions=(TargetKV(layers=(target.num_layers - 1,)),)), method="greedy"), target)
    assert "layer 6" in refused(Needs(extensions=(TargetKV(layers=(target.num_layers,)),)), target)


def test_a_vocabulary_that_is_not_the_targets_is_refused_whatever_the_sampling(target):
    assert "target id 1000" in refused(Needs(distributions=("dense",), draft_vocabulary=(1, 1000)), target)
