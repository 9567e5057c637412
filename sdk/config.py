"""User input: strict models that forbid unknown keys, what a proposer is configured with, structured output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import TypeVar

from .errors import ConfigError, PluginId, Refusal, did_you_mean
from .ranges import DraftLength

DraftSampleMethod = Literal["greedy", "probabilistic"]
OptionsT = TypeVar("OptionsT", default=Any)
_FORMS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


class StrictModel(BaseModel):
    """Base of all user input. It is frozen, and refuses unknown keys with a suggestion.

    Its own members are public. Those of pydantic's BaseModel are no part of the contract.

    Constructing one raises ConfigError: SD-E131 (a key that nobody declares) or SD-E132 (a wrong value). One message
    names every wrong key.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    def __init__(self, /, **values: Any) -> None:
        where = type(self).__name__
        unknown = [key for key in values if key not in self.key_names()]
        if unknown and self.model_config.get("extra") != "allow":
            raise unknown_keys(where, unknown, self.key_names())
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise wrong_values(where, error) from error

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str) -> Self:
        """Construct from a mapping.

        where: its name in errors ("speculative_config", a plugin's options, ...).
        """
        try:
            return cls(**{str(key): value for key, value in values.items()})
        except ConfigError as error:
            summary = error.summary.replace(cls.__name__, where, 1)
            raise ConfigError(error.code, summary, error.facts) from error.__cause__

    def replace(self, /, **changes: Any) -> Self:
        """A copy with some values changed, validated like any other."""
        return type(self)(**(dict(self) | changes))

    @classmethod
    def key_names(cls) -> frozenset[str]:
        """The keys that this model accepts."""
        return frozenset(cls.model_fields) | {field.alias for field in cls.model_fields.values() if field.alias}


def unknown_keys(
    where: str,
    unknown: list[str],
    known: frozenset[str],
    answers: Mapping[str, str] | None = None,
    *,
    plugin: PluginId | None = None,
) -> ConfigError:
    """The error for keys that nobody declares. `answers`: what to say of some, instead of the key that is closest."""
    words = map(str, unknown)
    hints = {word: did_you_mean(word, known, cutoff=0.75) for word in words}  # a word of another engine is no typo
    facts = {key: f"did you mean {hint!r}?" if hint else "unknown" for key, hint in hints.items()}
    facts |= {key: answer for key, answer in (answers or {}).items() if key in unknown}
    accepted = ", ".join(sorted(known)) or "none"
    noun = "keys" if len(unknown) > 1 else "a key"
    facts |= {"accepted": accepted}
    return ConfigError("SD-E131", f"{where} has {noun} that nobody declares", facts, plugin=plugin)


def wrong_values(where: str, error: ValidationError, *, plugin: PluginId | None = None) -> ConfigError:
    """The error for values of the wrong type or out of range: one fact per key, with its path."""
    facts: dict[str, str] = {}
    for item in error.errors():
        parts = [str(part) for part in item["loc"]]
        path = ".".join(part for part in parts if "[" not in part) or where  # pydantic's own words for a union have one
        missing = item["type"] == "missing"
        found = "" if missing else f"; found {item['input']!r}"
        facts[path] = f"{item['msg'].removeprefix('Value error, ')}{found}"
    return ConfigError("SD-E132", f"{where} has unusable values", facts, plugin=plugin)


class Extension(StrictModel):
    """Something beyond the core that a proposer asks for in `Needs.extensions`. Its fields say what exactly it needs.

    An engine lists the ids of what it offers in `TargetInfo.extensions`. A proposer may look there, and choose.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    id: ClassVar[str]  # "name@version"
    methods: ClassVar[type | None] = None  # a Protocol: what is called on a proposer that asks. None means nothing

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls.id = f"{cls.name}@{cls.version}"

    @classmethod
    def method_names(cls) -> tuple[str, ...]:
        """The methods that are called on a proposer that asks."""
        return tuple(name for name in vars(cls.methods or object) if not name.startswith("_"))

    def united(self, other: Self) -> Self:
        """One request in the place of two, for proposers that run beside each other. Raises Refusal if none is."""
        if self != other:
            raise Refusal(f"{self.id} is asked for with other settings: {self!r} and {other!r}", "equal settings")
        return self


class NetworkSettings(StrictModel):
    """How a draft network runs. None means the target's setting."""

    dtype: str | None = Field(default=None, description="torch dtype name")
    moe_backend: str | None = Field(default=None, description="experts implementation; 'auto': transformers' default")
    quantization: str | None = Field(
        default=None, description="how weights are stored. None means as in the checkpoint"
    )
    trust_remote_code: bool = Field(
        default=False, strict=True, description="run modelling code that the checkpoint brings along"
    )


class ProposerConfig(StrictModel, Generic[OptionsT]):
    """The settings that a proposer is constructed with: the common ones, and its own validated options.

    `ProposerConfig[Options]` in an annotation says which options they are.
    """

    num_draft_tokens: DraftLength = Field(description="K: the most tokens on a path of a draft")
    max_nodes: DraftLength | None = Field(default=None, description="the most nodes of a tree. None means chains")
    model: str | None = Field(
        default=None, description="the checkpoint (directory or hub id). None means that none was given"
    )
    draft_sample_method: DraftSampleMethod = "greedy"
    network: NetworkSettings = Field(default=NetworkSettings(), description="how draft networks run")
    options: OptionsT = Field(  # type: ignore[assignment]
        default=None, description="an instance of the class's Options model. None means that it has none"
    )

    @property
    def width(self) -> int:
        """The most drafts of a request in a step: nodes of a tree, or tokens of a chain."""
        return self.max_nodes or self.num_draft_tokens


class StructuredOutputs(StrictModel):
    """The form that a request's output must have, under vLLM's names. Exactly one of the first six is given."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    json_schema: str | dict[str, Any] | None = Field(default=None, alias="json", description="a JSON schema")
    json_object: bool = Field(default=False, description="any JSON object")
    regex: str | None = Field(default=None, min_length=1, description="a regular expression of the whole output")
    choice: tuple[str, ...] = Field(default=(), description="one of these texts")
    grammar: str | None = Field(default=None, min_length=1, description="a context-free grammar in GBNF")
    structural_tag: str | dict[str, Any] | None = Field(default=None, description="tags, and what stands between them")
    disable_any_whitespace: bool = Field(default=False, description="JSON with one fixed way to put whitespace")
    disable_additional_properties: bool = Field(
        default=False, description="accepted for vLLM's sake: objects never have keys that their schema does not name"
    )
    whitespace_pattern: str | None = Field(default=None, description="what may stand between the tokens of JSON")

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [kind for kind in _FORMS if getattr(self, "json_schema" if kind == "json" else kind)]
        if len(given) != 1:
            raise ValueError(f"exactly one of {', '.join(_FORMS)} is given; found {', '.join(given) or 'none'}")
        if any(text == "" for text in self.choice):
            raise ValueError("choice contains an empty text")
        return self
