import functools
import inspect
import warnings
from dataclasses import replace

import pytest
from pydantic import BaseModel, Field, field_validator

from specdec.core.config.speculative_config import SpeculativeConfig
from specdec.core.registry import PluginSettings, ResolvedProposer, load_proposer
from specdec.core.registry.discovery import discover
from specdec.core.registry.load import construct
from specdec.sdk import (
    ConfigError,
    HostProposer,
    LateProposer,
    Needs,
    Proposer,
    ProposerBase,
    Refusal,
    StrictModel,
    lifecycle,
)
from specdec.sdk.config import NetworkSettings
from specdec.sdk.errors import PluginId, PluginLoadError, SpecdecWarning
from specdec.sdk.extensions import Metrics, State, Trees

PLUGIN = PluginId("mine", "test_load:Mine", "dist-x", "0.3.1")


class Fine:
    def __init__(self, config):
        self.config = config

    def propose(self, step):
        return None


class WithOptions(Fine):
    class Options(StrictModel):
        window: int = Field(default=4, ge=1)
        name: str = "x"


@pytest.fixture
def load(target):
    def load(cls, model=None, **values):
        config = SpeculativeConfig.parse({"method": "mine", "num_speculative_tokens": 4} | values)
        return load_proposer(ResolvedProposer(PLUGIN, cls, model), config, target)

    return load


@pytest.fixture
def refused(load):
    def refused(cls, expect=PluginLoadError, **values):
        with pytest.raises(expect) as info:
            load(cls, **values)
        assert "dist-x:mine 0.3.1" in str(info.value)
        return info.value

    return refused


def test_missing_num_speculative_tokens_says_what_to_add(refused):
    error = refused(Fine, ConfigError, num_speculative_tokens=None)
    assert error.code == "SD-E133"
    assert '"num_speculative_tokens": 4' in str(error)


def test_misspelt_num_speculative_tokens_is_pointed_out(refused):
    error = refused(Fine, ConfigError, num_speculative_tokens=None, num_speculative_token=3)
    assert "did you mean 'num_speculative_tokens'" in str(error)


def test_missing_num_speculative_tokens_is_what_the_class_states(load):
    class States(Fine):
        default_draft_tokens = 6

    class Reads(Fine):
        @classmethod
        def default_draft_tokens(cls, model):
            return len(model)

    class DraftsAtMost(Fine):
        needs = Needs(max_draft_tokens=7)

    def k(cls, given=None):
        return load(cls, model="abc", num_speculative_tokens=given).config.num_draft_tokens

    assert [k(States), k(Reads), k(DraftsAtMost)] == [6, 3, 7]
    assert [k(States, 2), k(Reads, 2), k(DraftsAtMost, 2)] == [2, 2, 2]


@pytest.mark.parametrize("stated", [0, -1, "4", 2.0])
def test_unusable_default_draft_length_is_shown(refused, stated):
    class States(Fine):
        default_draft_tokens = stated

    assert repr(stated) in str(refused(States, ConfigError, num_speculative_tokens=None))


def test_a_default_draft_length_that_raises_is_attributed_on_the_plugin(refused):
    class Raises(Fine):
        @classmethod
        def default_draft_tokens(cls, model):
            raise KeyError("depth")

    assert refused(Raises, num_speculative_tokens=None).code == "SD-E114"


def line_of(function):
    return f"{inspect.getsourcefile(function)}:{inspect.unwrap(function).__code__.co_firstlineno}"


def test_smallest_proposer_is_loaded_with_the_cheapest_needs(load):
    loaded = load(Fine)
    assert (loaded.cls, loaded.needs, loaded.methods, loaded.plugin) == (Fine, Needs(), frozenset(), PLUGIN)


def test_common_settings_reach_the_proposer(load):
    loaded = load(Fine, "some/checkpoint", draft_sample_method="probabilistic", dtype="float32", moe_backend="eager")
    config = loaded.config
    assert (config.num_draft_tokens, config.model, config.options) == (4, "some/checkpoint", None)
    assert (config.draft_sample_method, config.network) == (
        "probabilistic",
        NetworkSettings(dtype="float32", moe_backend="eager"),
    )


