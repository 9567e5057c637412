"""A checkpoint of a drafter that says which target it was made for: given as the model, it brings its target along.

The format is that of the `speculators` project: config.json with a `speculators_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.sdk.errors import ConfigError

from ..config.speculative_config import WHERE, SpeculativeConfig
from ..model.model_support import locate_model, read_config
from ..proposing.speculation import SpeculativeSettings


def with_verifier(model: str | Path, asked: SpeculativeSettings) -> tuple[str | Path, SpeculativeSettings]:
    """The target and the speculative config that `model` stands for; both as given unless it is such a checkpoint.

    What the user wrote wins over what the checkpoint says. Raises ConfigError SD-E136 if `speculative_config` names
    another checkpoint, or if this one names no target; SD-E140 and SD-E143 if `model` has no readable config.json.
    """
    path = locate_model(model)
    config, directory = read_config(path)
    own = config.get("speculators_config")
    if not isinstance(own, Mapping):
        return model, asked
    written = SpeculativeConfig.as_mapping(asked) if asked is not None else {}
    named = written.get("model")
    if named is not None and not _is_same(locate_model(named), path, directory):
        facts = {"model": f"{str(model)!r} is a drafter's checkpoint", f"{WHERE}.model": repr(str(named))}
        facts["fix"] = f'leave "model" out of {WHERE}, or give the target as the model'
        raise ConfigError("SD-E136", f"the model and {WHERE} name different draft checkpoints", facts)
    return _verifier(own, path, directory), {"model": path} | dict(written)


def _is_same(named: str, path: str, directory: Path) -> bool:
    """Whether a name, or a directory, is that of the checkpoint at `path`, which lies in `directory`."""
    return named == path or Path(named).resolve() == directory.resolve()


def _verifier(own: Mapping[str, Any], path: str, directory: Path) -> str:
    """A name or path; one that begins with a dot is relative to the checkpoint."""
    verifier = own.get("verifier")
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    if not name:
        facts = {"field": "speculators_config.verifier.name_or_path", "file": directory / "config.json"}
        facts["fix"] = f'LLM(TARGET, speculative_config={{"model": "{path}", "num_speculative_tokens": K}})'
        raise ConfigError("SD-E136", "this is a drafter's checkpoint, and it does not name its target", facts)
    name = str(name)
    return str((directory / name).resolve()) if name.startswith(("./", "../")) else name
