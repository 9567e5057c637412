"""The contract's own data: declarations refuse nonsense, errors say enough, fakes stand in for the engine."""

from __future__ import annotations

import copy
import operator
import pickle
import re

import numpy as np
import pytest
import torch

from specdec.sdk import (
    ConfigError,
    Draft,
    HostProposer,
    Needs,
    ProposerConfig,
    Refusal,
    RequestView,
    Services,
    SpecdecError,
    StrictModel,
)
from specdec.sdk.errors import PluginId, RequestError
from specdec.sdk.extensions import DraftKV, Extension, State, TargetKV, TargetLayers, TargetTokens, Trees
from specdec.sdk.host_proposer import ReadTokens
from specdec.testing import FakeServices, fake_target_info, step_view


class Options(StrictModel):
    window: int = 4


@pytest.mark.parametrize(
    ("model", "values", "suggestion"),
    [
        (Needs, {"hiden_states": (1,)}, "hidden_states"),
        (DraftKV, {"num_layer": 1}, "num_layers"),
        (Options, {"windw": 1}, "window"),
    ],
    ids=["needs", "draft_kv", "options"],
)
def test_unknown_key_is_refused_with_a_suggestion(model, values, suggestion):
    with pytest.raises(ConfigError, match=f"did you mean '{suggestion}'") as caught:
        model(**values)
    assert caught.value.code == "SD-E131"


@pytest.mark.parametrize(
    "values",
    [
        {"distributions": ("sparse",)},
        {"sparse_top_m": 4},
        {"distributions": ("one_hot",)},
        {"distributions": "dense"},
        {"distributions": (), "draft_vocabulary": (1, 2)},
        {"min_draft_tokens": 5, "max_draft_tokens": 4},
        {"hidden_states": (-1,)},
        {"hidden_states": ("last",)},
        {"placement": "gpu"},
        {"sampling": ("temprature",)},
    ],
    ids=str,
)
def test_needs_that_contradict_themselves_are_refused(values):
    with pytest.raises(ConfigError) as caught:
        Needs(**values)
    assert caught.value.code == "SD-E132"


def test_declarations_are_frozen_and_changed_copies_are_validated():
    needs = Needs(hidden_states=(2, "final"))
    with pytest.raises(ValueError, match="frozen"):
        needs.history = True
    assert needs.replace(history=True).history
    with pytest.raises(ConfigError):
        needs.replace(placement="nowhere")


def test_parse_names_the_place_in_the_users_own_words():
    with pytest.raises(ConfigError, match=r"^SD-E132 proposer_config has unusable values"):
        Options.parse({"window": "wide"}, "proposer_config")


def test_a_key_that_is_no_text_is_an_unknown_key():
    with pytest.raises(ConfigError, match=r"SD-E131 proposer_config has a key that nobody declares\n  1 "):
        Options.parse({1: 2}, "proposer_config")


def test_error_text_has_code_plugin_and_aligned_facts():
    plugin = PluginId("x", "pkg:X", "specdec-plugin-x", "0.3.1")
    error = SpecdecError("SD-E999", "it broke", {"expected": 1, "found": "two\nlines"}, plugin=plugin)
    assert str(error).splitlines() == [
        "SD-E999 it broke   [specdec-plugin-x:x 0.3.1]",
        "  expected  1",
        "  found     two",
        "            lines",
    ]


