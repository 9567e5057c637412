"""What is known before vLLM loads a weight: the proposer, its needs, and whether this vLLM can meet them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import AutoTokenizer

from specdec.core.host import Speculation, registry
from specdec.sdk.extensions import Grammars, TargetTokens
from specdec.sdk.needs import Needs

from .driver import Driver
from .followed_grammars import FollowedGrammars
from .ignored_keys import refuse_ignored
from .plan import describe_target, refuse_needs, refuse_plan, withheld_by
from .rows import RequestRows
from .settings import Supervision, read_settings, read_supervision
from .shared_target import SharedTarget
from .watch import Watch
from .workers_page import WorkersPage


@dataclass(frozen=True)
class Prepared:
    """A proposer that was found, checked and admitted for vLLM's target."""

    speculation: Speculation
    hooks: registry.HookPlugins
    supervision: Supervision
    vllm_config: Any

    @property
    def needs(self) -> Needs:
        return self.speculation.loaded.needs

    @property
    def wants_logits(self) -> bool:
        """Whether the proposer reads the target's most likely tokens, or a plugin wants to know what was verified."""
        return self.needs.extension(TargetTokens) is not None or bool(self.hooks.observers.on_verified.get_hookimpls())

    @classmethod
    def of(cls, method: str | None, vllm_config: Any, *, in_worker: bool = True) -> Prepared:
        """`method`: the proposer's name; None: as additional_config says. Raises ConfigError, Refusal, ...

        `in_worker`: no other process may ask a GPU for its memory. That would initialise CUDA in it, and keep memory.
        """
        refuse_plan(vllm_config)
        asked, additional = vllm_config.speculative_config, vllm_config.additional_config
        refuse_ignored(asked)
        config = read_settings(method, additional, asked.num_speculative_tokens, asked.draft_sample_method)
        plugin_settings = registry.PluginSettings.from_environment(os.environ)
        hooks = registry.load_hooks(plugin_settings)
        info = describe_target(vllm_config)
        withheld = withheld_by(vllm_config)
        speculation = Speculation.prepare(config, info, plugin_settings, hooks, withheld=withheld, allocates=in_worker)
        assert speculation is not None, "a config was given"
        refuse_needs(speculation.loaded.needs, vllm_config)
        return cls(speculation, hooks, read_supervision(additional), vllm_config)

    def driver(self, target_model: Any, rows: RequestRows, *, read_late: bool = False) -> Driver:
        """Make and bind the proposer, once the target has its weights. `Driver.lay_out` follows."""
        tokenizer = load_tokenizer(self.vllm_config.model_config)
        info = self.speculation.info
        target = SharedTarget(target_model, info)
        grammars = None
        if self.needs.extension(Grammars) is not None:
            compact = self.vllm_config.structured_outputs_config.disable_any_whitespace
            grammars = FollowedGrammars(tokenizer, info.vocab_size, compact=compact)
        watch = Watch(self.speculation.loaded.plugin, self.supervision.hang_seconds)
        watch.start()
        driver = Driver(
            self.speculation,
            self.hooks.observers,
            target,
            tokenizer,
            rows,
            grammars=grammars,
            read_late=read_late,
            watch=watch,
            retry_after_steps=self.supervision.retry_after_steps,
        )
        page = WorkersPage.of(os.environ)
        if page is not None:
            watch.each_time(partial(page.write, driver.published))
            driver.at_close(page.remove)
        return driver


def load_tokenizer(model: Any) -> Any:
    """The target's, of the revision and with the trust that vLLM's ModelConfig says. None: vLLM is to load none."""
    if model.skip_tokenizer_init:
        return None
    return AutoTokenizer.from_pretrained(
        model.tokenizer, revision=model.tokenizer_revision, trust_remote_code=model.trust_remote_code
    )
