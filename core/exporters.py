"""The engine's metrics as text: Prometheus's format, and those that hook plugins register."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.sdk import ConfigError
from specdec.sdk.errors import did_you_mean

from .hooks import HookPlugins
from .metrics import Counter, Metric

PROMETHEUS = "prometheus"


def export(name: str, metrics: Sequence[Metric], hooks: HookPlugins) -> str:
    """The metrics in one format.

    Raises ConfigError SD-E132 if nobody offers it, PluginLoadError SD-E118 if a plugin's exporter fails.
    """
    if name == PROMETHEUS:
        return prometheus_text(metrics)
    exporters = hooks.offered("register_metrics_exporters", "metrics exporter")
    if name not in exporters:
        offered = [PROMETHEUS, *exporters]
        meant = did_you_mean(name, offered)
        facts = ({"did you mean": meant} if meant else {}) | {"offered": ", ".join(offered)}
        raise ConfigError("SD-E132", f"there is no metrics exporter {name!r}", facts)
    with exporters[name].blamed():
        return str(exporters[name].value(metrics))


def prometheus_text(metrics: Sequence[Metric]) -> str:
    """Text format 0.0.4: a TYPE line per name, then one sample per set of labels; names end in `_total`."""
    lines: list[str] = []
    for metric in metrics:
        name = f"{metric.name}_total"
        declaration = f"# TYPE {name} counter"
        lines += [] if declaration in lines else [declaration]
        if isinstance(metric, Counter):
            lines.append(_sample(name, metric.labels, metric.value))
        else:
            for position, value in enumerate(metric.values):
                lines.append(_sample(name, metric.labels | {"position": str(position)}, value))
    return "\n".join(lines) + "\n"


def _sample(name: str, labels: dict[str, str], value: float) -> str:
    told = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{told}}} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