def test_a_class_that_was_made_in_no_module_has_its_methods(load):
    methods = ("__init__(self, config)", "propose(self, step)", "observe(self, step)")
    made = {}
    exec("class Loose:\n" + "".join(f"    def {each}: ...\n" for each in methods), made)  # as notebooks and pages do
    assert made["Loose"].observe.__module__ is None
    assert load(made["Loose"]).methods == {"observe"}


def test_lifecycle_methods_are_looked_up_once(load):
    class Mine(Fine):
        def observe(self, step): ...

        def on_finish(self, request): ...

    assert load(Mine).methods == {"observe", "on_finish"}


def test_methods_that_are_only_inherited_from_the_contract_do_not_count(load, refused):
    class Mine(ProposerBase):
        def propose(self, step): ...

        def close(self): ...

    class Beside(Fine, ProposerBase):
        def on_start(self, request): ...

    class Below(Mine):
        def observe(self, step): ...

    class Empty(Proposer): ...

    class Nothing(ProposerBase): ...

    assert load(Mine).methods == {"close"}
    assert load(Beside).methods == {"on_start"}
    assert load(Below).methods == {"close", "observe"}
    for unfinished in (Empty, Nothing):
        error = refused(unfinished)
        assert error.code == "SD-E110"
        assert error.summary.endswith('no method "propose"')


@pytest.mark.parametrize("candidate", [Fine.propose, lambda config: Fine(config), "text", None])
def test_something_that_is_no_class_is_refused(refused, candidate):
    assert refused(candidate).code == "SD-E113"


def test_class_without_propose_is_told_what_it_has(refused):
    class Mine:
        def __init__(self, config): ...

        def proposes(self, step): ...

    error = refused(Mine)
    assert error.code == "SD-E110"
    for fact in ('"proposes"', line_of(Mine.proposes), 'did you mean "propose"?', "propose(self, step)"):
        assert fact in str(error)


def test_abstract_class_is_told_what_is_missing(refused):
    class Mine(HostProposer):
        def drafts(self, tokens, k): ...

    error = refused(Mine)
    assert error.code == "SD-E110"
    assert 'no method "draft"' in str(error)
    assert '"drafts"' in str(error)


class TwoArguments(Fine):
    def propose(self, input_ids, k): ...


class KeywordOnly(Fine):
    def propose(self, *, step): ...


class NoArgument(Fine):
    def propose(self): ...


class Static(Fine):
    @staticmethod
    def propose(this, step): ...


class Property(Fine):
    propose = property(lambda self: None)


class Value(Fine):
    propose = 3


class Asynchronous(Fine):
    async def propose(self, step): ...


class Generator(Fine):
    def propose(self, step):
        yield step


@pytest.mark.parametrize(
    "cls", [TwoArguments, KeywordOnly, NoArgument, Static, Property, Value, Asynchronous, Generator]
)
def test_propose_that_cannot_be_called_is_refused(refused, cls):
    error = refused(cls)
    assert error.code == "SD-E111"
    assert "expected  propose(self, step)" in str(error)


def test_wrong_signature_shows_what_was_found_and_where(refused):
    text = str(refused(TwoArguments))
    assert "propose(self, input_ids, k)" in text
    assert line_of(TwoArguments.propose) in text


class StaticNeeds(Fine):
    @staticmethod
    def needs(cls, config, target): ...


def test_a_static_method_that_takes_its_class_is_told_from_what_was_expected(refused):
    text = str(refused(StaticNeeds))
    assert "expected  needs(cls, config, target)" in text
    assert "found     @staticmethod needs(cls, config, target)" in text


