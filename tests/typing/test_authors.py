"""What type checkers say of proposers as their authors write them, with the wheel installed and no plugin of a checker.

Files of `right/` are right. In those of `wrong/` a comment names what is found in its line: `mypy CODE` with --strict,
`pyright RULE` in the modes basic and strict, `strict RULE` in the latter only.
"""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scripts.clean_environment import Environment

from specdec.sdk.check import check_class
from specdec.sdk.errors import PluginId

HERE = Path(__file__).parent
EXPECTED = re.compile(r"\b(mypy|pyright|strict) ([\w-]+)")
MYPY = re.compile(r"(.+?):(\d+): error: .*\[([\w-]+)\]")
FOLLOWS = ("reportUnknown", "reportUntyped")  # from another error, in files of wrong/


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Environment:
    made = Environment.create(tmp_path_factory.mktemp("typing") / "environment", with_checkout=False)
    made.install(HERE.parents[1])
    for folder in ("right", "wrong"):
        shutil.copytree(HERE / folder, made.folder.parent / folder)
    return made


def checked(environment: Environment, module: str, *arguments: str) -> str:
    """What a checker prints of the installed package. Not every error of it is an error here."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, cwd=environment.folder.parent, env=environment.variables, capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def pyright(environment: Environment, mode: str) -> set[tuple[str, int, str]]:
    settings = {"typeCheckingMode": mode, "venvPath": str(environment.folder.parent), "venv": environment.folder.name}
    (environment.folder.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    files = sorted(f"{path.parent.name}/{path.name}" for path in HERE.glob("*/*.py"))
    found = json.loads(checked(environment, "pyright", "--outputjson", "--project", "pyrightconfig.json"))
    assert found["summary"]["filesAnalyzed"] == len(files)
    errors = {
        (place(each["file"]), each["range"]["start"]["line"] + 1, each["rule"]) for each in found["generalDiagnostics"]
    }
    return {each for each in errors if not (each[0].startswith("wrong/") and each[2].startswith(FOLLOWS))}


def place(file: str) -> str:
    return "/".join(Path(file).parts[-2:])


def expected(*words: str) -> set[tuple[str, int, str]]:
    """What comments say is found by a checker, which `words` name."""
    return {
        (place(str(path)), number, found)
        for path in HERE.glob("*/*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for word, found in EXPECTED.findall(line.partition("#: ")[2])
        if word in words
    }


@pytest.mark.parametrize("path", sorted((HERE / "right").glob("*.py")), ids=lambda path: path.stem)
def test_what_is_right_can_be_loaded_too(path):
    module = runpy.run_path(str(path))
    classes = [each for each in module.values() if isinstance(each, type) and each.__module__ == "<run_path>"]
    proposers = [each for each in classes if hasattr(each, "propose")]
    assert proposers or path.stem == "hooks"
    for each in proposers:
        check_class(each, PluginId(each.__name__, f"right:{each.__name__}"))


@pytest.mark.slow
def test_pyright_finds_these_in_basic_mode(environment):
    assert pyright(environment, "basic") == expected("pyright")


@pytest.mark.slow
def test_pyright_finds_these_in_strict_mode(environment):
    assert pyright(environment, "strict") == expected("pyright", "strict")


@pytest.mark.full
def test_mypy_finds_these_without_a_plugin(environment):
    options = ("--strict", "--config-file=", "--no-pretty", f"--python-executable={environment.python}")
    found = [MYPY.match(line) for line in checked(environment, "mypy", *options, "right", "wrong").splitlines()]
    assert {(each[1], int(each[2]), each[3]) for each in found if each} == expected("mypy")


@pytest.mark.slow
def test_what_the_sdk_exports_has_known_types(environment):
    report = json.loads(
        checked(environment, "pyright", "--verifytypes", "specdec.sdk", "--ignoreexternal", "--outputjson")
    )
    completeness = report["typeCompleteness"]
    assert completeness["packageRootDirectory"] == str(next(environment.folder.glob("lib/*/site-packages/specdec")))
    unknown = [each["name"] for each in completeness["symbols"] if each["isExported"] and not each["isTypeKnown"]]
    assert completeness["completenessScore"] >= 0.98, unknown
