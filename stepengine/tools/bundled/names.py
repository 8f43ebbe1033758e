"""
The names of the bundled tools, typed, and the function that makes each tool.

A name alone has no access to anything: the tool is made with a root folder or a back end, and passed to an engine. The
parameters of each tool are repeated here for type checkers. A test compares them with the schema that models see, and runs
every tool to compare its result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol

from attrs import frozen

from stepengine.data.names import ToolName
from stepengine.tools.bundled.shapes import (
    AgentInfo,
    Answers,
    ChildAsked,
    ChildEntry,
    CommandResult,
    Confirmation,
    Documentation,
    EditedFile,
    FileEntry,
    FilePart,
    FilesByDescription,
    FilesByPattern,
    FollowupAsked,
    HookEntry,
    JobStatus,
    Listing,
    Replacement,
    SearchResult,
    Todo,
    TreeEntry,
    UserQuestion,
    WebPage,
    WebResults,
    WrittenFile,
)
from stepengine.tools.makers import MAKERS, ToolMaker


class _ToolSignatures(Protocol):
    """Signatures of the bundled tools; no method has a body. ``Errors`` says when ``yield from`` raises, ``Limits`` what applies to a call."""

    # --- files

    @staticmethod
    def read_files(
        paths: Sequence[str | FilePart],
        *,
        offset: int = 1,
        limit: int = 2_000,
        line_numbers: bool = False,
    ) -> list[FileEntry]:
        """
        Read text files.

        Errors: none for a file: one that is missing, secret, binary, too large or outside of the root gives an entry with `error`.
        Limits: 50 files and 100,000 characters, 2,000 lines of a file, 2,000 characters of a line; files over the limit give an entry with `error`. A file over 10 MB is read only with `offset` or `limit`.
        """

    @staticmethod
    def list_directory(path: str = ".") -> Listing:
        """
        List the entries of a folder.

        Errors: the folder does not exist, is none, or is outside of the root.
        Limits: 20,000 entries, 10 seconds; `message` says when there are more. Links, special files and secret files are left out.
        """

    @staticmethod
    def read_subtree(paths: Sequence[str] | None = None, *, max_tokens: int = 4_000) -> list[TreeEntry]:
        """
        Show folders as trees, with the top-level names of source files.

        Errors: none for a path: one that cannot be shown gives an entry with `error`.
        Limits: 50 paths, others give an entry with `error`; `max_tokens` in all, of which more than 20,000 counts as 20,000 with a `message`; 20,000 entries, 10 seconds.
        """

    @staticmethod
    def write_file(path: str, content: str, *, instructions: str = "", expected_hash: str = "") -> WrittenFile:
        """
        Create a file, or overwrite a whole one.

        Errors: the path is outside of the root, secret, protected, a link or a folder; the file has changed since the run read it, or is not that of `expected_hash`.
        Limits: 4 MiB.
        """

    @staticmethod
    def str_replace(path: str, replacements: Sequence[Replacement], *, expected_hash: str = "") -> EditedFile:
        """
        Replace exact pieces of text in a file, all of them or none.

        Errors: as for `write_file`; the file does not exist or is no text; an `old_string` is not there, or more than once without `allow_multiple`. Nothing is changed then.
        Limits: 4 MiB.
        """

    @staticmethod
    def delete_file(path: str, *, expected_hash: str = "") -> WrittenFile:
        """
        Delete a file.

        Errors: as for `write_file`; there is no such file.
        Limits: one file; folders are not deleted.
        """

    @staticmethod
    def propose_write_file(path: str, content: str, *, instructions: str = "") -> EditedFile:
        """
        Propose a whole file; nothing is written.

        Errors: as for `write_file`; the file on disk is no text.
        Limits: 4 MiB for a file, 8 MiB for all proposals of a run. Proposals are forgotten when the run ends.
        """

    @staticmethod
    def propose_str_replace(path: str, replacements: Sequence[Replacement]) -> EditedFile:
        """
        Propose replacements in a file, after those of earlier proposals; nothing is written.

        Errors: as for `str_replace`.
        Limits: as for `propose_write_file`.
        """

    # --- searches

    @staticmethod
    def glob(pattern: str, *, cwd: str | None = None, max_results: int = 100) -> FilesByPattern:
        """
        Find files by a pattern for their path, sorted by path.

        Errors: the pattern cannot be used; `cwd` is no folder below the root.
        Limits: `max_results` over 2,000 counts as 2,000 with a `message`; 20,000 entries, 10 seconds. What `.gitignore` leaves out is not found, nor, by wildcards, names with a dot in front.
        """

    @staticmethod
    def code_search(pattern: str, *, flags: str = "", cwd: str | None = None, max_results: int = 15) -> SearchResult:
        """
        Search the text of files with a regular expression.

        Errors: the pattern is none; a flag is not allowed; `cwd` is no folder below the root. Finding nothing is no error: `count` is 0.
        Limits: 250 matches and 20,000 characters, `max_results` matches of a file (over 250 counts as 250 with a `message`), files up to 4 MiB, 10 seconds. What `.gitignore` leaves out and hidden files are not searched.
        """

    @staticmethod
    def find_files(prompt: str, *, max_results: int = 12) -> FilesByDescription:
        """
        Find the files that fit a description, without a model.

        Errors: none; where nothing fits, `files` is empty.
        Limits: `max_results` over 30 counts as 30 with a `message`; 20,000 entries, 10 seconds.
        """

    # --- programs

    @staticmethod
    def run_terminal_command(
        command: str | Sequence[str], *, cwd: str | None = None, timeout_seconds: float = 30
    ) -> CommandResult:
        """
        Run a program to its end.

        Errors: the command needs a shell and none is allowed; the program is not there; it was stopped after `timeout_seconds`, or because it printed more than 64 MiB: then `error.result` holds what it had printed. An `exit_code` other than 0 is no error.
        Limits: `timeout_seconds` is at most 600; 50,000 characters of each stream are kept. With `process_type="BACKGROUND"` it gives a `StartedJob`, by `ToolCall("run_terminal_command", {...})`.
        """

    @staticmethod
    def check_job(job_id: str, *, wait_for: str | None = None, timeout_seconds: float = 0) -> JobStatus:
        """
        Return the status and new output of a background program, after waiting for its end or a text.

        Errors: the run has no such job.
        Limits: `timeout_seconds` is at most 600. A job ends with its run.
        """

    @staticmethod
    def kill_job(job_id: str, *, signal: Literal["SIGTERM", "SIGINT", "SIGKILL"] = "SIGTERM") -> JobStatus:
        """
        Send a signal to a background program and all that it started, and return its status.

        Errors: the run has no such job. One that had ended already is no error.
        Limits: what goes on 1.5 seconds after the signal is killed.
        """

    @staticmethod
    def run_file_change_hooks(files: Sequence[str]) -> list[HookEntry]:
        """
        Run the checks that are configured for changed files.

        Errors: a file is outside of the root. A check that fails has an `exit_code` other than 0, one that cannot run `error`.
        Limits: 50 files; each check has the time that its `FileChangeHook` gives it.
        """

    # --- the web

    @staticmethod
    def web_search(query: str, *, depth: Literal["standard", "deep"] = "standard") -> WebResults:
        """
        Search the web.

        Errors: the back end does not answer.
        Limits: 1,000 characters of query; about 5 results, `deep` up to 20.
        """

    @staticmethod
    def read_docs(library_title: str, topic: str, *, max_tokens: int = 10_000) -> Documentation:
        """
        Return excerpts of a library's documentation about a topic.

        Errors: the library is not known, or says nothing about the topic; a page cannot be fetched.
        Limits: `max_tokens` over 20,000 counts as 20,000 with a `message`; 200 pages of a run.
        """

    @staticmethod
    def read_url(url: str, *, max_chars: int = 20_000) -> WebPage:
        """
        Read a page of the web as text.

        Errors: the address is private or not allowed; the host does not answer. A page with `status` 404 is no error.
        Limits: `max_chars` of at least 1,000, over 50,000 counts as 50,000 with a `message`; 2,000,000 bytes, 20 seconds, 5 redirects; 200 pages of a run.
        """

    # --- people, skills, notes

    @staticmethod
    def ask_user(questions: Sequence[UserQuestion]) -> Answers:
        """
        Ask a person questions.

        Errors: none; who answers nothing gives `skipped`. Without somebody to ask the run is suspended.
        Limits: none.
        """

    @staticmethod
    def suggest_followups(followups: Sequence[FollowupAsked]) -> Confirmation:
        """
        Suggest the user's next messages in an event.

        Errors: none.
        Limits: at least one.
        """

    @staticmethod
    def skill(name: str, *, file: str | None = None) -> str:
        """
        Read the instructions of a skill, or one of its files.

        Errors: there is no such skill, or no such file; the error lists the nearest names.
        Limits: 32,768 bytes.
        """

    @staticmethod
    def remember(text: str, *, scope: Literal["project", "user"] = "project", tags: Sequence[str] = ()) -> str:
        """
        Store a note for later conversations, and return a text with its id.

        Errors: the note is blank; there are no notes of the scope.
        Limits: 2,000 characters, five tags.
        """

    @staticmethod
    def recall(query: str = "", *, scope: Literal["project", "user"] | None = None, limit: int = 10) -> str:
        """
        Search the notes, and return a text with a line for each match.

        Errors: there are no notes of the scope.
        Limits: `limit` over 50 counts as 50, and the text says so; 8 KiB.
        """

    @staticmethod
    def forget(id: str, *, scope: Literal["project", "user"] = "project") -> str:
        """
        Delete a note.

        Errors: there is no such note.
        Limits: one note.
        """

    # --- agents

    @staticmethod
    def spawn_agents(agents: Sequence[ChildAsked]) -> list[ChildEntry]:
        """
        Run agents at the same time; `AgentCall` and `Parallel` do the same with types.

        Errors: every one of them failed. When some did, those have `error` in their entry.
        Limits: 16 agents in a call of a model; 100,000 characters of an output are shown.
        """

    @staticmethod
    def spawn_agent_inline(
        agent_type: str, *, prompt: str = "", params: Mapping[str, Any] | None = None
    ) -> Confirmation:
        """
        Run an agent in this conversation; its final history replaces that of the run.

        Errors: the agent did not complete; the history stays as it was.
        Limits: one agent.
        """

    @staticmethod
    def lookup_agent_info(agent_id: str) -> AgentInfo:
        """
        Look up the description, parameters and output of an agent.

        Errors: none; for an agent that there is not `found` is `false`.
        Limits: agents of this engine.
        """

    # --- the run itself

    @staticmethod
    def set_output(data: Any) -> Confirmation:
        """
        Set the output of the run.

        Errors: the output does not fit the agent's `output_schema`; the earlier one stays.
        Limits: the fields of the output may stand in the place of `data`.
        """

    @staticmethod
    def set_messages(messages: Sequence[Any]) -> Confirmation:
        """
        Replace the history; for handlers alone.

        Errors: calls and results do not pair, or a message has another form. Nothing is changed then.
        Limits: none.
        """

    @staticmethod
    def add_message(
        role: Literal["user", "assistant"],
        content: str,
        *,
        tags: Sequence[str] = (),
        ttl: Literal["agent_step", "user_prompt"] | None = None,
    ) -> Confirmation:
        """
        Append a message to the history; for handlers alone.

        Errors: none.
        Limits: none.
        """

    @staticmethod
    def end_turn(message: str = "") -> Confirmation:
        """
        End the turn.

        Errors: none.
        Limits: calls behind it in the same reply are not executed.
        """

    @staticmethod
    def hand_off(agent: str) -> Confirmation:
        """
        Hand the conversation over to another agent, which continues it after the run's own agent has ended.

        Errors: an agent that is not among the `spawnable_agents`; the agent itself.
        Limits: calls behind it in the same reply are not executed.
        """

    @staticmethod
    def task_completed() -> Confirmation:
        """
        Report that the whole task is done; if an agent has this tool, its turn ends only with this call.

        Errors: none.
        Limits: calls behind it in the same reply are not executed.
        """

    @staticmethod
    def write_todos(todos: Sequence[Todo]) -> Confirmation:
        """
        Replace the to-do list.

        Errors: none.
        Limits: none.
        """

    @staticmethod
    def think_deeply(thought: str) -> Confirmation:
        """
        Record a thought; nothing else changes.

        Errors: none.
        Limits: none.
        """


read_files = ToolName(_ToolSignatures.read_files)
list_directory = ToolName(_ToolSignatures.list_directory)
read_subtree = ToolName(_ToolSignatures.read_subtree)
write_file = ToolName(_ToolSignatures.write_file)
str_replace = ToolName(_ToolSignatures.str_replace)
delete_file = ToolName(_ToolSignatures.delete_file)
propose_write_file = ToolName(_ToolSignatures.propose_write_file)
propose_str_replace = ToolName(_ToolSignatures.propose_str_replace)
glob = ToolName(_ToolSignatures.glob)
code_search = ToolName(_ToolSignatures.code_search)
find_files = ToolName(_ToolSignatures.find_files)
run_terminal_command = ToolName(_ToolSignatures.run_terminal_command)
check_job = ToolName(_ToolSignatures.check_job)
kill_job = ToolName(_ToolSignatures.kill_job)
run_file_change_hooks = ToolName(_ToolSignatures.run_file_change_hooks)
web_search = ToolName(_ToolSignatures.web_search)
read_docs = ToolName(_ToolSignatures.read_docs)
read_url = ToolName(_ToolSignatures.read_url)
ask_user = ToolName(_ToolSignatures.ask_user)
suggest_followups = ToolName(_ToolSignatures.suggest_followups)
skill = ToolName(_ToolSignatures.skill)
remember = ToolName(_ToolSignatures.remember)
recall = ToolName(_ToolSignatures.recall)
forget = ToolName(_ToolSignatures.forget)
spawn_agents = ToolName(_ToolSignatures.spawn_agents)
spawn_agent_inline = ToolName(_ToolSignatures.spawn_agent_inline)
lookup_agent_info = ToolName(_ToolSignatures.lookup_agent_info)
set_output = ToolName(_ToolSignatures.set_output)
set_messages = ToolName(_ToolSignatures.set_messages)
add_message = ToolName(_ToolSignatures.add_message)
end_turn = ToolName(_ToolSignatures.end_turn)
hand_off = ToolName(_ToolSignatures.hand_off)
task_completed = ToolName(_ToolSignatures.task_completed)
write_todos = ToolName(_ToolSignatures.write_todos)
think_deeply = ToolName(_ToolSignatures.think_deeply)


# --- what makes them -------------------------------------------------------------------------------------------------


@frozen
class BundledTool:
    """
    A bundled tool and its documentation.

    Attributes:
        name: Its name, which knows its types.
        maker: The function that makes it; ``None`` for tools that every run has.
    """

    name: ToolName[..., Any]
    maker: ToolMaker | None = None

    def documentation(self, title: str) -> str:
        """Return a part of the tool's documentation: ``"Errors"``, ``"Limits"``, or with ``""`` the description."""
        text = " ".join((self.name.__doc__ or "").split())
        parts = re.split(r"\b(Errors|Limits): ", text)
        sections = dict(zip(["", *parts[1::2]], parts[::2], strict=True))
        return sections[title].strip()


BUNDLED: Mapping[str, BundledTool] = MappingProxyType(
    {
        str(name): BundledTool(name, MAKERS[name])
        for name in (
            read_files,
            list_directory,
            read_subtree,
            write_file,
            str_replace,
            delete_file,
            propose_write_file,
            propose_str_replace,
            code_search,
            glob,
            find_files,
            run_terminal_command,
            check_job,
            kill_job,
            run_file_change_hooks,
            web_search,
            read_docs,
            read_url,
            skill,
            remember,
            recall,
            forget,
            suggest_followups,
            ask_user,
            spawn_agents,
            spawn_agent_inline,
            lookup_agent_info,
            set_output,
            set_messages,
            add_message,
            end_turn,
            hand_off,
            task_completed,
            write_todos,
            think_deeply,
        )
    }
)
"""Every bundled tool by name."""
