"""
A rule binds what it names: one that can match nothing is refused, and no spelling of a path goes around one.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentDefinition, Engine, ToolCall
from stepengine.data.json import freeze_object
from stepengine.data.tools import ToolSpec
from stepengine.errors import DefinitionError
from stepengine.permissions import Policy, Request, Rule, read_only_commands
from stepengine.tools.bundled import file_tools, search_tools, shell_tools

OTHERS = ToolSpec("files__read", category="mcp")


def decide(rule: Rule, **given: Any) -> str:
    """
    Return what a policy of one rule, which allows everything else that it can, says about a call.
    """
    request = Request(tool=OTHERS, input=freeze_object(given))
    rules = [rule] if rule.decision == "allow" else [rule, Rule.allow_tool("*", priority=-1)]
    return Policy(rules, mode="dont_ask").check(request).decision


# --- rules that can match nothing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("glob", "remedy"),
    [
        ("~/secrets", "'secrets'"),
        ("~ann/secrets/**", "relative to the root"),
        ("secrets\\**", "'secrets/**'"),
        ("file:secrets/**", "'secrets/**'"),
        ("https://example.org/**", "a rule about domains"),
        ("C:/project/secrets/**", "relative to the root"),
        ("../secrets", "relative"),
        ("$HOME/secrets", "relative to the root"),
        ("%USERPROFILE%/secrets", "relative to the root"),
        ("secrets%2F**", "'secrets/**'"),
        ("secrets/** ", "'secrets/**[ ]'"),
        (" secrets/**", "'[ ]secrets/**'"),
        ("secrets\n", "control character"),
        ("", "1 to 512 characters"),
    ],
)
@pytest.mark.spec("reliability:PM45")
def test_a_path_rule_that_matches_nothing_is_refused_with_advice(glob: str, remedy: str) -> None:
    for make in (Rule.deny_path, Rule.ask_for_path, Rule.allow_path):
        with pytest.raises(DefinitionError) as refused:
            make(glob)
        assert remedy in refused.value.message


@pytest.mark.parametrize("glob", ["~*", "**/*~", "$*", "a$b", "[~]/x", "note: x.md", "100%/**", ".", "./docs", "docs/"])
@pytest.mark.spec("reliability:PM45")
def test_unusual_names_that_exist_can_be_named(glob: str) -> None:
    assert glob == Rule.deny_path(glob).matcher.glob


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: Rule.deny_tool("read files"), "letters, digits"),
        (lambda: Rule.deny_tool("github/push"), "github__push"),
        (lambda: Rule.deny_tool("fs.read"), "fs__read"),
        (lambda: Rule.deny_tool("read_?"), "only *"),
        (lambda: Rule.deny_tool("a" * 65), "64"),
        (lambda: Rule.deny_path("x", tool="read files"), "letters, digits"),
        (lambda: Rule.deny_domain("example.org", tool="read files"), "letters, digits"),
        (lambda: Rule.deny_category(" write"), "'write'"),
        (lambda: Rule.deny_domain("example.org:8443"), "'example.org'"),
        (lambda: Rule.deny_domain("ann@example.org"), "'docs.example.org'"),
        (lambda: Rule.deny_domain("exa mple.org"), "'docs.example.org'"),
        (lambda: Rule.deny_domain("*."), "'docs.example.org'"),
        (lambda: Rule.deny_command(["rm", "*"]), "['rm']"),
        (lambda: Rule.deny_command(["rm ", "-rf"]), "blanks"),
        (lambda: Rule.deny_command("*"), 'Rule.deny_category("execute")'),
        (lambda: Rule.ask_for_command(["git*", "push"]), "no wildcards"),
        (lambda: Rule.allow_command(["bin/"]), "not the name of a program"),
        (lambda: Rule.deny_tool("x", scope="agent:"), "needs the id"),
    ],
    ids=map(str, itertools.count()),
)
@pytest.mark.spec("reliability:PM45")
def test_other_rules_that_match_nothing_are_refused_with_advice(make: Any, remedy: str) -> None:
    with pytest.raises(DefinitionError) as refused:
        make()
    assert remedy in refused.value.message


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("Example.ORG.", "https://example.org/a"),
        ("exämple.org", "https://xn--exmple-cua.org/"),
        ("*.exämple.org", "https://docs.exämple.org/"),
        ("::1", "http://[::1]/"),
        ("[2606:4700::1111]", "http://[2606:4700::1111]:80/"),
    ],
)
@pytest.mark.spec("reliability:PM43", "reliability:PM45")
def test_a_host_rule_binds_in_every_spelling(host: str, url: str) -> None:
    assert "allow" == decide(Rule.allow_domain(host), url=url)
    assert "deny" == decide(Rule.allow_domain(host), url="https://other.org/")


@pytest.mark.parametrize("name", ["withhold", "allow_secrets", "allow_protected"])
@pytest.mark.parametrize("pattern", ["~/secrets", "secrets\\*"])
@pytest.mark.spec("reliability:PM45")
def test_tools_take_no_pattern_of_files_that_can_match_nothing(tmp_path: Path, name: str, pattern: str) -> None:
    with pytest.raises(DefinitionError, match=name):
        file_tools(tmp_path, write=True, **{name: [pattern]})  # type: ignore[arg-type]


# --- names that hold characters of patterns ---------------------------------------------------------------------------

NAMES = ["[draft].md", "a{b,c}.md", "[z-a].md", "x[1].md"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("glob", ["docs/{name}", "**/{name}", "docs/{name}/**"])
@pytest.mark.spec("reliability:PM46")
def test_a_rule_binds_the_file_of_exactly_its_name(glob: str, name: str) -> None:
    glob = glob.replace("{name}", name)
    assert "deny" == decide(Rule.deny_path(glob), path=f"docs/{name}/x" if glob.endswith("**") else f"docs/{name}")
    assert "deny" == decide(Rule.deny_path(glob), path=f"/srv/docs/{name}")
    assert "allow" == decide(Rule.deny_path(glob), path="docs/other.md")


@pytest.mark.parametrize(
    ("glob", "bound", "free"),
    [
        ("docs/[[]draft].md", ["docs/[draft].md"], ["docs/d.md"]),
        ("docs/[[]dr[]].md", ["docs/[dr].md"], ["docs/d.md"]),
        ("docs/a[*].md", ["docs/a*.md"], ["docs/ab.md"]),
        ("docs/a[?].md", ["docs/a?.md"], ["docs/ab.md"]),
        ("docs/[{]a,b}.md", ["docs/{a,b}.md"], ["docs/a.md"]),
        ("docs/{a,b[,]c}.md", ["docs/a.md", "docs/b,c.md"], ["docs/c.md"]),
        ("docs/{a,b[}]}.md", ["docs/a.md", "docs/b}.md"], ["docs/b.md"]),
        ("docs/[ab].md", ["docs/a.md", "docs/[ab].md"], ["docs/c.md"]),
        ("docs/{a,b}/*.md", ["docs/a/x.md", "docs/{a,b}/x.md"], ["docs/c/x.md"]),
    ],
)
@pytest.mark.spec("reliability:PM46")
def test_characters_of_patterns_are_escaped_by_brackets(glob: str, bound: list[str], free: list[str]) -> None:
    for path in bound:
        assert "deny" == decide(Rule.deny_path(glob), path=path), path
        assert "allow" == decide(Rule.allow_path(glob), path=path), path
    for path in free:
        assert "allow" == decide(Rule.deny_path(glob), path=path), path


@pytest.mark.parametrize("name", NAMES[:1])
@pytest.mark.spec("reliability:PM46", "reliability:FP4")
async def test_bundled_tools_withhold_a_file_with_pattern_characters(tmp_path: Path, name: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / name).write_text("canary\n")
    (tmp_path / "docs" / "open.md").write_text("plain canary\n")
    (tmp_path / "link").symlink_to(f"docs/{name}")
    inputs = [
        ("read_files", {"paths": ["link"]}),
        ("code_search", {"pattern": "canary"}),
        *([("run_terminal_command", {"command": "rg canary docs"})] if shutil.which("rg") else []),
    ]

    def handle(ctx: Any) -> Any:
        said = []
        for called, given in inputs:
            said.append((yield ToolCall(called, given, include_tool_call=False)).tool_result.text)
        return said

    agent = AgentDefinition(
        "reader",
        tools=[*file_tools(tmp_path), *search_tools(tmp_path), *shell_tools(tmp_path)],
        handle_steps=handle,
    )
    policy = Policy([Rule.deny_path(f"docs/{name}", id="sealed"), *read_only_commands(), Rule.allow_category("read")])
    result = await Engine([agent], permissions=policy).run("reader")

    for (called, _), text in zip(inputs, result.unwrap(), strict=True):
        assert name not in text.replace("link", ""), called
        assert called == "read_files" or "plain canary" in text


# --- spellings of a path in a call ------------------------------------------------------------------------------------

SPELLINGS = [
    "secrets/plan.txt",
    "file:///srv/shop/secrets/plan.txt",
    "file:secrets/plan.txt",
    "file://localhost/srv/shop/secrets/plan.txt",
    "fi\tle:///srv/shop/secrets/plan.txt",
    "file:///srv/shop/secrets/plan.txt?line=1#here",
    "file:///srv/shop/%73ecrets%2Fplan.txt",
    "secrets%2Fplan.txt",
    "secrets%25252Fplan.txt",
    "docs/%2e%2e/secrets/plan.txt",
    "file%3A///srv/shop/secrets/plan.txt",
    "%2525252525252525252525252525252525252525252573ecrets/plan.txt",
    "secrets\\plan.txt",
    "C:\\shop\\secrets\\plan.txt",
    "~/shop/secrets/plan.txt",
    "${PWD}/secrets/plan.txt",
    "\0file:///srv/shop/secrets/plan.txt",
    "\u2003secrets/plan.txt",
    "git+file:///srv/shop/secrets/plan.txt",
    "resource://secrets/plan.txt",
]


@pytest.mark.parametrize("path", SPELLINGS)
@pytest.mark.spec("reliability:PM47")
def test_no_spelling_of_a_path_goes_around_a_rule(path: str) -> None:
    for given in ({"path": path}, {"paths": ["docs/a", path]}, {"files": [{"file": path}]}):
        assert "deny" == decide(Rule.deny_path("secrets/**"), **given), given
        assert "deny" == decide(Rule.ask_for_path("secrets"), **given), given
        assert "deny" == decide(Rule.allow_path("docs/**"), **given), given


MOVES = [
    {"source": "secrets/plan.txt", "destination": "docs/plan.txt"},
    {"source": "docs/plan.txt", "destination": "/srv/shop/secrets/plan.txt"},
    {"filename": "secrets/plan.txt"},
    {"edits": [{"where": "secrets%2fplan.txt"}]},
    {"files": {"secrets/plan.txt": "New text."}},
    {"anything": [{"secrets/plan.txt": {"text": "New text."}}]},
    {"anything": "./" * 3_000 + "secrets/plan.txt"},
    {"anything": "%2e%2f" * 3_000 + "secrets/plan.txt"},
    {"command": ["cat", "secrets/plan.txt"]},
]


@pytest.mark.parametrize("given", MOVES)
@pytest.mark.spec("reliability:PM47")
def test_a_path_is_recognised_by_value_in_any_argument(given: dict[str, Any]) -> None:
    """As those of ``move_file`` of the file server of MCP."""
    assert "deny" == decide(Rule.deny_path("secrets/**"), **given)
    assert "deny" == decide(Rule.ask_for_path("secrets"), **given)
    assert "allow" == decide(Rule.deny_path("other/**"), **given)


@pytest.mark.spec("reliability:PM47")
def test_a_rule_about_all_files_is_not_about_every_text() -> None:
    assert "allow" == decide(Rule.deny_path("**"), city="Rome")
    assert "deny" == decide(Rule.deny_path("**"), path="Rome")


@pytest.mark.parametrize("path", ["docs/100%.md", "docs/a%20b.md", "docs/a~b.md", "docs/a:b.md", "docs/50%25.md"])
@pytest.mark.spec("reliability:PM47")
def test_names_that_only_look_encoded_stay_usable(path: str) -> None:
    assert "allow" == decide(Rule.allow_path("docs/**"), path=path)
    assert "allow" == decide(Rule.deny_path("secrets/**"), path=path)
