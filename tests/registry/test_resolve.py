import json
import sys

import importlib_metadata
import pytest

from specdec.core.config.speculative_config import SpeculativeConfig
from specdec.core.registry import HookPlugins, PluginSettings, Registry
from specdec.core.registry.class_path import unregistered
from specdec.core.registry.discovery import PluginEntry
from specdec.core.registry.hooks import Offer
from specdec.sdk import ConfigError, hookimpl
from specdec.sdk.errors import PluginId, PluginLoadError


class Offering(HookPlugins):
    """Hook plugins that register these."""

    def __init__(self, proposers=(), recognisers=()):
        super().__init__()
        self.proposers, self.recognisers = (lambda: proposers), (lambda: recognisers)


def resolve(hooks=None, settings=None, **values):
    config = SpeculativeConfig.parse({"num_speculative_tokens": 3} | values)
    return Registry.discover(settings or PluginSettings(), hooks).resolve(config)


def refused(hooks=None, expect=PluginLoadError, **values):
    with pytest.raises(expect) as info:
        resolve(hooks, **values)
    return info.value


@pytest.mark.parametrize("method", ["echo", "dist-x:echo", "dist_x:echo", "x_mod:Mine"])
def test_method_is_a_name_a_qualified_name_or_a_class_path(install, write_module, method):
    write_module("x_mod")
    install("dist-x", "1.2", proposers=["echo = x_mod:Mine"])
    found = resolve(method=method)
    assert found.cls is sys.modules["x_mod"].Mine
    assert found.plugin == PluginId("echo", "x_mod:Mine", "dist-x", "1.2")
    assert found.model is None


def test_only_the_named_plugin_is_imported(install, write_module):
    write_module("x_mod")
    write_module("y_mod", "raise RuntimeError('imported')")
    install("dist-x", proposers=["echo = x_mod:Mine"])
    install("dist-y", proposers=["other = y_mod:Mine"])
    resolve(method="echo")
    assert "y_mod" not in sys.modules


@pytest.mark.parametrize("model", ["pkg.mod.Mine", "pkg.mod:Mine"])
def test_model_alone_is_a_class_path(write_module, model):
    write_module("pkg.mod")
    found = resolve(model=model)
    assert found.cls is sys.modules["pkg.mod"].Mine
    assert found.model is None
    assert found.plugin.distribution is None


def test_class_path_as_vllm_spells_it(write_module):
    write_module("pkg.mod")
    assert resolve(method="custom_class", model="pkg.mod.Mine").cls is sys.modules["pkg.mod"].Mine


@pytest.mark.parametrize("model", [{}, {"model": "mine"}, {"model": "./checkpoint"}])
def test_vllms_spelling_without_a_class_path_says_where_the_path_stands(model):
    error = refused(method="custom_class", **model)
    assert error.code == "SD-E101"
    assert '"method": "custom_class", "model": "package.module.Class"' in str(error)
    assert "install the distribution" not in str(error)


def test_nested_class_is_reached_with_a_colon(write_module):
    write_module("x_mod", "class Outer:\n    class Inner: ...\n")
    assert resolve(method="x_mod:Outer.Inner").cls.__name__ == "Inner"


def test_class_path_inside_an_installed_distribution_names_it(site, install, write_module):
    write_module("x_pkg.mod")
    install("dist-x", "1.2")
    (site / "dist_x-1.2.dist-info" / "top_level.txt").write_text("x_pkg\n")
    assert resolve(method="x_pkg.mod:Mine").plugin.distribution == "dist-x"


def test_method_with_model_is_the_methods_checkpoint(install, write_module):
    write_module("x_mod")
    install("dist-x", proposers=["echo = x_mod:Mine"])
    assert resolve(method="echo", model="some.checkpoint").model == "some.checkpoint"


@pytest.mark.parametrize("package", ["torch", "pytest", "_pytest", "yaml", "six", "specdec", "json", "nobody"])
def test_the_owner_of_a_package_is_the_one_that_python_lists(package):
    listed = set(importlib_metadata.packages_distributions().get(package, ()))
    owner = unregistered(package, f"{package}.module:Class").distribution
    assert ({owner} if owner else set()) == (listed if len(listed) == 1 else set())


