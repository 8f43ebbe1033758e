"""
``stepengine chat``: one conversation after another turn, on the reference console.

Each turn is a root run of its own with a journal of its own, and goes on from the state that the one before left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import AsyncExitStack
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import attrs
import typer

from stepengine.cli import bench
from stepengine.cli.bench import Bench, bench_for, family, limits_of, registry_of
from stepengine.cli.conversations import recorded_conversations
from stepengine.cli.exits import Exit, complain
from stepengine.cli.journals import answer_with_result, is_taken, journal_at, limits_again, name_of, repeat
from stepengine.cli.options import AskForMore, CodeMode, Model, NoJournal, Options, with_options
from stepengine.cli.perform import GRACE, Run, print_warnings, reason_of, resume_hint, tell_more
from stepengine.cli.recording import (
    GOES_ON,
    RecordedRun,
    RunRecording,
    entries,
    find_recorded,
    history_file,
    policy_changes,
    script_again,
    with_record,
)
from stepengine.cli.screen.console import (
    DIGITS,
    NO,
    QUIT,
    WHICH,
    YES,
    Screen,
    TypedLines,
    console_on,
    follow,
    show_markdown,
)
from stepengine.cli.screen.interrupting import interruptible
from stepengine.cli.screen.progress import diff_lines
from stepengine.cli.screen.prompt import PASTED, SOON, Above, Prompt, PromptHistory, attached, shell_output
from stepengine.cli.screen.render import cut, message_of, money, one_line, tokens, visible
from stepengine.cli.scripts import ScriptFile
from stepengine.cli.settings import UsageProblem
from stepengine.cli.toolset import in_code_mode
from stepengine.data.alike import find_nearest
from stepengine.data.definition import AgentDefinition, normalised_id
from stepengine.data.messages import AssistantMessage, UserMessage
from stepengine.data.questions import Question, answer_problem
from stepengine.data.state import AgentState, RunResult, RunStatus
from stepengine.data.usage import Spending
from stepengine.errors import AnswerRejected, DefinitionError, StepEngineError, UnknownModel

if TYPE_CHECKING:
    from stepengine.data.hooks import StepContext
    from stepengine.data.yields import Steps
    from stepengine.journal import Journal
    from stepengine.permissions import Policy, Rule
    from stepengine.runtime.handle import RunHandle

__all__ = ("Chat", "chat")

HELP = "Say what to do. /help lists the commands, /quit leaves. What changes something is asked about first."
NO_MODEL = (
    "No model is set yet: /model PROVIDER/MODEL sets one, such as /model anthropic/claude-sonnet-4-5 with ANTHROPIC_API_KEY set; "
    "/model lists those that have a key."
)
KEYS = """\
Enter sends, Alt-Enter or Ctrl-J begins a new line. Esc or Ctrl-C stops a turn, Ctrl-C twice leaves; Ctrl-D leaves.
@path sends a file along, @@ is an at sign. !command runs in your own shell and shows the agent what came of it; !! does not show it.
//text says /text to the agent. What is said while it works is read before its next model call; commands that change something wait
for the end, those that tell something answer at once, also at a question.
Ctrl-O shows the last result or thoughts whole, Shift-Tab takes the next mode, Ctrl-R searches what was said before."""
COMMANDS = {
    "help": "this",
    "model": "[MODEL]  show or set the model of all agents, from the next turn on",
    "agents": "who may spawn whom",
    "agent": "ID  talk with another agent, in a new conversation",
    "mode": "[MODE]  show or set what holds where no rule does; Shift-Tab takes the next one",
    "rules": "what is allowed, asked about and denied",
    "forget": "NUMBER  ask again about what was allowed for good; /rules has the numbers",
    "todos": "what the agent has to do yet",
    "diff": "what was written in this chat",
    "cost": "tokens and cost by turn, agent and model",
    "context": "what goes with the next prompt, by estimate",
    "memory": "the notes that agents keep of this project and of you",
    "skill": "[NAME [TEXT]]  list the skills of the project, or send the instructions of one",
    "debug": "where the last turn is recorded",
    "undo": "bring back the files that the last turn wrote",
    "save": "FILE  write the conversation as Markdown",
    "fork": "[TURN]  go on from after a turn; by default from before the last one",
    "compact": "[HINT]  have the conversation summarised now",
    "resume": "[NUMBER|RUN]  list the conversations and runs of this folder, or continue one",
    "clear": "forget the conversation and begin a new one",
    "quit": "leave",
}
"""What may be said to the chat itself; each but the last is a method of ``Chat``."""
TELLING = frozenset({"help", "agents", "rules", "diff", "cost", "debug"})
"""Commands that change nothing and know the turn that goes on: they are done at once."""
SHOWING = frozenset({"model", "agent", "mode"})
"""Commands that only tell what holds when nothing is said behind them."""
QUEUED = "say it now? y yes, n no, Enter puts it back into the line > "
QUEUED_PLAIN = "say it now? y yes, n no > "
SENT_CHARS = 8_192
SEAT_SECONDS = 1.0
"""How long a question waits for whoever sits there to be shown it: the run goes on before its events are read."""
SHOWN_TURNS = 20
SHOWN_CONVERSATIONS = 20
SHOWN_NOTES = 50
UNDONE = "(The files that the last turn wrote were brought back to what they were before it.)"
TOO_NARROW = 20


@partial(with_options, without=("write", "shell", "as_json", "quiet"))
def chat(
    options: Options,
    agent: Annotated[
        str, typer.Argument(metavar="AGENT", help="Id or file of the agent, before what is said; default: coder.")
    ] = "",
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The first thing to say.")] = "",
    *,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with the last conversation of this folder, or with RUN, given in place of AGENT."
        ),
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Read and show plain lines, as where there is no terminal.")
    ] = False,
    model: Model = None,
    script: ScriptFile = "",
    no_journal: NoJournal = False,
    code_mode: CodeMode = False,
    ask_for_more: AskForMore = False,
) -> Exit:
    r"""
    Talk with an agent: watch it work, decide what it may do.

    Say what to do, and the next thing when it is done.

    It reads, searches and runs commands that only look (ls, git log) by itself; whatever else runs a program or changes
    a file is shown and asked about first (y, n REASON, a for always, e for all edits). What you type while it works is sent
    to it. Esc or Ctrl-C stops a turn, Ctrl-C twice leaves; /help lists what else there is. Each turn is recorded as a run.

    Several lines, a history and completion need the extra `chat`; `stepengine config doctor` tells how it is added.

    Examples:
      stepengine chat --model anthropic/claude-sonnet-4-5
      stepengine chat coder "Look at the failing test"
      stepengine chat ./agents/mine.py "Look at the test" --cwd ../project
      stepengine chat --resume
      stepengine chat --resume 20260301T080000Z-1a2b3c

    Without a model and a key, each turn gets the replies of a file from the first on:
      stepengine chat ./agents/mine.py --script replies.json

    Without a terminal nobody can be asked, so that nothing is changed:
      printf 'Which files are there?\n' | stepengine chat
    """
    from stepengine.engine.loading import AgentPlace, load_agent

    chosen = find_recorded(agent) if resume else None
    before = chosen or (_last_chat(agent) if resume else None)
    agent = (
        ("" if chosen else agent)
        or (before and (before.text("agent", "file") or before.text("agent", "id")))
        or "coder"
    )
    if before is not None:
        script = script_again(attrs.evolve(options, model=model, script=script), before)
    code_mode = code_mode or (before is not None and before.flag("options", "code_mode"))
    ask_for_more = ask_for_more or (before is not None and before.flag("options", "ask_for_more"))
    options = attrs.evolve(options, agent=agent, prompt=prompt, model=model, no_journal=no_journal, code_mode=code_mode)
    options = attrs.evolve(options, ask_for_more=ask_for_more, script=script)
    options = options.in_force()
    history = None if before is None else _left_by(before, options)
    if before is not None and before.status in GOES_ON:
        options = attrs.evolve(options, policy_changes=policy_changes(before))
    # What the tools may do is asked about, call by call, and the console itself shows the run.
    options = attrs.evolve(options, write=True, shell=True, asks=True, quiet=True)  # noqa: S604  (no process is started)
    try:
        definition = load_agent(agent, folders=options.settings.agent_folders)
    except DefinitionError as error:
        if prompt or AgentPlace.of_text(agent) is not None:
            raise
        msg = f"{error.message}. The agent stands before what is said to it: stepengine chat coder {shlex.quote(agent)}"
        raise UsageProblem(msg) from None
    made = Chat(options, in_code_mode(definition) if code_mode else definition, plain=plain)
    if history is not None and before is not None:
        made.continue_from(history, before)
    try:
        return asyncio.run(made.talk())
    except KeyboardInterrupt:  # on a plain terminal, which has shown it on the line of the prompt
        print(flush=True)
        return Exit.INTERRUPTED


def _last_chat(agent: str) -> RecordedRun:
    """
    Return the last turn of the newest chat of this folder.

    Raises:
        UsageProblem: when there is none, or it was another agent's.
    """
    here = str(Path.cwd())
    found = next((e for e in entries() if e.text("command") == "chat" and e.text("cwd") == here), None)
    if found is None:
        msg = "there is no chat of this folder to continue; begin one without --resume"
        raise UsageProblem(msg)
    if (
        agent
        and normalised_id(agent) != normalised_id(found.text("agent", "id"))
        and agent != found.text("agent", "file")
    ):
        msg = (
            f"the last chat of this folder is with {found.text('agent', 'id')!r}; leave {agent!r} out to go on with it"
        )
        raise UsageProblem(msg)
    return found


def _left_by(entry: RecordedRun, options: Options) -> RunResult:
    """Return what a recorded turn came to; no model is called and nothing is shown."""
    there = attrs.evolve(with_record(options, entry), settings=options.settings, quiet=True)
    return repeat(journal_at(entry.journal), there)


class Chat:
    """
    A conversation at a console.

    Args:
        options: What was typed.
        agent: The agent.
        plain: Read and show plain lines, whatever the terminal can do.
    """

    def __init__(self, options: Options, agent: AgentDefinition, *, plain: bool = False) -> None:
        from stepengine.permissions.policy import MODES

        settings = options.settings
        above = Above(sys.stdout)
        console = console_on(cast("TextIO", above), color=settings.get("display.color"))
        poor = console.is_dumb_terminal or bool(os.environ.get("CI")) or console.width < TOO_NARROW
        self._options = options
        self._agent = agent
        self._bench = bench_for(options, agent, is_new=True)
        self._console = console
        lines = TypedLines(sys.stdin)
        plain = plain or poor or settings.get("display.plain") or not (lines.is_terminal and console.is_terminal)
        names = [f"/{name}" for name in COMMANDS]
        history = PromptHistory(history_file())
        self._terminal = Prompt(
            console, lines, above, commands=names, root=options.cwd.resolve(), history=history, plain=plain
        )
        self._terminal.keys = {"c-o": self._show_whole, "s-tab": self._next_mode}
        self._terminal.at_once = self._at_once
        self._terminal.status = self._status
        # Until the turn is over, the rule that the answer adds does what the mode does afterwards.
        self._terminal.accepts_edits = partial(setattr, self, "_wanted", "accept_edits")
        self._screen: Screen | None = None
        self._is_working = False
        self._windows: dict[str, int | None] = {}
        self._filled: int | None = None  # tokens of the next prompt, by estimate
        self._shown = {
            "verbose": options.verbose, "level": settings.get("display.log"), "thinking": settings.get("display.thinking"),
            "markdown": not plain,
        }  # fmt: skip
        self._states: list[AgentState] = []
        self._results: list[RunResult] = []
        self._journal: Journal | None = None
        self._notes: list[str] = []
        self._leaves = False
        self._diffs: list[str] = []
        self._wanted = ""  # the mode that Shift-Tab chose
        self._waiting: RecordedRun | None = None
        self._questions: Sequence[Question] = ()
        # Nobody gets out of being asked who did not begin so.
        self._modes: list[str] = [mode for mode in MODES if mode != "bypass" or self._policy.mode == "bypass"]
        self._engines = AsyncExitStack()
        self._session_id = f"chat-{secrets.token_hex(6)}"  # what is allowed for good holds for all turns

    def continue_from(self, last: RunResult, entry: RecordedRun) -> None:
        """Continue after the *last* turn, recorded as *entry*, or with this turn if it is not over. Show its last messages."""
        self._states = [last.state]
        self._session_id = entry.text("session_id") or self._session_id
        self._filled = sum(_context_parts(last.state).values())
        self._waiting = entry if entry.status in GOES_ON else None
        self._questions = last.pending_questions
        for message in _spoken_messages(last.state)[-SHOWN_TURNS:]:
            if message.role != "user" and self._shown["markdown"]:
                show_markdown(self._console, message.text)
                continue
            lines = visible(message.text.strip()).splitlines()
            self._terminal.say(
                "\n".join([f"{'> ' if message.role == 'user' else '  '}{line}" for line in lines]), "dim"
            )

    async def talk(self) -> Exit:
        """Take one turn after another; return the exit code of the last one."""
        code = Exit.COMPLETED
        self._terminal.say(f"{self._agent.id}: {one_line(self._agent.description, 200)}".rstrip(": "))
        self._terminal.say(HELP)
        if not (
            self._options.script or self._options.models or self._options.settings.get("model") or self._agent.model
        ):
            self._terminal.say(NO_MODEL, "yellow")
        async with self._engines:
            self._engines.enter_context(_leave_at_sigterm())
            self._engines.enter_context(self._terminal.taken())
            await self._engines.enter_async_context(self._bench.engine)
            if self._waiting is not None:
                code = await self._go_on(self._waiting)
                if code is Exit.SUSPENDED or self._leaves:
                    return code
            said: str | None = self._options.prompt or await self._terminal.next()
            while said is not None and said.strip() not in QUIT:
                code = await self._do(said, code)
                if code is Exit.SUSPENDED or self._leaves:
                    return code
                said = await self._terminal.next()
        return code

    async def _do(self, said: str, code: Exit) -> Exit:
        """Do what was said; return its exit code, or the previous one if it has none."""
        if self._wanted:
            mode, self._wanted = self._wanted, ""
            await self._decide_by(attrs.evolve(self._policy, mode=cast("Any", mode)))
        if said.startswith("/") and not said.startswith("//"):
            return await self._command(said)
        if said.startswith("!"):
            await self._shell(said)
        elif said.strip():
            said = said.removeprefix("/") if said.startswith("//") else said
            return await self._turn(self._compose_prompt(said), title=said)
        return code

    def _compose_prompt(self, said: str) -> str:
        """Return what goes to the agent: what was said, the files that it names, and what happened since the last turn."""
        found = attached(said, self._options.cwd.resolve())
        for note in found.notes:
            self._terminal.say(f"  {visible(note)}", "dim")
        sent = "\n\n".join([*self._notes, found.text])
        self._notes.clear()
        return sent

    async def _shell(self, said: str) -> None:
        """Run a command of the person's own; only who sits there may."""
        if self._terminal.was_pasted:
            self._terminal.say(PASTED, "yellow")
            return
        if not self._terminal.lines.is_terminal:
            complain("!command is for somebody at a terminal; nothing was run")
            return
        command = said.lstrip("!").strip()
        try:
            output = await shell_output(command, self._options.cwd.resolve())
        except (OSError, ValueError) as error:  # the folder is gone, or there is a NUL in it
            self._terminal.say(f"it was not run: {visible(str(error))}", "yellow")
            return
        self._terminal.say(visible(output))
        if not said.startswith("!!"):
            self._notes.append(f"(I ran `{command}` myself. It printed:)\n{output[:SENT_CHARS]}")

    async def _at_once(self, said: str) -> bool:
        """Carry out a command that is possible while a turn is under way, or at a question; say so when there is no such command."""
        name, _, rest = said[1:].strip().partition(" ")
        if name in COMMANDS and name not in TELLING and (name not in SHOWING or rest.strip()):
            return False
        if self._screen is not None:
            self._screen.make_room()
        self._terminal.echo(now=True)
        await self._command(said)
        return True

    async def _command(self, said: str) -> Exit:
        name, _, rest = said[1:].strip().partition(" ")
        if name not in COMMANDS:
            near = find_nearest(name, COMMANDS, n=1)
            hint = f"did you mean /{near[0]}?" if near else "/help lists what there is"
            self._terminal.say(
                f"there is no /{one_line(name, 40)}; {hint}  (//{one_line(name, 40)} says it to the agent)"
            )
            return Exit.COMPLETED
        try:
            code: Exit | None = await getattr(self, f"_do_{name}")(rest.strip())
        except (UsageProblem, StepEngineError, OSError) as error:
            self._terminal.say(visible(str(error)), "yellow")
        else:
            return code or Exit.COMPLETED
        return Exit.COMPLETED

    # --- commands -----------------------------------------------------------------------------------------------------

    async def _do_help(self, _: str) -> None:
        width = max(map(len, COMMANDS)) + 1
        self._terminal.say(KEYS)
        self._terminal.say("\n".join([f"  /{name:{width}} {about}" for name, about in COMMANDS.items()]))

    async def _do_model(self, model: str) -> None:
        if not model:
            from stepengine.cli.commands.models import describe_model, known, list_providers

            now = _model_name(self._options, self._agent)
            registry = registry_of(self._options.settings)
            self._terminal.say(f"now: {one_line(now)}")
            with contextlib.suppress(UnknownModel):  # that of a server at --base-url
                for model_known in known(registry, now):
                    self._terminal.say(describe_model(model_known))
            for entry in list_providers(registry):
                if entry.key != "missing":
                    self._terminal.say(f"  {entry.prefix}/...  key {one_line(entry.key, 60)}")
            return
        options = attrs.evolve(self._options, model=[m for m in self._options.model or () if "=" in m] + [model])
        bench.models_of(options).check(model)
        await self._take(options, self._agent)
        self._terminal.say(f"from the next turn on: {one_line(model)}; what was allowed for good is asked about again")

    async def _do_agents(self, _: str) -> None:
        from stepengine.cli.commands.agents import tree_lines

        known = family(self._agent, self._options.agent, self._options.settings.agent_folders)
        self._terminal.say("\n".join(tree_lines(known)))

    async def _do_cost(self, _: str) -> None:
        spent = Spending()
        for number, result in enumerate(self._results, start=1):
            spent += result.spending
            self._terminal.say(
                f"  turn {number}   {tokens(result.usage) or 'no model call'}   {money(result.cost, of=result.usage)}"
            )
        if self._is_working and self._screen is not None:
            so_far = self._screen.spent
            self._terminal.say(f"  this turn so far   {tokens(so_far.usage) or 'no model call'}   {money(so_far.cost)}")
        for what, used, costs in (
            ("agent", spent.by_agent, spent.cost_by_agent),
            ("model", spent.by_model, spent.cost_by_model),
        ):
            for name, usage in used.items():
                said = tokens(usage) or "no tokens reported"
                self._terminal.say(f"  {what} {one_line(name, 60)}   {said}   {money(costs[name], of=usage)}")
        self._terminal.say(f"in all {tokens(spent.usage) or 'no model call'}   {money(spent.cost, of=spent.usage)}")

    async def _do_agent(self, name: str) -> None:
        from stepengine.engine import load_agent

        if not name:
            self._terminal.say(
                f"now: {self._agent.id}; /agent ID takes another one, /agents lists those that it may spawn"
            )
            return
        agent = load_agent(name, folders=self._options.settings.agent_folders)
        agent = in_code_mode(agent) if self._options.code_mode else agent
        await self._take(attrs.evolve(self._options, agent=name), agent)
        self._terminal.say(f"{agent.id}: {one_line(agent.description, 200)}".rstrip(": "))
        await self._do_clear("")

    async def _do_mode(self, mode: str) -> None:
        if not mode:
            self._terminal.say(f"now: {self._policy.mode}; there are {', '.join(self._modes)}")
            return
        if mode not in self._modes:
            msg = f"{one_line(mode, 40)} is no mode that this chat can take; there are {', '.join(self._modes)}"
            raise UsageProblem(msg)
        await self._decide_by(attrs.evolve(self._policy, mode=cast("Any", mode)))
        self._terminal.say(f"mode {mode}, from the next turn on")

    def _next_mode(self) -> None:
        modes = self._modes
        self._wanted = modes[(modes.index(self._wanted or self._policy.mode) + 1) % len(modes)]
        self._terminal.say(f"mode {self._wanted}, from the next turn on")

    @property
    def _policy(self) -> Policy:
        return bench.policy_of(self._options) or bench.asking_policy()

    async def _decide_by(self, policy: Policy) -> None:
        """Have *policy* decide from the next turn on; what was allowed for good in this conversation stays so."""
        from stepengine.permissions import Category

        for rule in self._bench.engine.remembered(self._session_id):
            if isinstance(rule.matcher, Category):
                continue  # all edits: the mode says that, and another mode ends it
            policy = policy.with_session_rule(self._session_id, rule)
        await self._take(attrs.evolve(self._options, policy=policy, policy_changes=None), self._agent)

    def _allowed_rules(self) -> list[Rule]:
        """Return what was allowed for good, in files and in this conversation: in the engine of now, and in those before it."""
        policy, here = self._policy, f"session:{self._session_id}"
        before = [rule for rule in policy.rules if str(rule.scope) == here]
        return [*policy.remembered, *before, *self._bench.engine.remembered(self._session_id)]

    async def _do_rules(self, _: str) -> None:
        allowed = self._allowed_rules()
        self._terminal.say(f"mode {self._policy.mode}")
        for rule in self._policy.rules:
            if rule not in allowed:
                self._terminal.say(f"  {rule.decision:6} {one_line(str(rule.matcher), 200)}")
        for number, rule in enumerate(allowed, start=1):
            self._terminal.say(f"  always {number}  {one_line(str(rule.matcher), 200)}")

    async def _do_forget(self, which: str) -> None:
        allowed = self._allowed_rules()
        number = _number(which)
        if not 1 <= number <= len(allowed):
            there = (
                f"1 to {len(allowed)}, as /rules numbers them" if allowed else "and nothing was allowed for good yet"
            )
            msg = f"/forget NUMBER has it asked about again, {there}"
            raise UsageProblem(msg)
        rule, policy = allowed[number - 1], self._policy
        if rule in (*policy.rules, *policy.remembered):
            rules, remembered = [[r for r in kept if r != rule] for kept in (policy.rules, policy.remembered)]
            await self._decide_by(attrs.evolve(policy, rules=rules, remembered=remembered))
        else:
            self._bench.engine.forget(self._session_id, rule.id)
        self._terminal.say(f"asked about again in this chat: {one_line(str(rule.matcher), 200)}")

    async def _do_todos(self, _: str) -> None:
        todos = self._states[-1].context.get("todos", ()) if self._states else ()
        lines = [f"  [{'x' if todo['completed'] else ' '}] {one_line(todo['task'], 200)}" for todo in todos]
        self._terminal.say("\n".join(lines) or "there are no todos")

    async def _do_diff(self, _: str) -> None:
        diffs = [*self._diffs, *(self._screen.diffs if self._is_working and self._screen is not None else ())]
        for diff in diffs:
            for line, style in diff_lines(diff):
                self._terminal.say(line, style)
        if not diffs:
            self._terminal.say("nothing was written in this chat")

    async def _do_memory(self, _: str) -> None:
        from stepengine.tools.bundled import FileMemory
        from stepengine.tools.bundled.remembering import project_scope

        store, scopes = FileMemory(), (project_scope(self._options.cwd.resolve()), "user")
        notes = [(scope.partition(":")[0], n) for scope in scopes for n in await store.search(scope, "", SHOWN_NOTES)]
        self._terminal.say(
            "\n".join([f"  {scope}  {visible(note.line)}" for scope, note in notes]) or "there are no notes"
        )

    async def _do_skill(self, said: str) -> Exit | None:
        from stepengine.workspace.skills import find_skills, instructions_of, skill_named

        name, _, words = said.partition(" ")
        folder = self._options.cwd.resolve()
        if not name:
            found = await asyncio.to_thread(find_skills, folder, user=True)
            lines = [f"  {skill.name}  {one_line(skill.description, 200)}" for skill in found.skills.values()]
            self._terminal.say("\n".join([*lines, *found.warnings]) or "there are no skills here")
            return None
        skill = await asyncio.to_thread(skill_named, folder, name, user=True)
        # Only what the person typed sends files along: a skill is somebody else's text.
        sent = "\n\n".join([instructions_of(skill), self._compose_prompt(words.strip())])
        return await self._turn(sent.rstrip(), title=f"/skill {said}")

    async def _do_debug(self, _: str) -> None:
        if self._journal is None:
            self._terminal.say("no turn of this chat is recorded")
            return
        name = name_of(self._journal)
        self._terminal.say(f"{visible(name)}\nlook into it with: stepengine debug {shlex.quote(visible(name))}")

    async def _do_clear(self, _: str) -> None:
        self._states, self._session_id = [], f"chat-{secrets.token_hex(6)}"
        self._filled = None
        self._notes.clear()
        self._terminal.say("a new conversation; the one before is recorded, and files stay as they are")

    async def _take(self, options: Options, agent: AgentDefinition) -> None:
        """Go on with other options or another agent, from the next turn on."""
        made = bench_for(options, agent, is_new=True)
        await self._engines.enter_async_context(made.engine)
        self._options, self._bench, self._agent = options, made, agent

    async def _do_context(self, _: str) -> None:
        if not self._states:
            self._terminal.say("nothing was said yet")
            return
        parts = _context_parts(self._states[-1])
        self._terminal.say("about so many tokens go with the next prompt:")
        for what, count in {**parts, "together": sum(parts.values())}.items():
            self._terminal.say(f"  {what:<17} {count:>9,}")

    async def _do_undo(self, _: str) -> None:
        from stepengine.journal import undo

        if self._journal is None:
            self._terminal.say("there is no recorded turn to undo")
            return
        root = self._options.cwd.resolve()
        planned = str(undo(self._journal, root, dry_run=True, partial=True))
        self._terminal.say(f"this would be done:\n{visible(planned)}")
        if ((await self._terminal.line("bring them back? y/n > ")) or "").strip().lower() not in YES:
            self._terminal.say("nothing was done")
            return
        # A turn of this chat, which this process recorded.
        self._terminal.say(visible(str(undo(self._journal, root, partial=True, trust=True))))
        self._notes.append(UNDONE)

    async def _do_save(self, file: str) -> None:
        if not file:
            msg = "/save FILE writes the conversation as Markdown; name a file that there is not yet"
            raise UsageProblem(msg)
        said = _spoken_messages(self._states[-1]) if self._states else []
        parts = [f"## {'You' if m.role == 'user' else self._agent.id}\n\n{m.text.strip()}\n" for m in said]
        _write_new(Path(file), "\n".join(parts))
        self._terminal.say(f"wrote {one_line(file)}")

    async def _do_fork(self, turn: str) -> None:
        last = len(self._states) - 1
        number = _number(turn) if turn else last
        if not 0 <= number <= last:
            there = f"0 to {last}; without one, from before the last" if self._states else "and there is none yet"
            msg = f"/fork TURN goes on from after a turn, {there}"
            raise UsageProblem(msg)
        self._states, self._session_id = self._states[:number], f"chat-{secrets.token_hex(6)}"
        self._filled = sum(_context_parts(self._states[-1]).values()) if self._states else None
        self._terminal.say(
            f"goes on from after turn {number}; files stay as they are, and what came after it is still recorded"
        )

    async def _do_resume(self, which: str) -> Exit | None:
        from stepengine.engine.loading import load_agent

        entry = await _choose_recorded(self._terminal, self._session_id, which, self._console.width)
        if entry is None:
            return None
        name, code_mode = entry.text("agent", "file") or entry.text("agent", "id"), entry.flag("options", "code_mode")
        options = attrs.evolve(self._options, agent=name, code_mode=code_mode)
        agent = load_agent(name, folders=options.settings.agent_folders)
        # It is repeated as it was recorded, whatever is allowed in this chat.
        recorded = attrs.evolve(options, write=False, shell=False, asks=False, policy=None, policy_changes=None)
        last = await asyncio.to_thread(_left_by, entry, recorded)
        if entry.status in GOES_ON:
            options = attrs.evolve(options, policy=None, policy_changes=policy_changes(entry))
        await self._take(options, in_code_mode(agent) if code_mode else agent)
        self._notes.clear()
        self._journal = None
        self._terminal.say(f"{self._agent.id}: continues {entry.stem}; files stay as they are")
        self.continue_from(last, entry)
        waiting, self._waiting = self._waiting, None
        return None if waiting is None else await self._go_on(waiting)

    async def _do_compact(self, hint: str) -> None:
        from stepengine.context import compact, summarize
        from stepengine.engine.packages import stands_in

        if not self._states:
            self._terminal.say("nothing was said yet")
            return

        def handle_steps(ctx: StepContext) -> Steps[None]:
            yield from compact(ctx.agent_state, summarize(directives=hint))

        before = self._states[-1]
        # Not recorded: what a journal holds is repeated with the agent's own handler.
        options = attrs.evolve(self._options, no_journal=True)
        agent = attrs.evolve(self._agent, handle_steps=handle_steps, output_schema=None, input_schema=None)
        stands_in(agent, self._agent)
        await self._turn("", agent, options)
        after = self._states[-1]
        self._filled = sum(_context_parts(after).values())
        self._terminal.say(f"{len(before.message_history)} messages before, {len(after.message_history)} now")

    # --- a turn -------------------------------------------------------------------------------------------------------

    async def _turn(
        self, said: str, agent: AgentDefinition | None = None, options: Options | None = None, *, title: str = ""
    ) -> Exit:
        from stepengine.engine.packages import id_of

        agent, options = agent or self._agent, options or self._options
        about = {"agent_id": id_of(agent), "prompt": title, "session_id": self._session_id}
        with RunRecording.begun(options, None, command="chat", **about) as recording:
            try:
                handle = self._bench.engine.start(
                    agent,
                    said,
                    previous=self._states[-1] if self._states else None,
                    session_id=self._session_id,
                    journal=recording.journal,
                    limits=limits_of(options, agent),
                )
            except StepEngineError as error:
                return complain(visible(message_of(error)))
            recording.started(handle.run_id)
            return await self._watch_turn(handle, recording, options)

    async def _go_on(self, entry: RecordedRun) -> Exit:
        """Go on with a turn that waits for an answer, or was left in the middle: ask what it asks."""
        journal = journal_at(entry.journal)
        limits = limits_again(journal, attrs.evolve(with_record(self._options, entry), settings=self._options.settings))
        self._states.clear()  # the turn's end has all that was said
        questions, code = self._questions, Exit.SUSPENDED
        while code is Exit.SUSPENDED:
            answers: dict[str, Any] = {}
            for question in questions:
                if not await self._ask_recorded(question, answers):
                    return Exit.SUSPENDED
            try:
                handle = await self._bench.engine.start_resume(
                    journal, agent=self._agent, limits=limits, in_doubt="ask", answers=answers,
                    wait_for_answers=SEAT_SECONDS,
                )  # fmt: skip
            except StepEngineError as error:
                return complain(visible(message_of(error)))
            code = await self._watch_turn(handle, RunRecording(journal, entry), self._options, settled=answers)
            if questions:
                break
            # Only the journal knew that something was cut off in the middle: that is the question.
            self._questions = questions = self._results[-1].pending_questions
            if not questions:
                break  # it waits for no person: nobody here could end that
        return code

    async def _ask_recorded(self, question: Question, answers: dict[str, Any]) -> bool:
        """Ask a recorded question; return whether it was answered."""

        def answer(said: Any) -> None:
            if isinstance(said, str) and is_taken(question.id, said):
                said = answer_with_result(said)
            elif problem := answer_problem(said, question):
                raise AnswerRejected(problem)
            answers[question.id] = said

        async def other(typed: str) -> None:
            if typed.strip() and not await self._terminal.takes(typed):
                self._terminal.say_next([self._terminal.meant(typed)])

        return await self._terminal.asked(question, answer, other)

    async def _watch_turn(
        self, handle: RunHandle, recording: RunRecording, options: Options, *, settled: Collection[str] = ()
    ) -> Exit:
        """Show a turn to its end and keep what came of it."""
        screen = self._screen = Screen(self._console, **self._shown)
        for question in self._questions:
            screen.mark_asked(question)
        self._questions = ()
        # Where nobody sits there, the engine refuses what needs a person's permission.
        permits = self._terminal.lines.is_terminal
        turn = asyncio.ensure_future(follow(handle, screen, self._terminal, permits=permits, settled=settled))
        self._is_working = True
        with self._interruptible(handle, turn) as received:
            await asyncio.wait((turn,))
        self._is_working = False
        self._diffs += screen.diffs
        if recording.journal is not None:
            options = attrs.evolve(options, journal=name_of(recording.journal), stem=recording.stem)
        if turn.cancelled():
            self._leaves = True
            again = f"; go on with: {resume_hint(options, self._agent.id)}" if recording.journal is not None else ""
            return complain(f"left in the middle of a turn{again}", Exit.INTERRUPTED)
        result = turn.result()
        recording.ended(result)
        unread = handle.unread
        self._terminal.say_next(unread)
        self._journal = recording.journal or self._journal
        self._results.append(result)
        if result.status is not RunStatus.FAILED:
            self._states.append(result.state)
            self._filled = screen.filled or sum(_context_parts(result.state).values())
        run = Run(result, received[0] if received else None)
        _explain_ending(run, len(unread), options, self._bench)
        if signal.SIGTERM in received:
            self._leaves = True
            return Exit.TERMINATED
        if received and self._terminal.waiting:
            await self._settle_waiting()
        return run.code

    async def _settle_waiting(self) -> None:
        """After Ctrl-C: ask whether what was typed for the turn that was stopped shall be said all the same."""
        for line in self._terminal.waiting:
            self._terminal.say(f"not said yet: {one_line(line, 200)}", "yellow")
        said = ((await self._terminal.line(QUEUED if self._terminal.is_rich else QUEUED_PLAIN)) or "").strip().lower()
        if said not in YES:
            self._terminal.take_back(to_line=said not in NO)

    @contextlib.contextmanager
    def _interruptible(self, handle: RunHandle, turn: asyncio.Task[Any]) -> Iterator[list[int]]:
        """Ctrl-C interrupts the turn, and soon after it leaves the chat. Gives the signals received."""
        loop = asyncio.get_running_loop()
        last = loop.time()

        def stop() -> None:
            nonlocal last
            last = loop.time()
            handle.interrupt(grace=GRACE)
            loop.call_soon_threadsafe(_show_stopping, handle, self._screen, self._terminal)

        def again() -> None:
            if loop.time() - last < SOON:
                loop.call_soon_threadsafe(turn.cancel)
            else:
                stop()

        # The keys of a terminal that is read key by key are no signals.
        pressed = partial(signal.raise_signal, signal.SIGINT)
        with interruptible(stop, again) as received, self._terminal.during(self._live, pressed):
            yield received

    def _live(self) -> str:
        return "" if self._screen is None else self._screen.live()

    def _status(self) -> str:
        """Return the status line: model, mode, folder, how much of the context is left, and what the chat cost so far."""
        model = _model_name(self._options, self._agent)
        costs = [result.cost for result in self._results]
        if self._is_working and self._screen is not None:
            costs.append(self._screen.spent.cost)
        left = self._context_left(model)
        cost = None if None in costs else sum([c for c in costs if c is not None], Decimal(0))
        after = [*([] if left is None else [f"{left} % of context left"]), money(cost)]
        return _fit_status(
            model, self._wanted or self._policy.mode, self._options.cwd.resolve(), after, self._console.width
        )

    def _context_left(self, model: str) -> int | None:
        """Return how many percent of the model's context the next prompt leaves; ``None`` where its size is not known."""
        if model not in self._windows:
            self._windows[model] = None
            with contextlib.suppress(StepEngineError):
                self._windows[model] = registry_of(self._options.settings).info(model).context_window
        window = self._windows[model]
        filled = self._screen.filled if self._is_working and self._screen is not None else 0
        return None if not window else max(0, 100 - round(100 * (filled or self._filled or 0) / window))

    def _show_whole(self) -> None:
        """Show the last thoughts or the last result of a tool with nothing left out."""
        whole = "" if self._screen is None else self._screen.whole
        self._terminal.say(visible(whole) if whole else "(no thoughts and no result yet)", "dim", gutter="| ")


