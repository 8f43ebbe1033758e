"""``stepengine ask``: one model call, to test a model."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import attrs
import typer

from stepengine.cli import bench
from stepengine.cli.exits import Exit, print_error
from stepengine.cli.options import ApiKeyEnv, Config, Options, Price, read_text_or_stdin
from stepengine.cli.perform import FinishedRun, add_price_or_key_advice, describe_ending, run_agent_to_end
from stepengine.cli.screen.render import format_cost, format_tokens, one_line, result_to_json, to_ascii_json, visible
from stepengine.data import events as ev
from stepengine.data.definition import AgentDefinition
from stepengine.data.models import ModelSettings

SHOWN = ("status", "stop_reason", "text", "error", "usage", "cost", "warnings")


def ask(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model, such as anthropic/claude-sonnet-4-5.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from stdin.")],
    *,
    system: Annotated[str, typer.Option(help="System prompt.", metavar="TEXT")] = "",
    base_url: Annotated[
        str,
        typer.Option(
            help="Base URL of an OpenAI-compatible server (Chat Completions) that serves MODEL.", metavar="URL"
        ),
    ] = "",
    api_key_env: ApiKeyEnv = "",
    price: Price = "",
    max_tokens: Annotated[
        int, typer.Option(help="Maximum tokens of the reply; 0 for the provider's default.", min=0)
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, at the end.")] = False,
    config: Config = None,
) -> Exit:
    """
    Call a model once, and stream its reply.

    The quickest test of a key, an address and a model name. Usage and cost are printed to stderr.

    Examples:
      stepengine ask anthropic/claude-haiku-4-5 "Say hello."
      stepengine ask openai/gpt-5-mini - --system "One word." < question.txt
      stepengine ask llama3.2 "Say hello." --base-url http://localhost:11434/v1
      stepengine ask "anthropic/claude-haiku-4-5 | openai/gpt-5" "Hello" --json
    """
    from stepengine.engine import Engine

    options = Options(
        model=[model], base_url=base_url, api_key_env=api_key_env, price=price, config=config
    ).with_settings()
    settings = ModelSettings(max_tokens=max_tokens or None)
    agent: AgentDefinition = AgentDefinition("ask", model=model, system_prompt=system, settings=settings)
    talk = CallDisplay(model, quiet=as_json)
    limits = attrs.evolve(options.settings.limits, max_steps=1, on_max_steps="stop", ask=False)
    models, pricing = bench.make_model_registry(options), bench.make_pricing(options)
    engine = Engine([agent], models=models, observers=[talk], limits=limits, pricing=pricing)
    began = time.monotonic()
    run = run_agent_to_end(engine, agent, read_text_or_stdin(prompt), None)
    return _print_result(run, options, talk, time.monotonic() - began, as_json=as_json)


class CallDisplay:
    """
    Shows one model call while it runs: text on stdout, everything else on stderr.

    Attributes:
        model: The model that replied.
        streamed: Whether text was shown.
    """

    def __init__(self, model: str, *, quiet: bool) -> None:
        self.model = model
        self.streamed = False
        self._quiet = quiet

    def on_event(self, event: ev.Event) -> None:
        """Print text, retries and a discarded reply as they arrive, and store the name of the model that replied."""
        if isinstance(event, ev.ModelFinished) and event.reply is not None:
            self.model = event.reply.model or self.model
        elif isinstance(event, ev.ModelRetry):
            print_error(f"attempt {event.attempt} failed; retrying in {event.wait:.1f} s: {event.error}")
        elif isinstance(event, ev.TextDelta) and not self._quiet:
            self.streamed = True
            print(visible(event.text), end="", flush=True)
        elif isinstance(event, ev.ReplyDiscarded) and self.streamed:
            print(flush=True)
            self.streamed = False
            print_error("the reply was interrupted and discarded")


def _print_result(run: FinishedRun, options: Options, display: CallDisplay, seconds: float, *, as_json: bool) -> Exit:
    """Print the reply or its JSON, then an error and the cost on stderr; return the exit code."""
    result = run.result
    if as_json:
        told = result_to_json(result)
        print(to_ascii_json({"model": display.model, **{name: told[name] for name in SHOWN}}))
    elif display.streamed:
        print(flush=True)
    elif result.text:
        print(visible(result.text))
    if run.code is not Exit.COMPLETED:
        print_error(add_price_or_key_advice(describe_ending(run), run, options))
    if result.usage.requests and not as_json:
        spent = [
            one_line(display.model),
            format_tokens(result.usage),
            format_cost(result.cost, usage=result.usage),
            f"{seconds:.1f} s",
        ]
        print(" | ".join([part for part in spent if part]), file=sys.stderr)
    return run.code
