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

OfFile = Annotated[str, Doc("The path of the file, relative to the root folder.")]
Message = Annotated[str, Doc("What happened, in a sentence.")]
Incomplete = Annotated[str, Doc("What is left out, and why; absent if nothing is.")]
Problem = Annotated[str, Doc("Why this entry has no other data.")]
Seconds = Annotated[float, Doc("How long it ran.")]
ExitCode = Annotated[int | None, Doc("The exit code; `null` if a signal ended the program.")]
Signal = Annotated[str, Doc("The signal that ended the program, such as `SIGTERM`.")]
Shown = Annotated[str, Doc("The command in the form shown to people.")]
Printed = Annotated[str, Doc("Its standard output: start and end, at most 50,000 characters.")]
Problems = Annotated[str, Doc("Its standard error, cut likewise; absent if empty.")]
IsCut = Annotated[bool, Doc("Whether a part of its output is left out.")]


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
    content: NotRequired[Annotated[str, Doc("The exact lines; absent with `error`.")]]
    total_lines: NotRequired[Annotated[int | None, Doc("How many lines the file has; `null` if it is too large.")]]
    offset: NotRequired[Annotated[int, Doc("The first line of `content`, counting from 1.")]]
    has_more: NotRequired[Annotated[bool, Doc("Whether more lines follow after `content`.")]]
    hash: NotRequired[Annotated[str, Doc("For `expected_hash`; absent for files over 10 MB.")]]
    message: NotRequired[Incomplete]
    error: NotRequired[Problem]


class Listing(TypedDict):
    """What is directly in a folder."""

    files: Annotated[list[str], Doc("Names of files, sorted.")]
    directories: Annotated[list[str], Doc("Names of folders, sorted.")]
    path: Annotated[str, Doc("The path of the folder, relative to the root folder.")]
    message: NotRequired[Incomplete]


class TreeEntry(TypedDict):
    """A folder as a tree, a file with its names, or why there is neither."""

    path: Annotated[str, Doc("The folder or file.")]
    type: NotRequired[Annotated[Literal["directory", "file"], Doc("The kind of entry; absent with `error`.")]]
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
    unified_diff: Annotated[str, Doc("The change as a git diff; at most 20,000 characters.")]


# --- searches --------------------------------------------------------------------------------------------------------


class FilesByPattern(TypedDict):
    """Files that fit a pattern."""

    files: Annotated[list[str], Doc("Files, sorted by path; at most `max_results`.")]
    count: Annotated[int, Doc("The total number of files.")]
    message: Message


class FilesByDescription(TypedDict):
    """Files that fit a description."""

    files: Annotated[list[str], Doc("Files, best first.")]
    symbols: Annotated[dict[str, list[str]], Doc("The matching top-level names, by file.")]
    message: Message


class Match(TypedDict):
    """A place in a file, or with some flags a file."""

    path: OfFile
    line: NotRequired[Annotated[int, Doc("The line, counting from 1.")]]
    count: NotRequired[Annotated[int, Doc("With `-c`: the number of matches in the file.")]]


class SearchResult(TypedDict):
    """What a search found."""

    stdout: Annotated[str, Doc("Files with their matching lines, as text.")]
    message: Message
    count: Annotated[int, Doc("The number of entries in `matches`.")]
    matches: Annotated[list[Match], Doc("The matches, as data.")]
    stderr: NotRequired[Annotated[str, Doc("Problems of the search; absent if there were none.")]]


# --- programs --------------------------------------------------------------------------------------------------------


class CommandResult(TypedDict):
    """A program that has ended."""

    command: Shown
    exit_code: ExitCode
    signal: NotRequired[Signal]
    duration_seconds: Seconds
    message: NotRequired[Annotated[str, Doc("Why it was stopped; absent if it ended by itself.")]]
    stdout: Printed
    stderr: NotRequired[Problems]
    truncated: IsCut


class StartedJob(TypedDict):
    """A program that goes on in the background."""

    command: Shown
    job_id: Annotated[str, Doc("For `check_job` and `kill_job`.")]
    pid: Annotated[int, Doc("The process id.")]
    message: Message
    output_file: Annotated[str, Doc("The file with its output, up to 16 MiB; deleted when the run ends.")]


class JobStatus(TypedDict):
    """How a program in the background is doing."""

    job_id: Annotated[str, Doc("The job.")]
    command: Shown
    status: Annotated[Literal["running", "exited"], Doc("Whether it is still running.")]
    exit_code: NotRequired[ExitCode]
    signal: NotRequired[Signal]
    duration_seconds: Seconds
    output_file: Annotated[str, Doc("The file with its output, up to 16 MiB; deleted when the run ends.")]
    found: NotRequired[Annotated[bool, Doc("With `wait_for`: whether the text was printed.")]]
    message: NotRequired[Annotated[str, Doc("Remarks about the job; absent if there are none.")]]
    stdout: Annotated[str, Doc("Its output since the last check.")]
    stderr: NotRequired[Problems]
    truncated: IsCut


