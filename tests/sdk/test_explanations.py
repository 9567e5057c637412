"""Every code that the sources use is explained, and every explanation is of a code that they use."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from scripts import error_reference

from specdec.sdk import errors
from specdec.sdk.explanations import explanations

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"\bSD-[EWC]\d{3}\b")
CALLS = {  # what builds an error without naming its class
    "_error": "ProposerError",
}


SOURCES = [
    text
    for house in ("core", "sdk", "adapters", "testing", "lab", "cli", "plugins")
    for path in sorted((ROOT / house).rglob("*.py"))
    if CODE.search(text := path.read_text())
]
NODES = [node for text in SOURCES for node in ast.walk(ast.parse(text))]


def used():
    """Codes in code, not in docstrings: those are prose, and may lag behind."""
    prose = {id(node.value) for node in NODES if isinstance(node, ast.Expr)}
    constants = [node for node in NODES if isinstance(node, ast.Constant) and id(node) not in prose]
    return {code for node in constants if type(node.value) is str for code in CODE.findall(node.value)}


def raised():
    """(class, code) of every call such as ConfigError("SD-E132", ...)."""
    found = set()
    for node in NODES:
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name, code = getattr(node.func, "id", getattr(node.func, "attr", "")), node.args[0].value
            if type(code) is str and CODE.fullmatch(code) and (name in CALLS or name.endswith("Error")):
                found.add((CALLS.get(name, name), code))
    return found


def test_codes_in_the_sources_are_the_codes_explained():
    explained = set(explanations())
    assert used() - explained == set(), "add a text to sdk/explanations/, then: python -m scripts.error_reference"
    assert explained - used() == set(), "nothing uses these any more"


def test_docstrings_name_no_code_that_does_not_exist():
    mentioned = {code for text in SOURCES for code in CODE.findall(text)}
    assert mentioned <= set(explanations())


def test_the_class_that_is_explained_is_the_class_that_is_raised():
    known = explanations()
    wrong = [
        (error, code)
        for error, code in sorted(raised())
        if code in known and not issubclass(getattr(errors, error), getattr(errors, known[code].error))
    ]
    assert not wrong


def test_warnings_are_explained_as_warnings():
    assert all((each.error == "warning") == each.code.startswith("SD-W") for each in explanations().values())


@pytest.mark.parametrize("each", explanations().values(), ids=lambda each: each.code)
def test_an_explanation_is_complete(each):
    assert all(text.endswith(".") for text in (each.means, each.why, each.fix))
    assert (each.bad is None) == (each.good is None), "a bad example comes with a good one"
    assert not each.title.endswith(".")
    assert all(len(line) <= 120 for line in each.text.splitlines())


def test_the_reference_page_is_current():
    assert error_reference.PAGE.read_text() == error_reference.page(), "python -m scripts.error_reference"
