"""What `specdec new` writes, and that strangers can start from it."""

from __future__ import annotations

import ast
import errno
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hostile import NAMES, tree
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packaging.utils import canonicalize_name
from scripts.clean_environment import Environment
from typer.testing import CliRunner

from specdec.cli._app import build_app
from specdec.cli._scaffold import Names, sdk_range
from specdec.sdk import ConfigError
from specdec.testing import check_proposer

PACKAGES = ("lookup", "draft-model", "head", "block", "tree", "remote")
KINDS = (*PACKAGES, "external")


def new(*arguments):
    return CliRunner().invoke(build_app(), ["new", *map(str, arguments)])


def written(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and ".git/" not in str(path)}


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """Every kind, side by side."""
    folder = tmp_path_factory.mktemp("generated")
    for kind in KINDS:
        result = new(f"some-{kind}", "--kind", kind, "--dir", folder, "--no-git")
        assert result.exit_code == 0, result.output
    return folder


@pytest.mark.parametrize("kind", PACKAGES)
def test_a_package_is_complete(generated, kind):
    folder = generated / f"specdec-plugin-some-{kind}"
    package = f"src/specdec_plugin_some_{kind.replace('-', '_')}"
    modules = {"__init__.py", "proposer.py", "py.typed", *(["network.py"] if kind in ("head", "block") else [])}
    assert written(folder) == {
        ".github/workflows/test.yml",
        ".gitignore",
        "CHANGELOG.md",
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "tests/test_conformance.py",
        "tests/test_proposer.py",
        *(f"{package}/{module}" for module in modules),
    }
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    [(name, target)] = project["entry-points"]["specdec.proposers"].items()
    assert (project["name"], name) == (folder.name, f"some-{kind}")
    module, class_name = target.split(":")
    assert re.search(rf"^class {class_name}\b", (folder / "src" / module / "proposer.py").read_text(), re.MULTILINE)


def test_external_is_one_file_and_one_test(generated):
    assert {name for name in written(generated) if "/" not in name} == {"some_external.py", "test_some_external.py"}


def test_generated_code_is_small_clean_and_without_leftovers(generated):
    for path in map(generated.joinpath, written(generated)):
        text = path.read_text()
        assert "$" not in text.replace("${{ matrix.python }}", ""), f"an unfilled place in {path}"
        if path.suffix == ".py":
            ast.parse(text)
            assert len(text.splitlines()) < 130
    ruff = [sys.executable, "-m", "ruff"]
    rules = ["--select", "E,F,W,I,UP,B,SIM,C4,PT", "--no-cache"]
    for folder in generated.glob("specdec-plugin-*"):
        for command in ([*ruff, "check", *rules, "."], [*ruff, "format", "--check", "--no-cache", "."]):
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("kind", PACKAGES)
def test_a_generated_class_fits_the_contract(generated, kind, monkeypatch):
    """A slice of what its own tests run."""
    folder = generated / f"specdec-plugin-some-{kind}"
    monkeypatch.syspath_prepend(folder / "src")
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    [target] = project["entry-points"]["specdec.proposers"].values()
    module, class_name = target.split(":")
    found = check_proposer(f"{module}.proposer:{class_name}", only=["loads", "draft_form", "greedy_equality"])
    assert [(each.check, each.status, each.text) for each in found if each.status != "passed"] == []


@pytest.mark.slow  # made full, and ci
def test_every_package_installs_and_its_own_tests_of_the_proposer_pass(generated, tmp_path):
    """Its tests of conformance, the whole kit and the speed are in test_every_kind.py."""
    environment = Environment.create(tmp_path / "environment", with_checkout=True)
    for kind in PACKAGES:
        project = generated / f"specdec-plugin-some-{kind}"
        environment.install(project)
        tests = str(project / "tests" / "test_proposer.py")
        assert " passed" in environment.run("pytest", "-q", "-p", "no:cacheprovider", tests, cwd=project)
    rows = json.loads(environment.run("specdec", "list", "--json", cwd=tmp_path))
    found = {row["name"]: (row["status"], row["distribution"]) for row in rows if row["name"].startswith("some-")}
    assert found == {f"some-{kind}": ("ok", f"specdec-plugin-some-{kind}") for kind in PACKAGES}


