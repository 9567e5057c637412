"""The public API as a stub file: every public name with its parameters, fields, types and defaults, without prose."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent

import griffe

SOURCES = Path(__file__).parents[1] / "src"
PUBLIC_BELOW = ("specdec.sdk", "specdec.adapters")  # each module there that has an `__all__`
PUBLIC = ("specdec", "specdec.testing")
HEADING = "# module "
NOTICE = "deprecated"  # the function that says so, in sdk/errors.py
PRELUDE = "from dataclasses import KW_ONLY, dataclass\nfrom enum import Enum, IntEnum, StrEnum\n"


def load() -> griffe.Module:
    """The package as its sources stand. Nothing of it is imported."""
    package = griffe.load("specdec", search_paths=[SOURCES], resolve_aliases=True, allow_inspection=False)
    assert isinstance(package, griffe.Module)
    return package


def stub(package: griffe.Module) -> str:
    """The stubs of all public modules, each below a line with its name."""
    sections = []
    for module in public_modules(package):
        names = sorted(map(str, module.exports or ()))
        declarations = "".join(_declaration(name, module[name], names) for name in names)
        sections.append(f"{HEADING}{module.path}\n{declarations}")
    return "".join([*map(_notice, _notices(package)), "\n".join(sections)])


def public_modules(package: griffe.Module) -> list[griffe.Module]:
    """Those that export names, in the order of their paths."""
    places = [module for module in walk(package) if module.path in PUBLIC or module.path.startswith(PUBLIC_BELOW)]
    return sorted((module for module in places if module.exports), key=lambda module: module.path)


def walk(module: griffe.Module) -> Iterator[griffe.Module]:
    """The module and all that lie below it."""
    yield module
    for below in module.modules.values():
        if isinstance(below, griffe.Module):
            yield from walk(below)


@contextmanager
def parsed(text: str) -> Iterator[griffe.Module]:
    """A stub as griffe sees it: a package of the same modules."""
    modules = {}
    for section in text.split(HEADING)[1:]:
        path, _, code = section.partition("\n")
        file = "/".join([*path.split(".")[1:], "__init__.py"])
        modules[file] = PRELUDE + code
    with griffe.temporary_visited_package("specdec", modules) as package:
        yield package


def _notices(package: griffe.Module) -> Iterator[ast.Call]:
    """Calls in the sources that say that a name goes."""
    for module in walk(package):
        if isinstance(module.filepath, Path):
            for node in ast.walk(ast.parse(module.filepath.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == NOTICE:
                    yield node


def _notice(call: ast.Call) -> str:
    told = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    return f"# {NOTICE} {ast.literal_eval(call.args[0])} since {told['since']} until {told['removed_in']}\n"


def _declaration(name: str, member: griffe.Object | griffe.Alias, public: Collection[str]) -> str:
    target = member.final_target if isinstance(member, griffe.Alias) else member
    if isinstance(target, griffe.Class):
        return _class(name, target, public)
    if isinstance(target, griffe.Function):
        return _function(name, target)
    assert isinstance(target, griffe.Attribute)
    annotation = f": {target.annotation}" if target.annotation is not None else ""
    if "property" in target.labels:
        return f"@property\ndef {name}(self){annotation.replace(':', ' ->', 1)}: ...\n"
    if annotation and target.value is None:
        return f"{name}{annotation}\n"
    set_by_instances = target.value is None or "class-attribute" not in target.labels | {"module-attribute"}
    return f"{name}{annotation} = {'...' if set_by_instances else _value(str(target.value))}\n"


def _function(name: str, function: griffe.Function) -> str:
    kinds = "".join(f"@{kind}\n" for kind in ("classmethod", "staticmethod") if kind in function.labels)
    signature = function.signature(name=name)
    if function.parent is not None and function.parent.is_class and "staticmethod" not in function.labels:
        rest = signature[len(name) + 1 :]  # griffe leaves out self
        signature = f"{name}({function.parameters[0].name}{'' if rest.startswith(')') else ', '}{rest}"
    return f"{kinds}def {signature}: ...\n"


def _class(name: str, cls: griffe.Class, public: Collection[str]) -> str:
    """With what it inherits from classes that are not public themselves."""
    bases = f"({', '.join(map(str, cls.bases))})" if cls.bases else ""
    decorators = "".join(f"@{each.value}\n" for each in cls.decorators if "dataclass" in str(each.value))
    inherited = {
        key: member
        for key, member in cls.inherited_members.items()
        if member.final_target.path.startswith("specdec.") and member.final_target.parent.name not in public
    }
    members = {key: member for key, member in (inherited | cls.members).items() if _is_shown(key, cls)}
    body = "".join(_declaration(key, member, public) for key, member in members.items()) or "...\n"
    return f"\n{decorators}class {name}{bases}:\n{indent(body, '    ')}"


def _is_shown(name: str, cls: griffe.Class) -> bool:
    if "dataclass" in cls.labels and name in ("__init__", "_"):
        return name == "_"  # its constructor is its fields
    return name == "__init__" or not name.startswith("_")


def _value(text: str) -> str:
    """A default without what describes it."""
    try:
        expression = ast.parse(text, mode="eval").body
    except SyntaxError:
        return text
    if isinstance(expression, ast.Call):
        expression.keywords = [each for each in expression.keywords if each.arg != "description"]
    return ast.unparse(expression)