def passed_through(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


class AnyArguments(Fine):
    def propose(self, *args, **kwargs): ...


class OtherName(Fine):
    def propose(self, batch, /, verbose=False): ...


class GoodStatic(Fine):
    @staticmethod
    def propose(step): ...


class OnTheClass(Fine):
    @classmethod
    def propose(cls, step): ...


class Decorated(Fine):
    @passed_through
    def propose(self, step): ...


@pytest.mark.parametrize("cls", [AnyArguments, OtherName, GoodStatic, OnTheClass, Decorated])
def test_any_shape_that_takes_the_step_by_position_is_accepted(load, cls):
    assert load(cls).cls is cls


class NoConstructor:
    def propose(self, step): ...


class TwoConfigs(Fine):
    def __init__(self, config, target): ...


@pytest.mark.parametrize("cls", [NoConstructor, TwoConfigs])
def test_constructor_must_take_the_config(refused, cls):
    error = refused(cls)
    assert error.code == "SD-E111"
    assert "expected  __init__(self, config)" in str(error)


@pytest.mark.parametrize(
    ("name", "wrong", "expected"),
    [
        ("bind", lambda self, target: None, "bind(self, target, services)"),
        ("warmup", lambda self, steps: None, "warmup(self)"),
        ("observe", lambda self: None, "observe(self, step)"),
        ("on_finish", lambda self, request, metrics: None, "on_finish(self, request)"),
    ],
)
def test_lifecycle_signatures_are_checked(refused, name, wrong, expected):
    error = refused(type("Mine", (Fine,), {name: wrong}))
    assert error.code == "SD-E111"
    assert expected in str(error)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("on_finished", "on_finish"),
        ("on_strat", "on_start"),
        ("onStart", "on_start"),
        ("on_accept", "on_preempt"),
        ("warm_up", "warmup"),
        ("observ", "observe"),
        ("observed", "observe"),
        ("updateWeights", "update_weights"),
    ],
)
def test_near_miss_of_a_lifecycle_name_is_a_warning(load, name, meant):
    mine = type("Mine", (Fine,), {name: lambda self, request: None})
    with pytest.warns(SpecdecWarning, match=f"{name} .*did you mean {meant}") as caught:
        load(mine)
    assert "dist-x:mine 0.3.1" in str(caught[0].message)


@pytest.mark.parametrize("name", ["onfinish", "on_end"])
def test_what_a_base_of_the_sdk_implements_may_be_misspelt_too(load, name):
    mine = type(
        "Mine", (HostProposer,), {"draft": lambda self, request, tokens, k: [], name: lambda self, request: None}
    )
    with pytest.warns(SpecdecWarning, match=f"{name} .*did you mean on_finish"):
        load(mine)


async def deferred(self, request, tokens, k):
    return []


@pytest.mark.parametrize(
    ("base", "name", "written"),
    [
        (HostProposer, "draft", lambda self, tokens: []),
        (HostProposer, "draft", deferred),
        (LateProposer, "ask", lambda self, request: []),
    ],
)
def test_what_a_base_of_the_sdk_calls_is_held_to_its_arguments_at_load(refused, base, name, written):
    error = refused(type("Mine", (base,), {name: written}))
    assert error.code == "SD-E111"
    assert f"{name}(self, request, tokens, k)" in str(error)


def test_event_of_another_name_is_a_warning_too(load):
    with pytest.warns(SpecdecWarning, match="on_zzz .*never called"):
        load(type("Mine", (Fine,), {"on_zzz": lambda self: None}))


def test_helpers_with_other_names_do_not_warn(load):
    names = ("preload", "reload", "draft", "reset", "_on_finished", "best_match")
    mine = type("Mine", (Fine,), {name: lambda self: None for name in names})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(mine)


def test_near_names_do_not_warn_where_the_class_calls_them_or_has_the_other_too(load):
    class Mine(Fine):
        def observe(self, step):
            self.on_accept(step)

        def on_accept(self, step): ...

        def observed(self): ...

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(Mine).methods == {"observe"}


@pytest.mark.parametrize("version", ["1.0"])
def test_api_version_up_to_ours_is_accepted(load, version):
    assert load(type("Mine", (Fine,), {"api_version": version}))


@pytest.mark.parametrize("version", ["0.2", "1.1", "2.1"])
def test_newer_api_version_is_refused_with_what_is_accepted(refused, version):
    error = refused(type("Mine", (Fine,), {"api_version": version}))
    assert error.code == "SD-E120"
    assert f"targets proposer API {version}" in str(error)
    assert "1.0 - 1.0" in str(error)


