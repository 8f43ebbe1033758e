"""
A text that no definition marks as a path may name one: what is protected is never read without a question or a denial.

The spellings are a product: ways to name a file, wrapped as programs take texts apart, in each position of an input. The tools do what careless
programs do: they open every path that ``careless.readings`` finds in any text, so that a rule which overlooks one is seen by the file that is read.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st

from stepengine import Answer, ToolCall, Workspace, tool
from stepengine.data.json import freeze_object
from stepengine.data.tools import ToolSpec
from stepengine.permissions import Call, Policy, Request, Rule
from stepengine.workspace.patterns import GlobPattern

from . import careless
from .runs import run_calls

SECRET, FREE = "canary-77a1", "free-text"
DENY = Policy([Rule.deny_path("secrets/**"), Rule.allow_tool("*")])
ALLOW = Policy([Rule.allow_path("docs/**")], mode="dont_ask")

NAMES = [
    "secrets/plan.txt", "./secrets/plan.txt", "secrets//plan.txt", "docs/../secrets/plan.txt", "link/plan.txt", "docs/link", "{root}/secrets/plan.txt",
    "secrets%2Fplan.txt", "%73ecrets/plan.txt", "secrets\\plan.txt", "secr{e,x}ts/plan.txt", "{secrets,docs}/plan.txt", "secrets/pl*.txt",
    "s*/plan.txt", "[s]ecrets/plan.txt", "secret?/plan.txt", "sec'ret's/plan.txt", "secr\\ets/plan.txt", "docs/{..,a}/secrets/plan.txt",
    "secrets\\u002fplan.txt", "\\163ecrets/plan.txt", "[[:alpha:]]ecrets/plan.txt", "../desk/secrets/plan.txt", "{{docs,sec}rets,a}/plan.txt", "docs/deep/../plan.txt",
]  # fmt: skip
WRAPS = [
    "{}", " {}", "{} ", "{}\n", "\t{}", "{}\xa0", "\u3000{}", "{}\r\n", "\0{}", "docs/a.md {}", "docs/a.md\t{}", "docs/a.md\n{}", "docs/a.md\xa0{}", "docs/a.md,{}",
    "docs/a.md;{}", "docs/a.md:{}", "docs/a.md|{}", "docs/a.md\0{}", "--path={}", "-p={}", "-I{}", "-f {}", "path={}", "@{}", "<{}", ">{}", "'{}'", '"{}"', "`{}`",
    "({})", "[{}]", "[docs/a.md,{}]", "{{docs/a.md,{}}}", "file:{}", "FILE:{}", "C:{}", "git+file:{}", "HEAD:{}", "!{}", "see {}.", "Look at {}, please.", '["{}"]',
    '{{"path": "{}"}}', "[plan]({})", "{}#L1", "{}:12", "a&b={}", "url=https://example.org/a&path={}", "https://example.org/\0{}", "docs/a.md\\n{}", "“{}”", "«{}»", "\uff08{}\uff09", "docs/a.md+{}", "\ufeff{}", "\u200b{}", "docs/a.md \u2192 {}", "docs/a.md\u21d2{}",
]  # fmt: skip


def at_positions(text: str) -> list[dict[str, Any]]:
    """
    Return inputs that have a text in each position.
    """
    return [
        {"path": text},
        {"path": "docs/a.md", "other": text},
        {"path": "docs/a.md", "more": ["x", [text]]},
        {"path": "docs/a.md", "more": [{"deep": text}]},
        {"path": "docs/a.md", "more": [{text: "x"}]},
        {"path": "docs/a.md", "paths": text},
        {"path": "docs/a.md", "other": f"--path={text}"},
    ]


def at_one_position_each(texts: list[str]) -> list[dict[str, Any]]:
    """
    Return an input for each text, with the text in one position; the positions take turns.
    """
    return [positions[number % len(positions)] for number, positions in enumerate(map(at_positions, texts))]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("texts") / "desk"
    (made / "secrets").mkdir(parents=True)
    (made / "docs").mkdir()
    (made / "secrets/plan.txt").write_text(SECRET)
    (made / "key").write_text(SECRET)
    (made / "docs/a.md").write_text(FREE)
    (made / "docs/plan.txt").write_text(FREE)
    (made / "link").symlink_to("secrets")
    (made / "docs/link").symlink_to("../secrets/plan.txt")
    (made / "secrets/deep").mkdir()
    (made / "docs/deep").symlink_to("../secrets/deep")
    return made


@pytest.fixture(autouse=True)
def _there(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)


look = tool(careless.look)


@tool(about="{path}")
def look_there(path: str = "docs/a.md") -> str:
    """Look."""
    return careless.read_all({"path": path})


def outcomes(tools: list[Any], name: str, inputs: list[dict[str, Any]], policy: Policy, **options: Any) -> list[str]:
    """
    Return what a model would see of each call.
    """
    return run_calls(tools, [ToolCall(name, one, include_tool_call=False) for one in inputs], policy, **options)


def spelled(desk: Path) -> list[str]:
    """
    Return each name in each wrapping.
    """
    names = [name.replace("{root}", str(desk)) for name in NAMES]
    return [wrap.replace("{{", "{").replace("}}", "}").replace("{}", name) if wrap.count("{}") == 1 else name for wrap, name in itertools.product(WRAPS, names)]  # fmt: skip


def seen(name: str, given: dict[str, Any], *, about: Any = None) -> Request:
    return Request(tool=ToolSpec(name, about=about), input=freeze_object(given))


@pytest.mark.parametrize("is_complete", [False, pytest.param(True, marks=pytest.mark.deep)], ids=["some", "every"])
@pytest.mark.parametrize("policy", [DENY, ALLOW], ids=["deny", "allow"])
@pytest.mark.spec("reliability:PM47", "requirements:X70")
def test_no_spelling_at_any_position_reads_a_protected_file(desk: Path, policy: Policy, is_complete: bool) -> None:
    texts = spelled(desk) if is_complete else spelled(desk)[::7]
    inputs = [given for text in texts for given in at_positions(text)] if is_complete else at_one_position_each(texts)
    declared = [{"path": text} for text in texts]
    # What the rules allow as written is run: only then it is known where links lead.
    free = [given for given in inputs if policy.check(seen("look", given)).decision == "allow"]
    free_there = [one for one in declared if policy.check(seen("look_there", one, about="{path}")).decision == "allow"]

    found = outcomes([look], "look", free, policy)
    there = outcomes([look_there], "look_there", free_there, policy)

    assert [] == [one for one, text in zip([*free, *free_there], [*found, *there], strict=True) if SECRET in text]


@pytest.fixture
def served() -> Any:
    """
    Make sources of the careless tool of a server in this process.
    """
    pytest.importorskip("mcp", reason="the extra mcp is not installed")
    from mcp.server import MCPServer

    from stepengine.adapters.mcp import mcp_tools

    server = MCPServer("careless")
    server.tool()(careless.look)
    return functools.partial(mcp_tools, server, name="files")


@pytest.mark.spec("reliability:PM47")
def test_no_spelling_has_a_server_read_a_protected_file(desk: Path, served: Any) -> None:
    inputs = at_one_position_each(spelled(desk)[::41])
    free = [given for given in inputs if DENY.check(seen("files__look", given)).decision == "allow"]
    plain = {"path": "docs/a.md", "other": "docs/plan.txt"}

    *found, allowed = outcomes([served()], "files__look", [*free, inputs[0], inputs[1], plain], DENY)

    assert [] == [one for one, text in zip([*free, *inputs[:2]], found, strict=True) if SECRET in text]
    assert FREE in allowed


@pytest.mark.spec("reliability:PM47", "requirements:X70")
def test_declared_paths_of_a_server_are_the_only_ones_judged(served: Any) -> None:
    inputs = [
        {"path": "docs/a.md", "other": "See secrets/notes.md."},
        {"path": "secrets/plan.txt"},
        {"path": "link/plan.txt"},
    ]

    prose, *denied = outcomes([served(about={"look": "{path}"})], "files__look", inputs, DENY)

    assert FREE in prose
    assert ["Denied by the rule", "'link/plan.txt' is"] == [text[:18] for text in denied]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:PM47")
def test_most_spellings_reach_the_file_without_rules(desk: Path) -> None:
    """Else the test above proves nothing."""
    reached = [SECRET in careless.read_all({"other": text}) for text in spelled(desk)[::7]]

    assert len(reached) // 2 < sum(reached)


PLAIN = [
    {"path": "docs/a.md"},
    {"path": "docs/a.md", "other": "docs/plan.txt"},
    {"path": "docs/a.md", "more": [["docs/plan.txt"], {"deep": "docs/a.md"}]},
    {"path": "docs/a.md", "other": "Write a plan, see docs/plan.txt or https://example.org/a/b."},
    {"path": "docs/a.md", "other": "fast"},
    {"paths": "docs/a.md docs/plan.txt"},
]


@pytest.mark.parametrize("given", PLAIN)
@pytest.mark.spec("reliability:PM47")
def test_an_unprotected_file_named_plainly_is_read(given: dict[str, Any]) -> None:
    for policy in (DENY, ALLOW):
        (text,) = outcomes([look], "look", [given], policy)
        assert FREE in text


@pytest.mark.parametrize("path", ["docs/my notes/a.md", "docs/@types/a.md", "docs/[id]/a.md", "docs/a,b/c.md", "docs/Bob's.md", "docs/{a,b}.md"])  # fmt: skip
@pytest.mark.spec("reliability:PM47")
def test_a_marked_text_is_one_path(path: str) -> None:
    for policy in (DENY, ALLOW):
        assert "allow" == policy.check(seen("look", {"path": path})).decision
        assert "allow" == policy.check(seen("look", {"place": path}, about="{place}")).decision


@pytest.mark.parametrize("text", ["key", "x key", "-f key", "fast,key", "secrets", "@secrets"])
@pytest.mark.spec("reliability:PM47")
def test_a_word_that_names_a_file_is_asked_about(text: str) -> None:
    named, other = outcomes([look], "look", [{"path": "docs/a.md", "other": one} for one in (text, "fast")], ALLOW)

    assert "person" in named
    assert FREE in other


@pytest.mark.parametrize("mode", ["default", "plan", "accept_edits", "bypass"])
@pytest.mark.spec("reliability:PM47", "requirements:M3")
def test_a_text_that_may_match_a_deny_always_asks(mode: Any) -> None:
    policy = Policy(DENY.rules, mode)

    for given in ({"other": "secrets/plan.txt"}, {"path": "a,secrets/plan.txt"}):
        verdict = policy.check(seen("look", given))
        assert ("ask", "deny path secrets/**") == (verdict.decision, verdict.rule and verdict.rule.id)
        assert "secrets/plan.txt" in verdict.message
    assert "deny" == policy.check(seen("look", {"path": "secrets/plan.txt"})).decision
    assert "deny" == Policy(DENY.rules, "dont_ask").check(seen("look", {"other": "secrets/plan.txt"})).decision


@pytest.mark.spec("reliability:PM47")
def test_an_approved_text_lets_the_tool_read_the_file() -> None:
    class Approve:
        def ask(self, question: Any) -> Answer:
            return Answer(text="yes")

    (text,) = outcomes([look], "look", [{"other": "link/plan.txt and secrets/plan.txt"}], DENY, interactor=Approve())

    assert SECRET in text


@pytest.mark.parametrize("other", ["secrets/plan.txt", "../x", "see README.md", "a,docs/b.md", "@key"])
@pytest.mark.spec("reliability:PM47", "requirements:X71")
def test_an_approval_of_one_file_covers_no_other(other: str) -> None:
    def reading(**given: str) -> Request:
        return Request(tool=ToolSpec("look", category="read"), input=freeze_object(given))

    plain, more = reading(path="docs/a.md", other="fast"), reading(path="docs/a.md", other=other)

    assert Call.from_request(plain).matches(reading(path="docs/a.md", other="slow"), "allow")
    assert not Call.from_request(plain).matches(more, "allow")
    assert Call.from_request(more).matches(more, "allow")


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:PM47")
def test_a_text_too_long_to_analyse_is_asked_about() -> None:
    many = " ".join(f"word{n}" for n in range(25_000))
    for text in ("a" * 400_001, many, "%" + "25" * 5 + "2f", "a" * 600 + "{b,c}" * 200):
        assert "ask" == DENY.check(seen("look", {"other": text})).decision
        assert "deny" == ALLOW.check(seen("look", {"path": "docs/a.md", "other": text})).decision
    assert "allow" == DENY.check(seen("look", {"other": "word " * 70_000})).decision


@pytest.mark.spec("reliability:PM47")
def test_texts_of_bundled_tools_that_are_no_paths_pass(desk: Path) -> None:
    (desk / "docs/new.md").unlink(missing_ok=True)
    written, searched = (
        outcomes(["write_file", "code_search"], name, [given], DENY, workspace=Workspace(desk, write=True))[0]
        for name, given in (
            ("write_file", {"path": "docs/new.md", "content": "See secrets/plan.txt."}),
            ("code_search", {"pattern": "secrets"}),
        )
    )

    assert "Created docs/new.md" in written
    assert "secrets/plan.txt" in searched


@hypothesis_given(st.lists(st.sampled_from(["secrets", "secret*", "*", "**", "?ecrets", "docs", "plan.txt", "p*.txt", "[ps]lan.txt", "a"]), min_size=1, max_size=4))  # fmt: skip
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_pattern_overlaps_a_rule_if_a_path_matches_both(names: list[str]) -> None:
    rule, pattern = GlobPattern("secrets/**"), GlobPattern("/".join(names))
    words = ["secrets", "docs", "plan.txt", "a"]
    paths = [path for length in range(1, 5) for path in itertools.product(words, repeat=length)]

    if any(rule.match(path) and pattern.match(path) for path in paths):
        assert rule.overlaps(["?" + name[4:] if name.startswith("[") else name for name in names])


@pytest.mark.parametrize("text", ["cat my\\ notes/x.txt", "--path=my%20notes/x.txt", "see 'my\\ notes/x'"])
@pytest.mark.spec("reliability:PM47")
def test_an_escaped_blank_belongs_to_the_name_of_a_folder(text: str) -> None:
    policy = Policy([Rule.deny_path("my notes/**"), Rule.allow_tool("*")])

    assert "ask" == policy.check(seen("look", {"other": text})).decision
    assert "allow" == policy.check(seen("look", {"other": text.replace("notes", "pages")})).decision


@pytest.mark.spec("reliability:PM47")
def test_an_undeclared_name_of_a_member_may_be_a_path() -> None:
    declared = {"properties": {"secrets/plan.txt": {"type": "string"}}}
    given = freeze_object({"secrets/plan.txt": "text"})

    assert "ask" == DENY.check(Request(tool=ToolSpec("save"), input=given)).decision
    assert "allow" == DENY.check(Request(tool=ToolSpec("save", input_schema=declared), input=given)).decision
    assert "deny" == ALLOW.check(seen("save", {"path": "docs/a.md", "../x.py": "text"})).decision


SUFFIXED = [
    "script.7z", "x.2024", "..x", "x.md~", "file.mp3", ".x~", "x.c~", "evil.code-workspace", "x.каталог", "x.averylongextension",
]  # fmt: skip
NUMBERS = ["v1.2", "3.14", "1.2.3", "Fig.3", "1.5GB", "e.g.", "i.e.", "wait...", "...then", "p.12", "10.5"]


@pytest.mark.parametrize(
    ("text", "decision"),
    [*[(f"write {name}", "deny") for name in SUFFIXED], *[(f"see {word} of it", "allow") for word in NUMBERS]],
)
@pytest.mark.spec("reliability:PM47")
def test_an_allow_counts_file_names_and_no_numbers(text: str, decision: str) -> None:
    assert decision == ALLOW.check(seen("look", {"path": "docs/a.md", "other": text})).decision


@pytest.mark.spec("reliability:PM47")
def test_a_number_among_paths_is_a_path() -> None:
    assert "deny" == ALLOW.check(seen("look", {"path": ["docs/a.md", 5]})).decision
    assert "deny" == Policy([Rule.deny_path("5"), Rule.allow_tool("*")]).check(seen("look", {"path": 5})).decision


@pytest.mark.parametrize("text", ["café/plan.txt", "cafe\u0301/plan.txt", "हिन्दी/plan.txt"])
@pytest.mark.spec("reliability:PM47")
def test_marks_of_letters_split_no_name(text: str) -> None:
    policy = Policy([Rule.deny_path(f"{text.partition('/')[0]}/**"), Rule.allow_tool("*")])

    assert "ask" == policy.check(seen("look", {"other": f"see {text}"})).decision


PROSE = [
    ("**/*.pem", "http://example.org/a.pem"), ("**/id_*", "**Important:** read it"), ("**/id_*", "call f(*args) or f(a, **kwargs)"), ("**/id_*", "**Fixed** in 2.0"), ("**/id_*", "x = [*a.b, c], {**d}"),
    ("secrets/**", "https://example.org:8080/a/b:c"), ("secrets/**", "assert!(x) and ![a](b)"),
]  # fmt: skip


@pytest.mark.parametrize(("glob", "text"), PROSE)
@pytest.mark.spec("reliability:PM47")
def test_addresses_and_marks_of_prose_are_no_paths(desk: Path, glob: str, text: str) -> None:
    policy = Policy([Rule.deny_path(glob), Rule.allow_tool("*")])

    assert "allow" == policy.check(seen("look", {"other": text})).decision
    assert FREE in outcomes([look], "look", [{"path": "docs/a.md", "other": text}], policy)[0]


HIDDEN = [
    ("secrets/**", "https://example.org/a:secrets/plan.txt"), ("secrets/**", "http://h/x.jar!/secrets/p"), ("secrets/**", "!(docs)/plan.txt"), ("secrets/**", "@(sec|x)rets/plan.txt"),
    ("secrets/**", "+++ b/secrets/plan.txt"), ("café/**", '"b/caf\\303\\251/x"'), ("café/**", "caf\\xc3\\xa9/x"), ("@scope/**", "@@scope/x"), ("secrets/**", "-xfsecrets/plan.txt"), ("secrets/**", "tar -xzvfsecrets/plan.tar"), ("my notes/**", "path=my+notes/x"), ("**/id_*", "id_**"), ("**/id_*", "**/id*"),
]  # fmt: skip


@pytest.mark.parametrize(("glob", "text"), HIDDEN)
@pytest.mark.spec("reliability:PM47")
def test_a_protected_file_in_a_rare_notation_is_asked_about(glob: str, text: str) -> None:
    policy = Policy([Rule.deny_path(glob), Rule.allow_tool("*")])

    assert "ask" == policy.check(seen("look", {"other": text})).decision


@pytest.mark.parametrize("mode", ["default", "bypass"])
@pytest.mark.parametrize("text", ["l*k/plan.txt", "l???/plan.txt", "l*/pl*", "docs/l*", "docs/**", "d*s/l?nk", "[l]ink/plan.txt", "l*/new.txt", "link/new.txt", "docs/deep/new.txt"])  # fmt: skip
@pytest.mark.spec("reliability:PM47")
def test_patterns_and_new_files_are_judged_by_link_targets(desk: Path, text: str, mode: Any) -> None:
    policy = Policy(DENY.rules, mode)
    for given in ({"path": text}, {"other": f"see {text} there"}):
        assert "allow" == policy.check(seen("look", given)).decision
        (found,) = outcomes([look], "look", [given], policy)
        assert "is withheld from tools by the rule" in found


@pytest.mark.spec("reliability:PM47")
def test_an_allowed_pattern_is_judged_by_where_links_lead(desk: Path) -> None:
    for text in ("docs/*", "docs/l*", "docs/**"):
        assert "allow" == ALLOW.check(seen("look", {"path": text})).decision
        assert "needs the approval of a person first" in outcomes([look], "look", [{"path": text}], ALLOW)[0]
    assert FREE in outcomes([look], "look", [{"path": "docs/a*"}], ALLOW)[0]


@pytest.mark.spec("reliability:PM47")
def test_emphasis_that_matches_an_existing_file_is_judged(desk: Path) -> None:
    (desk / "id_key").write_text(SECRET)
    policy = Policy([Rule.deny_path("**/id_*"), Rule.allow_tool("*")])
    try:
        assert "is withheld from tools" in outcomes([look], "look", [{"other": "see **key** there"}], policy)[0]
    finally:
        (desk / "id_key").unlink()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:PM47")
def test_a_pattern_over_links_that_lead_back_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs/a").mkdir(parents=True)
    for name in ("one", "two"):
        (tmp_path / "docs/a" / name).symlink_to("..")
    monkeypatch.chdir(tmp_path)

    assert "" == outcomes([look], "look", [{"path": "docs/**/*/**/x"}], DENY)[0]