@pytest.mark.parametrize(
    "error",
    [
        SpecdecError("SD-E999", "it broke", {"found": 1}, plugin=PluginId("x", "pkg:X")),
        Refusal("K is 9", "K = 4"),
        RequestError("SD-E270", "no such key"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_whole_out_of_another_process(error):
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_class_path_outside_a_distribution_is_its_own_label():
    assert PluginId("mypkg.Mine", "mypkg:Mine").label == "mypkg:Mine"


def test_refusal_keeps_reason_and_remedy_when_attributed():
    attributed = Refusal("K is 9", "K = 4").attributed_on(PluginId("x", "pkg:X", "dist", "1"))
    assert (attributed.reason, attributed.what_would_work) == ("K is 9", "K = 4")
    assert "dist:x 1" in str(attributed)
    assert attributed.exit_code == 3


def test_lists_become_a_padded_draft():
    draft = Draft.from_lists([[5, 6], [], [7, 8, 9]], 3)
    assert draft.token_ids.tolist() == [[5, 6, -1], [-1, -1, -1], [7, 8, 9]]
    assert draft.lengths.tolist() == [2, 0, 3]
    assert draft.distribution is None
    assert Draft.from_lists([], 3).token_ids.shape == (0, 3)
    with pytest.raises(ValueError, match="4 tokens, and this step takes at most 3"):
        Draft.from_lists([[1, 2, 3, 4]], 3)


@pytest.mark.parametrize("ids", [[np.int32(5), np.uint8(6)], [torch.tensor(5), torch.tensor([6])], np.array([5, 6])])
def test_integers_of_other_libraries_are_token_ids(ids):
    assert Draft.from_lists([ids], 2).token_ids.tolist() == [[5, 6]]


@pytest.mark.parametrize(
    ("odd", "found"),
    [
        (5.7, r"5\.7 \(float\)"),
        (5.0, r"5\.0 \(float\)"),
        (np.float32(5), r"np\.float32\(5\.0\) \(float32\)"),
        (torch.tensor(5.7), r"tensor\(5\.7\d*\) \(Tensor\)"),
        (True, r"True \(bool\)"),
        (np.True_, "True"),
        (torch.tensor(True), r"tensor\(True\)"),
        ("5", r"'5' \(str\)"),
        (None, r"None \(NoneType\)"),
    ],
    ids=str,
)
def test_no_float_bool_or_text_is_made_a_token_id(odd, found):
    with pytest.raises(TypeError, match=f"a draft holds {found}.*integer" if odd is not np.True_ else found):
        Draft.from_lists([[3], [4, odd]], 3)


def test_host_proposer_refuses_a_draft_of_floats():
    class Averages(HostProposer):
        def draft(self, request, tokens, k):
            return [tokens[-1] + 0.7]

    with pytest.raises(TypeError, match=r"a draft holds \d+\.7 \(float\)"):
        Averages(None).propose(step_view([[1, 2, 3]], 4))


class Echo(HostProposer):
    def __init__(self, config):
        super().__init__(config)
        self.seen = []

    def draft(self, request, tokens, k):
        self.seen.append(list(tokens))
        return list(tokens)[:k]


def echo() -> Echo:
    return Echo(ProposerConfig(num_draft_tokens=3))


def test_host_proposer_sees_the_whole_history_and_its_budget():
    proposer = echo()
    first = proposer.propose(step_view([[1, 2, 3, 4], [5, 6]], 3, budget=[3, 1]))
    assert first.token_ids.tolist() == [[1, 2, 3], [5, -1, -1]]
    proposer.propose(step_view([[1, 2, 3, 4, 9, 8], [5, 6, 7]], 3, shown_from=[3, 1], budget=[2, 0]))
    assert proposer.seen == [[1, 2, 3, 4], [5, 6], [1, 2, 3, 4, 9, 8]]


def test_host_proposer_keeps_a_request_that_changes_rows_and_forgets_a_finished_one():
    proposer = echo()
    proposer.propose(step_view([[1, 2, 3]], 3, request_ids=["a"], slots=[0]))
    proposer.propose(step_view([[1, 2, 3, 4]], 3, request_ids=["a"], slots=[5], generation=[9]))
    assert proposer.seen[-1] == [1, 2, 3, 4]
    proposer.on_finish(RequestView(request_id="a", slot=5, generation=9, prompt_token_ids=[1, 2, 3]))
    proposer.propose(step_view([[7, 8]], 3, request_ids=["a"]))
    assert proposer.seen[-1] == [7, 8]


def test_the_end_of_a_fake_text_has_as_many_tokens_as_are_asked_for():
    history = step_view([[7, 8, 9], [4]], 3).history
    ends = [history.tail(number).tolist() for number in (0, 2, 4)]
    assert ends == [[[], []], [[8, 9], [-1, 4]], [[-1, 7, 8, 9], [-1, -1, -1, 4]]]
    assert step_view([], 3).history.tail(2).shape == (0, 2)


def test_fake_services_satisfy_the_protocol_and_tie_embedding_and_head():
    services: Services = FakeServices(fake_target_info(vocab_size=10, hidden_size=4))
    hidden = services.embed(torch.tensor([[1, 2]]))
    assert services.lm_head(hidden).shape == (1, 2, 10)


def test_fake_draft_kv_shows_holes_as_nan_and_overwrites():
    services = FakeServices(draft_kv=DraftKV(num_layers=1, num_heads=2, head_dim=4))
    store = services.draft_kv()
    rows, positions = torch.tensor([3, 3]), torch.tensor([0, 2])
    store.write(0, rows, positions, torch.ones(2, 2, 4), torch.zeros(2, 2, 4))
    store.write(0, rows[:1], positions[:1], torch.full((1, 2, 4), 5.0), torch.zeros(1, 2, 4))
    keys, _ = store.read(0, 3, 3)
    assert keys[0].eq(5).all()
    assert keys[1].isnan().all()
    assert keys[2].eq(1).all()


def test_asking_for_undeclared_draft_kv_is_refused():
    with pytest.raises(Refusal, match="belongs to draft_kv@1"):
        FakeServices().draft_kv()


def test_fake_random_depends_on_request_position_and_index_only():
    one = step_view([[1, 2], [3, 4, 5]], 2).random
    alone = step_view([[3, 4, 5]], 2, request_ids=["request-1"]).random
    assert torch.equal(one.uniform(1)[1:], alone.uniform(1))
    assert one.uniform(0)[0] != one.uniform(1)[0]
    assert 0 < float(one.uniform(0).min()) < 1


def test_host_proposer_runs_when_its_init_is_not_called():
    class Own(HostProposer):
        def __init__(self, config):
            self.window = 2

        def draft(self, request, tokens, k):
            return tokens[-self.window :]

    first, second = Own(ProposerConfig(num_draft_tokens=3)), Own(ProposerConfig(num_draft_tokens=3))
    assert first.propose(step_view([[1, 2, 3]], 3)).token_ids.tolist() == [[2, 3, -1]]
    assert second.propose(step_view([[4, 5]], 3)).token_ids.tolist() == [[4, 5, -1]]


CHANGES = {
    "append": lambda tokens: tokens.append(7),
    "extend": lambda tokens: tokens.extend([7]),
    "insert": lambda tokens: tokens.insert(0, 7),
    "pop": lambda tokens: tokens.pop(),
    "remove": lambda tokens: tokens.remove(2),
    "clear": lambda tokens: tokens.clear(),
    "sort": lambda tokens: tokens.sort(reverse=True),
    "reverse": lambda tokens: tokens.reverse(),
    "item": lambda tokens: operator.setitem(tokens, 0, 7),
    "slice": lambda tokens: operator.setitem(tokens, slice(0, 2), []),
    "del": lambda tokens: operator.delitem(tokens, -1),
    "+=": lambda tokens: operator.iadd(tokens, [7]),
    "*=": lambda tokens: operator.imul(tokens, 2),
}


class Changes(Echo):
    change = None

    def draft(self, request, tokens, k):
        self.seen.append(list(tokens))
        type(self).change(tokens)
        return []


@pytest.mark.parametrize("change", CHANGES)
def test_host_proposer_lets_nobody_change_the_tokens_that_it_keeps(change):
    kind = type("Changing", (Changes,), {"change": staticmethod(CHANGES[change])})
    proposer = kind(ProposerConfig(num_draft_tokens=3))
    for _ in range(2):
        with pytest.raises(TypeError, match=r"change list\(tokens\)"):
            proposer.propose(step_view([[1, 2, 3]], 3))
    assert proposer.seen == [[1, 2, 3]] * 2


def test_every_method_that_only_a_list_has_is_refused_for_the_tokens_of_a_host_proposer():
    changing = vars(list).keys() - vars(tuple).keys() - {"copy", "__reversed__", "__init__", "__sizeof__"}
    assert len(changing) == 12
    assert changing <= vars(ReadTokens).keys()


def test_copies_of_the_tokens_of_a_host_proposer_are_lists_of_the_authors_own():
    tokens = ReadTokens([1, 2])
    copies = [copy.copy(tokens), copy.deepcopy(tokens), pickle.loads(pickle.dumps(tokens)), tokens[:], tokens.copy()]
    copies += [tokens * 1]
    for each in copies:
        assert type(each) is list
        each.append(7)
    assert tokens == [1, 2]


@pytest.mark.parametrize(("returned", "found"), [(None, "None"), (7, "'int'"), ("ab", "'str'")])
def test_host_proposer_says_what_draft_must_return(returned, found):
    class Wrong(HostProposer):
        def draft(self, request, tokens, k):
            return returned

    view = step_view([[1, 2, 3]], 3)
    with pytest.raises(TypeError, match=f"draft returned {found}; it returns a list of token ids"):
        Wrong(ProposerConfig(num_draft_tokens=3)).propose(view)


ASKED = (
    ("tree@1", "no extension is called 'tree@1': did you mean 'trees@1'?"),
    ("telepathy@1", "there are trees@1, "),
    ("trees@2", "this SDK has trees@1, and 'trees@2' is newer: upgrade specdec-sdk, or ask for 'trees@1'"),
    ("trees", "'trees' has no number that this SDK has: ask for 'trees@1'"),
    (Trees, "Trees is a class: write Trees()"),
    (3, "an extension is asked for as Trees() or 'trees@1'"),
    ("target_tokens@1", "top_k  Field required"),
    ({"id": "trees@1", "depth": 3}, "Trees has a key that nobody declares"),
)


@pytest.mark.parametrize(("asked", "told"), ASKED)
def test_an_extension_that_cannot_be_asked_for_is_refused_with_what_can(asked, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        Needs(extensions=(asked,))


class NewerTrees(Extension):
    name = "trees"
    version = 2


@pytest.mark.parametrize("other", ["trees@1", NewerTrees()])
def test_an_extension_is_asked_for_once_and_under_one_number(other):
    with pytest.raises(ConfigError, match="asked for once, under one number; found trees@1, trees@"):
        Needs(extensions=(Trees(), other))


def test_extensions_are_a_tuple():
    with pytest.raises(ConfigError, match=r"a tuple, also where there is one: \(Trees\(\),\)"):
        Needs(extensions=Trees())


def test_needs_and_their_extensions_go_through_json():
    kv = DraftKV(num_layers=1, num_heads=2, head_dim=4, lookahead=3)
    needs = Needs(history=True, extensions=("trees@1", TargetTokens(top_k=3), kv))
    copy = Needs.model_validate_json(needs.model_dump_json())
    assert copy == needs
    assert copy.extension(DraftKV) == kv
    assert (copy.extension(State), copy.lookahead) == (None, 3)


def test_an_extension_of_other_settings_serves_two_who_ask():
    one, other = TargetTokens(top_k=3), TargetTokens(top_k=2, rejected=True)
    assert one.united(other) == TargetTokens(top_k=3, rejected=True)
    assert TargetKV(layers=(2, 1)).united(TargetKV(layers=(1, 0))).layers == (2, 1, 0)
    run = TargetLayers(layers=(3,), lookahead=2).united(TargetLayers(layers=(0,)))
    assert run == TargetLayers(layers=(0, 3), lookahead=2)
    with pytest.raises(Refusal, match="two parts keep draft KV"):
        DraftKV(num_layers=1, num_heads=1, head_dim=1).united(DraftKV(num_layers=2, num_heads=1, head_dim=1))