@pytest.mark.parametrize(
    ("version", "accepted"),
    [("1.0", True), ("1.3", True), ("1.4", True), ("1.5", False), ("2.0", False), ("2.4", False), ("0.9", False)],
)
def test_a_minor_adds_and_a_major_may_break(load, refused, monkeypatch, version, accepted):
    monkeypatch.setattr(lifecycle, "API_VERSION", (1, 4))
    plugin = type("Mine", (Fine,), {"api_version": version})
    if accepted:
        assert load(plugin).cls is plugin
    else:
        assert "1.0 - 1.4" in str(refused(plugin))


@pytest.mark.parametrize(
    ("version", "is_called"), [({}, False), ({"api_version": "1.1"}, False), ({"api_version": "1.2"}, True)]
)
def test_a_method_that_came_after_the_version_of_the_class_is_its_own_helper(
    load, refused, monkeypatch, version, is_called
):
    monkeypatch.setattr(lifecycle, "API_VERSION", (1, 4))
    monkeypatch.setattr(lifecycle, "ADDED_METHODS", {"warmup": (1, 2)})
    helper = type("Mine", (Fine,), version | {"warmup": lambda self, kind: kind})
    if is_called:
        assert refused(helper).code == "SD-E111"
    else:
        assert "warmup" not in load(helper).methods
    assert ("warmup" in load(type("Mine", (Fine,), version | {"warmup": lambda self: None})).methods) == is_called


@pytest.mark.parametrize(
    ("requirement", "status"),
    [
        ("specdec-sdk>=0.0.1", "ok"),
        ("specdec-sdk", "ok"),
        ("specdec-sdk<0.0.1", "broken"),
        ("specdec-sdk>=99,<100", "broken"),
        ("Specdec_SDK==99.*", "broken"),
    ],
)
def test_older_and_newer_plugins_are_told_by_their_metadata(install, write_module, requirement, status):
    write_module("x_mod", "raise AssertionError('imported')")
    install("dist-x", proposers=["mine = x_mod:Mine"], requires=[requirement, "torch"])
    (row,) = (row for row in discover("proposers", PluginSettings()) if row.name == "mine")
    assert (row.status, row.code) == (status, "SD-E120" if status == "broken" else None)
    assert row.reason is None or requirement.partition("-")[0].lower() in row.reason.lower()


@pytest.mark.parametrize("version", [0.1, (0, 1), "1", "0.1.0", "new"])
def test_api_version_that_is_no_version_is_refused(refused, version):
    assert refused(type("Mine", (Fine,), {"api_version": version})).code == "SD-E119"


def test_options_are_validated_before_construction(load):
    options = load(WithOptions, proposer_config={"window": 7}).config.options
    assert (options.window, options.name) == (7, "x")


def test_top_level_key_that_the_options_declare_is_accepted(load):
    options = load(WithOptions, window=7, proposer_config={"name": "y"}).config.options
    assert (options.window, options.name) == (7, "y")


def test_key_in_both_places_is_refused(refused):
    error = refused(WithOptions, ConfigError, window=7, proposer_config={"window": 7})
    assert error.code == "SD-E135"
    assert "window" in str(error)


def test_unknown_option_is_refused_with_a_suggestion(refused):
    error = refused(WithOptions, ConfigError, proposer_config={"windw": 7})
    assert error.code == "SD-E131"
    assert "did you mean 'window'?" in str(error)


@pytest.mark.parametrize(
    ("key", "hint"), [("windw", "window"), ("draft_sample_metod", "draft_sample_method"), ("zzz", None)]
)
def test_unknown_top_level_key_is_refused_with_a_suggestion(refused, key, hint):
    error = refused(WithOptions, ConfigError, **{key: 7})
    assert error.code == "SD-E131"
    assert (f"did you mean {hint!r}?" if hint else "unknown") in str(error)


def test_options_of_a_proposer_without_any_are_refused(refused):
    assert refused(Fine, ConfigError, proposer_config={"window": 7}).code == "SD-E131"
    assert refused(Fine, ConfigError, window=7).code == "SD-E131"


def test_wrong_option_value_names_key_and_plugin(refused):
    error = refused(WithOptions, ConfigError, proposer_config={"window": 0, "name": 3})
    assert error.code == "SD-E132"
    assert "proposer_config has unusable values" in str(error)
    assert "window" in str(error)
    assert "name" in str(error)


