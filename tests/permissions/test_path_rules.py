"""
A rule about files binds every bundled tool, however a call names them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as hypothesis_given
from hypothesis import settings
from hypothesis import strategies as st

from stepengine import AgentDefinition, Engine, Question, ToolCall
from stepengine.data.json import freeze_object
from stepengine.data.tools import ToolSpec
from stepengine.errors import DefinitionError
from stepengine.permissions import CallsWhere, Policy, PolicyFile, Request, Rule
from stepengine.tools.bundled import (
    FileChangeHook,
    change_hook_tools,
    file_tools,
    followup_tools,
    memory_tools,
    search_tools,
    shell_tools,
    skill_tools,
)

from .runs import run_calls

CANARY = "canary-5cb1"
FOLDER = "vaults"
FILE = "ledger.py"
DENIED = f"{FOLDER}/{FILE}"
TEXT = f"def {CANARY.replace('-', '_')}():\n    return '{CANARY}'\n"
SHOWN = (CANARY, CANARY.replace("-", "_"))

NAMES_NO_FILE = {"suggest_followups", "remember", "recall", "forget", "check_job", "kill_job"}
"""Bundled tools whose input leads to no file of a project."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """
    A folder with a file that a rule denies, and with everything that leads to it under another name.
    """
    made = tmp_path_factory.mktemp("guarded") / "proj"
    (made / FOLDER).mkdir(parents=True)
    (made / DENIED).write_text(TEXT)
    (made / "open").mkdir()
    (made / "open" / "a.py").write_text("def open_one():\n    return 1\n")
    (made / "to_folder").symlink_to(FOLDER)
    (made / "to_file.py").symlink_to(DENIED)
    (made / "to_link.py").symlink_to("to_file.py")
    (made / "open" / "up").symlink_to(f"../{FOLDER}")
    (made / "open" / "round").symlink_to(f"../open/../{FOLDER}")
    (made / "absolute").symlink_to(made / FOLDER)
    (made / "itself").symlink_to(".")
    os.link(made / DENIED, made / "twin.py")
    (made / ".agents" / "skills" / "trade").mkdir(parents=True)
    (made / ".agents" / "skills" / "trade" / "SKILL.md").write_text(
        "---\nname: trade\ndescription: Trades.\n---\nTrade.\n"
    )
    os.link(made / DENIED, made / ".agents" / "skills" / "trade" / "twin.py")
    (made / ".agents" / "skills" / "trade" / "link.py").symlink_to(f"../../../{DENIED}")
    (made / "mounted").mkdir()
    is_mounted = (
        subprocess.run(
            ["mount", "--bind", made / FOLDER, made / "mounted"], capture_output=True, check=False
        ).returncode
        == 0
        if shutil.which("mount") and os.geteuid() == 0
        else False
    )
    yield made
    if is_mounted:
        subprocess.run(["umount", made / "mounted"], check=True)


def spellings(root: Path) -> list[str]:
    """
    Return ways to name the denied file, or the folder that it is in.
    """
    files = [
        DENIED, f"./{DENIED}", f"{FOLDER}//{FILE}", f"{FOLDER}/./{FILE}", f"open/../{DENIED}", f"{DENIED}/", f"{DENIED}/.",
        f"{DENIED} ", f" {DENIED}", f"{root}/{DENIED}", f"//{str(root)[1:]}/{DENIED}", f"{root}/open/../{DENIED}", DENIED.upper(), DENIED.title(),
        f"{FOLDER.upper()}/{FILE}", f"to_folder/{FILE}", "to_file.py", "to_link.py", f"open/up/{FILE}", f"open/round/{FILE}",
        f"absolute/{FILE}", f"itself/{DENIED}", f"itself/itself/to_folder/{FILE}", "twin.py", f"mounted/{FILE}", f"/proc/self/cwd/{DENIED}",
        f"/proc/self/root{root}/{DENIED}", f"/proc/{os.getpid()}/cwd/{DENIED}", "/proc/self/fd/0", "/dev/fd/0", f"file://{root}/{DENIED}",
        f"~/{DENIED}", f"$PWD/{DENIED}", DENIED.replace("/", "\\"), DENIED.replace("/", "%2f"), f"{FOLDER}/{FILE}\0", f"{FOLDER}/{FILE}\n",
        unicodedata.normalize("NFD", DENIED), f"{FOLDER}/*.py", f"{FOLDER[:-1]}[s]/{FILE}", f"{{{FOLDER},open}}/{FILE}", f"**/{FILE}", f"'{DENIED}'",
        f"{FOLDER}/../{FOLDER}/{FILE}", f"../{root.name}/{DENIED}",
    ]  # fmt: skip
    return [
        *files,
        FOLDER,
        f"{FOLDER}/",
        "to_folder",
        "to_folder/",
        "open/up",
        "absolute",
        "itself/to_folder",
        "mounted",
        f"{root}/{FOLDER}",
        ".",
    ]


def calls(tool: str, name: str) -> list[dict[str, Any]]:
    """
    Return inputs of a bundled tool that name a file in every way that the tool takes.
    """
    edit = [{"old_string": "return", "new_string": "yield"}]
    given = [f"-g '{name}'"] if name != "." else [f"-g '**/{FILE}'", f"-g '{FOLDER}/**' -l", "-c -i", f"-g '!{FOLDER}'"]
    return {
        "read_files": [{"paths": [name]}, {"paths": ["open/a.py", {"path": name, "offset": 1}]}],
        "list_directory": [{"path": name}],
        "read_subtree": [{"paths": [name]}, {}],
        "write_file": [{"path": name, "content": "gone\n"}],
        "str_replace": [{"path": name, "replacements": edit}],
        "delete_file": [{"path": name}],
        "propose_write_file": [{"path": name, "content": "gone\n"}],
        "propose_str_replace": [{"path": name, "replacements": edit}],
        "glob": [{"pattern": name}, {"pattern": "**/*", "cwd": name}, {"pattern": "**/*"}],
        "code_search": [
            *[{"pattern": "return|canary", "flags": f} for f in given],
            {"pattern": "return|canary", "cwd": name},
        ],
        "find_files": [{"prompt": f"{name} {CANARY} {FILE}"}],
        "run_terminal_command": [{"command": f"cat {FILE}", "cwd": name}],
        "run_file_change_hooks": [{"files": [name]}],
        "skill": [{"name": "trade", "file": name}, {"name": "trade", "file": f"../../../{name}"}, {"name": "trade"}],
    }[tool]  # fmt: skip


def bundled(root: Path) -> list[Any]:
    """
    Return every tool of every set that works on files.
    """
    look = FileChangeHook("look", ["cat", FILE], pattern="**/*.py", cwd=FOLDER)
    return [
        *file_tools(root, write=True, delete=True, propose=True),
        *search_tools(root),
        *shell_tools(root),
        *change_hook_tools(root, [look]),
        *skill_tools(root, user=False),
        *followup_tools(),
        *memory_tools(),
    ]


def outcomes(
    root: Path, tool: str, inputs: list[dict[str, Any]], *rules: Rule, tools: list[Any] | None = None
) -> list[str]:
    """
    Run calls of one tool under rules and return what a model would see of each.
    """

    calls = [ToolCall(tool, given) for given in inputs]
    return run_calls(bundled(root) if tools is None else tools, calls, Policy([Rule.allow_tool("*"), *rules]))


def tool_names() -> list[str]:
    """
    Return the names of all bundled tools that may lead to a file; one that is added later is among them by itself.
    """
    return sorted({tool.spec.name for tool in bundled(Path.cwd())} - NAMES_NO_FILE)


@pytest.mark.spec("requirements:X70", "requirements:M13")
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.deep)], ids=["some", "every"])
@pytest.mark.parametrize("tool", tool_names())
def test_no_bundled_tool_reads_or_changes_a_denied_file(root: Path, tool: str, step: int) -> None:
    """In the fast suite each spelling is tried by every third tool, and each tool tries every third spelling."""
    first = tool_names().index(tool) % step
    inputs = [given for name in spellings(root)[first::step] for given in calls(tool, name)]
    before = (root / DENIED).stat()

    found = outcomes(root, tool, inputs, Rule.deny_path(f"{FOLDER}/**"))

    leaks = [(given, text) for given, text in zip(inputs, found, strict=True) if any(word in text for word in SHOWN)]
    names = [(given, text) for given, text in zip(inputs, found, strict=True) if DENIED in _listed(text, given)]
    assert ([], []) == (leaks, names)
    assert (TEXT, before.st_ino) == ((root / DENIED).read_text(), (root / DENIED).stat().st_ino)


def _listed(text: str, given: dict[str, Any]) -> str:
    """Return a result without what it repeats of the input and without refusals, which name what was refused."""
    said = str(given)
    return "" if DENIED in said or "is withheld from tools" in text or "Denied by" in text else text


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X70")
def test_without_the_rule_the_same_calls_show_the_file(root: Path) -> None:
    tools = [*file_tools(root), *search_tools(root)]

    for tool in ("read_files", "code_search", "glob", "list_directory", "read_subtree", "find_files"):
        inputs = [given for name in (DENIED, FOLDER, "to_folder") for given in calls(tool, name)]
        found = outcomes(root, tool, inputs, tools=tools)
        assert any(FILE in text or CANARY in text for text in found), tool


@pytest.mark.spec("requirements:X70")
@pytest.mark.parametrize("prefer_python", [False, True])
def test_a_search_reports_omissions_equally_for_hits_and_misses(root: Path, prefer_python: bool) -> None:
    tools = search_tools(root, prefer_python=prefer_python)
    inputs = [{"pattern": pattern, "cwd": "."} for pattern in (CANARY, "no-such-text")]

    hit, miss = outcomes(root, "code_search", inputs, Rule.deny_path(f"{FOLDER}/**"), tools=tools)

    assert hit == miss
    assert "files that rules keep from tools are left out" in hit


@pytest.mark.spec("requirements:X70")
def test_the_target_of_a_link_is_asked_about_like_itself(root: Path) -> None:
    rules = [Rule.ask_for_path(f"{FOLDER}/**", priority=1)]
    inputs = [{"paths": ["to_file.py"]}, {"paths": ["open/a.py"]}]

    linked, plain = outcomes(root, "read_files", inputs, *rules)

    assert "needs the approval of a person first" in linked
    assert CANARY not in linked
    assert "open_one" in plain


@pytest.mark.spec("requirements:X70")
@pytest.mark.parametrize("decision", ["allow", "deny", "ask"])
@pytest.mark.parametrize("others", [(), (Rule.allow_tool("read_files"),)], ids=["alone", "allowed"])
def test_no_predicate_shows_a_file_that_needs_approval(root: Path, decision: Any, others: tuple[Rule, ...]) -> None:
    predicate = Rule(decision, CallsWhere(lambda _: decision == "allow"))
    policy = Policy([Rule.ask_for_path(f"{FOLDER}/**", priority=1), predicate, *others])
    calls = [ToolCall("read_files", {"paths": [path]}) for path in ("to_file.py", DENIED, "open/a.py")]

    linked, named, plain = run_calls(file_tools(root), calls, policy)
    _, approved, _ = run_calls(file_tools(root), calls, policy, interactor=Agreeing())

    assert [False, False, decision == "allow" or bool(others)] == [
        CANARY in linked,
        CANARY in named,
        "open_one" in plain,
    ]
    assert CANARY in approved


class Agreeing:
    """A person who approves every call."""

    def ask(self, _question: Question) -> bool:
        return True


@pytest.mark.spec("requirements:X70")
def test_an_allowed_path_is_judged_by_its_link_target(root: Path) -> None:
    call = ToolCall("read_files", {"paths": ["open/a.py", f"open/up/{FILE}"]})

    (text,) = run_calls(file_tools(root), [call], Policy([Rule.allow_path("open/**")]))

    assert ("open_one" in text, CANARY in text, "needs the approval of a person" in text) == (True, False, True)


@pytest.mark.spec("requirements:X70")
def test_a_rule_for_one_tool_or_agent_binds_only_that(root: Path) -> None:
    inputs = [{"paths": ["to_file.py"]}]

    for rule in (
        Rule.deny_path(f"{FOLDER}/**", tool="write_file"),
        Rule.deny_path(f"{FOLDER}/**", scope="agent:other"),
    ):
        (text,) = outcomes(root, "read_files", inputs, rule)
        assert CANARY in text


@pytest.mark.spec("requirements:X70")
def test_a_rule_for_files_of_a_folder_spares_subfolders() -> None:
    policy = Policy([Rule.allow_tool("*"), Rule.deny_path("src/*")])
    reads = ToolSpec("read_files", category="read")

    decided = {
        p: policy.check(Request(tool=reads, input=freeze_object({"path": p}))).decision for p in ("src/a", "src/b/c")
    }

    assert {"src/a": "deny", "src/b/c": "allow"} == decided


# --- the file that says what is allowed ------------------------------------------------------------------------------


@pytest.mark.spec("requirements:X70")
@pytest.mark.parametrize("made", ["file_tools", "shell_tools", "change_hook_tools"])
@pytest.mark.parametrize("given_to", ["agent", "engine"])
def test_tools_that_could_write_the_policy_file_are_refused(tmp_path: Path, made: str, given_to: str) -> None:
    file = tmp_path / "deep" / "rules.json"
    file.parent.mkdir()
    Policy([Rule.allow_tool("*")]).save(file)
    tools = {
        "file_tools": lambda: file_tools(tmp_path, write=True),
        "shell_tools": lambda: shell_tools(tmp_path),
        "change_hook_tools": lambda: change_hook_tools(tmp_path, [FileChangeHook("look", ["true"])]),
    }[made]()
    agent = AgentDefinition("user", tools=tools if given_to == "agent" else [])

    with pytest.raises(DefinitionError, match=r"model could change its own permissions.*below_root=True"):
        Engine([agent], tools=tools if given_to == "engine" else [], permissions=PolicyFile(file))


@pytest.fixture(params=["file", "folder", "chain"])
def linked_policy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A path to a policy file outside of the folder ``work`` that leads through a link in this folder."""
    (tmp_path / "work").mkdir()
    (tmp_path / "kept").mkdir()
    Policy([Rule.ask_for_tool("*")]).save(tmp_path / "kept" / "rules.json")
    if request.param == "folder":
        (tmp_path / "work" / "in").symlink_to(tmp_path / "kept")
        return tmp_path / "work" / "in" / "rules.json"
    (tmp_path / "work" / "rules.json").symlink_to("../kept/rules.json")
    if request.param == "file":
        return tmp_path / "work" / "rules.json"
    (tmp_path / "rules.json").symlink_to("work/rules.json")
    return tmp_path / "rules.json"