async def _choose_recorded(terminal: Prompt, session_id: str, which: str, width: int) -> RecordedRun | None:
    """
    Return the last turn of the conversation that a number or name means; without one, list them and ask.

    Raises:
        UsageProblem: when there is no such conversation or run.
    """
    known = await asyncio.to_thread(recorded_conversations, str(Path.cwd()))
    found = [one for one in known if one.session_id != session_id][:SHOWN_CONVERSATIONS]
    if not which and not found:
        terminal.say("there is no other conversation or run of this folder; `stepengine runs --all` lists all")
        return None
    if not which:
        for number, one in enumerate(found, start=1):
            terminal.say(cut(f"{number:>4}. {one.line}", max(TOO_NARROW, width - 1)))
        which = ((await terminal.line(WHICH)) or "").strip()
    if not which:
        return None
    number = _number(which)
    entry = found[number - 1].last if 1 <= number <= len(found) else find_recorded(which)
    if entry is None:
        msg = f"there is no conversation or run {one_line(which, 40)!r}; /resume lists them"
        raise UsageProblem(msg)
    if entry.status == "running":
        msg = f"{entry.stem} is running in another process; wait until it ends"
        raise UsageProblem(msg)
    return entry


def _explain_ending(run: Run, unread: int, options: Options, bench: Bench) -> None:
    """Print why a turn did not complete, and its warnings. For an interrupted turn the summary is enough."""
    from stepengine.engine.run import undelivered

    # These messages are said in the next turn, or go back into the line.
    dropped = undelivered(unread)
    result = attrs.evolve(run.result, warnings=tuple([w for w in run.result.warnings if w != dropped]))
    if run.code is Exit.INTERRUPTED:
        print_warnings(result)
        return
    tell_more(result, options)
    if run.code is not Exit.COMPLETED:
        complain(reason_of(run, options, bench))


