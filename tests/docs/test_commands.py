"""No document prints a command that does not exist. Transcripts are run (conftest.py); this is about the others."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import pytest
from typer.main import get_command

from specdec.cli._app import build_app

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "assets/tiny/README.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
]
BLOCK = re.compile(r"^```(?:bash|sh|shell)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:specdec|python -m) [^`]+)`")
COMMENT = re.compile(r"(?<!\S)#.*")
ENDS = "();<>|&\n{}"  # of a command
CLI = get_command(build_app())


def commands(block: str) -> Iterator[list[str]]:
    """The words of each command of a shell block."""
    lexer = shlex.shlex(COMMENT.sub("", block.replace("\\\n", " ")), posix=True, punctuation_chars=ENDS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    for ends, words in groupby(lexer, key=lambda word: set(word) <= set(ENDS)):
        if not ends:
            yield list(words)


TESTS_WITH = {"vllm": "tests/adapters/vllm_server", "sglang": "tests/adapters/in_sglang"}


def printed(pattern: re.Pattern[str], *program: str) -> list[list[str]]:
    """What is said to a program wherever the pattern finds a command of it; its name may have a folder before it."""
    texts = [text for page in PAGES for text in pattern.findall(page.read_text())]
    found = []
    for words in (words for text in texts for words in commands(text)):
        names = tuple(Path(word).name for word in words)
        starts = [i for i in range(len(words)) if names[i : i + len(program)] == program and "install" not in words[:i]]
        found += [words[i + len(program) :] for i in starts]
    return found


@pytest.mark.parametrize("words", printed(BLOCK, "specdec"), ids=" ".join)
def test_a_command_of_specdec_is_taken_by_its_parser(words):
    context = CLI.make_context("specdec", list(words))
    verb = words[-1 - len(context.args)]
    assert CLI.commands[verb].make_context(verb, list(context.args), parent=context)


@pytest.mark.parametrize("words", printed(INLINE, "specdec"), ids=" ".join)
def test_a_command_of_specdec_in_a_sentence_has_a_verb_and_options_that_exist(words):
    """Such a one may be shortened; what is there has to exist."""
    verb = next((CLI.commands[word] for word in words if word in CLI.commands), CLI)
    known = {option for command in (CLI, verb) for each in command.params for option in each.opts}
    assert verb is not CLI or words[0].startswith("-"), f"no verb among {', '.join(CLI.commands)}"
    assert {word for word in words if word.startswith("-")} - {"-h", "--help"} <= known


@pytest.mark.parametrize("words", [*printed(BLOCK, "python", "-m"), *printed(INLINE, "python", "-m")], ids=" ".join)
def test_a_module_that_is_run_exists_and_names_the_options(words):
    """Options are looked up in the sources of our own modules: asking some for --help would run them."""
    module, *rest = words
    engine, _, _ = module.partition(".")
    if engine in TESTS_WITH:
        pytest.skip(f"{engine} is not installed here; {TESTS_WITH[engine]} runs this one")
    spec = find_spec(module)
    assert spec is not None
    package = spec.submodule_search_locations
    run = find_spec(f"{module}.__main__") if package else spec
    assert run is not None
    main = Path(run.origin)
    if main.is_relative_to(ROOT):
        source = "\n".join(file.read_text() for file in (main.parent.glob("*.py") if package else [main]))
        assert [word for word in rest if word.startswith("--") and f'"{word}"' not in source] == []


def test_a_command_that_does_not_exist_is_seen():
    with pytest.raises(Exception, match="No such option: --num-prompt"):
        CLI.commands["bench"].make_context("bench", ["tiny", "--num-prompt", "3"])
