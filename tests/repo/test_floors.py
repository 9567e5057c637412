"""The floors of the dependencies: `nox -s floors` runs tests with all of them at once."""

from __future__ import annotations

import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from scripts.floors import EXTRAS, floors

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()
STATED = [Requirement(each) for each in floors(PROJECT)]


def floor_of(name: str) -> Version:
    (found,) = (each for each in STATED if each.name == name)
    (pin,) = found.specifier
    assert pin.operator == "=="
    return Version(pin.version)


def test_every_dependency_of_users_has_a_floor():
    tables = tomllib.loads(PROJECT)["project"]
    asked = [*tables["dependencies"], *(each for extra in EXTRAS for each in tables["optional-dependencies"][extra])]
    assert {each.name for each in STATED} == {Requirement(each).name for each in asked}


def test_a_dependency_without_a_floor_is_refused():
    with pytest.raises(ValueError, match="expected NAME>=VERSION, found 'torch'"):
        list(floors(PROJECT.replace("torch>=2.11", "torch")))


def test_no_floor_is_below_what_transformers_demands():
    """Such a floor would name a version that pip never installs."""
    demanded = {each.name: each.specifier for each in map(Requirement, requires("transformers")) if not each.marker}
    shared = demanded.keys() & {each.name for each in STATED}
    assert {"numpy", "packaging", "safetensors"} <= shared
    assert [name for name in shared if floor_of(name) not in demanded[name]] == []


def test_what_ci_tests_is_not_below_the_floors():
    pins = [line.partition("#")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()]
    tested = {each.name: each.specifier for each in map(Requirement, filter(None, pins))}
    for each in STATED:
        for pin in tested.get(each.name, ()):
            assert Version(pin.version) >= floor_of(each.name), each.name