def test_plain_pydantic_options_forbid_unknown_keys_all_the_same(load, refused):
    class Mine(Fine):
        class Options(BaseModel):
            window: int = 4
            width: int = Field(default=1, alias="w")

    assert load(Mine, proposer_config={"window": 5, "w": 2}).config.options.width == 2
    assert refused(Mine, ConfigError, proposer_config={"other": 5}).code == "SD-E131"
    assert refused(Mine, ConfigError, proposer_config={"window": "x"}).code == "SD-E132"


def test_options_that_are_no_pydantic_model_are_refused(refused):
    assert refused(type("Mine", (Fine,), {"Options": dict})).code == "SD-E115"


def test_validator_that_raises_something_odd_is_attributed(refused):
    class Mine(Fine):
        class Options(StrictModel):
            window: int = 4

            @field_validator("window")
            @classmethod
            def _look_up(cls, value):
                return {}[value]

    error = refused(Mine, proposer_config={"window": 5})
    assert error.code == "SD-E115"
    assert "in _look_up" in str(error)


def test_needs_may_be_a_value_or_a_classmethod(load, target):
    class Computed(Fine):
        @classmethod
        def needs(cls, config, target):
            return Needs(hidden_states=(target.num_layers,), max_draft_tokens=config.num_draft_tokens)

    assert load(type("Mine", (Fine,), {"needs": Needs(history=True)})).needs.history
    assert load(Computed).needs == Needs(hidden_states=(6,), max_draft_tokens=4)


def test_refusal_gets_the_plugins_name(refused):
    class Mine(Fine):
        @classmethod
        def needs(cls, config, target):
            raise Refusal("a vocabulary of 1000 is too small", "a larger target")

    error = refused(Mine, Refusal)
    assert error.plugin == PLUGIN
    assert "a larger target" in str(error)


def failing_needs(cls, config, target):
    return {}["absent"]


def misspelt_needs(cls, config, target):
    return Needs(hidden_state=(1,))


@pytest.mark.parametrize(
    ("needs", "told"),
    [
        (classmethod(failing_needs), "in failing_needs"),
        (classmethod(misspelt_needs), "did you mean 'hidden_states'?"),
        (classmethod(lambda cls, config, target: {"history": True}), "found     dict"),
        (failing_needs, "put @classmethod above it"),
        ({"history": True}, "found     a dict"),
    ],
    ids=["raises", "unknown need", "returns a dict", "plain function", "dict"],
)
def test_unusable_needs_are_refused(refused, needs, told):
    error = refused(type("Mine", (Fine,), {"needs": needs}))
    assert error.code == "SD-E114"
    assert told in str(error)


def test_signature_of_needs_is_checked(refused):
    error = refused(type("Mine", (Fine,), {"needs": classmethod(lambda cls, config: Needs())}))
    assert error.code == "SD-E111"
    assert "needs(cls, config, target)" in str(error)


@pytest.mark.parametrize(
    ("needs", "told"),
    [
        (Needs(max_draft_tokens=3), ("is 4", "at most 3", '"num_speculative_tokens": 3')),
        (Needs(min_draft_tokens=5), ("is 4", "at least 5", '"num_speculative_tokens": 5')),
    ],
)
def test_draft_length_outside_what_is_offered_is_refused_with_numbers(refused, needs, told):
    error = refused(type("Mine", (Fine,), {"needs": needs}), Refusal)
    assert all(fact in str(error) for fact in told)


def test_class_distribution_version_and_length_are_told_of_every_load(load, caplog):
    caplog.set_level("INFO", logger="specdec")
    load(Fine)
    record = caplog.records[0]
    assert (record.name, record.levelname) == ("specdec", "INFO")
    for fact in ("test_load:Mine", "dist-x", "0.3.1", "K=4"):
        assert fact in record.getMessage()
    assert "\n" not in record.getMessage()


def test_construct_gives_an_instance(load):
    loaded = load(Fine)
    assert construct(loaded).config is loaded.config


