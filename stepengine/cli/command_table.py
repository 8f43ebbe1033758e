"""
The table of commands: each with its group, its module and the first line of its help.

The module of a command is imported when the command is called or its own help is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from stepengine.cli.exits import Exit
from stepengine.cli.interrupts import exit_on_interrupt

OVERVIEW = r"""
Run LLM agents written as Python generators; record, resume and replay every run.

Start here (no key, no network):
  stepengine demo
  stepengine init my-agent
  stepengine agents list
  stepengine agents models
  stepengine run code_searcher \
      --params '{"search_queries": [{"pattern": "def main"}]}'

Every run is recorded. Show it, resume it, replay it:
  stepengine run ./agents/mine.py "Go"
  stepengine chat
  stepengine runs
  stepengine show --last
  stepengine show --last --html --open
  stepengine resume --last --answer q3=yes
  stepengine replay --last
"""

FIRST = """\
LLM agents as Python generators, with runs you can replay.

  stepengine demo                    watch an agent work; no key, no network
  stepengine init my-agent           create a project with agent and tests
  stepengine config doctor           check which models and tools work here
  stepengine run AGENT "Do this"     run an agent of `stepengine agents list`
  stepengine chat                    chat with an agent; it asks before acting
  stepengine show --last             show the last run: each one is recorded
  stepengine resume --last           resume it, or `replay` it without a model
  stepengine --help                  list all commands; COMMAND --help for one"""
"""The text for ``stepengine`` without a command."""


class ListedCommand(NamedTuple):
    """
    A command in the list; its module is imported when it is called or its help is requested.

    Attributes:
        place: Its module below ``stepengine.cli``, and its function.
        text: The first line of that function's docstring.
    """

    place: str
    text: str

    def load(self) -> Callable[..., Exit]:
        """Import the command's module and return its function."""
        module, _, name = self.place.partition(":")
        with exit_on_interrupt():
            function: Callable[..., Exit] = getattr(import_module(f"stepengine.cli.{module}"), name)
        return function


