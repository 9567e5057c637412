"""The check at load, against the vLLM that is installed and against one that is written for it."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest
from engine_source import edit, write_engine

from specdec.adapters.vllm_shared.relied_on import TRIED_VERSIONS
from specdec.adapters.vllm_v1 import compatibility
from specdec.adapters.vllm_v1.compatibility import MEMBERS, PARAMETERS, check_vllm
from specdec.adapters.written_for import differences
from specdec.sdk.errors import PluginLoadError


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """A vLLM with all that is relied on, and nothing else: its module and its folder."""
    module = ModuleType("vllm")
    module.__version__ = f"{TRIED_VERSIONS[-1]}+cpu"
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(compatibility, "folder_of", lambda package: tmp_path)
    write_engine(tmp_path, PARAMETERS, MEMBERS)
    return module, tmp_path


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "specdec"]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # vLLM's own warnings
def test_the_vllm_that_was_tried_is_taken_without_a_word(caplog):
    check_vllm()
    assert said(caplog) == []


def test_another_version_with_the_same_signatures_is_taken_with_a_warning(vllm, caplog):
    check_vllm()
    assert said(caplog) == []
    module, _ = vllm
    module.__version__ = "0.99.0+cpu"
    with caplog.at_level(logging.WARNING, "specdec"):
        check_vllm()
    (warning,) = said(caplog)
    assert "SD-W195" in warning
    assert "0.99.0" in warning
    assert TRIED_VERSIONS[-1] in warning


def test_a_method_that_is_another_now_stops_the_load_with_both_signatures(vllm):
    _, folder = vllm
    runner = "v1/worker/gpu_model_runner.py"
    edit(folder, runner, "_update_states(self, scheduler_output", "_update_states(self, output, more")
    edit(folder, runner, "def _get_spec_decode_draft_probs", "def _get_probs")
    edit(folder, "v1/core/sched/output.py", "    finished_req_ids: int\n", "")
    with pytest.raises(PluginLoadError, match="SD-E195") as refused:
        check_vllm()
    assert "_update_states(self, output, more), expected (self, scheduler_output)" in str(refused.value)
    assert "_get_spec_decode_draft_probs is gone" in str(refused.value)
    assert "SchedulerOutput has no finished_req_ids" in str(refused.value)


def changed(names):
    """The same, but for the last, and the last."""
    *others, last = names.split(", ")
    return ", ".join([*others, "another"]), last


@pytest.mark.parametrize("place", PARAMETERS)
def test_a_signature_that_changed_is_named(place, tmp_path):
    names, last = changed(PARAMETERS[place])
    write_engine(tmp_path / "changed", {**PARAMETERS, place: names}, MEMBERS)
    (line,) = differences(tmp_path / "changed", PARAMETERS, MEMBERS)
    assert place in line
    assert last in line
    write_engine(tmp_path / "gone", {each: PARAMETERS[each] for each in PARAMETERS if each != place}, MEMBERS)
    assert differences(tmp_path / "gone", PARAMETERS, MEMBERS) == [f"{place} is gone"]


@pytest.mark.parametrize("place", MEMBERS)
def test_a_field_that_is_gone_is_named_and_more_fields_do_not_matter(place, tmp_path):
    names, last = changed(MEMBERS[place])
    write_engine(tmp_path, PARAMETERS, {**MEMBERS, place: names})
    assert differences(tmp_path, PARAMETERS, MEMBERS) == [f"{place} has no {last}"]
