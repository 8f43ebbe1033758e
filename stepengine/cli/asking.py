"""``stepengine ask``: one model call, to see in one line whether a model answers."""

from __future__ import annotations

import sys
import time
from typing import Any

import attrs

from stepengine.cli import running
from stepengine.cli.options import Options, UsageProblem
from stepengine.cli.report import Exit, json_of, money, tokens
from stepengine.cli.running import Run, complain
from stepengine.cli.screen import dumps, one_line, visible
from stepengine.data import events as ev
from stepengine.data.models import ModelSettings
from stepengine.errors import StepEngineError

__all__ = ("Talk", "ask_command")

SHOWN = ("status", "stop_reason", "text", "error", "usage", "cost", "warnings")


class Talk:
    """
    Shows one model call while it goes on: text on stdout, everything else on stderr.

    Attributes:
        model: The model that answered.
        streamed: Whether text was shown.
    """

    def __init__(self, model: str, *, quiet: bool) -> None:
        self.model = model
        self.streamed = False
        self._quiet = quiet

    def on_event(self, event: ev.Event) -> None:
        """Show *event*."""
        if isinstance(event, ev.ModelFinished) and event.reply is not None:
            self.model = event.reply.model or self.model
        elif isinstance(event, ev.ModelRetry):
            complain(f"attempt {event.attempt} failed, the next one follows in {event.wait:.1f} s: {event.error}")
        elif isinstance(event, ev.TextDelta) and not self._quiet:
            self.streamed = True
            print(visible(event.text), end="", flush=True)
        elif isinstance(event, ev.ReplyDiscarded) and self.streamed:
            print(flush=True)
            self.streamed = False
            complain("the reply broke off; what it said does not count")


def ask_command(options: Options, *, system: str, max_tokens: int) -> Exit:
    """Call the model of *options* once and print what it says."""
    from stepengine.data.definition import AgentDefinition
    from stepengine.engine import Engine

    settings = ModelSettings(max_tokens=max_tokens or None)
    model, as_json = (options.model or [""])[0], options.as_json
    agent: AgentDefinition[Any] = AgentDefinition("ask", model=model, system_prompt=system, settings=settings)
    talk = Talk(model, quiet=as_json)
    began = time.monotonic()
    try:
        options = options.in_force()
        limits = attrs.evolve(options.settings.limits, max_steps=1, on_max_steps="stop")
        engine = Engine([agent], models=running.models_of(options), observers=[talk], limits=limits)
        text = sys.stdin.read() if options.prompt == "-" else options.prompt
        run = running.perform(engine, agent, text, None)
    except UsageProblem as problem:
        return complain(str(problem))
    except StepEngineError as error:
        return complain(error.message)
    return _told(run, talk, time.monotonic() - began, as_json=as_json)


def _told(run: Run, talk: Talk, seconds: float, *, as_json: bool) -> Exit:
    result = run.result
    if as_json:
        told = json_of(result)
        print(dumps({"model": talk.model, **{name: told[name] for name in SHOWN}}))
    elif talk.streamed:
        print(flush=True)
    elif result.text:
        print(visible(result.text))
    if run.code is not Exit.COMPLETED:
        complain(running.ending_of(run))
    if result.usage.requests and not as_json:
        spent = [one_line(talk.model), tokens(result.usage), money(result.cost), f"{seconds:.1f} s"]
        print(" | ".join([part for part in spent if part]), file=sys.stderr)
    return run.code
