"""Prometheus metrics of one application."""

from collections.abc import Callable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Metrics:
    """Counters and histograms. Each application has its own registry."""

    registry: CollectorRegistry
    requests: Counter
    seconds: Histogram
    rejected: Counter
    batch_texts: Histogram
    batch_seconds: Histogram
    routes: set[str] = field(default_factory=set)
    """Paths with their own label; all other paths share the label ``other``."""

    @classmethod
    def create(cls) -> "Metrics":
        """Return metrics at zero."""
        own = CollectorRegistry()
        return cls(
            own,
            Counter("pluralign_requests", "Requests answered.", ["route", "status"], registry=own),
            Histogram("pluralign_request_seconds", "Seconds per request.", ["route"], registry=own),
            Counter("pluralign_rejected", "Requests rejected with 503.", ["route"], registry=own),
            Histogram("pluralign_batch_texts", "Texts per scoring batch.", buckets=BATCH_BUCKETS, registry=own),
            Histogram("pluralign_batch_seconds", "Seconds per scoring batch.", registry=own),
        )

    def count_request(self, path: str, status: int, seconds: float) -> None:
        """Count one request."""
        route = path if path in self.routes else "other"
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)
        if status == 503:
            self.rejected.labels(route).inc()

    def count_batch(self, texts: int, seconds: float) -> None:
        """Count one scoring batch."""
        self.batch_texts.observe(texts)
        self.batch_seconds.observe(seconds)

    def watch_queue(self, length: Callable[[], int]) -> None:
        """Report the number of texts waiting to be scored."""
        Gauge("pluralign_queue_texts", "Texts waiting to be scored.", registry=self.registry).set_function(length)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)
