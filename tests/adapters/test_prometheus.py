"""Metrics as Prometheus reads them: what an engine exports unless another name is given."""

from specdec.adapters.prometheus import prometheus_text
from specdec.core.registry import PluginSettings
from specdec.core.registry.functions import call_offered
from specdec.core.request.metrics import Counter, Vector

METRICS = [
    Counter("specdec:steps", 3, {"model_name": 'a "b"'}),
    Vector("specdec:accepted", (2, 1), {"engine": "0"}),
    Counter("specdec:steps", 4, {"model_name": "c"}),
]


def test_it_is_found_by_name():
    offered = call_offered("metrics_exporters", "prometheus", METRICS, str, PluginSettings(), ())
    assert offered == prometheus_text(METRICS)


def test_prometheus_text_has_one_sample_per_label_set():
    text = prometheus_text(METRICS)
    assert [line for line in text.splitlines() if not line.startswith("#")] == [
        'specdec:steps_total{model_name="a \\"b\\""} 3.0',
        'specdec:steps_total{model_name="c"} 4.0',
        'specdec:accepted_total{engine="0",position="0"} 2.0',
        'specdec:accepted_total{engine="0",position="1"} 1.0',
    ]
