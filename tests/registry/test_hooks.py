import inspect

import pytest

from specdec import LLM, SamplingParams
from specdec.core.config.speculative_config import SpeculativeConfig
from specdec.core.registry import PluginSettings, Registry
from specdec.core.registry.discovery import discover
from specdec.core.registry.hooks import HookPlugins
from specdec.sdk.errors import PluginLoadError
from specdec.sdk.hooks import HookSpecs, StepStats

HOOKS = {name: hook for name, hook in vars(HookSpecs).items() if not name.startswith("_")}

STATS = StepStats(
    step=1,
    num_requests=1,
    num_tokens_computed=1,
    num_drafts=0,
    num_draft_tokens=0,
    num_accepted_tokens=0,
    num_committed_tokens=1,
)
LISTENER = """
from specdec.sdk import hookimpl
seen = []
@hookimpl
def on_step(stats):
    seen.append(stats.step)
"""
FAILING = """
from specdec.sdk import hookimpl
calls = []
@hookimpl
def on_step(stats):
    calls.append(stats)
    raise ValueError("no such table")
@hookimpl
def on_engine_stop(summary):
    calls.append("stop")
"""


@pytest.fixture
def offer(install, write_module):
    """Install a distribution whose hook plugin is a module with this source."""

    def offer(source, dist="dist-h", module="h_mod", value=None):
        install(dist, "0.3.1", plugins=[f"hooks = {value or module}"])
        return write_module(module, source)

    return offer


def load(**settings):
    entries = discover("plugins", PluginSettings(**settings))
    return HookPlugins(tuple(entry for entry in entries if entry.distribution != "specdec-sdk"))


def statuses(hooks):
    return {entry.label: entry.status for entry in hooks.entries}


def imported(name):
    return __import__(name)


def test_observers_hear_of_a_step(offer):
    offer(LISTENER)
    hooks = load()
    hooks.observers.on_step(stats=STATS)
    assert imported("h_mod").seen == [1]
    assert statuses(hooks) == {"dist-h:hooks": "ok"}


def test_implementation_may_leave_arguments_out(offer):
    offer("""
        from specdec.sdk import hookimpl
        seen = []
        @hookimpl
        def on_request_finished(metrics):
            seen.append(metrics)
        """)
    load().observers.on_request_finished(request="a request", metrics={"num_steps": 3})
    assert imported("h_mod").seen == [{"num_steps": 3}]


def test_class_is_instantiated(offer):
    offer(
        """
        from specdec.sdk import hookimpl
        seen = []
        class Hooks:
            @hookimpl
            def on_engine_stop(self, summary):
                seen.append(summary)
        """,
        value="h_mod:Hooks",
    )
    load().observers.on_engine_stop(summary={"steps": 1})
    assert imported("h_mod").seen == [{"steps": 1}]


def test_nobody_listening_is_known_before_arguments_are_built(offer):
    offer(LISTENER)
    observers = load().observers
    assert observers.on_step.get_hookimpls()
    assert not observers.on_request_finished.get_hookimpls()


def test_blocked_plugin_is_not_imported(offer):
    offer("raise RuntimeError('imported')")
    assert statuses(load(allow=frozenset())) == {"dist-h:hooks": "blocked"}
    for word in ("hooks", "dist-h:hooks", "dist-h", "Dist_H"):
        assert statuses(load(deny=frozenset({word}))) == {"dist-h:hooks": "blocked"}


def test_broken_plugin_is_a_row_and_a_warning_and_others_load(offer, caplog):
    path = offer("\nraise RuntimeError('no licence')")
    offer(LISTENER, "dist-i", "i_mod", value="i_mod")
    hooks = load(deny=frozenset({"dist-h:hooks"}))
    assert statuses(hooks)["dist-i:hooks"] == "ok"
    hooks = load(deny=frozenset({"dist-i:hooks"}))
    (row,) = (entry for entry in hooks.entries if entry.distribution == "dist-h")
    assert (row.status, row.code) == ("broken", "SD-E103")
    assert "no licence" in row.reason
    (record,) = caplog.records
    for fact in ("SD-W101", "dist-h:hooks 0.3.1", f"{path}:2"):
        assert fact in record.getMessage()