def test_a_file_in_the_working_directory_can_be_named(generated):
    """As the console script is run: without the working directory at the front of the path."""
    code = "from specdec.cli._app import main; main()"
    command = [sys.executable, "-P", "-c", code, "info", "some_external.SomeExternalProposer"]
    done = subprocess.run(command, cwd=generated, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "because"),
    [
        ("", "letters, digits"),
        ("my idea", "letters, digits"),
        ("-idea", "letters, digits"),
        ("2fast", "'2fast' cannot be a name in Python"),
        ("class", "'class' cannot be a name in Python"),
        ("ngram", "specdec-sdk offers a proposer of this name"),
        ("Draft.Model", "specdec-sdk offers a proposer of this name"),
        ("host", "the SDK has a class HostProposer"),
    ],
)
def test_an_unusable_name_is_refused_and_nothing_written(tmp_path, name, because):
    with pytest.raises(ConfigError, match="SD-E190") as error:
        Names.checked(name, as_module=False)
    assert because in str(error.value)
    assert new("--dir", tmp_path / "new", "--", name).exit_code == 2
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=12) | st.sampled_from(NAMES), st.sampled_from(["lookup", "external"]))
@example("..", "lookup")
@example("specdec-plugin-..", "external")
def test_no_name_leads_out_of_the_folder(tmp_path_factory, name, kind):
    home = tmp_path_factory.mktemp("home")
    (home / "mine").write_text("mine")
    new("--kind", kind, "--no-git", "--dir", home / "new", "--", name)
    assert {each.partition("/")[0] for each in tree(home)} <= {"mine", "new"}
    assert (home / "mine").read_text() == "mine"
    assert {each.partition("/")[0] for each in tree(home / "new") if kind == "lookup"} <= {
        f"specdec-plugin-{canonicalize_name(name).removeprefix('specdec-plugin-')}"
    }


def test_a_file_that_would_hide_a_module_is_refused(tmp_path):
    assert new("json", "--kind", "external", "--dir", tmp_path).exit_code == 2
    assert list(tmp_path.iterdir()) == []
    assert Names.checked("json", as_module=False).package == "specdec_plugin_json"


@pytest.mark.parametrize(("kind", "blocker"), [("lookup", "specdec-plugin-idea"), ("external", "test_idea.py")])
def test_what_exists_is_never_overwritten(tmp_path, kind, blocker):
    (tmp_path / blocker).write_text("mine")
    assert new("idea", "--kind", kind, "--dir", tmp_path).exit_code == 2
    assert written(tmp_path) == {blocker}
    assert (tmp_path / blocker).read_text() == "mine"


@pytest.mark.parametrize("kind", ["lookup", "external"])
def test_what_cannot_be_written_whole_is_not_written(tmp_path, monkeypatch, kind):
    (tmp_path / "mine").write_text("mine")
    write, paths = Path.write_text, []

    def full(path, *arguments, **options):
        paths.append(path)
        if len(paths) == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", full)
    done = new("idea", "--kind", kind, "--dir", tmp_path / "new" / "folder")
    assert done.exit_code == 2
    assert "SD-E187" in done.stderr
    assert "No space left on device" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    done = new("idea", "--dir", tmp_path / "file" / "x")
    assert done.exit_code == 2
    assert "SD-E187" in done.stderr


def test_names_are_normalised():
    names = Names.checked("Specdec_Plugin_My.Idea", as_module=False)
    assert (names.name, names.distribution) == ("my-idea", "specdec-plugin-my-idea")
    assert (names.package, names.module, names.class_name) == ("specdec_plugin_my_idea", "my_idea", "MyIdeaProposer")


@pytest.mark.parametrize(("no_git", "inside"), [(False, False), (True, False), (False, True)])
def test_a_repository_is_made_unless_there_is_one_or_none_is_wanted(tmp_path, no_git, inside):
    if inside:
        subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    new("idea", "--dir", tmp_path, *(["--no-git"] if no_git else []))
    assert (tmp_path / "specdec-plugin-idea" / ".git").is_dir() == (not no_git and not inside)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.1.0", ">=0.1.0,<0.2"), ("0.3.2.dev1+cpu", ">=0.3.2.dev1,<0.4"), ("1.4.0", ">=1.4.0,<2")],
)
def test_a_plugin_depends_on_the_sdk_that_it_was_made_with(version, expected):
    assert sdk_range(version) == expected
