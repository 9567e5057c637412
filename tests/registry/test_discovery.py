import sys

import pytest

from specdec.core.registry import PluginSettings, Registry
from specdec.core.registry.discovery import discover, unmet_sdk_requirement
from specdec.sdk.errors import PluginLoadError


def rows(name, settings=None):
    found = discover("proposers", settings or PluginSettings())
    return {row.distribution: row for row in found if row.name == name}


def test_listing_reads_name_target_distribution_and_version(install):
    install("dist-x", "1.2", proposers=["echo = x_mod.sub:Echo"])
    row = rows("echo")["dist-x"]
    assert (row.target, row.version, row.status, row.reason) == ("x_mod.sub:Echo", "1.2", "ok", None)
    assert row.label == "dist-x:echo"


def test_listing_imports_no_plugin(install, write_module):
    write_module("explosive", "raise RuntimeError('imported')")
    install("dist-x", proposers=["echo = explosive:Echo"], plugins=["hooks = explosive"])
    assert rows("echo")["dist-x"].status == "ok"
    strangers = [row for row in discover("plugins", PluginSettings()) if row.distribution == "dist-x"]
    assert [row.status for row in strangers] == ["ok"]
    assert "explosive" not in sys.modules


@pytest.mark.parametrize("value", ["x_mod", "not a path", "x-mod:Echo", "x_mod:", "x_mod:1st", ":Echo"])
def test_malformed_entry_point_is_a_broken_row(install, value):
    install("dist-x", proposers=[f"echo = {value}", "fine = x_mod:Echo"])
    row = rows("echo")["dist-x"]
    assert row.status == "broken"
    assert repr(value) in row.reason
    assert rows("fine")["dist-x"].status == "ok"


def test_unreadable_entry_points_file_breaks_only_its_own_distribution(install):
    install("dist-x", entry_points="[specdec.proposers]\nthis line has no equals sign\n")
    install("dist-y", proposers=["echo = y_mod:Echo"])
    (row,) = rows("?").values()
    assert (row.distribution, row.status) == ("dist-x", "broken")
    assert rows("echo")["dist-y"].status == "ok"


def test_distribution_without_a_name_is_skipped(install, site):
    folder = site / "left_over-1.0.dist-info"
    folder.mkdir()
    (folder / "entry_points.txt").write_text("[specdec.proposers]\necho = gone:Echo\n")
    assert rows("echo") == {}


