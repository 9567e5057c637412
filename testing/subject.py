"""The proposer that is checked: how it is asked for, and everything that it can be put on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from specdec import LLM
from specdec.core.host import SpeculativeConfig, admit, parts_of, registry
from specdec.sdk.errors import ConfigError, PluginId, Refusal, SpecdecError
from specdec.sdk.extensions import TargetTokens
from specdec.sdk.needs import Needs
from specdec.sdk.types import TargetInfo

from .report import NotApplicable
from .stage import Stage
from .text import MOST_ACCEPTED
from .worlds import RealTarget, World, load_target

NUM_DRAFT_TOKENS = 4
MAX_NUM_SEQS = 4
MAX_MODEL_LEN = 192  # of a text: a prompt of 40 tokens, and what the longest schedule commits to it
NUM_STEPS = 30  # of that schedule
BLOCK_SIZE = 1  # so that a draft pass that writes one position too many is found out

CONFIGS = ("config.json", "adapter_config.json")  # in a directory that is a checkpoint

Asked = str | Path | type[Any]


@dataclass(frozen=True)
class Subject:
    """One proposer under one `speculative_config`, on one target."""

    asked: Asked  # a class, a method ("name", "dist:name", "module:Class") or a checkpoint; a Path is a checkpoint
    settings: Mapping[str, Any]  # further keys of `speculative_config`
    target_model: str = "tiny"
    seed: int = 0
    plugin_settings: registry.PluginSettings = field(default_factory=registry.PluginSettings)
    opened: list[Stage] = field(default_factory=list, repr=False, compare=False)  # stages that are not closed

    def __post_init__(self) -> None:
        if not isinstance(self.asked, str | Path | type):
            facts = {"found": f"{self.asked!r:.80}", "fix": "the class itself, or its path: check_proposer(MyProposer)"}
            expected = {"expected": "a class, a method of speculative_config or a checkpoint"}
            raise ConfigError("SD-E132", "this is nothing that can be checked", expected | facts)

    @property
    def label(self) -> str:
        """How a user names it."""
        return f"{self.asked.__module__}:{self.asked.__qualname__}" if isinstance(self.asked, type) else str(self.asked)

    @property
    def is_importable(self) -> bool:
        """Whether the path of a class leads back to it."""
        return not isinstance(self.asked, type) or registry.class_of(self.label) is self.asked

    @property
    def target(self) -> RealTarget:
        return load_target(self.target_model)

    @cached_property
    def _given(self) -> SpeculativeConfig:
        key = "method" if isinstance(self.asked, type) or not is_checkpoint(self.asked) else "model"
        other = self.settings.get(key, self.label)
        if str(other) != self.label:
            module, _, name = self.label.rpartition(".")
            is_path = key == "model" and module and "/" not in self.label
            fix = f'"{module}:{name}", for a class with this checkpoint; or ' if is_path else ""
            facts = {"found": f"{key}={other!r} in speculative_config", "fix": f"{fix}leave out {key}"}
            raise ConfigError("SD-E132", f"{self.label} is to be checked, and another is named", facts)
        return SpeculativeConfig.parse({key: self.label, **self.settings})

    @cached_property
    def config(self) -> SpeculativeConfig:
        """The whole `speculative_config`; K, if it was left out, is 4, or the most that the proposer drafts."""
        if self._given.num_speculative_tokens is not None:
            return self._given
        most = None
        with suppress(SpecdecError):  # whatever it is, the check `loads` shows it
            least = self._given.replace(num_speculative_tokens=1)
            most = registry.load_proposer(self.resolved, least, self.target.info).needs.max_draft_tokens
        return self._given.replace(num_speculative_tokens=min(NUM_DRAFT_TOKENS, most or NUM_DRAFT_TOKENS))

    @cached_property
    def resolved(self) -> registry.ResolvedProposer:
        """The class, and who to blame. Raises PluginLoadError or ConfigError, as the engine does."""
        hooks = registry.load_hooks(self.plugin_settings)
        if not isinstance(self.asked, type):
            return registry.Registry.discover(self.plugin_settings, hooks).resolve(self._given)
        cls = hooks.adapted(self.asked)
        plugin = PluginId(self.asked.__name__, self.label)
        return registry.ResolvedProposer(plugin, cls, self._given.model, hooks)

    @cached_property
    def needs(self) -> Needs:
        """What it declares under its configuration."""
        return self.load().needs

    @property
    def reports_distribution(self) -> bool:
        """Whether it can report draft distributions at all."""
        try:
            return self.load(probabilistic=True).needs.stored_form != "one_hot"
        except Refusal:
            return False

    @property
    def modes(self) -> tuple[bool, ...]:
        """Whether drafts are probabilistic, in every way that it can be asked for them."""
        asked = self.config.draft_sample_method == "probabilistic"
        return (asked, True) if self.reports_distribution and not asked else (asked,)

    def load(
        self,
        *,
        k: int | None = None,
        probabilistic: bool | None = None,
        info: TargetInfo | None = None,
    ) -> registry.LoadedProposer:
        """Checked, and admitted on the target, as the engine does it. Raises SpecdecError."""
        changes: dict[str, Any] = {} if k is None else self._with_drafts(k)
        if probabilistic is not None:
            changes["draft_sample_method"] = "probabilistic" if probabilistic else "greedy"
        info = info or self.target.info
        loaded = registry.load_proposer(self.resolved, self.config.replace(**changes), info)
        if probabilistic is not True or loaded.needs.stored_form != "one_hot":
            admit(loaded, info)
        return loaded

    def _with_drafts(self, k: int) -> dict[str, Any]:
        """Settings for at most `k` drafts, or for at most `k` nodes of a tree."""
        if self.config.max_nodes is None:
            return {"num_speculative_tokens": k}
        return {"num_speculative_tokens": min(k, self.config.num_speculative_tokens or k), "max_nodes": k}

    def stage(
        self,
        *,
        k: int | None = None,
        probabilistic: bool | None = None,
        world: World | None = None,
        max_num_seqs: int = MAX_NUM_SEQS,
        max_model_len: int | None = None,
        shown: Mapping[str, Any] | None = None,
    ) -> Stage:
        """A new instance on a new stage. `shown`: changes of the needs that views are built for.

        max_model_len: None means that texts have room for every schedule, as far as the target has it.
        """
        world = world or self.target
        longest = max_model_len or self._room(k, world.info.max_model_len)
        info = replace(world.info, max_num_seqs=max_num_seqs, max_model_len=longest, block_size=BLOCK_SIZE)
        loaded = self.load(k=k, probabilistic=probabilistic, info=info)
        given = None if shown is None else Needs(**(dict(loaded.needs) | dict(shown)))
        self.opened.append(Stage(loaded, info, world, seed=self.seed, shown=given))
        return self.opened[-1]

    def _room(self, k: int | None, most: int) -> int:
        """Tokens that a text has room for. `k`: drafts of a step, None means as asked. `most`: what the target has."""
        num_drafts = k or self.config.num_speculative_tokens or NUM_DRAFT_TOKENS
        more = NUM_STEPS * max(min(num_drafts, MOST_ACCEPTED) - NUM_DRAFT_TOKENS, 0)
        return max(min(MAX_MODEL_LEN + more, most), MAX_MODEL_LEN)

    def close(self, stages: Sequence[Stage]) -> None:
        """Close stages that are open. What a proposer raises there is the affair of one check."""
        for stage in list(stages):
            self.opened.remove(stage)
            with suppress(SpecdecError):
                stage.close()

    def stages(self, *, max_num_seqs: int = MAX_NUM_SEQS) -> Iterator[Stage]:
        """Yield a new stage for each of `modes`. Each is closed before the next one is made."""
        for probabilistic in self.modes:
            stage = self.stage(probabilistic=probabilistic, max_num_seqs=max_num_seqs)
            yield stage
            self.close([stage])

    def pairs(self) -> Iterator[tuple[Stage, Stage]]:
        """Yield two stages that are alike for each of `modes`."""
        return zip(self.stages(), self.stages(), strict=True)

    def llm(self, **settings: Any) -> LLM:
        """The real engine with this proposer, on the CPU unless `settings` say otherwise.

        It begins with the state in `state_dir`, if there is one, and never writes it: that is a user's.

        Raises NotApplicable if its class cannot be imported by its path.
        """
        if not self.is_importable:
            raise NotApplicable(f"the engine imports by path, and {self.label} is not at the top of a module")
        llm = LLM(
            self.target.model,
            speculative_config=self.config,
            plugin_settings=self.plugin_settings,
            **{"device": "cpu"} | settings,
        )
        host = parts_of(llm.engine).host
        assert host is not None, "a proposer is asked for"
        host.saves_state = False
        return llm

    def need_determinism(self) -> None:
        """Raises NotApplicable for a proposer that does not promise it."""
        if not self.needs.deterministic:
            raise NotApplicable("it declares deterministic=False")

    def need_whole_prefill(self) -> None:
        """Raises NotApplicable where a fresh prefill does not show everything that drafts are made of."""
        self.need_determinism()
        if self.needs.extension(TargetTokens):
            raise NotApplicable("it asks for TargetTokens, of which a fresh prefill shows the last row only")

    def need_own_state(self) -> None:
        """Raises NotApplicable where requests may influence each other's drafts."""
        if self.needs.state == "shared":
            raise NotApplicable('it declares state="shared": other requests may change its drafts')

    def need_shared_state(self) -> None:
        """Raises NotApplicable where requests share nothing anyway."""
        if self.needs.state != "shared":
            raise NotApplicable('its requests share no state (Needs.state is not "shared")')

    def need_distribution(self) -> None:
        """Raises NotApplicable for one-hot proposers."""
        if not self.reports_distribution:
            raise NotApplicable("it reports no draft distribution (Needs.distributions is empty)")


def is_checkpoint(asked: str | Path) -> bool:
    """A path, an owner/name or a dotted class path goes into `model`, anything else into `method`."""
    if isinstance(asked, Path) or "/" in asked or ("." in asked and ":" not in asked):
        return True
    return any((Path(asked) / name).is_file() for name in CONFIGS)  # any other directory of a method's name is no model