def _show_stopping(handle: RunHandle, screen: Screen | None, terminal: Prompt) -> None:
    """Show that the turn is ending: in the status line, or as a line where there is none and it takes a while."""
    if screen is not None:
        screen.is_stopping = True
    if (names := ", ".join(handle.finishing)) and not terminal.is_rich:
        terminal.say(f"(waits up to {GRACE:g} s for {one_line(names, 60)}; Ctrl-C once more leaves)", "dim")


def _model_name(options: Options, agent: AgentDefinition) -> str:
    """Return the model of a chat, or the words that replace it."""
    instead = f"script {Path(options.script).name}" if options.script else "no model"
    return str(options.main_model or options.settings.get("model") or agent.model or instead)


@contextlib.contextmanager
def _leave_at_sigterm() -> Iterator[None]:
    """Leave at SIGTERM as at any other end while nothing runs: what was taken is given back, the terminal too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(Exit.TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _fit_status(model: str, mode: str, folder: Path, after: Sequence[str], width: int) -> str:
    """Return the parts of the status line, shortened to one line of less than *width* characters."""
    with contextlib.suppress(ValueError, RuntimeError):  # elsewhere, or nobody's home
        folder = Path("~") / folder.relative_to(Path.home())
    name, place, room = one_line(model, 60), one_line(str(folder), 200), 0
    for shown in (name, name.rpartition("/")[2]):
        room = width - 1 - len(" | ".join([shown, mode, "", *after]))
        if len(place) <= room:
            return " | ".join([shown, mode, place, *after])
    place = f"...{place[3 - room :]}" if room > len("...") else ""
    return cut(" | ".join([part for part in (shown, mode, place, *after) if part]), max(1, width - 1))


def _context_parts(state: AgentState) -> dict[str, int]:
    """Return about how many tokens of each kind go with the next prompt."""
    from stepengine.data.estimate import estimate_tokens, message_tokens, tool_tokens

    parts = {
        "system prompt": estimate_tokens(state.system_prompt),
        "tools": tool_tokens(state.tool_definitions.values()),
    }
    for message in state.message_history:
        what = {"user": "what you said", "assistant": "what it said", "tool": "results of tools"}[message.role]
        parts[what] = parts.get(what, 0) + message_tokens(message)
    return parts


def _spoken_messages(state: AgentState) -> list[UserMessage | AssistantMessage]:
    """Return what the person and the agent said, without instructions, reminders and tool calls."""
    found: list[UserMessage | AssistantMessage] = []
    for message in state.message_history:
        if isinstance(message, AssistantMessage):
            found += [message] if message.text.strip() else []
        elif isinstance(message, UserMessage) and "USER_PROMPT" in message.tags:
            found.append(message)
    return found


def _number(typed: str) -> int:
    """Return the number that was typed, -1 for anything else."""
    return int(typed) if typed.isascii() and typed.isdigit() and len(typed) < DIGITS else -1


def _write_new(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