@pytest.mark.spec("requirements:X70")
def test_tools_that_could_replace_a_policy_link_are_refused(tmp_path: Path, linked_policy: Path) -> None:
    tools = file_tools(tmp_path / "work", write=True)

    with pytest.raises(DefinitionError, match=r"model could change its own permissions.*below_root=True"):
        Engine([AgentDefinition("user", tools=tools)], permissions=PolicyFile(linked_policy))


@pytest.mark.spec("requirements:X70", "requirements:M11")
def test_remembered_rules_are_stored_behind_a_link(tmp_path: Path, linked_policy: Path) -> None:
    rule = Policy([Rule.allow_tool("read_files")]).to_json()["rules"][0]
    links = [path for path in tmp_path.rglob("*") if path.is_symlink()]

    PolicyFile(linked_policy).add_rule(freeze_object(rule))

    assert links == [path for path in links if path.is_symlink()]
    assert ["allow tool read_files"] == [kept.id for kept in PolicyFile(tmp_path / "kept" / "rules.json").remembered]
    assert [] == [path for path in tmp_path.rglob("*.lock") if path.parent.resolve() != tmp_path / "kept"]


@pytest.mark.spec("requirements:X70")
def test_below_root_protects_the_links_to_the_policy_file(tmp_path: Path, linked_policy: Path) -> None:
    links = [path for path in tmp_path.rglob("*") if path.is_symlink()]
    names = [str(path.relative_to(tmp_path)) for path in links]
    calls = [ToolCall("delete_file", {"path": name}) for name in names]
    calls += [ToolCall("write_file", {"path": name, "content": "{}"}) for name in names]
    Policy([Rule.allow_tool("*")]).save(linked_policy)

    run_calls(file_tools(tmp_path, write=True, delete=True), calls, PolicyFile(linked_policy, below_root=True))

    assert links == [path for path in links if path.is_symlink()]
    assert Policy([Rule.allow_tool("*")]) == Policy.load(linked_policy)


