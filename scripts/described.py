"""Python declarations as Markdown: docstrings, fields with their trailing comments, keys with their JSON Schema."""

from __future__ import annotations

import ast
import copy
import inspect
import io
import tokenize
from collections.abc import Iterator, Sequence
from textwrap import indent
from types import ModuleType
from typing import Any

from pydantic import BaseModel

ENUMS = ("IntEnum", "StrEnum", "Enum")
BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def described(module: ModuleType, names: Sequence[str]) -> list[str]:
    """A section for each of the names that the module itself declares, in the order of its source."""
    source = inspect.getsource(module)
    comments = _comments(source)
    sections = []
    body = ast.parse(source).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        name = _declared(node)
        if name in names:
            sections.append(_section(node, following, getattr(module, name), comments))
    return sections


def keys(model: type[BaseModel]) -> str:
    """A table of the keys of a pydantic model."""
    properties = model.model_json_schema(by_alias=False)["properties"]
    rows = []
    for name, schema in properties.items():
        field = model.model_fields[name]
        default = "required" if field.is_required() else f"`{field.get_default(call_default_factory=True)!r}`"
        shown = field.alias or name  # as a user writes it
        rows.append((f"`{shown}`", _kind(schema), default, field.description or ""))
    return table(("key", "takes", "default", ""), rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the text of cells is kept, `|` and line breaks are not."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def docstring(thing: Any) -> str:
    """A docstring, dedented; in an AST node or an object."""
    if isinstance(thing, ast.ClassDef | ast.FunctionDef | ast.Module):
        return ast.get_docstring(thing) or ""
    return inspect.getdoc(thing) or ""


def _section(node: ast.stmt, following: ast.stmt | None, value: Any, comments: dict[int, str]) -> str:
    parts = [f"### {_declared(node)}"]
    if isinstance(node, ast.ClassDef):
        parts += [docstring(node), *_members(node, value, comments)]
    elif isinstance(node, ast.FunctionDef):
        parts += [_signature(node), docstring(node)]
    else:
        parts += [f"`{ast.unparse(node)}`", comments.get(node.lineno, ""), _text_below(following)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _members(node: ast.ClassDef, cls: type, comments: dict[int, str]) -> Iterator[str]:
    if issubclass(cls, BaseModel):
        yield keys(cls) if cls.model_fields else ""
    elif any(isinstance(base, ast.Name) and base.id in ENUMS for base in node.bases):
        members = [each for each in node.body if isinstance(each, ast.Assign)]
        values = [(f"`{_declared(each)}`", ast.unparse(each.value), comments.get(each.lineno, "")) for each in members]
        yield table(("member", "value", ""), values)
    else:
        pairs = zip(node.body, [*node.body[1:], None], strict=True)
        fields = [(each, below) for each, below in pairs if isinstance(each, ast.AnnAssign) and not _is_private(each)]
        rows = [_field(each, below, comments) for each, below in fields]
        yield table(("field", "type", ""), rows) if rows else ""
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and not _is_private(each):
            yield "* " + indent(f"{_signature(each)}\n\n{docstring(each)}".strip(), "  ").lstrip()


def _field(node: ast.AnnAssign, following: ast.stmt | None, comments: dict[int, str]) -> tuple[str, str, str]:
    default = "" if node.value is None else f" = {ast.unparse(node.value)}"
    lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    comment = " ".join(comments[line] for line in lines if line in comments) or _text_below(following)
    return f"`{_declared(node)}`", f"`{ast.unparse(node.annotation)}{default}`", comment


def _signature(node: ast.FunctionDef) -> str:
    kinds = {each.id for each in node.decorator_list if isinstance(each, ast.Name)}
    returned = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    if "property" in kinds:
        return f"`{node.name}{returned.replace(' ->', ':')}`"
    arguments = ast.unparse(_without_receiver(node.args))
    note = " (classmethod)" if "classmethod" in kinds else ""
    note += " (the first answer counts)" if "firstresult=True" in map(ast.unparse, _decorator_keywords(node)) else ""
    return f"`{node.name}({arguments}){returned}`{note}"


def _without_receiver(arguments: ast.arguments) -> ast.arguments:
    """Without `self` or `cls`. A parameter of that name that has an annotation is one like others."""
    shown = copy.copy(arguments)
    for name in ("posonlyargs", "args"):
        listed = getattr(arguments, name)
        if listed and listed[0].arg in ("self", "cls") and listed[0].annotation is None:
            setattr(shown, name, listed[1:])
            break
    return shown


def _decorator_keywords(node: ast.FunctionDef) -> Iterator[ast.keyword]:
    for each in node.decorator_list:
        yield from each.keywords if isinstance(each, ast.Call) else ()


def _declared(node: ast.stmt) -> str:
    """The name that a statement declares; empty if it declares none, or several."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
            return name
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return ""


def _is_private(node: ast.stmt) -> bool:
    return _declared(node).startswith("_") and _declared(node) != "__init__"


def _text_below(node: ast.stmt | None) -> str:
    """The text that stands alone under a constant."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return inspect.cleandoc(node.value.value)
    return ""


def _comments(source: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokens
        if token.type == tokenize.COMMENT and not token.string.startswith(("# noqa", "# type", "# fmt"))
    }


def _kind(schema: dict[str, Any]) -> str:
    """What a JSON Schema takes, in words."""
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"])
    if "$ref" in schema:
        return f"[{schema['$ref'].rpartition('/')[2]}](#{schema['$ref'].rpartition('/')[2].lower()})"
    if "const" in schema or "enum" in schema:
        return " or ".join(f"`{value!r}`" for value in schema.get("enum", [schema.get("const")]))
    kind = str(schema.get("format", schema.get("type", "anything")))
    if kind == "array":
        kind = f"list of {_kind(schema['items'])}"
    bounds = [f"{words} {schema[bound]}" for bound, words in BOUNDS.items() if bound in schema]
    return " ".join([kind, *bounds])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")