def test_second_copy_of_a_distribution_on_the_path_is_ignored(install, site, monkeypatch, tmp_path):
    install("dist-x", "1.0", proposers=["echo = x_mod:Echo"])
    other = tmp_path / "other" / "dist_x-0.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: dist-x\nVersion: 0.9\n")
    (other / "entry_points.txt").write_text("[specdec.proposers]\nechoed = x_mod:Echo\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(other.parent)])
    assert rows("echo")["dist-x"].version == "1.0"
    assert rows("echoed") == {}


def test_one_name_of_two_distributions_is_a_duplicate_in_both_rows(install):
    install("dist-x", proposers=["echo = x_mod:Echo"])
    install("dist-y", proposers=["echo = y_mod:Echo", "other = y_mod:Other"])
    found = rows("echo")
    assert {row.status for row in found.values()} == {"duplicate"}
    assert "dist-y:echo" in found["dist-x"].reason
    assert rows("other")["dist-y"].status == "ok"


def test_duplicate_is_an_error_only_when_the_bare_name_is_asked_for(install):
    install("dist-x", "0.3.1", proposers=["echo = x_mod:Echo"])
    install("dist-y", "2.0", proposers=["echo = y_mod:Echo"])
    registry = Registry.discover(PluginSettings())
    assert registry.find("dist-y:echo").target == "y_mod:Echo"
    with pytest.raises(PluginLoadError) as info:
        registry.find("echo")
    text = str(info.value)
    assert text.startswith("SD-E112")
    for fact in ("dist-x 0.3.1", "x_mod:Echo", '"dist-x:echo" or "dist-y:echo"'):
        assert fact in text


def test_one_name_twice_in_one_distribution_cannot_be_asked_for(install):
    install("dist-x", proposers=["echo = x_mod:Echo", "echo = x_mod:Other"])
    for name in ("echo", "dist-x:echo"):
        with pytest.raises(PluginLoadError, match="SD-E112"):
            Registry.discover(PluginSettings()).find(name)


def test_denying_one_of_two_leaves_the_other(install):
    install("dist-x", proposers=["echo = x_mod:Echo"])
    install("dist-y", proposers=["echo = y_mod:Echo"])
    found = rows("echo", PluginSettings(deny=frozenset({"dist-x:echo"})))
    assert (found["dist-x"].status, found["dist-y"].status) == ("blocked", "ok")


@pytest.mark.parametrize(
    ("environment", "statuses"),
    [
        ({}, {"echo": "ok", "other": "ok"}),
        ({"SPECDEC_PLUGINS": ""}, {"echo": "blocked", "other": "blocked"}),
        ({"SPECDEC_PLUGINS": "echo"}, {"echo": "ok", "other": "blocked"}),
        ({"SPECDEC_PLUGINS": "dist-x:echo, dist-y:other"}, {"echo": "ok", "other": "blocked"}),
        ({"SPECDEC_DISABLE_PLUGINS": "echo"}, {"echo": "blocked", "other": "ok"}),
        ({"SPECDEC_DISABLE_PLUGINS": "DIST.X:echo"}, {"echo": "blocked", "other": "ok"}),
        ({"SPECDEC_PLUGINS": "echo,other", "SPECDEC_DISABLE_PLUGINS": "echo"}, {"echo": "blocked", "other": "ok"}),
    ],
)
def test_allow_and_deny_lists(install, environment, statuses):
    install("dist-x", proposers=["echo = x_mod:Echo", "other = x_mod:Other"])
    settings = PluginSettings.from_environment(environment)
    assert {name: rows(name, settings)["dist-x"].status for name in statuses} == statuses


def test_blocked_row_says_which_list_blocks_it(install):
    install("dist-x", proposers=["echo = x_mod:Echo"])
    assert "SPECDEC_PLUGINS" in rows("echo", PluginSettings(allow=frozenset()))["dist-x"].reason
    assert "SPECDEC_DISABLE_PLUGINS" in rows("echo", PluginSettings(deny=frozenset({"echo"})))["dist-x"].reason


def test_asking_for_a_blocked_proposer_is_an_error_with_the_list(install):
    install("dist-x", proposers=["echo = x_mod:Echo"])
    with pytest.raises(PluginLoadError) as info:
        Registry.discover(PluginSettings(deny=frozenset({"echo"}))).find("echo")
    assert info.value.code == "SD-E104"
    assert "SPECDEC_DISABLE_PLUGINS" in str(info.value)
    assert "dist-x:echo 1.0" in str(info.value)


def test_distribution_that_requires_another_sdk_is_refused_before_import(install, write_module):
    write_module("explosive", "raise RuntimeError('imported')")
    install("dist-x", proposers=["echo = explosive:Echo"], requires=["specdec-sdk>=99,<100"])
    row = rows("echo")["dist-x"]
    assert (row.status, row.code) == ("broken", "SD-E120")
    with pytest.raises(PluginLoadError) as info:
        Registry.discover(PluginSettings()).find("echo")
    assert info.value.code == "SD-E120"
    assert "<100,>=99" in str(info.value)
    assert "explosive" not in sys.modules


@pytest.mark.parametrize(
    "requirement",
    ["specdec-sdk", "specdec_sdk>=0.0.1", "other>=99", "specdec-sdk>=99; extra == 'test'", "not a requirement !"],
)
def test_requirements_that_do_not_exclude_this_sdk_are_met(requirement):
    assert unmet_sdk_requirement([requirement]) is None