GROUPS = {
    "Start here": {
        "demo": ListedCommand("commands.demo:demo", "Watch an agent edit a small project, without a key."),
        "init": ListedCommand("commands.init:init", "Create a project: an agent, its tests, a recorded run, and CI."),
        "run": ListedCommand("commands.run:run", "Run an agent, and print its output."),
        "chat": ListedCommand("commands.chat:chat", "Chat with an agent: watch it work, decide what it may do."),
        "runs": ListedCommand("commands.runs:runs", "List the recorded runs of this folder, or schedules."),
        "show": ListedCommand("commands.show:show", "Show a run step by step, here or as a page for a browser."),
        "studio": ListedCommand("commands.studio:studio", "Open a page to start, watch and answer runs."),
        "resume": ListedCommand(
            "commands.resume:resume", "Resume a run: answer its question, or continue after a crash."
        ),
        "replay": ListedCommand("commands.replay:replay", "Repeat a run from its record, without model and network."),
        "fork": ListedCommand("commands.fork:fork", "Branch a run at any step, into a new journal."),
        "eval": ListedCommand(
            "commands.evaluate:evaluate", "Evaluate agents on a set of cases, with confidence intervals."
        ),
        "serve": ListedCommand("commands.serve:serve", "Serve runs over HTTP until stopped."),
    },
    "More commands": {
        "test": ListedCommand(
            "commands.test:replay_runs_as_tests", "Replay runs against the current code, as a test suite."
        ),
        "debug": ListedCommand("commands.debug:debug", "Step through a recorded run, forwards and backwards."),
        "ask": ListedCommand("commands.ask:ask", "Call a model once, and stream its reply."),
        "undo": ListedCommand("commands.undo:undo", "Restore the files that a run wrote."),
        "send": ListedCommand("commands.send:send", "Send a message or an answer to a run, in any process."),
        "cancel": ListedCommand("commands.cancel:cancel", "Cancel a run in another process."),
        "acp": ListedCommand("commands.acp:acp", "Serve an agent to an editor; the editor starts this command."),
    },
}
"""Commands of one word, by the panel of the list and their name; those that are needed first come first."""
UNDER = {
    "journal": (
        "Check, repair and move recorded runs.",
        {
            "check": ListedCommand("commands.check:check", "Check journals and files: damage, secrets, signatures."),
            "repair": ListedCommand("commands.repair:repair", "Repair a damaged journal, or make an edited one valid."),
            "scrub": ListedCommand("commands.scrub:scrub", "Copy a journal without anything that looks like a secret."),
            "export": ListedCommand("commands.durable_runs:export_run", "Export a durable run to a journal file."),
            "import": ListedCommand(
                "commands.durable_runs:import_run", "Continue the run of a journal file as a durable run."
            ),
        },
    ),
    "compare": (
        "Compare runs, models and versions of an agent.",
        {
            "diff": ListedCommand("commands.diff:diff", "Show what two runs did differently."),
            "impact": ListedCommand("commands.impact:impact", "Report how a change to an agent affects recorded runs."),
            "blame": ListedCommand("commands.blame:blame", "Find the step that made a run fail."),
            "pin": ListedCommand("commands.pin:pin", "Turn a failed run into a test that fails until it is fixed."),
            "improve": ListedCommand(
                "commands.improve:improve", "Search for a better version of an agent, and verify it."
            ),
            "price": ListedCommand("commands.price:price", "Estimate what recorded runs would cost with other models."),
        },
    ),
    "agents": (
        "List agents, tools and models; check and trust packages.",
        {
            "list": ListedCommand("commands.agents:agents", "List the agents that can be run."),
            "tools": ListedCommand("commands.tools:tools", "List the bundled tools, their parameters and results."),
            "models": ListedCommand(
                "commands.models:models", "List the providers of models, and whether their keys are set."
            ),
            "check": ListedCommand(
                "commands.package:check_package_of_agents", "Check a package of agents as its users will find it."
            ),
            "agree": ListedCommand(
                "commands.package:approve_installed_package", "Approve what an installed package of agents requests."
            ),
            "trust": ListedCommand("code_trust:trust", "Allow commands to run the agent files of a folder."),
        },
    ),
    "config": (
        "Show settings, check policies, diagnose problems.",
        {
            "show": ListedCommand("commands.config:config", "Show every setting, its value and where it came from."),
            "doctor": ListedCommand(
                "commands.doctor:doctor", "Check the installation: what works, what to fix, and how."
            ),
            "policy": ListedCommand("commands.policy:policy", "Check a policy, and try it on recorded runs."),
        },
    ),
    "mcp": (
        "Serve agents as MCP tools, and inspect MCP servers.",
        {
            "serve": ListedCommand("commands.mcp:serve", "Serve agents as the tools of an MCP server."),
            "inspect": ListedCommand("commands.mcp:inspect_server", "Show what an MCP server offers."),
        },
    ),
    "cassette": (
        "Record the HTTP traffic of any Python program, and replay it.",
        {
            "record": ListedCommand("commands.cassette:record", "Run a program and record its HTTP traffic."),
            "replay": ListedCommand("commands.cassette:replay", "Run a program on recorded replies, without network."),
        },
    ),
    "deploy": (
        "Manage durable runs: workers, submissions, releases, database.",
        {
            "worker": ListedCommand("commands.worker:worker", "Execute durable runs from a database until stopped."),
            "submit": ListedCommand("commands.submit:submit", "Submit a durable run, and print its id."),
            "status": ListedCommand(
                "commands.status:status", "Show a deployment: runs, live and dead workers, releases."
            ),
            "release": ListedCommand(
                "commands.durable_runs:move_runs_to_release", "Move runs from one release to another."
            ),
            "takeover": ListedCommand("commands.takeover:takeover", "Assign the runs of a dead worker to live ones."),
            "retry": ListedCommand("commands.retry:retry", "Resume a stopped durable run after its last record."),
            "migrate": ListedCommand("commands.migrate:migrate", "Create and update the tables of durable runs."),
            "gc": ListedCommand("commands.gc:delete_ended_runs", "Delete durable runs that ended long ago."),
        },
    ),
    "tokens": (
        "Manage the tokens of a run server and their scopes.",
        {
            "add": ListedCommand("commands.tokens:create_token", "Create a token, and print it once."),
            "list": ListedCommand("commands.tokens:list_tokens", "List tokens, their owners and scopes."),
            "revoke": ListedCommand("commands.tokens:revoke_token", "Revoke a token: requests with it are refused."),
        },
    ),
}
"""Commands of two words: for each first word its help text, and the commands by their second word."""
LISTED = {
    **{name: (group, listed) for group, commands in GROUPS.items() for name, listed in commands.items()},
    **{first: ("Groups of commands", ListedCommand("", text)) for first, (text, _) in UNDER.items()},
}
"""The entries of the list by name, in their order: the group, and a command, or the help text of a first word."""
