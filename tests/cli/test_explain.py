"""`specdec explain`: every code, one code, a check of the kit, and a name that is neither."""

import inspect
import json

import pytest
from typer.testing import CliRunner

from specdec.cli._app import build_app
from specdec.testing.checks import ALL_CHECKS


@pytest.mark.parametrize("asked", ["SD-E112", "sd-e112", "E112", "e112"])
def test_a_code_is_explained_however_it_is_written(asked):
    finished = CliRunner().invoke(build_app(), ["explain", asked])
    assert finished.exit_code == 0, finished.stderr
    head, *_ = finished.stdout.splitlines()
    assert head.startswith("SD-E112  the name is offered more than once")
    sections = [line for line in finished.stdout.splitlines() if line and not line.startswith(" ")][1:]
    assert sections == ["means", "why", "fix", "bad", "good"]


def test_all_codes_are_listed(specdec):
    found = json.loads(specdec("explain", "--json").stdout)
    assert len(found) > 80
    assert set(found[0]) == {"code", "family", "title", "error", "means", "why", "fix", "bad", "good"}
    assert "SD-E112\tPluginLoadError\tthe name is offered more than once" in specdec("explain").stdout.splitlines()


@pytest.mark.parametrize(("asked", "meant"), [("SDW301", "SD-W301"), ("row_orders", "row_order")])
def test_an_unknown_code_or_check_is_refused_with_a_suggestion(asked, meant):
    finished = CliRunner().invoke(build_app(), ["explain", asked])
    assert finished.exit_code == 2
    assert f"did you mean  {meant}\n" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.name)
def test_a_check_is_explained_by_its_own_docstring(check):
    told = CliRunner().invoke(build_app(), ["explain", check.name])
    assert told.exit_code == 0, told.output
    assert told.output.startswith(f"{check.name}   [a check, from level {check.level} on]")
    assert " ".join(inspect.getdoc(check.run).split()) in " ".join(told.output.split())
    assert f"specdec check TARGET --only {check.name}\n" in told.output


def test_a_check_can_be_had_as_json():
    told = json.loads(CliRunner().invoke(build_app(), ["explain", "budgets", "--json"]).output)
    assert told["level"] == "basic"
    assert told["rule"].startswith("No row gets more drafts than its budget")


@pytest.mark.slow
def test_an_error_says_where_more_is_told(specdec):
    finished = specdec("info", "nobody")
    assert finished.stderr.splitlines()[-1] == "more: specdec explain SD-E101"
