"""The metrics of several replicas on one page, told apart by a label. It asks nobody."""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


class _Pages(Collector):
    def __init__(self, pages: Sequence[tuple[str, bytes]]) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, text in self._pages:
            for family in text_string_to_metric_families(text.decode()):
                whole = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, "replica": replica}
                    whole.add_sample(sample.name, labels, sample.value, sample.timestamp)
        yield from families.values()


def merged(pages: Sequence[tuple[str, bytes]]) -> bytes:
    """One page in Prometheus' text format: every sample of every page, with its `replica`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Pages(pages))
    return generate_latest(registry)
