"""The rooms of devices cannot be imported here: `pytest -p closed_rooms`, or `python -m closed_rooms bench ...`."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from typing import Any

ROOMS = tuple(f"specdec.core.kernels.{room}" for room in ("cpu", "cuda", "compiled"))


class Closed:
    """An importer that has nothing, and says so before the others are asked."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.startswith(ROOMS):
            raise ModuleNotFoundError(f"{name} is closed", name=name)
        return None


sys.meta_path.insert(0, Closed())

if __name__ == "__main__":
    from specdec.cli import main

    main()
