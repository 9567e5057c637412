"""Whatever a draft checkpoint's configuration says, it is refused by name: no proposer falls over it."""

from __future__ import annotations

import json
import shutil

import pytest
from hostile import NOT_JSON, changed, tree
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import info_of
from plugin_helpers import TINY

from specdec import LLM
from specdec.core.proposing.speculation import Speculation
from specdec.core.registry import PluginSettings
from specdec.core.registry.hooks import load_hooks
from specdec.sdk import SpecdecError

HEADS = {name: name for name in ("dflash", "dspark", "eagle", "eagle3", "medusa")}
HEADS |= dict.fromkeys(("draft", "moe_draft", "pard"), "draft_model")
FAULTS_OF_PLUGINS = {"SD-E108", "SD-E114", "SD-E116"}


@pytest.fixture(scope="module")
def info():
    with LLM("tiny", max_model_len=256, max_num_seqs=2) as llm:
        return info_of(llm)


def refusal(folder, info, **asked) -> str | None:
    """The code of the error that a start without weights ends in."""
    plugins = PluginSettings()
    try:
        Speculation.prepare({"model": str(folder)} | asked, info, plugins, load_hooks(plugins))
    except SpecdecError as error:
        return error.code
    return None


def copied(name, folder):
    """A checkpoint whose weights are those of the packaged one."""
    folder.mkdir()
    for path in (TINY / name).iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    return config


@pytest.mark.parametrize("name", HEADS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_no_configuration_makes_a_proposer_fall_over(name, info, tmp_path_factory, data):
    home = tmp_path_factory.mktemp("home")
    config = copied(name, home / "head")
    hostile = changed(config).map(json.dumps).map(str.encode)
    text = data.draw(st.one_of(hostile, hostile, hostile, NOT_JSON))
    (home / "head" / "config.json").write_bytes(text)
    before = tree(home)
    asked = data.draw(st.sampled_from([{}, {"method": HEADS[name]}]))
    assert refusal(home / "head", info, **asked) not in FAULTS_OF_PLUGINS
    assert tree(home) == before
    shutil.rmtree(home)