@pytest.mark.spec("requirements:X70")
def test_harmless_tools_may_work_beside_a_policy_file(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    Policy([Rule.allow_tool("*")]).save(tmp_path / "rules.json")
    tools = [*search_tools(tmp_path), *file_tools(tmp_path / "work", write=True)]

    assert [] == run_calls(tools, [], PolicyFile(tmp_path / "rules.json"))


@pytest.mark.spec("requirements:X70")
def test_below_root_protects_the_policy_file_and_its_lock(tmp_path: Path) -> None:
    file = tmp_path / "rules.json"
    Policy([Rule.allow_tool("*")]).save(file)
    (tmp_path / "other.json").symlink_to("rules.json")
    before = file.read_bytes()
    calls = [
        ToolCall("write_file", {"path": "rules.json", "content": "{}"}),
        ToolCall("write_file", {"path": "rules.json.lock", "content": "{}"}),
        ToolCall("delete_file", {"path": "rules.json"}),
        ToolCall("read_files", {"paths": ["other.json"]}),
        ToolCall("write_file", {"path": "free.txt", "content": "free"}),
    ]

    tools = file_tools(tmp_path, write=True, delete=True)
    seen = run_calls(tools, calls, PolicyFile(file, below_root=True))

    assert [True, True, True, True, False] == ["stores permanent approvals" in text for text in seen]
    assert (before, "free") == (file.read_bytes(), (tmp_path / "free.txt").read_text())


@pytest.mark.spec("requirements:X70", "requirements:X60")
@pytest.mark.parametrize(
    "path",
    [
        "AGENTS.md", "sub/CLAUDE.md", "agents/mine.py", ".agents/x/SKILL.md", ".git/hooks/pre-commit", ".github/workflows/ci.yml",
        ".gitlab-ci.yml", "stepengine.toml", "pyproject.toml", "conftest.py", ".claude/settings.json", ".husky/pre-push", "./AGENTS.MD", ".mcp.json",
    ],
)  # fmt: skip
def test_accept_edits_asks_about_files_that_instruct_agents(path: str) -> None:
    policy = Policy(mode="accept_edits")
    writes = ToolSpec("write_file", category="write")

    decided = [
        policy.check(Request(tool=writes, input=freeze_object({"path": p}))).decision for p in (path, "src/app.py")
    ]

    assert ["ask", "allow"] == decided


GLOBS = ["a/**", "**/b", "a/*/c", "*.py", "A/B", "a/{b,c}", "**/*.py", "b"]
PATHS = [(), ("a",), ("a", "b"), ("A", "B"), ("a", "x", "c"), ("b",), ("m.py",), ("a", "b", "m.PY"), ("d", "e")]


def test_folder_named_like_a_patch_prefix_is_no_other_path() -> None:
    look = ToolSpec("look", category="read")
    policy = Policy(rules=[Rule.deny_path("b"), Rule.allow_tool("look", priority=-1)])

    def decide(**given: str) -> str:
        return policy.check(Request(tool=look, input=freeze_object(given))).decision

    assert "allow" == decide(path="a/b")
    assert "ask" == decide(patch="--- a/b\n+++ b/b\n")


@pytest.mark.deep
@settings(max_examples=300)
@hypothesis_given(
    made=st.lists(
        st.tuples(
            st.sampled_from(("allow_path", "deny_path", "ask_for_path")),
            st.sampled_from(GLOBS),
            st.sampled_from((None, "look", "other")),
            st.integers(0, 2),
        ),
        max_size=6,
    ),
    mode=st.sampled_from(("default", "dont_ask", "bypass")),
    parts=st.sampled_from(PATHS[1:]),
)
def test_a_search_withholds_exactly_the_files_calls_cannot_name(
    made: list[tuple[str, str, str | None, int]], mode: Any, parts: tuple[str, ...]
) -> None:
    """
    The rules are folded once for a call, and must say of each file what they say of a call about that file alone.
    """
    rules = [
        getattr(Rule, kind)(glob, tool=tool, priority=priority, id=f"{number}")
        for number, (kind, glob, tool, priority) in enumerate(made)
    ]
    policy = Policy(rules=[*rules, Rule.allow_tool("look", priority=-1)], mode=mode)
    look = ToolSpec("look", category="read")
    searching = Request(tool=look, input=freeze_object({"pattern": "x"}))
    naming = Request(tool=look, input=freeze_object({"path": "/".join(parts)}))
    guard = policy.make_guard(searching)

    withheld = guard is not None and guard.file is not None and bool(guard.file((), parts))
    assert (policy.check(naming).decision != "allow") == withheld
