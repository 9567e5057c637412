"""vLLM's `vllm.general_plugins` entry point: what vLLM has to be told before it can run our proposers in V2.

And what its scheduler, in either runner's engine, is told of drafts that a grammar refuses.

vLLM calls `register` in its front process, in the engine core and in every worker, before it makes a configuration or
a runner. Configurations without a proposer of ours behave as before. Nothing here imports the runner, nor torch beyond
what vLLM's configuration has imported.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Literal

from specdec.sdk.errors import PluginLoadError, message
from specdec.sdk.extensions import DraftKV

from ..vllm import is_ours, method_of
from ..vllm_shared import refused_drafts
from .compatibility import facts_of, v2_differences

CANNOT = "this vLLM's V2 model runner is not the one that the adapter was written for"

KEY = "specdec_plan"
"""What vLLM's processes must know of a proposer, decided once in the first of them: in `additional_config`, which
reaches every process and is part of the key of vLLM's compiled graphs.
"""

DROPS = "specdec_drops_last_block"
"""An attribute of vLLM's SpeculativeConfig, whose methods see nothing else of the configuration."""

logger = logging.getLogger("specdec")


@cache
def register() -> None:
    """Wrap, once in a process. A vLLM without what is wrapped stays as it is: others use it without us.

    vLLM calls this without a guard, so nothing that goes wrong here may reach it.
    """
    try:
        wrapped = _wrapped()
    except (ImportError, AttributeError) as error:
        logger.info("this vLLM has no V2 model runner that runs our proposers: %s", error)
        return
    except Exception:
        logger.warning("specdec's entry point failed; vLLM goes on as if it were not installed", exc_info=True)
        return
    for owner, name, replacement in wrapped:
        setattr(owner, name, replacement)


def _wrapped() -> list[tuple[Any, str, Any]]:
    """Each place that is replaced, with its replacement. Raises ImportError, AttributeError."""
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.worker.gpu import spec_decode

    listed = "_get_v2_model_runner_unsupported_features"
    module = sys.modules[VllmConfig.__module__]
    validate, fill = StructuredOutputManager.validate_tokens, StructuredOutputManager.grammar_bitmask
    return [
        (VllmConfig, listed, _supported(getattr(VllmConfig, listed))),
        (VllmConfig, "__post_init__", _planned(VllmConfig.__post_init__, module)),
        (VllmConfig, "num_lookahead_tokens", property(_lookahead(VllmConfig.num_lookahead_tokens.fget))),
        (SpeculativeConfig, "__post_init__", _as_written(SpeculativeConfig.__post_init__)),
        (SpeculativeConfig, "use_eagle_block_drop", _block_drop(SpeculativeConfig.use_eagle_block_drop)),
        (spec_decode, "init_speculator", _init_speculator(spec_decode.init_speculator)),
        (StructuredOutputManager, "validate_tokens", refused_drafts.keeping(validate)),
        (StructuredOutputManager, "grammar_bitmask", refused_drafts.without_refused(fill, validate)),
    ]


def forced() -> bool:
    """Whether the user leaves vLLM no choice of a runner."""
    import vllm.envs

    return bool(vllm.envs.VLLM_USE_V2_MODEL_RUNNER)


def _as_written(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(original)
    def post_init(speculative: Any) -> Any:
        """Check what the user wrote, before vLLM fills in the rest."""
        if _names_us(speculative.model):
            from ..vllm_shared.ignored_keys import refuse_ignored
            from .wrong_class import refuse_wrong_class

            refuse_wrong_class(speculative)
            refuse_ignored(speculative)
        return original(speculative)

    return post_init


def _names_us(model: object) -> bool:
    return isinstance(model, str) and model.partition(".")[0] == "specdec"


def _supported(original: Callable[[Any], list[str]]) -> Callable[[Any], list[str]]:
    @wraps(original)
    def unsupported(config: Any) -> list[str]:
        """vLLM's list without `custom_class`, where the class is ours and this vLLM is one that we know."""
        found = original(config)
        if not is_ours(config.speculative_config):
            return found
        differing = v2_differences()
        if differing and forced():
            raise PluginLoadError("SD-E238", CANNOT, facts_of(differing))
        if differing:
            logger.warning("%s", message("SD-W238", CANNOT, facts_of(differing)))
            return found
        return [each for each in found if "'custom_class'" not in each] + _amiss(config)

    return unsupported


def _amiss(config: Any) -> list[str]:
    """What fails in this V2 runner with drafts of anybody. Its head looks up a LoRA adapter for one row a request."""
    return [] if config.lora_config is None else ["LoRA adapters where several rows of a request are verified"]


def _planned(original: Callable[[Any], None], module: Any) -> Callable[[Any], None]:
    @wraps(original)
    def post_init(config: Any) -> None:
        """Asynchronous scheduling is granted by the method's name. What every process must know is decided here."""
        if is_ours(config.speculative_config):
            from ..vllm_shared import request_check, workers_page

            request_check.install()
            workers_page.show()
            if refused_drafts.must_stay(config):
                config.additional_config = {**config.additional_config, refused_drafts.KEY: True}
        if not is_ours(config.speculative_config) or not config.use_v2_model_runner:
            original(config)
            return
        if KEY not in config.additional_config:
            config.additional_config = {**config.additional_config, KEY: _plan_of(config)}
        object.__setattr__(config.speculative_config, DROPS, config.additional_config[KEY]["drops_last_block"])
        names = module.NgramGPUTypes
        module.NgramGPUTypes = Literal["ngram_gpu", "custom_class"]
        try:
            original(config)
        finally:
            module.NgramGPUTypes = names

    return post_init


def _plan_of(config: Any) -> dict[str, object]:
    """Raises ConfigError, PluginLoadError, Refusal: whatever can be refused before weights load."""
    from ..vllm_shared.prepare import Prepared

    needs = Prepared.of(method_of(config.speculative_config.model), config, in_worker=False).needs
    kv = needs.extension(DraftKV)
    return {
        "lookahead": needs.lookahead if kv else 0,
        "drops_last_block": kv is not None and kv.depends_on_next_token,
        "hidden_states": list(needs.hidden_states),
    }


def _lookahead(original: Callable[[Any], int]) -> Callable[[Any], int]:
    @wraps(original)
    def num_lookahead_tokens(config: Any) -> int:
        """Slots past the newest token in vLLM's pages, for the KV of drafts."""
        return int(config.additional_config[KEY]["lookahead"]) if _is_planned(config) else original(config)

    return num_lookahead_tokens


def _is_planned(config: Any) -> bool:
    return is_ours(config.speculative_config) and KEY in config.additional_config


def _block_drop(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    @wraps(original)
    def use_eagle_block_drop(speculative: Any) -> bool:
        """Whether the last cached block is computed anew: its last row was computed from the token after the block."""
        return bool(getattr(speculative, DROPS, False)) or original(speculative)

    return use_eagle_block_drop


def _init_speculator(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        """Called while the runner is made."""
        if not is_ours(vllm_config.speculative_config):
            return original(vllm_config, device, req_states)
        from .hooks import install
        from .speculator import Speculator

        install()
        return Speculator(vllm_config, device, req_states)

    return init_speculator
