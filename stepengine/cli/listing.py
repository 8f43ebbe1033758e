"""
The table of commands: each with its group, its module and the first line of its help.

The module of a command is imported when the command is called or its own help is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from stepengine.cli.exits import Exit
from stepengine.cli.interrupts import loading

__all__ = ("FIRST", "GROUPS", "LISTED", "OVERVIEW", "UNDER", "ListedCommand")

OVERVIEW = r"""
Run programmatic LLM agents: Python generators decide, the engine performs.

Start here (no key, no network):
  stepengine demo
  stepengine init my-agent
  stepengine agents list
  stepengine agents models
  stepengine run code_searcher \
      --params '{"search_queries": [{"pattern": "def main"}]}'

Every run is recorded. Look at it, go on with it, repeat it:
  stepengine run ./agents/mine.py "Go"
  stepengine chat
  stepengine runs
  stepengine show --last
  stepengine show --last --html --open
  stepengine resume --last --answer q3=yes
  stepengine replay --last
"""

FIRST = """\
Agents as Python generators: they decide, the engine performs.

  stepengine demo                    watch one work; no key, no network
  stepengine init my-agent           a project: agent, tests, a recorded run
  stepengine config doctor           which models and tools work here
  stepengine run AGENT "Do this"     run one of `stepengine agents list`
  stepengine chat                    talk with one; it asks before it acts
  stepengine show --last             every run is recorded: look at it,
  stepengine resume --last           go on with it, or `replay` it for nothing
  stepengine --help                  all commands; COMMAND --help for one"""
"""What is shown to somebody who types no command: how a day begins."""


class ListedCommand(NamedTuple):
    """
    A command as the list shows it; its module is loaded when it is called, or its own help is asked for.

    Attributes:
        place: Its module below ``stepengine.cli``, and its function.
        text: The first line of that function's docstring.
    """

    place: str
    text: str

    def load(self) -> Callable[..., Exit]:
        """Return the function."""
        module, _, name = self.place.partition(":")
        with loading():
            function: Callable[..., Exit] = getattr(import_module(f"stepengine.cli.{module}"), name)
        return function


GROUPS = {
    "Start here": {
        "demo": ListedCommand("commands.demo:demo", "Watch an agent edit a small project, without a key."),
        "init": ListedCommand("commands.init:init", "Make a project: an agent, its tests, a recorded run, and CI."),
        "run": ListedCommand("commands.run:run", "Run an agent, and print its output."),
        "chat": ListedCommand("commands.chat:chat", "Talk with an agent: watch it work, decide what it may do."),
        "runs": ListedCommand("commands.runs:runs", "List the recorded runs of this folder, or schedules."),
        "show": ListedCommand("commands.show:show", "Show a run step by step, here or as a page for a browser."),
        "studio": ListedCommand("commands.studio:studio", "Open a page where runs are started, watched and answered."),
        "resume": ListedCommand("commands.resume:resume", "Go on with a run: answer it, or pick it up after a crash."),
        "replay": ListedCommand("commands.replay:replay", "Repeat a run from its record, without model and network."),
        "fork": ListedCommand("commands.fork:fork", "Go on from the middle of a run, in a new journal."),
        "eval": ListedCommand(
            "commands.evaluate:evaluate", "Say how good agents are at a set of tasks, with intervals."
        ),
        "serve": ListedCommand("commands.serve:serve", "Serve runs over HTTP until told to stop."),
    },
    "More commands": {
        "test": ListedCommand("commands.test:suite", "Replay runs against the present code, as a test suite."),
        "debug": ListedCommand("commands.debug:debug", "Stand at any step of a recorded run, and go both ways."),
        "ask": ListedCommand("commands.ask:ask", "Call a model once, and print its reply while it comes."),
        "undo": ListedCommand("commands.undo:undo", "Bring back the files that a run wrote."),
        "send": ListedCommand("commands.send:send", "Send a message or an answer to a run, in any process."),
        "cancel": ListedCommand("commands.cancel:cancel", "Cancel a run in another process."),
        "acp": ListedCommand("commands.acp:acp", "Serve an agent to an editor; the editor starts this command."),
    },
    "Groups of commands": {},
}
"""Commands of one word, by the panel of the list and their name; those that are needed first come first."""
UNDER = {
    "journal": (
        "Groups of commands",
        "Check, repair and move recorded runs.",
        {
            "check": ListedCommand("commands.check:check", "Check journals and files: damage, secrets, signatures."),
            "repair": ListedCommand("commands.repair:repair", "Repair a damaged journal, or make an edited one valid."),
            "scrub": ListedCommand("commands.scrub:scrub", "Copy a journal without what looks like a secret."),
            "export": ListedCommand("commands.moving:export", "Write a durable run into an ordinary journal file."),
            "import": ListedCommand("commands.moving:import_", "Let a run of a journal file go on as a durable run."),
        },
    ),
    "compare": (
        "Groups of commands",
        "Compare runs, models and versions of an agent.",
        {
            "diff": ListedCommand("commands.diff:diff", "Show what two runs did differently."),
            "impact": ListedCommand("commands.impact:impact", "Say what a change of an agent does to recorded runs."),
            "blame": ListedCommand("commands.blame:blame", "Find the step at which a failed run lost its chance."),
            "pin": ListedCommand("commands.pin:pin", "Turn a run that failed into a test that fails until repaired."),
            "improve": ListedCommand(
                "commands.improve:improve", "Search for a better version of an agent, and prove it."
            ),
            "price": ListedCommand("commands.price:price", "Say what recorded runs would have cost with other models."),
        },
    ),
    "agents": (
        "Groups of commands",
        "Agents, tools and models here; packages of agents; trust.",
        {
            "list": ListedCommand("commands.agents:agents", "List the agents that can be run."),
            "tools": ListedCommand("commands.tools:tools", "List the bundled tools, and what they take and give."),
            "models": ListedCommand(
                "commands.models:models", "List the providers of models, and whether their keys are set."
            ),
            "check": ListedCommand(
                "commands.package:check", "Check what somebody who installs a package of agents meets."
            ),
            "agree": ListedCommand("commands.package:agree", "Agree to what the agents of an installed package want."),
            "trust": ListedCommand("trusting:trust", "Let commands run the agent files of a folder."),
        },
    ),
    "config": (
        "Groups of commands",
        "Settings, policies, and whether everything here works.",
        {
            "show": ListedCommand("commands.config:config", "Show every setting, its value and where it came from."),
            "doctor": ListedCommand(
                "commands.doctor:doctor", "Say what is here, what is missing, and how to repair it."
            ),
            "policy": ListedCommand("commands.policy:policy", "Check a policy, and try it on recorded runs."),
        },
    ),
    "mcp": (
        "Groups of commands",
        "Agents as tools for MCP clients, and a look at MCP servers.",
        {
            "serve": ListedCommand("commands.mcp:serve", "Offer agents as the tools of an MCP server."),
            "inspect": ListedCommand("commands.mcp:inspect_server", "Show what an MCP server offers."),
        },
    ),
    "cassette": (
        "Groups of commands",
        "Record the HTTP traffic of any Python program, and replay it.",
        {
            "record": ListedCommand("commands.cassette:record", "Run a program and record its HTTP traffic."),
            "replay": ListedCommand("commands.cassette:replay", "Run a program on recorded replies, without network."),
        },
    ),
    "deploy": (
        "Groups of commands",
        "Durable runs: workers, orders, releases, the database.",
        {
            "worker": ListedCommand("commands.worker:worker", "Run durable runs from a database until told to stop."),
            "submit": ListedCommand("commands.submit:submit", "Order a durable run, and print its id."),
            "status": ListedCommand(
                "commands.status:status", "Show a deployment: runs, workers alive and dead, releases."
            ),
            "release": ListedCommand("commands.moving:move", "Let runs of one release go on with another."),
            "takeover": ListedCommand("commands.takeover:takeover", "Give the runs of a dead worker to the living."),
            "retry": ListedCommand("commands.retry:retry", "Continue a stopped durable run after its last record."),
            "migrate": ListedCommand("commands.migrate:migrate", "Make and update the tables of durable runs."),
            "gc": ListedCommand("commands.gc:collect", "Delete durable runs that ended long ago."),
        },
    ),
    "tokens": (
        "Groups of commands",
        "Tokens of a server of runs, and what each allows.",
        {
            "add": ListedCommand("commands.tokens:add", "Make a token, and print it: it is shown this one time."),
            "list": ListedCommand("commands.tokens:listed", "List who has a token, and for what."),
            "revoke": ListedCommand("commands.tokens:revoke", "Revoke a token: its holder is refused from then on."),
        },
    ),
}
"""Commands of two words: their group, what the first word stands for, and the commands by their second word."""
LISTED = {
    name: (group, listed)
    for group, commands in GROUPS.items()
    for name, listed in [
        *commands.items(),
        *[(first, ListedCommand("", text)) for first, (of, text, _) in UNDER.items() if of == group],
    ]
}
"""What the list shows, by name and in its order: the group, and the command or what a first word stands for."""
