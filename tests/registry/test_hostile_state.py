"""Whatever lies where a proposer's state is kept, nothing but this proposer's own state is ever removed or read."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specdec.sdk import ConfigError, SpecdecError
from specdec.sdk.errors import PluginId
from specdec.sdk.saved_state import MANIFEST, find_state, save_state

MINE = PluginId("mine", "m:Mine", "specdec-plugin-mine", "1.2")
OTHER = PluginId("other", "m:Other", "specdec-plugin-other", "1.2")
USERS = ("letter.txt", "photos/one.png", "state-of-mine/thesis.tex", "state-/empty", "inside/manifest.json")


def write(path: Path) -> None:
    (path / "learnt").mkdir()
    (path / "learnt" / "counts").write_text("7")


def tree(root: Path) -> dict[str, bytes | str | None]:
    """Every file below, with what it holds; links with where they lead, directories with None."""
    found: dict[str, bytes | str | None] = {}
    for each in sorted(root.rglob("*")):
        name = str(each.relative_to(root))
        found[name] = os.readlink(each) if each.is_symlink() else each.read_bytes() if each.is_file() else None
    return found


@pytest.fixture
def home(tmp_path):
    """A user's directory, with a state directory inside it and files of theirs in both."""
    return make_home(tmp_path / "home")


def make_home(home: Path) -> Path:
    for folder in (home, home / "state"):
        for name in USERS:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name)
    return home


def manifest(state: Path, **changes: object) -> None:
    """As our own, with changes."""
    fields = {"format": 1, "proposer": MINE.label, "version": MINE.version, "directory": "state-abcd1234"}
    (state / MANIFEST).write_text(json.dumps(fields | changes))


NAMES = [
    "..",
    "",
    ".",
    "../..",
    "/",
    "photos",
    "photos/",
    "inside",
    "state-",
    "state-of-mine",
    "state-../..",
    "state-abcd1234/..",
    "state-abcd1234/../..",
    "state-abcd1234\n",
    "STATE-ABCD1234",
    "letter.txt",
    "a\0b",
    "\ud800",
]


@pytest.mark.parametrize("name", [*NAMES, "state-abcd1234"])
def test_a_directory_that_we_did_not_name_is_neither_read_nor_removed(name, home):
    state = home / "state"
    manifest(state, directory=name)
    before = tree(home)
    for call in (lambda: find_state(state, MINE), lambda: save_state(state, MINE, write)):
        with pytest.raises(ConfigError, match="SD-E181"):
            call()
    assert tree(home) == before


def test_an_absolute_name_is_refused(home, tmp_path):
    victim = tmp_path / "state-abcd1234"
    shutil.copytree(home / "photos", victim)
    manifest(home / "state", directory=str(victim))
    with pytest.raises(ConfigError, match="SD-E181"):
        save_state(home / "state", MINE, write)
    assert (victim / "one.png").exists()


@pytest.mark.parametrize("leads_to", ["..", "photos", "../photos", "nowhere", "letter.txt"])
def test_a_link_under_the_name_of_a_state_is_refused(leads_to, home):
    state = home / "state"
    (state / "state-abcd1234").symlink_to(leads_to)
    manifest(state)
    before = tree(home)
    for call in (lambda: find_state(state, MINE), lambda: save_state(state, MINE, write)):
        with pytest.raises(ConfigError, match="SD-E181"):
            call()
    assert tree(home) == before


def test_links_inside_a_state_are_removed_and_not_followed(home):
    state = home / "state"
    save_state(state, MINE, lambda path: (path / "link").symlink_to(home / "photos"))
    save_state(state, MINE, write)
    assert (home / "photos" / "one.png").read_text() == "photos/one.png"


def test_a_manifest_that_leads_nowhere_is_kept(home):
    link = home / "state" / MANIFEST
    link.symlink_to("nowhere")
    with pytest.raises(ConfigError, match="SD-E181"):
        save_state(home / "state", MINE, write)
    assert os.readlink(link) == "nowhere"


@pytest.mark.parametrize("other", [OTHER, PluginId("mine", "m:Mine", "specdec-plugin-mine", "2.0")])
def test_state_of_another_proposer_or_version_is_not_replaced(other, home):
    save_state(home / "state", other, write)
    before = tree(home)
    with pytest.raises(ConfigError, match=r"(?s)SD-E181.*written by"):
        save_state(home / "state", MINE, write)
    assert tree(home) == before


def test_a_save_replaces_the_earlier_state_and_leaves_what_else_is_there(home):
    before = tree(home)
    for _ in range(3):
        save_state(home / "state", MINE, write)
    added = tree(home).keys() - before.keys()
    (own,) = {name.split("/")[1] for name in added} - {MANIFEST}
    assert added == {f"state/{MANIFEST}", *(f"state/{own}{end}" for end in ("", "/learnt", "/learnt/counts"))}
    assert {name: what for name, what in tree(home).items() if name in before} == before


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(NAMES)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "format": st.just(1) | VALUES,
        "proposer": st.just(MINE.label) | VALUES,
        "version": st.just(MINE.version) | VALUES,
        "directory": st.sampled_from(["state-abcd1234", "state-real_one", *NAMES]) | VALUES,
        "more": VALUES,
    },
)
TEXTS = st.one_of(
    FIELDS.map(json.dumps).map(str.encode),
    VALUES.map(json.dumps).map(str.encode),
    st.binary(max_size=64),
    st.integers(0, 200_000).map(lambda depth: b"[" * depth),
    st.integers(0, 200_000).map(lambda depth: b'{"a":' * depth),
)


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.sampled_from(["directory", "link", "file", "nothing"]))
@example(b'{"format":1,"proposer":"specdec-plugin-mine:mine","version":"1.2","directory":".."}', "nothing")
@example(b'{"format":1,"proposer":"specdec-plugin-mine:mine","version":"1.2","directory":""}', "nothing")
@example(
    b'{"format":1,"proposer":"specdec-plugin-mine:mine","version":"1.2","directory":"state-abcd1234"}', "directory"
)
def test_no_manifest_makes_us_touch_what_is_not_ours(tmp_path_factory, text, kind):
    home = make_home(tmp_path_factory.mktemp("home"))
    state, own = home / "state", home / "state" / "state-abcd1234"
    (state / MANIFEST).write_bytes(text)
    match kind:
        case "directory":
            own.mkdir()
        case "link":
            own.symlink_to(home / "photos")
        case "file":
            own.write_text("mine")
    before = tree(home)
    try:
        if refusal(state) == "SD-E181":
            assert tree(home) == before
            return
        gone = {name for name, what in before.items() if tree(home).get(name, "gone") != what}
        assert gone <= {f"state/{MANIFEST}", "state/state-abcd1234"}, "all else is as it was"
        assert kind == "directory"
        assert find_state(state, MINE).is_dir()
    finally:
        shutil.rmtree(home)


def refusal(state: Path) -> str | None:
    """The code of the error that a save ends in."""
    try:
        save_state(state, MINE, write)
    except SpecdecError as error:
        return error.code
    return None
