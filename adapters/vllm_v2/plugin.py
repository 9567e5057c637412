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
from functools import cache, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

from specdec.sdk.errors import ConfigError, PluginLoadError, message
from specdec.sdk.extensions import DraftKV

from ..vllm import PREFIX, is_ours, method_of
from ..vllm_shared import refused_drafts
from ..vllm_shared.wrapping import around
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

    without_refused = partial(refused_drafts.without_refused, StructuredOutputManager.validate_tokens)
    functions: list[tuple[Any, str, Callable[..., Any]]] = [
        (VllmConfig, "_get_v2_model_runner_unsupported_features", _unsupported),
        (VllmConfig, "__post_init__", partial(_post_init, sys.modules[VllmConfig.__module__])),
        (SpeculativeConfig, "__post_init__", _check_as_written),
        (SpeculativeConfig, "use_eagle_block_drop", _use_eagle_block_drop),
        (spec_decode, "init_speculator", _init_speculator),
        (StructuredOutputManager, "validate_tokens", refused_drafts.keeping),
        (StructuredOutputManager, "grammar_bitmask", without_refused),
    ]
    wrapped = [(owner, name, around(getattr(owner, name), replacement)) for owner, name, replacement in functions]
    lookahead = property(around(VllmConfig.num_lookahead_tokens.fget, _num_lookahead_tokens))
    return [*wrapped, (VllmConfig, "num_lookahead_tokens", lookahead)]


def forced() -> bool:
    """Whether the user leaves vLLM no choice of a runner."""
    import vllm.envs

    return bool(vllm.envs.VLLM_USE_V2_MODEL_RUNNER)


def _check_as_written(original: Callable[[Any], Any], speculative: Any) -> Any:
    """Check what the user wrote, before vLLM fills in the rest."""
    if _names_us(speculative.model):
        from ..vllm_shared.ignored_keys import refuse_ignored

        _refuse_wrong_class(speculative)
        refuse_ignored(speculative)
    return original(speculative)


def _names_us(model: object) -> bool:
    return isinstance(model, str) and model.partition(".")[0] == "specdec" and not Path(model).exists()


def _refuse_wrong_class(speculative: Any) -> None:
    """Raise ConfigError SD-E215 if a model of this package is something that vLLM would not run as a drafter."""
    model, method = speculative.model, speculative.method
    if model == PREFIX or not (model.startswith(PREFIX) or _is_drafter(model)):
        facts = {"found": f'"model": "{model}"', "fix": f'"model": "{PREFIX}NAME", where NAME is the proposer\'s name'}
        raise ConfigError("SD-E215", "vLLM's speculative_config names no class of the adapter", facts)
    if method not in (None, "custom_class"):
        facts = {"found": f'"method": "{method}", "model": "{model}"'}
        facts["effect"] = f'vLLM would run its own method "{method}", and no proposer of ours'
        facts["fix"] = f'"model": "{model}" alone; without "model" vLLM runs its own'
        raise ConfigError("SD-E215", "vLLM's speculative_config names a method beside the class", facts)


def _is_drafter(model: str) -> bool:
    """Whether it is the path of a class that goes on from the adapter's, as that which records does."""
    from ..vllm_v1.drafter import Drafter

    try:
        found = resolve_name(model)
    except (ImportError, AttributeError, ValueError):  # ValueError: it is no path of Python's
        return False
    return isinstance(found, type) and issubclass(found, Drafter)


def _unsupported(original: Callable[[Any], list[str]], config: Any) -> list[str]:
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


def _amiss(config: Any) -> list[str]:
    """What fails in this V2 runner with drafts of anybody. Its head looks up a LoRA adapter for one row a request."""
    return [] if config.lora_config is None else ["LoRA adapters where several rows of a request are verified"]


def _post_init(module: Any, original: Callable[[Any], None], config: Any) -> None:
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


def _num_lookahead_tokens(original: Callable[[Any], int], config: Any) -> int:
    """Slots past the newest token in vLLM's pages, for the KV of drafts."""
    is_planned = is_ours(config.speculative_config) and KEY in config.additional_config
    return int(config.additional_config[KEY]["lookahead"]) if is_planned else original(config)


def _use_eagle_block_drop(original: Callable[[Any], bool], speculative: Any) -> bool:
    """Whether the last cached block is computed anew: its last row was computed from the token after the block."""
    return bool(getattr(speculative, DROPS, False)) or original(speculative)


def _init_speculator(original: Callable[..., Any], vllm_config: Any, device: Any, req_states: Any) -> Any:
    """Called while the runner is made."""
    if not is_ours(vllm_config.speculative_config):
        return original(vllm_config, device, req_states)
    from .hooks import install
    from .speculator import Speculator

    install()
    return Speculator(vllm_config, device, req_states)
