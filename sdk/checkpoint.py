"""A draft checkpoint before any weight is loaded: its configuration, and its tensors by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import CheckpointError, Refusal
from .json_files import read_json_file
from .packaged import packaged, refused_name

if TYPE_CHECKING:
    from torch import Tensor

    from .types import TargetInfo

_REQUIRED = object()
_FIX = 'give a directory or hub id that exists ("model"), and name the proposer ("method")'
_CONFIGS = "config.json", "adapter_config.json"
_SIZES = {"hidden_size": "hidden size", "vocab_size": "vocabulary", "num_layers": "number of layers"}
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.bin", "*.pt")


LOGIT_SCALES = "logit_scale", "logits_scaling"
"""Keys for what logits are multiplied by, and what they are divided by."""


def logit_scale(config: Mapping[str, Any]) -> float | None:
    """The factor on the head's output that a configuration states. None means that it states none."""
    factor, divisor = (config.get(key) for key in LOGIT_SCALES)
    if factor:
        return float(factor)
    return 1 / float(divisor) if divisor else None


def require_target(target: TargetInfo, works: str = "a checkpoint trained for this target", **sizes: int) -> None:
    """Raise Refusal, with both numbers, where a drafter was made for another target.

    works: what would work instead. sizes: what the drafter expects of the target, by the fields of `_SIZES`.
    """
    for name, expected in sizes.items():
        found = getattr(target, name)
        if expected != found:
            reason = f"it was made for a target whose {_SIZES[name]} is {expected}, and this target's is {found}"
            raise Refusal(reason, works)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory. Opening it reads its configuration and nothing else.

    That is config.json, or for an adapter of PEFT adapter_config.json.
    """

    directory: Path
    config: Mapping[str, Any] = field(repr=False)

    @classmethod
    def open(cls, model: str | Path) -> Checkpoint:
        """Open a checkpoint. From the hub it fetches configuration, weights and modelling code, and runs nothing.

        model: a directory, the name of a packaged model ("tiny/NAME"), or a hub id.

        Raises CheckpointError: SD-E105 if there is none, SD-E106 if its configuration is no JSON object, SD-E171 if it
        does not say its kind as texts.
        """
        try:
            directory = packaged(str(model)) or Path(model).expanduser()
            found, place = _config_in(directory), directory.resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a name that is too long for a file, has a null, or "~x"
            facts = {"because": error, "fix": _FIX}
            raise CheckpointError("SD-E105", f'there is no checkpoint "{model!s:.80}"', facts) from error
        if found is None:
            directory = _from_hub(str(model), place)
        path = _config_in(directory) or directory / _CONFIGS[0]
        try:
            config = read_json_file(path)
        except (OSError, ValueError) as error:
            raise CheckpointError("SD-E106", f"{path} is not JSON", {"error": error}) from error
        if not isinstance(config, dict):
            raise CheckpointError("SD-E106", f"{path} is not a JSON object", {"found": type(config).__name__})
        checkpoint = cls(directory, config)
        for key in ("model_type", "speculators_model_type"):
            checkpoint.get(key, str, None)
        names = checkpoint.get("architectures", list, None) or []
        if not all(isinstance(name, str) for name in names):
            raise unusable(checkpoint, "architectures", "a list of texts", names)
        return checkpoint

    @property
    def config_file(self) -> Path:
        """The file that `config` was read from."""
        return _config_in(self.directory) or self.directory / _CONFIGS[0]

    @property
    def logit_scale(self) -> float | None:
        """The factor on its head's output that the configuration states. None means that it states none.

        Raises CheckpointError SD-E171 for a value that is not a number.
        """
        paths = [(prefix, key) for prefix in ("model.", "transformer_layer_config.", "") for key in LOGIT_SCALES]
        stated = {key: found for prefix, key in paths if (found := self.get(prefix + key, (int, float), None))}
        return logit_scale(stated)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape by name, from the headers of the weight files. Raises CheckpointError SD-E146."""
        shapes: dict[str, tuple[int, ...]] = {}
        for file in self.weight_files:
            shapes |= _shapes(file)
        return shapes

    def tensor(self, name: str) -> Tensor:
        """Load one tensor that is needed before the weights. Raises CheckpointError: SD-E146, SD-E172."""
        for file in self.weight_files:
            if name in _shapes(file):
                return read_tensors(file, (name,))[name]
        raise lacks(self, name)

    @property
    def weight_files(self) -> list[Path]:
        """The safetensors files, or else torch's own files. Raises CheckpointError SD-E146 if there is none."""
        for pattern in _WEIGHTS:
            files = sorted(self.directory.glob(pattern))
            if files:
                return files
        raise CheckpointError("SD-E146", f"no weights in {str(self.directory)!r}", {"looked for": ", ".join(_WEIGHTS)})

    def get(self, path: str, kind: type | tuple[type, ...], default: Any = _REQUIRED) -> Any:
        """The configuration's value at a path. null counts as absent.

        path: "key" or "key.key".
        kind: the type of the value, or several.
        default: the value if it is absent.

        Raises CheckpointError: SD-E170 if it is absent and has no default, SD-E171 if it is of another type.
        """
        value: Any = self.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is None:
            if default is _REQUIRED:
                facts = {"field": path, "file": self.config_file, "has": ", ".join(self.config) or "no field"}
                raise CheckpointError("SD-E170", f"the draft checkpoint's configuration has no {path!r}", facts)
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise unusable(self, path, " or ".join(each.__name__ for each in kinds), value)
        return value


