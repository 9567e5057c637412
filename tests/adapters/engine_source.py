"""An engine that is written for the checks of its source."""

from __future__ import annotations

from collections import defaultdict


def write_engine(folder, parameters, members):
    """The package with all that is relied on, and nothing else."""
    bodies = defaultdict(list)  # by file and class
    for place, names in parameters.items():
        file, _, path = place.partition(":")
        owner, _, name = path.rpartition(".")
        bodies[file, owner].append(f"def {name}({names}, *args, another=None, **kwargs): ...")
    for place, names in members.items():
        bodies[tuple(place.split(":"))] += [f"{name}: int" for name in names.split(", ")]
    for (file, owner), lines in bodies.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        with (folder / file).open("a") as source:
            head, indent = (f"class {owner}:\n", "    ") if owner else ("", "")
            source.write(head + "".join(f"{indent}{line}\n" for line in lines))
    return folder


def edit(package, file, old, new):
    """Write another text in a file of it."""
    source = (package / file).read_text()
    assert old in source
    (package / file).write_text(source.replace(old, new))
