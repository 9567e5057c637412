"""`specdec info`: everything that one proposer says about itself."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Annotated, Any

import importlib_metadata
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, JsonSchemaWarningKind
from pydantic_core import CoreSchema

from specdec.sdk.errors import PluginId

from ._output import JsonOption
from ._session import Session

if TYPE_CHECKING:
    from specdec.core.registry import HookPlugins

NO_OPTIONS = {"type": "object", "properties": {}, "additionalProperties": False}


def command(
    ctx: typer.Context,
    target: Annotated[
        str, typer.Argument(help="A name, distribution:name, package.module:Class or package.module.Class.")
    ],
    schema: Annotated[
        bool, typer.Option("--schema", help="Print only the JSON Schema of the proposer's options.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show one proposer: where it comes from, what it needs, and which options it has. Imports that one."""
    from specdec.core.registry.importing import import_target
    from specdec.core.registry.load import options_model, static_needs
    from specdec.sdk.check import check_class
    from specdec.sdk.request_options import request_options_model

    session: Session = ctx.obj
    plugin, hooks = _who(target, session)
    cls = hooks.adapted(import_target(plugin))
    methods = check_class(cls, plugin)
    options = options_model(cls, plugin)
    if schema:
        _print_json(options.model_json_schema(schema_generator=_Schema) if options else NO_OPTIONS)
        return
    needs = static_needs(cls, plugin)
    facts = {
        "name": plugin.name,
        "class": plugin.target,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "api": getattr(cls, "api_version", None),
        "summary": inspect.cleandoc(cls.__doc__ or "").partition("\n")[0] or None,
        "needs": needs.model_dump(mode="json", exclude_defaults=True) if needs else "computed from config and target",
        "methods": sorted({"propose", *methods}),
        "options": _options(options),
        "request options": _options(request_options_model(cls, plugin)),
        "file": _place(cls),
        "documentation": _documentation(plugin),
    }
    if as_json:
        _print_json(facts)
    else:
        _show(facts, session)


def _print_json(facts: Any) -> None:
    """Print JSON, in which infinity and NaN are texts: it has no numbers for them."""
    standard = json.loads(json.dumps(facts, default=str), parse_constant=str)
    print(json.dumps(standard, indent=2))


def _who(target: str, session: Session) -> tuple[PluginId, HookPlugins]:
    """Hook plugins are loaded only for what no entry point offers."""
    from specdec.core.registry import Registry
    from specdec.core.registry.class_path import class_path
    from specdec.core.registry.hooks import load_hooks

    registry = Registry.discover(session.settings)
    if registry.find(target) is None:
        registry = Registry.discover(session.settings, load_hooks(session.settings))
        target = class_path(target) or target
    return registry.plugin(target), registry.hooks


def _options(model: type[BaseModel] | None) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "type": inspect.formatannotation(field.annotation),
            "default": _default(field),
            "description": field.description,
        }
        for name, field in (model.model_fields if model else {}).items()
    ]


def _default(field: FieldInfo) -> Any:
    if field.is_required():
        return "required"
    if field.default_factory_takes_validated_data:
        return "computed from other options"
    return field.get_default(call_default_factory=True)


class _Schema(GenerateJsonSchema):
    """A schema that allows anything where JSON has no form for an option, such as a function."""

    def handle_invalid_for_json_schema(self, schema: CoreSchema, error_info: str) -> JsonSchemaValue:
        return {}

    def emit_warning(self, kind: JsonSchemaWarningKind, detail: str) -> None:
        """A default without a form is left out."""


def _place(cls: type) -> str | None:
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return None


def _documentation(plugin: PluginId) -> str | None:
    if plugin.distribution is None:
        return None
    metadata = importlib_metadata.metadata(plugin.distribution)
    for entry in metadata.get_all("Project-URL") or []:
        label, _, url = entry.partition(",")
        if label.strip().lower() in ("documentation", "docs"):
            return str(url).strip()
    return None


def _show(facts: dict[str, Any], session: Session) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, value in facts.items():
        for number, line in enumerate(_lines(value)):
            table.add_row("" if number else label, escape(line))
    session.console().print(table)


def _lines(value: object) -> list[str]:
    """A value as lines for people: nothing is a dash, a mapping or a list of options one line per item."""
    if value in (None, "", [], {}):
        return ["-"]
    if isinstance(value, dict):
        return [f"{key}={item!r}" for key, item in value.items()]
    if isinstance(value, list):
        return [_option_line(item) if isinstance(item, dict) else str(item) for item in value]
    return [str(value)]


def _option_line(option: dict[str, Any]) -> str:
    default = "required" if option["default"] == "required" else f"= {option['default']!r}"
    note = f"   {option['description']}" if option["description"] else ""
    return f"{option['name']}: {option['type']} {default}{note}"
