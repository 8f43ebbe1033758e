"""
The names of bundled tools: what they say that a tool takes and gives is what it takes and gives.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NotRequired, get_args, get_origin, get_type_hints

import pytest
from pydantic import TypeAdapter
from typing_extensions import is_typeddict

from stepengine import (
    AgentDefinition,
    Answer,
    Engine,
    StepContext,
    Steps,
    ToolCall,
    ToolResult,
    call,
)
from stepengine.errors import DataError, ToolError
from stepengine.testing import run_script
from stepengine.tools.agent_tools import BUILT_IN
from stepengine.tools.bundled import (
    Fetched,
    FileChangeHook,
    FileMemory,
    SearchHit,
    change_hook_tools,
    file_tools,
    followup_tools,
    memory_tools,
    read_files,
    recall,
    run_terminal_command,
    search_tools,
    shell_tools,
    skill_tools,
    web_tools,
)
from stepengine.tools.bundled.names import BUNDLED
from stepengine.tools.bundled.shapes import StartedJob
from stepengine.workspace.walk import WalkBudget

HIT = SearchHit("Title", "https://example.com", "Some words.")
PAGE = b"<html><head><title>T</title><meta name='description' content='D'></head><body><p>Text</p></body></html>"
PAGES = {
    "https://a.example/page": Fetched("https://a.example/page", 200, "text/html", PAGE),
    "https://a.example/image": Fetched("https://a.example/image", 200, "image/png"),
    "https://a.example/bare": Fetched("https://a.example/bare", 200, "", b"Text"),
}


class Web:
    """
    A back end for all that reaches the web.
    """

    async def search(self, query: str, depth: str) -> list[SearchHit]:
        return [HIT] if query == "something" else []

    async def read(self, library_title: str, topic: str, max_tokens: int) -> str:
        return f"What {library_title} says of {topic}."

    async def fetch(self, url: str) -> Fetched:
        return PAGES[url]


class Person:
    """
    Chooses the first option; writes where there is none; says nothing to what is no question.
    """

    async def ask(self, question: Any) -> Any:
        if question.text == "Nothing?":
            return Answer(declined=True)
        return Answer(selected="one") if question.options else Answer(text="free")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """
    A project with something for every tool to find.
    """
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    made = tmp_path / "project"
    for folder in ("src", "one", ".agents/skills/release", ".git"):
        (made / folder).mkdir(parents=True)
    (made / "src" / "a.py").write_text("def first():\n    return 1\n\n\ndef second():\n    return 2\n")
    (made / "src" / "b.py").write_text("first = 1\n")
    (made / "src" / "c.py").write_text("".join(f"def a_rather_long_name_{n}(): pass\n" for n in range(200)))
    (made / "src" / "long.txt").write_text(("x" * 99 + "\n") * 1_500)
    (made / "one" / "only.txt").write_text("x\n")
    (made / "old.txt").write_text("x\n")
    (made / ".agents/skills/release/SKILL.md").write_text("---\nname: release\ndescription: D\n---\nDo it.\n")
    monkeypatch.setattr("stepengine.tools.bundled.files.read_tools.WalkBudget", partial(WalkBudget, 2))
    return made


def tools_of(root: Path) -> list[Any]:
    hooks = [
        FileChangeHook("fine", ["true"], pattern="**/*.py"),
        FileChangeHook("told", ["sh", "-c", "echo bad >&2; kill -9 $$"], pattern="**/*.py"),
        FileChangeHook("slow", ["sleep", "9"], pattern="**/*.py", timeout=0.05),
        FileChangeHook("gone", ["no-such-program"], pattern="**/*.py"),
    ]
    web = Web()
    made = [
        *file_tools(root, write=True, delete=True, propose=True),
        *search_tools(root),
        *shell_tools(root, shell="bash"),
        *change_hook_tools(root, hooks),
        *web_tools(web, web, web),
        *skill_tools(root),
        *memory_tools(FileMemory(root.parent / "notes")),
        *followup_tools(),
    ]
    return [*made, *[BUILT_IN[name] for name, known in BUNDLED.items() if known.maker is None]]


QUESTION = {"question": "Which?", "options": ["one", "two"]}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("read_files", {"paths": ["src/a.py", "nowhere", "src/long.txt"]}),
    ("list_directory", {"path": "src"}),
    ("list_directory", {"path": "one"}),
    ("read_subtree", {"paths": ["src", "src/a.py", "nowhere"]}),
    ("read_subtree", {"paths": ["src/c.py"], "max_tokens": 20}),
    ("read_subtree", {"max_tokens": 4}),
    ("write_file", {"path": "new.py", "content": "VALUE = 1\n"}),
    ("str_replace", {"path": "new.py", "replacements": [{"old_string": "1", "new_string": "2"}]}),
    ("delete_file", {"path": "old.txt"}),
    ("propose_write_file", {"path": "newer.py", "content": "x\n"}),
    ("propose_str_replace", {"path": "new.py", "replacements": [{"old_string": "2", "new_string": "3"}]}),
    ("glob", {"pattern": "**/*.py"}),
    ("code_search", {"pattern": "first"}),
    ("code_search", {"pattern": "first", "flags": "-c"}),
    ("code_search", {"pattern": "first", "flags": "-l"}),
    ("find_files", {"prompt": "first"}),
    ("run_terminal_command", {"command": ["true"]}),
    ("run_terminal_command", {"command": "echo bad >&2; kill -9 $$"}),
    ("run_terminal_command", {"command": ["sleep", "9"], "timeout_seconds": 0.05}),
    ("run_terminal_command", {"command": "echo bad >&2; echo ready; exec sleep 60", "process_type": "BACKGROUND"}),
    ("check_job", {"wait_for": "ready", "timeout_seconds": 30}),
    ("kill_job", {"signal": "SIGKILL"}),
    ("check_job", {}),
    ("kill_job", {}),
    ("run_file_change_hooks", {"files": ["src/a.py"]}),
    ("web_search", {"query": "something"}),
    ("web_search", {"query": "nothing"}),
    ("read_docs", {"library_title": "attrs", "topic": "slots"}),
    ("read_docs", {"library_title": "attrs", "topic": "slots", "max_tokens": 90_000}),
    *[("read_url", {"url": url}) for url in PAGES],
    ("ask_user", {"questions": [QUESTION, {"question": "How?"}]}),
    ("ask_user", {"questions": [{"question": "Nothing?"}]}),
    ("suggest_followups", {"followups": [{"prompt": "Write tests."}]}),
    ("skill", {"name": "release"}),
    ("remember", {"text": "Prefers small commits."}),
    ("recall", {"query": "commits"}),
    ("forget", {"id": "m1"}),
    (
        "spawn_agents",
        {
            "agents": [
                {"agent_type": "fine"},
                {"agent_type": "broken"},
                {"agent_type": "spent"},
                {"agent_type": "unknown"},
            ]
        },
    ),
    ("spawn_agent_inline", {"agent_type": "fine"}),
    ("lookup_agent_info", {"agent_id": "fine"}),
    ("lookup_agent_info", {"agent_id": "nobody"}),
    ("set_output", {"data": {"answer": 42}}),
    ("set_messages", {"messages": []}),
    ("add_message", {"role": "user", "content": "Hm."}),
    ("write_todos", {"todos": [{"task": "T", "completed": False}]}),
    ("think_deeply", {"thought": "Hm."}),
    ("task_completed", {}),
    ("hand_off", {"agent": "fine"}),
    ("end_turn", {}),
]
UNPROVOKED = {("SearchResult", "stderr")}
"""What no call here leads to."""


def child(name: str, handler: Any) -> AgentDefinition[Any]:
    return AgentDefinition(name, handle_steps=handler)


def fine(ctx: StepContext) -> Steps[str]:
    yield from ()
    return "fine"


def broken(ctx: StepContext) -> Steps[str]:
    yield from ()
    raise ValueError(ctx)


def spent(ctx: StepContext) -> Steps[str]:
    yield ToolCall("set_output", {"data": "so far"})
    raise ValueError(ctx)


def results_of(root: Path) -> list[tuple[str, Any]]:
    """
    Run every call, in a handler, and return what came back.
    """

    def handle_steps(ctx: StepContext) -> Steps[None]:
        job = ""
        for name, given in CALLS:
            input = {"job_id": job, **given} if name.endswith("_job") else given
            result = (yield ToolCall(name, input, include_tool_call=False)).tool_result
            assert result is not None
            assert result.data is not None or not result.is_error, f"{name}: {result.text}"
            job = result.data["job_id"] if isinstance(result.data, dict) and "pid" in result.data else job

    children = [child("fine", fine), child("broken", broken), child("spent", spent)]
    agent = AgentDefinition("caller", handle_steps=handle_steps, tools=tools_of(root), spawnable_agents=children)
    with Engine([agent], interactor=Person()) as engine:
        result = engine.run_sync(agent, "Go")
    assert result.error is None, result.error
    results = [(log.tool_name, log.result) for log in result.tool_calls]
    return [(name, result.text if result.data is None else result.data) for name, result in results]


def plain(annotation: Any) -> Any:
    while get_origin(annotation) in {Annotated, NotRequired}:
        annotation = get_args(annotation)[0]
    return annotation


def objects_in(annotation: Any, value: Any) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """
    Give each object in a value with the class that it is said to be of; values of other types are checked.
    """
    annotation = plain(annotation)
    if is_typeddict(annotation):
        assert isinstance(value, dict)
        yield annotation, value
        hints = get_type_hints(annotation, include_extras=True)
        for key in value.keys() & hints.keys():
            yield from objects_in(hints[key], value[key])
    elif get_origin(annotation) is list and is_typeddict(plain(get_args(annotation)[0])):
        for member in value:
            yield from objects_in(get_args(annotation)[0], member)
    else:
        TypeAdapter(annotation).validate_python(value, strict=True)


def declared_for(name: str, value: Any) -> Any:
    is_job = name == "run_terminal_command" and "pid" in value
    return StartedJob if is_job else BUNDLED[name].name.returns


@pytest.mark.deep
@pytest.mark.smoke
def test_every_bundled_tool_returns_exactly_its_documented_keys(root: Path) -> None:
    seen: dict[Any, list[frozenset[str]]] = {}
    results = results_of(root)
    for name, value in results:
        for kind, found in objects_in(declared_for(name, value), value):
            seen.setdefault(kind, []).append(frozenset(found))

    assert set(BUNDLED) == {name for name, _ in results}
    for kind, keys in seen.items():
        declared = kind.__required_keys__ | kind.__optional_keys__
        unseen = {key for key in declared if (kind.__name__, key) in UNPROVOKED}
        assert declared - unseen == frozenset().union(*keys), kind.__name__
        assert kind.__required_keys__ == frozenset.intersection(*keys) & declared, kind.__name__


@pytest.fixture(scope="module")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """
    The input schema of each bundled tool by its name.
    """
    folder = tmp_path_factory.mktemp("schemas")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder / "home"))
        (folder / "project").mkdir()
        return {made.spec.name: made.spec.input_schema for made in tools_of(folder / "project")}


def test_parameters_of_tool_names_match_the_tools_schemas(schemas: dict[str, Any]) -> None:
    for name, bundled in BUNDLED.items():
        takes = inspect.signature(bundled.name.signature).parameters
        properties = {key: value for key, value in schemas[name]["properties"].items() if (name, key) != BY_TOOL_CALL}

        assert list(properties) == list(takes), name
        assert set(schemas[name].get("required", ())) == {
            key for key, one in takes.items() if one.default is one.empty and (name, key) != ("set_output", "data")
        }, name
        for key, value in properties.items():
            if "default" in value and value["default"] != []:
                assert value["default"] == takes[key].default, (name, key)


BY_TOOL_CALL = ("run_terminal_command", "process_type")
"""What gives a result of another form, and is no part of the name."""


def test_a_handler_calls_bundled_tools_by_typed_names(root: Path) -> None:
    def handle_steps(ctx: StepContext) -> Steps[object]:
        (entry,) = yield from call(read_files, ["src/b.py"], limit=1)
        ran = yield from call(run_terminal_command, ["echo", "hi"])
        return [entry["content"], ran["exit_code"], ran["stdout"], (yield from call(recall))]

    agent = AgentDefinition("reader", handle_steps=handle_steps, tools=[read_files, "run_terminal_command", recall])
    with Engine([agent], tools=tools_of(root)[:-11]) as engine:
        result = engine.run_sync(agent, "Go")

    assert ["first = 1\n", 0, "hi\n", "There are no such notes."] == result.unwrap()


def test_a_typed_tool_name_is_an_ordinary_string() -> None:
    assert ("read_files", "'read_files'") == (read_files, repr(read_files))
    assert str is type(ToolCall(read_files, {"paths": ["a"]}).tool)
    assert AgentDefinition("a", tools=["read_files"]) == AgentDefinition("a", tools=[read_files])
    assert "read_files" == pickle.loads(pickle.dumps(read_files))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (ToolResult.error("it is locked"), "failed: it is locked"),
        (ToolResult.text("[cut]"), "returned a str, not a list"),
        (ToolResult.json({"a": 1}), "returned a JsonDict, not a list"),
    ],
    ids=["an error", "a long result that was cut", "another tool of the name"],
)
def test_a_result_of_another_shape_raises_a_tool_error(answer: ToolResult, words: str) -> None:
    def handle_steps(ctx: StepContext) -> Steps[str]:
        try:
            yield from call(read_files, ["a"])
        except ToolError as error:
            return error.message
        return "nothing"

    agent = AgentDefinition("reader", handle_steps=handle_steps, tools=["read_files"])

    assert words in run_script(agent, [(ToolCall("read_files", {"paths": ["a"]}), answer)])


def test_unknown_arguments_are_refused_before_anything_runs() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'path'"):
        read_files.arguments(["a"], path="a")  # type: ignore[call-arg]
    with pytest.raises(DataError):
        read_files.arguments([object()])  # type: ignore[list-item]
