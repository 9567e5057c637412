"""Metrics in Prometheus's text format: what an engine exports as "prometheus"."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from specdec.core.host import Counter, Gauge, Metric, Vector

Family = CounterMetricFamily | GaugeMetricFamily


@dataclass(frozen=True, eq=False)  # a registry keeps collectors by identity
class _Families:
    """The metrics as prometheus-client collects them: one family per name, whatever their order."""

    metrics: Sequence[Metric]

    def collect(self) -> Iterator[Family]:
        families: dict[str, Family] = {}
        for metric in self.metrics:
            labels = (*metric.labels, "position") if isinstance(metric, Vector) else tuple(metric.labels)
            kind = GaugeMetricFamily if isinstance(metric, Gauge) else CounterMetricFamily
            family = families.setdefault(metric.name, kind(metric.name, metric.name, labels=labels))
            if isinstance(metric, Counter | Gauge):
                family.add_metric(tuple(metric.labels.values()), metric.value)
                continue
            for position, value in enumerate(metric.values):
                family.add_metric((*metric.labels.values(), str(position)), value)
        yield from families.values()


def prometheus_text(metrics: Sequence[Metric]) -> str:
    """Prometheus's text format; names of counters end in `_total`."""
    registry = CollectorRegistry()
    registry.register(_Families(metrics))
    return generate_latest(registry).decode()
