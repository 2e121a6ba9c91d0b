"""Prometheus metrics of a gateway."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from trainer.gateway.session import ROW_REASONS

_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300)


class GatewayMetrics:
    """Series of one gateway."""

    def __init__(self) -> None:
        """Start all at zero."""
        self.registry = CollectorRegistry()
        self.rows = self._counter("gateway_rows", "Rows that began, by reason.", "reason")
        self.replies = self._counter("gateway_replies", "Recorded replies, by API and finish.", "api", "finish")
        self.tokens = self._counter("gateway_reply_tokens", "Tokens of recorded replies.")
        self.replaced = self._counter("gateway_replaced_replies", "Replies that were sampled again for equal requests.")
        self.unparsed = self._counter("gateway_unparsed_calls", "Replies whose call could not be parsed.")
        self.refused = self._counter("gateway_refused_requests", "Requests that were refused, by code.", "code")
        self.lost = self._counter("gateway_lost_turns", "Turns whose harness disconnected; they are not recorded.")
        self.finished = self._counter("gateway_finished_sessions", "Finished sessions, by outcome.", "outcome")
        self.open = Gauge("gateway_open_sessions", "Open sessions.", registry=self.registry)
        self.seconds = Histogram("gateway_reply_seconds", "Time of a reply.", buckets=_SECONDS, registry=self.registry)
        for reason in ROW_REASONS:
            self.rows.labels(reason)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(name, help_text, labels, registry=self.registry)

    def text(self) -> bytes:
        """Return all series in Prometheus's text format."""
        return generate_latest(self.registry)