def test_class_path_that_is_a_directory_too_is_refused(write_module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2.bak").mkdir()
    error = refused(expect=ConfigError, model="gpt2.bak")
    assert error.code == "SD-E109"
    assert '"./gpt2.bak"' in str(error)
    assert '"gpt2:bak"' in str(error)


def test_colon_path_is_a_class_whatever_directories_exist(write_module, tmp_path, monkeypatch):
    write_module("x_mod")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x_mod:Mine").mkdir()
    assert resolve(model="x_mod:Mine").cls.__name__ == "Mine"


def test_unknown_method_lists_what_is_installed_with_a_suggestion(install):
    install("dist-x", "1.2", proposers=["echo = x_mod:Mine"])
    error = refused(method="ecco")
    assert error.code == "SD-E101"
    assert 'did you mean  "echo"' in str(error)
    assert "dist-x:echo 1.2" in str(error)


def test_dotted_method_is_told_to_use_a_colon():
    assert '"method": "pkg.mod:Mine"' in str(refused(method="pkg.mod.Mine"))


@pytest.mark.parametrize("written", ["./pkg/mod.py:Mine", "pkg/mod.py:Mine", "./pkg/mod:Mine"])
def test_a_file_is_told_to_be_a_module(written):
    assert '"method": "pkg.mod:Mine"' in str(refused(method=written))


@pytest.mark.parametrize("written", ["pkg..Mine", ".pkg:Mine", "pkg mod"])
def test_what_resembles_no_class_path_is_told_how_one_is_written(written):
    assert '"method": "package.module:Class"' in str(refused(method=written))


@pytest.mark.parametrize("written", ["x_mod.py:Mine", "x_mod.deeper:Mine"])
def test_below_a_module_that_is_no_package_there_is_nothing(write_module, written):
    write_module("x_mod", "class Mine: ...\n")
    error = refused(method=written)
    assert error.code == "SD-E102"
    assert f'no module "{written.partition(":")[0]}"' in str(error)
    assert ("without .py" in str(error)) == (".py" in written)


def test_absent_module_is_named():
    error = refused(model="absent_pkg.Mine")
    assert error.code == "SD-E102"
    assert 'no module "absent_pkg" on the import path' in str(error)
    assert "./name" in str(error)


def test_absent_submodule_is_named_with_a_suggestion(write_module):
    write_module("pkg.proposer")
    error = refused(method="pkg.propose:Mine")
    assert 'no module "pkg.propose"' in str(error)
    assert "pkg.proposer" in str(error)


def test_failing_import_inside_a_found_module_names_what_it_imports(write_module):
    path = write_module("x_mod", "import os\nimport absent_dependency\n")
    error = refused(method="x_mod:Mine")
    assert error.code == "SD-E102"
    assert '"x_mod" was found' in str(error)
    assert 'its import of "absent_dependency" failed' in str(error)
    assert f"{path}:2" in str(error)
    assert isinstance(error.__cause__, ModuleNotFoundError)


def test_absent_name_in_a_found_dependency_is_told(write_module):
    write_module("x_mod", "from json import absent_name\n")
    assert "absent_name" in str(refused(method="x_mod:Mine"))


def test_absent_attribute_is_named_with_a_suggestion_and_the_file(write_module):
    path = write_module("x_mod")
    error = refused(model="x_mod.Mime")
    assert error.code == "SD-E102"
    for fact in ('attribute "Mime"', "x_mod:Mine", str(path)):
        assert fact in str(error)


def test_broken_plugin_is_attributed_with_the_authors_line_and_the_cause(install, write_module):
    path = write_module("x_mod", "import json\n\ndef prepare():\n    json.loads('{')\n\nprepare()\n")
    install("dist-x", "0.3", proposers=["echo = x_mod:Mine"])
    error = refused(method="echo")
    assert error.code == "SD-E103"
    assert "dist-x:echo 0.3" in str(error)
    assert f"{path}:4 in prepare" in str(error)
    assert isinstance(error.__cause__, json.JSONDecodeError)


def test_syntax_error_is_placed_in_the_authors_file(write_module):
    path = write_module("x_mod", "x = 1\nclass Mine\n")
    assert f"{path}:2" in str(refused(method="x_mod:Mine"))


def test_plugin_that_exits_while_importing_is_contained(write_module):
    write_module("x_mod", "raise SystemExit(3)")
    assert refused(method="x_mod:Mine").code == "SD-E103"


def test_malformed_entry_point_is_an_error_when_asked_for(install):
    install("dist-x", proposers=["echo = x_mod"])
    error = refused(method="echo")
    assert error.code == "SD-E103"
    assert 'expected "package.module:Class"' in str(error)


def offered(name, target):
    return PluginEntry(kind="proposers", name=name, target=target, distribution="dist-h", version="1.0")


def test_proposer_offered_by_a_hook_is_found_and_may_be_blocked(write_module):
    write_module("x_mod")
    hooks = Offering(proposers=(offered("hooked", "x_mod:Mine"),))
    assert resolve(hooks, method="hooked").plugin.label == "dist-h:hooked"
    with pytest.raises(PluginLoadError, match="SD-E104"):
        resolve(hooks, PluginSettings(deny=frozenset({"hooked"})), method="hooked")


class Magic:
    @hookimpl
    def resolve_proposer(self, spec):
        return "x_mod:Mine" if spec == "magic" else None


def test_unknown_method_may_be_resolved_by_a_hook(write_module):
    write_module("x_mod")
    hooks = HookPlugins()
    hooks.add(Magic(), "magician")
    assert resolve(hooks, method="magic").plugin.target == "x_mod:Mine"
    assert refused(hooks, method="tragic").code == "SD-E101"


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "odd", "architectures": ["OddForDraft"]}')
    return folder


