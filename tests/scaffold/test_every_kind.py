"""Every kind of `specdec new`, and the example package, in one clean environment made from the wheel."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest
from scripts.clean_environment import Environment

ROOT = Path(__file__).parents[2]
PACKAGES = ("lookup", "draft-model", "head", "block", "tree", "remote")
EXAMPLE = ROOT / "examples" / "specdec-plugin-retrieval"

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    made = Environment.create(tmp_path_factory.mktemp("clean") / "environment", with_checkout=False)
    made.install(ROOT)
    return made


def bench(environment, config, cwd, *arguments):
    told = environment.run("specdec", "bench", "tiny", "--json", "-sc", json.dumps(config), *arguments, cwd=cwd)
    result = json.loads(told)
    assert result["outputs_equal"]
    return result


@pytest.mark.parametrize("kind", PACKAGES)
def test_a_generated_package_works_as_it_is(environment, tmp_path, kind):
    environment.run("specdec", "new", f"some-{kind}", "--kind", kind, "--no-git", cwd=tmp_path)
    project = tmp_path / f"specdec-plugin-some-{kind}"
    environment.install(project)
    rows = json.loads(environment.run("specdec", "list", "--json", cwd=tmp_path))
    assert [row["status"] for row in rows if row["name"] == f"some-{kind}"] == ["ok"]
    environment.run("pytest", "-q", "-p", "no:cacheprovider", cwd=project)
    environment.run("specdec", "check", f"some-{kind}", "--level", "full", cwd=tmp_path)
    result = bench(environment, {"method": f"some-{kind}"}, tmp_path)
    assert result["speedup"] > 1, result["speedup_interval"]


def test_an_external_file_works_as_it_is(environment, tmp_path):
    environment.run("specdec", "new", "some-file", "--kind", "external", cwd=tmp_path)
    environment.run("pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path)
    result = bench(environment, {"model": "some_file.SomeFileProposer"}, tmp_path)
    assert result["speedup"] > 1, result["speedup_interval"]


def test_the_example_runs_from_its_wheel_by_name_and_by_path(environment, tmp_path):
    environment.install(EXAMPLE)
    environment.run("pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE), cwd=tmp_path)
    options = {"corpus": sysconfig.get_path("stdlib"), "pattern": "*.py", "index": str(tmp_path / "index")}
    results = [
        bench(environment, {"method": method, "proposer_config": options}, tmp_path, "--category", "code")
        for method in ("retrieval", "specdec_plugin_retrieval:RetrievalProposer")
    ]
    by_name, by_path = (result["tokens_per_target_step"] for result in results)
    assert by_name == by_path > 1.2