class HookEntry(TypedDict):
    """A check that ran for changed files."""

    hook_name: Annotated[str, Doc("The name of the `FileChangeHook`.")]
    command: Shown
    exit_code: NotRequired[ExitCode]
    signal: NotRequired[Signal]
    duration_seconds: NotRequired[Seconds]
    message: NotRequired[Annotated[str, Doc("Why it was stopped; absent if it ended by itself.")]]
    stdout: NotRequired[Printed]
    stderr: NotRequired[Problems]
    truncated: NotRequired[IsCut]
    error: NotRequired[Annotated[str, Doc("Why it could not run.")]]


# --- the web ---------------------------------------------------------------------------------------------------------


class WebHit(TypedDict):
    """A page that a search found."""

    title: Annotated[str, Doc("Its title.")]
    url: Annotated[str, Doc("Its address.")]
    snippet: Annotated[str, Doc("An excerpt.")]


class WebResults(TypedDict):
    """What a search of the web found."""

    results: Annotated[list[WebHit], Doc("Pages, best first.")]
    message: Message


class Documentation(TypedDict):
    """What the documentation of a library says."""

    documentation: Annotated[str, Doc("The text; a note at its end reports a cut.")]
    message: NotRequired[Incomplete]


class WebPage(TypedDict):
    """A page of the web."""

    url: Annotated[str, Doc("The address as it was given.")]
    final_url: Annotated[str, Doc("Where redirects led.")]
    status: Annotated[int, Doc("The HTTP status.")]
    content_type: NotRequired[Annotated[str, Doc("The content type that the server sent.")]]
    title: NotRequired[Annotated[str, Doc("Its title, if it has one.")]]
    description: NotRequired[Annotated[str, Doc("Its description, if it has one.")]]
    text: Annotated[str, Doc("The text; HTML as Markdown.")]
    truncated: Annotated[bool, Doc("Whether text is left out.")]
    message: NotRequired[Annotated[str, Doc("What is missing, and why; absent if nothing is.")]]


# --- agents, people --------------------------------------------------------------------------------------------------


class ChildEntry(TypedDict):
    """What became of a child."""

    agent_type: Annotated[str, Doc("The agent's id.")]
    run_id: NotRequired[Annotated[str, Doc("Its run; absent if it was refused.")]]
    status: Annotated[str, Doc("How its run ended; `failed` if it was refused.")]
    output: NotRequired[Annotated[Any, Doc("Its output by its `output_mode`; with `error`, the output until then.")]]
    error: NotRequired[Annotated[str, Doc("Why it did not complete.")]]


class AgentFacts(TypedDict):
    """What is told of an agent."""

    id: Annotated[str, Doc("Its id.")]
    full_agent_id: Annotated[str, Doc("The same.")]
    display_name: Annotated[str, Doc("Its name for people.")]
    model: Annotated[str | None, Doc("Its model.")]
    tool_names: Annotated[list[str], Doc("Its tools.")]
    spawnable_agents: Annotated[list[str], Doc("Ids of the agents that it may run.")]
    include_message_history: Annotated[bool, Doc("Whether it continues from its parent's history.")]
    spawner_prompt: Annotated[str, Doc("Its purpose.")]
    input_schema: Annotated[
        dict[str, Any], Doc("`prompt`: a description of its prompt; `params`: a JSON Schema or `null`.")
    ]
    output_mode: Annotated[str, Doc("Which part of its run is its output.")]
    output_schema: Annotated[dict[str, Any] | None, Doc("The JSON Schema of its output, if it has one.")]


class AgentInfo(TypedDict):
    """An agent that was looked up."""

    found: Annotated[bool, Doc("Whether the agent exists.")]
    agent: NotRequired[Annotated[AgentFacts, Doc("The facts about the agent.")]]
    error: NotRequired[Annotated[str, Doc("Why there are no facts.")]]


class AnswerGiven(TypedDict):
    """The answer to one question."""

    question_index: Annotated[int, Doc("The index of the question, counting from 0.")]
    selected: NotRequired[Annotated[list[str], Doc("The chosen options.")]]
    text: NotRequired[Annotated[str, Doc("The free text that was written instead.")]]


class Answers(TypedDict):
    """What a person answered."""

    answers: NotRequired[Annotated[list[AnswerGiven], Doc("An entry for each question.")]]
    skipped: NotRequired[Annotated[bool, Doc("`true` instead of `answers` if none was answered.")]]


class Confirmation(TypedDict):
    """A sentence that confirms the action."""

    message: Message
