"""Targets whose configuration has parts: recordings are of the part that is the language model."""

from __future__ import annotations

from scripts.small_models import small_config, small_model

from specdec.core.config.engine_config import EngineConfig
from specdec.core.engine.plan import Plan
from specdec.core.registry import PluginSettings
from specdec.lab.recording import fingerprint
from specdec.lab.recording.foreign import target_manifest
from specdec.lab.replay.stand_in import require_same_model


def test_every_engine_records_the_same_target_and_a_replay_recognises_it(tmp_path):
    small_model(small_config("gemma3")).save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cpu")
    ours = Plan.make(config, None, PluginSettings()).info
    manifest, _ = target_manifest(config, "transformers", "", ())
    assert manifest.target["hidden_size"] == ours.hidden_size
    assert manifest.model_fingerprint == fingerprint.of_model(ours.checkpoint_dir, ours.config)
    require_same_model(manifest, tmp_path)
