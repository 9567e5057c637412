"""The check at load, against the vLLM that is installed."""

from __future__ import annotations

import logging

import pytest

from specdec.adapters.vllm_v1.compatibility import TRIED_VERSIONS, check_vllm
from specdec.sdk.errors import PluginLoadError

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]  # vLLM's own warnings


def test_the_vllm_that_was_tried_is_taken_without_a_word(caplog):
    check_vllm()
    assert [record for record in caplog.records if record.name == "specdec"] == []


def test_another_version_with_the_same_signatures_is_taken_with_a_warning(caplog, monkeypatch):
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.99.0+cpu")
    with caplog.at_level(logging.WARNING, "specdec"):
        check_vllm()
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "specdec"]
    assert "SD-W195" in warning
    assert "0.99.0" in warning
    assert TRIED_VERSIONS[-1] in warning


def test_a_method_that_is_another_now_stops_the_load_with_both_signatures(monkeypatch):
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    monkeypatch.setattr(GPUModelRunner, "_update_states", lambda self, output, more: None)
    monkeypatch.delattr(GPUModelRunner, "_get_spec_decode_draft_probs")
    with pytest.raises(PluginLoadError, match="SD-E195") as refused:
        check_vllm()
    assert "_update_states(self, output, more), expected (self, scheduler_output)" in str(refused.value)
    assert "_get_spec_decode_draft_probs is gone" in str(refused.value)