def test_of_two_plugins_with_one_name_neither_is_loaded(offer):
    offer("raise RuntimeError('imported')")
    offer("raise RuntimeError('imported')", "dist-i", "i_mod")
    assert set(statuses(load()).values()) == {"duplicate"}


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def on_stepp(stats): ...", "no hook on_stepp; did you mean on_step?"),
        ("def zzz(): ...", "there is no hook zzz; hooks are register_proposers"),
        ("def on_step(stats, more): ...", "more"),
    ],
    ids=["unknown hook", "hook unlike any", "unknown argument"],
)
def test_hook_that_does_not_exist_is_refused(offer, caplog, source, told):
    offer(f"from specdec.sdk import hookimpl\n@hookimpl\n{source}\n@hookimpl\ndef on_engine_stop(): ...\n")
    hooks = load()
    (row,) = hooks.entries
    assert (row.status, row.code) == ("broken", "SD-E117")
    assert told in row.reason
    assert not hooks.observers.on_engine_stop.get_hookimpls()


def test_plugin_without_a_hook_is_refused(offer):
    offer("def on_step(stats): ...\n")
    (row,) = load().entries
    assert (row.status, row.code) == ("broken", "SD-E117")
    assert "put @hookimpl" in row.reason


@pytest.mark.parametrize("kind", ["wrapper", "hookwrapper"])
def test_wrappers_are_refused(offer, kind):
    offer(f"from specdec.sdk import hookimpl\n@hookimpl({kind}=True)\ndef on_step(stats):\n    yield\n")
    (row,) = load().entries
    assert row.status == "broken"
    assert "on_step is a wrapper" in row.reason


def test_one_object_offered_by_two_distributions_is_refused_the_second_time(install, write_module):
    write_module("h_mod", LISTENER)
    install("dist-h", plugins=["one = h_mod"])
    install("dist-i", plugins=["two = h_mod"])
    assert sorted(statuses(load()).values()) == ["broken", "ok"]


def test_failing_observer_does_not_stop_the_caller(offer):
    offer(FAILING)
    load().observers.on_step(stats=STATS)
    assert len(imported("h_mod").calls) == 1


def test_observers_after_a_failing_one_are_still_called(install, write_module):
    write_module("h_mod", FAILING)
    write_module("i_mod", LISTENER)
    install("dist-h", plugins=["failing = h_mod"])
    install("dist-i", plugins=["listening = i_mod"])
    observers = load().observers
    for _ in range(5):
        observers.on_step(stats=STATS)
    assert imported("i_mod").seen == [1] * 5


def test_third_failure_unregisters_the_plugin_with_one_warning(offer, caplog):
    path = offer(FAILING)
    observers = load().observers
    for _ in range(5):
        observers.on_step(stats=STATS)
    observers.on_engine_stop(summary={})
    assert len(imported("h_mod").calls) == 3
    assert not observers.on_step.get_hookimpls()
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    for fact in ("SD-W102", "dist-h:hooks", "on_step", "ValueError: no such table", f"{path}:7"):
        assert fact in record.getMessage()


