"""`specdec explain`: every code, one code, and a code that is not one."""

import json

import pytest


@pytest.mark.parametrize("asked", ["SD-E112", "sd-e112", "E112", "e112"])
def test_a_code_is_explained_however_it_is_written(specdec, asked):
    finished = specdec("explain", asked)
    assert finished.returncode == 0, finished.stderr
    head, *_ = finished.stdout.splitlines()
    assert head.startswith("SD-E112  the name is offered more than once")
    sections = [line for line in finished.stdout.splitlines() if line and not line.startswith(" ")][1:]
    assert sections == ["means", "why", "fix", "bad", "good"]


def test_all_codes_are_listed(specdec):
    found = json.loads(specdec("explain", "--json").stdout)
    assert len(found) > 80
    assert set(found[0]) == {"code", "family", "title", "error", "means", "why", "fix", "bad", "good"}
    assert "SD-E112\tPluginLoadError\tthe name is offered more than once" in specdec("explain").stdout.splitlines()


def test_an_unknown_code_is_refused_with_a_suggestion(specdec):
    finished = specdec("explain", "W31")
    assert finished.returncode == 2
    assert "did you mean  SD-W301" in finished.stderr


def test_an_error_says_where_more_is_told(specdec):
    finished = specdec("info", "nobody")
    assert finished.stderr.splitlines()[-1] == "more: specdec explain SD-E101"