def test_failing_constructor_is_attributed_with_the_authors_line(load):
    class Mine(Fine):
        def __init__(self, config):
            self.table = {}["absent"]

    with pytest.raises(PluginLoadError) as info:
        construct(load(Mine))
    assert info.value.code == "SD-E116"
    assert f"{__file__}" in str(info.value)
    assert "dist-x:mine 0.3.1" in str(info.value)
    assert isinstance(info.value.__cause__, KeyError)


def test_refusing_constructor_stays_a_refusal(load):
    class Mine(Fine):
        def __init__(self, config):
            raise Refusal("no corpus")

    with pytest.raises(Refusal, match="dist-x:mine") as info:
        construct(load(Mine))
    assert info.value.reason == "no corpus"


@pytest.mark.parametrize(
    ("name", "asked", "wrong", "expected"),
    [
        ("save", "state@1", lambda self: None, "save(self, path)"),
        ("metrics", "metrics@1", lambda self, kind: None, "metrics(self)"),
        ("update_weights", "new_weights@1", lambda self: None, "update_weights(self, tensors)"),
    ],
)
def test_signatures_of_an_extensions_methods_are_checked_where_it_is_asked_for(refused, name, asked, wrong, expected):
    error = refused(type("Mine", (Fine,), {"needs": Needs(extensions=(asked,)), name: wrong}))
    assert error.code == "SD-E111"
    assert expected in str(error)


def test_an_extension_whose_methods_are_missing_is_refused_with_what_to_write(refused):
    mine = type("Mine", (Fine,), {"needs": Needs(extensions=(State(),)), "save": lambda self, path: None})
    text = str(refused(mine))
    assert "expected  load(self, path)" in text
    assert "found     no such method" in text
    assert "leave State out of Needs.extensions" in text


def test_a_method_of_an_extension_that_was_not_asked_for_is_a_warning_and_not_called(load):
    mine = type("Mine", (Fine,), {"metrics": lambda self, kind: kind})
    with pytest.warns(SpecdecWarning, match=r"metrics .*is never called.*metrics@1, which Needs.extensions does not"):
        assert "metrics" not in load(mine).methods


def test_a_method_of_an_extension_that_is_not_offered_is_no_cause_for_a_warning(target, recwarn):
    asks = classmethod(lambda cls, config, target: Needs(extensions=target.extensions & {"metrics@1"}))
    mine = type("Mine", (Fine,), {"needs": asks, "metrics": lambda self: {}})
    config = SpeculativeConfig.parse({"method": "mine", "num_speculative_tokens": 4})
    lacking = replace(target, extensions=target.extensions - {"metrics@1"})
    assert "metrics" not in load_proposer(ResolvedProposer(PLUGIN, mine, None), config, lacking).methods
    assert not list(recwarn)


def test_methods_of_extensions_that_were_asked_for_are_called(load):
    methods = {"save": lambda self, path: None, "load": lambda self, path: None, "metrics": lambda self: {}}
    mine = type("Mine", (Fine,), {"needs": Needs(extensions=(State(), Metrics())), **methods})
    assert load(mine).methods >= set(methods)


class TreesWhereOffered(Fine):
    @classmethod
    def needs(cls, config, target):
        return Needs(extensions=(Trees(),) if Trees.id in target.extensions else ())


def test_a_proposer_falls_back_to_chains_where_trees_are_not_offered(target):
    config = SpeculativeConfig.parse({"method": "mine", "num_speculative_tokens": 4})
    resolved = ResolvedProposer(PLUGIN, TreesWhereOffered, None)
    offered = load_proposer(resolved, config, target)
    assert (offered.config.max_nodes, offered.config.width) == (4, 4)
    lacking = replace(target, extensions=frozenset())
    assert load_proposer(resolved, config, lacking).config.max_nodes is None
    with pytest.raises(Refusal, match="max_nodes is 8, and trees@1 is not offered here"):
        load_proposer(resolved, config.replace(max_nodes=8), lacking)


def test_nodes_are_those_of_a_tree_and_k_stays_its_depth(load):
    config = load(TreesWhereOffered, num_speculative_tokens=3, max_nodes=9).config
    assert (config.num_draft_tokens, config.max_nodes, config.width) == (3, 9, 9)