def is_odd(checkpoint):
    return checkpoint.config["model_type"] == "odd"


def recogniser(name, recognises=is_odd):
    return Offer(PluginId("hooks", "h_mod", "dist-h", "1.0"), name, recognises)


def test_checkpoint_says_which_proposer_it_is_for(install, write_module, checkpoint):
    write_module("x_mod")
    install("dist-x", proposers=["echo = x_mod:Mine"])
    others = recogniser("other", lambda checkpoint: False)
    found = resolve(Offering(recognisers=(others, recogniser("echo"))), model=str(checkpoint))
    assert (found.plugin.name, found.model) == ("echo", str(checkpoint))


def test_checkpoint_that_nobody_claims_is_refused_with_what_was_found(checkpoint):
    error = refused(Offering(recognisers=(recogniser("echo", lambda checkpoint: False),)), model=str(checkpoint))
    assert error.code == "SD-E107"
    for fact in ("OddForDraft", "asked", "echo", '"method": "NAME"'):
        assert fact in str(error)


def test_checkpoint_that_two_claim_is_refused(checkpoint):
    error = refused(Offering(recognisers=(recogniser("one"), recogniser("two"))), model=str(checkpoint))
    assert error.code == "SD-E107"
    assert "one [dist-h:hooks 1.0], two" in str(error)


def test_failing_recogniser_is_attributed(checkpoint):
    hooks = Offering(recognisers=(recogniser("echo", lambda checkpoint: checkpoint.config["absent"]),))
    error = refused(hooks, model=str(checkpoint))
    assert error.code == "SD-E108"
    assert "dist-h:hooks 1.0" in str(error)


@pytest.mark.parametrize(("text", "code"), [("{", "SD-E106"), ("[]", "SD-E106")])
def test_unreadable_checkpoint_config_is_refused(checkpoint, text, code):
    (checkpoint / "config.json").write_text(text)
    assert refused(expect=ConfigError, model=str(checkpoint)).code == code


def test_model_that_is_neither_directory_nor_hub_id_is_refused(tmp_path):
    error = refused(expect=ConfigError, model=str(tmp_path / "nowhere"))
    assert error.code == "SD-E105"
    assert "has no config.json" in str(error)
