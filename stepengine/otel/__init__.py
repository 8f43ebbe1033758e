"""
Spans and metrics from run events.

What lives here: an observer that turns events into OpenTelemetry spans and metrics under the GenAI conventions. The package
`opentelemetry` is imported only here, on first use.

What must not: setting up exporters (the application chooses the SDK), and any influence on a run.
"""

__all__: tuple[str, ...] = ()