def unusable(checkpoint: Checkpoint, field: str, expected: str, found: object) -> CheckpointError:
    """The error for a value of the configuration that is of another type, or contradicts what else is known."""
    facts = {"field": field, "file": checkpoint.config_file, "expected": expected, "found": repr(found)}
    return CheckpointError("SD-E171", f"the draft checkpoint's {field!r} cannot be used", facts)


def lacks(checkpoint: Checkpoint, tensor: str) -> CheckpointError:
    """The error for a tensor that is not stored. tensor: its name, and perhaps what it is."""
    has = ", ".join(sorted(checkpoint.shapes)[:12]) or "none"
    facts = {"tensor": tensor, "checkpoint": checkpoint.directory, "has": has}
    return CheckpointError("SD-E172", "the draft checkpoint lacks a tensor", facts)


def _config_in(directory: Path) -> Path | None:
    return next((file for name in _CONFIGS if (file := directory / name).is_file()), None)


def read_tensors(file: Path, prefixes: tuple[str, ...], device: str = "cpu") -> dict[str, Tensor]:
    """The tensors of one weight file whose names start with one of `prefixes`. Raises CheckpointError SD-E146."""
    from safetensors import safe_open

    with _reading(file):
        if file.suffix != ".safetensors":
            return {name: tensor for name, tensor in _saved(file, device).items() if name.startswith(prefixes)}
        with safe_open(file, framework="pt", device=device) as opened:
            return {name: opened.get_tensor(name) for name in opened.keys() if name.startswith(prefixes)}  # noqa: SIM118


def load_tensors(directory: Path, prefixes: tuple[str, ...], device: str = "cpu") -> dict[str, Tensor]:
    """The tensors of a checkpoint whose names start with one of `prefixes`. Raises CheckpointError SD-E146."""
    tensors: dict[str, Tensor] = {}
    for file in Checkpoint(directory, {}).weight_files:
        tensors |= read_tensors(file, prefixes, device)
    return tensors


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    with _reading(file):
        if file.suffix != ".safetensors":
            return {name: tuple(tensor.shape) for name, tensor in _saved(file, "meta").items()}
        with safe_open(file, framework="np") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118


def _saved(file: Path, device: str) -> Mapping[str, Tensor]:
    import torch

    saved: Mapping[str, Tensor] = torch.load(file, map_location=device, weights_only=True)
    strange = [name for name, tensor in saved.items() if not isinstance(name, str) or not torch.is_tensor(tensor)]
    if strange:
        raise TypeError(f"{strange[0]!r:.80} is no name of a tensor")
    return saved


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Turn whatever a damaged file makes the readers raise into CheckpointError SD-E146."""
    try:
        yield
    except Exception as error:
        raise CheckpointError("SD-E146", f"cannot read the weights in {file}", {"because": error}) from error


def _from_hub(model: str, looked_at: Path) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    facts = {"directory": f"{looked_at} has no config.json"}
    refused = refused_name(model)
    if refused:
        raise CheckpointError("SD-E105", f'there is no checkpoint "{model}"', facts | refused | {"fix": _FIX})
    try:
        directory = Path(snapshot_download(model, allow_patterns=["*.json", "*.py", *_WEIGHTS]))
        if _config_in(directory) is not None:
            return directory
        facts["hub"] = "the repository has no config.json"
    except HFValidationError:
        facts["hub"] = "this is no hub id"
    except Exception as error:
        facts["hub"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    facts["fix"] = _FIX
    raise CheckpointError("SD-E105", f'there is no checkpoint "{model}"', facts)
