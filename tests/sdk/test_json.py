"""What crosses to another process as JSON comes back as it was."""

from __future__ import annotations

from pathlib import Path

import importlib_metadata
import pytest
from pydantic import TypeAdapter

from specdec.sdk import StrictModel
from specdec.testing import fake_target_info
from specdec.testing.subject import Subject

PACKAGED = sorted(importlib_metadata.distribution("specdec-sdk").entry_points.select(group="specdec.proposers"))
REQUIRED = {"address": "ipc:///run/drafter"}
DRAFTERS = ["ngram", "suffix", "token_recycling", "tiny/eagle3", "tiny/medusa", "tiny/dflash", "tiny/draft"]


def came_back(value):
    adapter = TypeAdapter(type(value))
    return adapter.validate_json(adapter.dump_json(value))


@pytest.mark.parametrize("entry", PACKAGED, ids=lambda entry: entry.name)
def test_options_of_a_packaged_proposer_come_back(entry):
    model = getattr(entry.load(), "Options", StrictModel)
    required = {name: REQUIRED[name] for name, field in model.model_fields.items() if field.is_required()}
    options = model(**required)
    assert came_back(options) == options


@pytest.mark.parametrize("name", DRAFTERS)
def test_needs_of_a_packaged_proposer_come_back(name):
    needs = Subject(name, {}).needs
    assert came_back(needs) == needs


def test_facts_of_a_target_come_back():
    info = fake_target_info(checkpoint_dir=Path("a/b"), config={"model_type": "x", "rope": {"theta": 1e4}})
    assert came_back(info) == info
