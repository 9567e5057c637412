"""The models that ship with the package, by their short names; and names that are none, and nobody else's either."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

_ASSETS = Path(__file__).parents[1] / "assets"
_DEFAULT_MODEL = "target"
_WEIGHTS = "*.safetensors"
_SIMILAR = 0.8  # of 1; hub ids that begin like ours are less so


def packaged(name: str) -> Path | None:
    """The directory of "tiny" (the target) or "tiny/NAME" (one of its drafters). None means another name.

    None also means that the wheel has no weights of it: those that our tests alone need are in the sources only.
    """
    directory = _directory(name)
    return directory if directory and any(directory.glob(_WEIGHTS)) else None


def packaged_names() -> list[str]:
    """All of them."""
    found = {file.parent.relative_to(_ASSETS) for file in _ASSETS.glob(f"*/*/{_WEIGHTS}")}
    return sorted(str(each.parent if each.name == _DEFAULT_MODEL else each) for each in found)


def refused_name(name: str) -> dict[str, str]:
    """Why nobody has a model of a name that is no directory, as facts of an error. Empty: the hub may have it.

    Nearly all hub ids have an owner. One without is asked for once; a download would try for most of a minute.
    """
    from huggingface_hub import repo_exists, try_to_load_from_cache

    names, (family, slash, _) = packaged_names(), name.partition("/")
    if _directory(name):
        return {"weights": "in the sources only, which keeps the wheel small", "packaged": ", ".join(names)}
    meant = get_close_matches(name.lower(), names, n=1, cutoff=_SIMILAR)
    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return {}
        if meant:
            return {"did you mean": meant[0]}
        if family in names:
            return {"packaged": ", ".join(names)}
        if slash or repo_exists(name):
            return {}
    except Exception as error:  # of the client: no hub id, no network, switched off
        return {} if slash else {"hub": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
    return {"hub": "it has no model of this name"}


def _directory(name: str) -> Path | None:
    family, _, member = name.partition("/")
    if not family.isidentifier() or "/" in member or member.startswith("."):
        return None
    directory = _ASSETS / family / (member or _DEFAULT_MODEL)
    return directory if (directory / "config.json").is_file() else None
