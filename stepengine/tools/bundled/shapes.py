"""
What bundled tools give, as types: one class for each form of a result. And what they take where that is an object.

A result is JSON: a dict of one of these classes, a list of them, or a text. Keys that are not always there are
``NotRequired``. These classes say it once: ``call`` is typed by them, and the reference and ``stepengine agents tools`` are made
from them. Models are not shown them, and no request holds them. Annotations are evaluated here, because what is not evaluated
is always required.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from typing_extensions import Doc, TypedDict

__all__ = (
    "AgentFacts",
    "AgentInfo",
    "AnswerGiven",
    "Answers",
    "ChildAsked",
    "ChildEntry",
    "CommandResult",
    "Confirmation",
    "Documentation",
    "EditedFile",
    "FileEntry",
    "FilePart",
    "FilesByDescription",
    "FilesByPattern",
    "FollowupAsked",
    "HookEntry",
    "JobStatus",
    "Listing",
    "Match",
    "OptionAsked",
    "Replacement",
    "SearchResult",
    "StartedJob",
    "Todo",
    "TreeEntry",
    "UserQuestion",
    "WebHit",
    "WebPage",
    "WebResults",
    "WrittenFile",
)

OfFile = Annotated[str, Doc("The file, below the root.")]
Message = Annotated[str, Doc("What happened, in a sentence.")]
Incomplete = Annotated[str, Doc("What is left out, and why; not there when nothing is.")]
Problem = Annotated[str, Doc("Why there is nothing else in this entry.")]
Seconds = Annotated[float, Doc("How long it ran.")]
ExitCode = Annotated[int | None, Doc("What the program ended with; `null` when a signal ended it.")]
Signal = Annotated[str, Doc("The signal that ended it, such as `SIGTERM`.")]
Shown = Annotated[str, Doc("The command, as it is shown to people.")]
Printed = Annotated[str, Doc("What it printed: beginning and end, at most 50,000 characters.")]
Problems = Annotated[str, Doc("What it printed as errors, likewise; not there when it printed none.")]
IsCut = Annotated[bool, Doc("Whether something that it printed is left out.")]


# --- what goes in ----------------------------------------------------------------------------------------------------


class FilePart(TypedDict):
    """A part of one file."""

    path: str
    offset: NotRequired[int]
    limit: NotRequired[int]


class Replacement(TypedDict):
    """A piece of text and its replacement."""

    old_string: str
    new_string: str
    allow_multiple: NotRequired[bool]


class FollowupAsked(TypedDict):
    """A suggested next prompt."""

    prompt: str
    label: NotRequired[str]


class Todo(TypedDict):
    """A task, and whether it is done."""

    task: str
    completed: bool


class OptionAsked(TypedDict):
    """An option of a question."""

    label: str
    description: NotRequired[str]


class UserQuestion(TypedDict):
    """A question to a person."""

    question: str
    header: NotRequired[str]
    options: NotRequired[Sequence[str | OptionAsked]]
    multi_select: NotRequired[bool]


class ChildAsked(TypedDict):
    """An agent to run, with its input."""

    agent_type: str
    prompt: NotRequired[str]
    params: NotRequired[Mapping[str, Any]]


# --- files -----------------------------------------------------------------------------------------------------------


class FileEntry(TypedDict):
    """A file that was read, or why it was not."""

    path: Annotated[str, Doc("The path as it was given.")]
    content: NotRequired[Annotated[str, Doc("The lines, exactly; not there beside `error`.")]]
    total_lines: NotRequired[Annotated[int | None, Doc("How many lines the file has; `null` when it is too large.")]]
    offset: NotRequired[Annotated[int, Doc("The first line of `content`, counting from 1.")]]
    has_more: NotRequired[Annotated[bool, Doc("Whether lines follow that are not in `content`.")]]
    hash: NotRequired[Annotated[str, Doc("For `expected_hash`; not there for files over 10 MB.")]]
    message: NotRequired[Incomplete]
    error: NotRequired[Problem]


class Listing(TypedDict):
    """What is directly in a folder."""

    files: Annotated[list[str], Doc("Names of files, sorted.")]
    directories: Annotated[list[str], Doc("Names of folders, sorted.")]
    path: Annotated[str, Doc("The folder, below the root.")]
    message: NotRequired[Incomplete]


class TreeEntry(TypedDict):
    """A folder as a tree, a file with its names, or why there is neither."""

    path: Annotated[str, Doc("The folder or file.")]
    type: NotRequired[Annotated[Literal["directory", "file"], Doc("What it is; not there beside `error`.")]]
    printed_tree: NotRequired[Annotated[str, Doc("Of a folder: the tree.")]]
    token_count: NotRequired[Annotated[int, Doc("Of a folder: about how many tokens the tree has.")]]
    truncation_level: NotRequired[
        Annotated[
            Literal["none", "unimportant-files", "tokens", "depth-based"], Doc("Of a folder: how much was dropped.")
        ]
    ]
    variables: NotRequired[Annotated[list[str], Doc("Of a file: its top-level names.")]]
    message: NotRequired[Incomplete]
    error: NotRequired[Problem]


class WrittenFile(TypedDict):
    """A file that was written or deleted."""

    file: OfFile
    message: Message


class EditedFile(TypedDict):
    """A change to a file, made or proposed."""

    file: OfFile
    message: Message
    unified_diff: Annotated[str, Doc("The change, in git's form; at most 20,000 characters.")]


# --- searches --------------------------------------------------------------------------------------------------------


class FilesByPattern(TypedDict):
    """Files that fit a pattern."""

    files: Annotated[list[str], Doc("Files, sorted by path; at most `max_results`.")]
    count: Annotated[int, Doc("How many there are in all.")]
    message: Message


class FilesByDescription(TypedDict):
    """Files that fit a description."""

    files: Annotated[list[str], Doc("Files, best first.")]
    symbols: Annotated[dict[str, list[str]], Doc("For files with fitting top-level names: those.")]
    message: Message


class Match(TypedDict):
    """A place in a file, or with some flags a file."""

    path: OfFile
    line: NotRequired[Annotated[int, Doc("The line, counting from 1.")]]
    count: NotRequired[Annotated[int, Doc("With `-c`: how many matches the file has.")]]


class SearchResult(TypedDict):
    """What a search found."""

    stdout: Annotated[str, Doc("Files with their matching lines, to be read.")]
    message: Message
    count: Annotated[int, Doc("How many entries `matches` has.")]
    matches: Annotated[list[Match], Doc("The matches, to decide by.")]
    stderr: NotRequired[Annotated[str, Doc("Problems of the search; not there when there were none.")]]


# --- programs --------------------------------------------------------------------------------------------------------


class CommandResult(TypedDict):
    """A program that has ended."""

    command: Shown
    exit_code: ExitCode
    signal: NotRequired[Signal]
    duration_seconds: Seconds
    message: NotRequired[Annotated[str, Doc("Why it was stopped; not there when it ended by itself.")]]
    stdout: Printed
    stderr: NotRequired[Problems]
    truncated: IsCut


class StartedJob(TypedDict):
    """A program that goes on in the background."""

    command: Shown
    job_id: Annotated[str, Doc("For `check_job` and `kill_job`.")]
    pid: Annotated[int, Doc("The number of the process.")]
    message: Message
    output_file: Annotated[str, Doc("Holds what it prints, up to 16 MiB, until the run ends.")]


class JobStatus(TypedDict):
    """How a program in the background is doing."""

    job_id: Annotated[str, Doc("The job.")]
    command: Shown
    status: Annotated[Literal["running", "exited"], Doc("Whether it still runs.")]
    exit_code: NotRequired[ExitCode]
    signal: NotRequired[Signal]
    duration_seconds: Seconds
    output_file: Annotated[str, Doc("Holds what it prints, up to 16 MiB, until the run ends.")]
    found: NotRequired[Annotated[bool, Doc("With `wait_for`: whether the text was printed.")]]
    message: NotRequired[Annotated[str, Doc("What is special about it; not there when nothing is.")]]
    stdout: Annotated[str, Doc("What it printed since the last look.")]
    stderr: NotRequired[Problems]
    truncated: IsCut


class HookEntry(TypedDict):
    """A check that ran for changed files."""

    hook_name: Annotated[str, Doc("The name of the `FileChangeHook`.")]
    command: Shown
    exit_code: NotRequired[ExitCode]
    signal: NotRequired[Signal]
    duration_seconds: NotRequired[Seconds]
    message: NotRequired[Annotated[str, Doc("Why it was stopped; not there when it ended by itself.")]]
    stdout: NotRequired[Printed]
    stderr: NotRequired[Problems]
    truncated: NotRequired[IsCut]
    error: NotRequired[Annotated[str, Doc("Why it could not run.")]]


# --- the web ---------------------------------------------------------------------------------------------------------


class WebHit(TypedDict):
    """A page that a search found."""

    title: Annotated[str, Doc("Its title.")]
    url: Annotated[str, Doc("Its address.")]
    snippet: Annotated[str, Doc("Some words of it.")]


class WebResults(TypedDict):
    """What a search of the web found."""

    results: Annotated[list[WebHit], Doc("Pages, best first.")]
    message: Message


class Documentation(TypedDict):
    """What the documentation of a library says."""

    documentation: Annotated[str, Doc("The text; it says at its end when it was cut.")]
    message: NotRequired[Incomplete]


class WebPage(TypedDict):
    """A page of the web."""

    url: Annotated[str, Doc("The address as it was given.")]
    final_url: Annotated[str, Doc("Where redirects led.")]
    status: Annotated[int, Doc("The HTTP status.")]
    content_type: NotRequired[Annotated[str, Doc("What the server calls it.")]]
    title: NotRequired[Annotated[str, Doc("Its title, if it has one.")]]
    description: NotRequired[Annotated[str, Doc("Its description, if it has one.")]]
    text: Annotated[str, Doc("The text; HTML as Markdown.")]
    truncated: Annotated[bool, Doc("Whether text is left out.")]
    message: NotRequired[Annotated[str, Doc("What is missing, and why; not there when nothing is.")]]


# --- agents, people --------------------------------------------------------------------------------------------------


class ChildEntry(TypedDict):
    """What became of a child."""

    agent_type: Annotated[str, Doc("The agent's id.")]
    run_id: NotRequired[Annotated[str, Doc("Its run; absent if it was refused.")]]
    status: Annotated[str, Doc("How its run ended; `failed` if it was refused.")]
    output: NotRequired[
        Annotated[Any, Doc("Its output, as its `output_mode` says; beside `error` what it had by then.")]
    ]
    error: NotRequired[Annotated[str, Doc("Why it did not complete.")]]


class AgentFacts(TypedDict):
    """What is told of an agent."""

    id: Annotated[str, Doc("Its id.")]
    full_agent_id: Annotated[str, Doc("The same.")]
    display_name: Annotated[str, Doc("How people call it.")]
    model: Annotated[str | None, Doc("Its model.")]
    tool_names: Annotated[list[str], Doc("Its tools.")]
    spawnable_agents: Annotated[list[str], Doc("Ids of the agents that it may run.")]
    include_message_history: Annotated[bool, Doc("Whether it goes on from its parent's history.")]
    spawner_prompt: Annotated[str, Doc("What it is for.")]
    input_schema: Annotated[dict[str, Any], Doc("`prompt`, what to tell it; `params`, a JSON Schema or `null`.")]
    output_mode: Annotated[str, Doc("What of its run is its output.")]
    output_schema: Annotated[dict[str, Any] | None, Doc("The JSON Schema of its output, if it has one.")]


class AgentInfo(TypedDict):
    """An agent that was looked up."""

    found: Annotated[bool, Doc("Whether there is one.")]
    agent: NotRequired[Annotated[AgentFacts, Doc("What is told of it.")]]
    error: NotRequired[Annotated[str, Doc("Why nothing is told.")]]


class AnswerGiven(TypedDict):
    """The answer to one question."""

    question_index: Annotated[int, Doc("Which question, counting from 0.")]
    selected: NotRequired[Annotated[list[str], Doc("The options that were chosen.")]]
    text: NotRequired[Annotated[str, Doc("What was written instead.")]]


class Answers(TypedDict):
    """What a person answered."""

    answers: NotRequired[Annotated[list[AnswerGiven], Doc("An entry for each question.")]]
    skipped: NotRequired[Annotated[bool, Doc("`true` in place of `answers` when none was answered.")]]


class Confirmation(TypedDict):
    """A sentence that confirms the action."""

    message: Message
