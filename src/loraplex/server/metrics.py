"""Prometheus metrics: the engine's figures read at scrape time, and HTTP counters. No label holds a tenant, and the
number of series does not depend on how many adapters there are.
"""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from loraplex.server.engine_metrics import EngineCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TPOT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(self, engine: EngineCollector) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(engine)
        self._http = Counter(
            "loraplex_http_requests", "HTTP requests by route and status.", ("route", "status"), registry=self.registry
        )
        self._errors = Counter(
            "loraplex_errors",
            "Errors that were answered.",
            ("code", "reason"),
            registry=self.registry,
        )
        self._ttft_s = self._histogram("time_to_first_token", "From arrival to the first token.", _TTFT_BUCKETS_S)
        self._tpot_s = self._histogram("time_per_output_token", "Per token after the first.", _TPOT_BUCKETS_S)
        self._e2e_s = self._histogram("request", "From arrival to the end of the answer.", _E2E_BUCKETS_S)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"loraplex_{name}_seconds", help_text, registry=self.registry, buckets=buckets)

    def observe_http(self, route: str, status: int) -> None:
        """Count one HTTP request. `route` is the template of the route, not the path."""
        self._http.labels(route, str(status)).inc()

    def observe_error(self, code: str, reason: str | None) -> None:
        """Count one error that was answered, also after a stream had begun. Both are of fixed sets."""
        self._errors.labels(code, reason or "").inc()

    def observe_generation(self, ttft_s: float, decode_s: float, num_output_tokens: int, e2e_s: float) -> None:
        """Book the latencies of one generation that ended well."""
        self._ttft_s.observe(ttft_s)
        self._e2e_s.observe(e2e_s)
        if num_output_tokens > 1:
            self._tpot_s.observe(decode_s / (num_output_tokens - 1))

    def render(self) -> bytes:
        """The scrape, in Prometheus' text format."""
        return generate_latest(self.registry)