def test_interrupt_in_an_observer_reaches_the_caller(offer):
    offer("from specdec.sdk import hookimpl\n@hookimpl\ndef on_step():\n    raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load().observers.on_step(stats=STATS)


def test_registered_proposer_is_found_under_the_hook_plugins_distribution(offer, write_module, tmp_path):
    write_module("x_mod")
    (tmp_path / "config.json").write_text('{"model_type": "odd"}')
    offer("""
        from specdec.sdk import hookimpl
        @hookimpl
        def register_proposers(registry):
            registry.add("hooked", "x_mod:Mine")
        @hookimpl
        def register_speculator_config(registry):
            registry.add("hooked", lambda checkpoint: checkpoint.config["model_type"] == "odd")
        @hookimpl
        def resolve_proposer(spec):
            return "x_mod:Mine" if spec == "magic" else None
        """)
    registry = Registry.discover(PluginSettings(), load())

    def resolve(**values):
        config = SpeculativeConfig.parse({"num_speculative_tokens": 2} | values)
        return registry.resolve(config)

    assert str(resolve(method="hooked").plugin) == "dist-h:hooked 0.3.1"
    assert resolve(model=str(tmp_path)).plugin.name == "hooked"
    assert resolve(method="magic").plugin.target == "x_mod:Mine"
    with pytest.raises(PluginLoadError, match="SD-E101"):
        resolve(method="tragic")


REGISTERING = "from specdec.sdk import hookimpl\n@hookimpl\ndef register_proposers(registry):\n"


def test_recogniser_that_cannot_be_called_is_refused(offer):
    offer("""
        from specdec.sdk import hookimpl
        @hookimpl
        def register_speculator_config(registry):
            registry.add("hooked", "odd")
        """)
    hooks = load()
    with pytest.raises(PluginLoadError, match="SD-E118"):
        Registry.discover(PluginSettings(), hooks)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("    raise KeyError('x')", "register_proposers"),
        ("    registry.add('a', 'm:A'); registry.add('a', 'm:B')", "offered twice"),
        ("    registry.add('a', 'm')", "package.module:Class"),
        ("    registry.add('a', dict)", "package.module:Class"),
    ],
)
def test_registration_is_strict_and_names_the_plugin(offer, body, told):
    offer(REGISTERING + body)
    hooks = load()
    with pytest.raises(PluginLoadError) as info:
        Registry.discover(PluginSettings(), hooks)
    assert info.value.code == "SD-E118"
    assert told in str(info.value)
    assert "dist-h:hooks 0.3.1" in str(info.value)


def test_name_registered_by_two_plugins_is_a_duplicate(install, write_module):
    for number in (1, 2):
        write_module(f"h{number}", REGISTERING + "    registry.add('hooked', 'x_mod:Mine')")
        install(f"dist-{number}", plugins=[f"hooks{number} = h{number}"])
    registry = Registry.discover(PluginSettings(), load())
    with pytest.raises(PluginLoadError, match="SD-E112"):
        registry.find("hooked")


MAGIC = """
@hookimpl
def resolve_proposer(spec):
    called.append("resolve_proposer")
    return "h_mod:Mine"

@hookimpl
def isolate_proposer(isolation, proposer):
    called.append("isolate_proposer")
    return Apart if isolation == {"kind": "apart"} and proposer.cls is Mine else None

@hookimpl
def explain_key(key, value):
    called.append("explain_key")
    return "" if key == "theirs" else None

class Mine:
    def __init__(self, config): ...
    def propose(self, step): ...

class Apart(Mine):
    def propose(self, step):
        raise KeyError("always")
"""


def noting(name):
    arguments = ", ".join(list(inspect.signature(HOOKS[name]).parameters)[1:])
    return f"@hookimpl\ndef {name}({arguments}):\n    called.append({name!r})\n"


def test_every_hook_is_called(offer):
    """In one run: a proposer of two hooks fails, and a request ends."""
    others = "".join(noting(name) for name in HOOKS if f"def {name}(" not in MAGIC)
    offer("from specdec.sdk import hookimpl\ncalled = []\n" + others + MAGIC)
    config = {"method": "magic", "num_speculative_tokens": 2, "on_proposer_error": "skip_step"}
    config |= {"isolation": {"kind": "apart"}, "theirs": True}
    with LLM("tiny", speculative_config=config, max_model_len=128) as llm:
        llm.generate(["def main("], SamplingParams(temperature=0, max_tokens=4))
    assert set(imported("h_mod").called) == set(HOOKS)


def test_loading_twice_gives_the_same_rows(offer):
    offer(LISTENER)
    assert load().entries == load().entries
