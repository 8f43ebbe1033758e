"""
What a tool of an author says that its calls are about, and the rules that bind it by that.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import Tool, ToolCall, ToolContext, tool
from stepengine.data.json import freeze_object
from stepengine.data.tools import ToolSpec
from stepengine.errors import DefinitionError
from stepengine.permissions import Call, Policy, Request, Rule
from stepengine.permissions.rules import is_checkable_by_path_rules

from .runs import run_calls

DENY = Rule.deny_path("vault/**")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """
    A working directory with a denied file, and links that lead to it.
    """
    made = tmp_path / "desk"
    (made / "vault").mkdir(parents=True)
    (made / "vault/ledger.txt").write_text("secret")
    (made / "open").mkdir()
    (made / "open/a.txt").write_text("free")
    (made / "open/link.txt").symlink_to("../vault/ledger.txt")
    (made / "open/up").symlink_to("../vault")
    (made / "itself").symlink_to(".")
    (tmp_path / "elsewhere").symlink_to(made / "vault")
    monkeypatch.chdir(made)
    return made


@tool(about="{name}")
def show(name: str) -> str:
    """Show a file."""
    return Path(name).read_text()


def seen(about: Any, given: dict[str, Any]) -> Request:
    return Request(tool=ToolSpec("any", about=about), input=freeze_object(given))


@pytest.mark.spec("requirements:X70")
def test_a_declared_path_is_denied_under_every_spelling(place: Path) -> None:
    @tool(about=["{source}", "copies/{copy}"])
    def show(source: str, copy: str = "x") -> str:
        """Show a file."""
        return Path(source).read_text()

    names = [
        "vault/ledger.txt", "./vault//ledger.txt", "VAULT/ledger.txt", "open/../vault/ledger.txt", "open/link.txt", "open/up/ledger.txt",
        "itself/vault/ledger.txt", "itself/itself/open/up/ledger.txt", str(place / "vault/ledger.txt"), str(place / "open/link.txt"),
        "../desk/vault/ledger.txt", "../elsewhere/ledger.txt", str(place.parent / "elsewhere/ledger.txt"), f"/proc/self/root{place}/open/link.txt",
        "/proc/self/cwd/open/up/ledger.txt", f"/proc/{os.getpid()}/cwd/vault/ledger.txt",
    ]  # fmt: skip
    given = [ToolCall("show", {"source": name}) for name in names]
    by_the_other = [ToolCall("show", {"source": "open/a.txt", "copy": "../vault/b.txt"})]

    *found, plain = run_calls(
        [show],
        [*given, *by_the_other, ToolCall("show", {"source": "open/a.txt"})],
        Policy([Rule.allow_tool("*"), DENY]),
    )

    assert [] == [
        (name, text)
        for name, text in zip([*names, "the other"], found, strict=True)
        if "secret" in text or "free" in text
    ]
    assert "free" == plain


@pytest.mark.spec("requirements:X70")
def test_without_about_texts_are_asked_about_and_links_refused(place: Path) -> None:
    @tool
    def show(source: str) -> str:
        """Show a file."""
        return Path(source).read_text()

    @tool
    def show_path(options: dict[str, Any], path: str = "x") -> str:
        """Show a file."""
        return ""

    by_name, by_link = run_calls(
        [show],
        [ToolCall("show", {"source": name}) for name in ("vault/ledger.txt", "open/link.txt")],
        Policy([Rule.allow_tool("*"), DENY]),
    )
    assert by_name.startswith("Denied: a call of show needs a person's approval")
    assert by_link.startswith("'open/link.txt' is withheld from tools by the rule")
    assert (False, True) == (is_checkable_by_path_rules(show.spec), is_checkable_by_path_rules(show_path.spec))
    assert is_checkable_by_path_rules(tool(about=())(show.fn).spec)


@pytest.mark.spec("requirements:X70")
def test_relative_paths_start_at_the_workspace_where_there_is_one(place: Path, tmp_path: Path) -> None:
    @tool(about="{name}")
    def show(ctx: ToolContext, name: str) -> str:
        """Show a file."""
        assert ctx.workspace is not None
        return (ctx.workspace.root / name).read_text()

    os.chdir(tmp_path)
    calls = [ToolCall("show", {"name": name}) for name in ("open/link.txt", "open/a.txt")]

    linked, plain = run_calls([show], calls, Policy([Rule.allow_tool("*"), DENY]), workspace=place)

    assert ("free", False) == (plain, "secret" in linked)


@pytest.mark.spec("requirements:X70")
def test_any_suffix_of_an_outside_path_may_match_a_rule(place: Path) -> None:
    far = place.parent / "far" / "off" / "vault"
    far.mkdir(parents=True)
    (far / "k.txt").write_text("secret")
    (far.parent / "k.txt").write_text("free")
    (place / "open/far").symlink_to(far.parent)

    calls = [ToolCall("show", {"name": name}) for name in ("open/far/vault/k.txt", "open/far/k.txt")]
    (place / "open/door").symlink_to(far)

    *found, free = run_calls(
        [show], [ToolCall("show", {"name": "open/door/k.txt"}), *calls], Policy([Rule.allow_tool("*"), DENY])
    )

    assert ("free", False) == (free, any("secret" in text for text in found))


@pytest.mark.spec("requirements:X70")
def test_about_replaces_members_that_are_named_like_paths() -> None:
    policy = Policy([Rule.allow_tool("*"), DENY])

    assert "allow" == policy.check(seen((), {"path": "vault/x"})).decision
    assert "allow" == policy.check(seen(("{to}",), {"path": "vault/x", "to": "open/x"})).decision
    assert "deny" == policy.check(seen(("{to}",), {"to": ["open/x", {"deep": "vault/x"}]})).decision
    assert "deny" == policy.check(seen(("vault/{year}.csv",), {"year": 2026})).decision
    assert "deny" == policy.check(seen(("vault/prices.db",), {})).decision
    writes = ToolSpec("any", category="write", about=("{to}",))
    assert Call("any", paths=["a"]) == Call.from_request(
        Request(tool=writes, input=freeze_object({"to": "a", "target": "b"}))
    )


@pytest.mark.spec("requirements:X70", "requirements:X71")
def test_a_declared_address_is_judged_and_remembered_as_an_address() -> None:
    request = Request(
        tool=ToolSpec("send", category="network", about=("https://{region}.example.org/send",)),
        input=freeze_object({"region": "eu"}),
    )

    assert "deny" == Policy([Rule.deny_domain("*.example.org")]).check(request).decision
    assert Call("send", origins=["https://eu.example.org"]) == Call.from_request(request)


@pytest.mark.spec("requirements:X70", "reliability:PM43")
@given(
    before=st.sampled_from(["", "//", "https:", "https:/", "https:\\\\", "ftp:/", "https%3A%2F%2F", " ", "\t", "ann:pw@", "https:/good.org@"]),
    host=st.sampled_from(["evil.org", "EVIL.org", "a.evil.org", "evil.org.", "\uff45vil\u3002org", "ev%69l.org", "ev\til.org"]),
    after=st.sampled_from(["", "/", "/x", ":8443/x", "?q", "#f", "\\x"]),
    name=st.sampled_from(["url", "link"]),
)  # fmt: skip
def test_a_denied_host_is_found_in_any_declared_text(before: str, host: str, after: str, name: str) -> None:
    denied = [Rule.deny_domain("evil.org"), Rule.deny_domain("*.evil.org"), Rule.allow_tool("*")]
    request = seen((f"{{{name}}}",), {name: ["reports/q1 2026.csv", f"{before}{host}{after}"]})

    assert "deny" == Policy(denied, "bypass").check(request).decision


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X70", "reliability:PM43")
def test_host_rule_denies_no_file_and_allows_no_unclear_address() -> None:
    denied, allowed = Policy([Rule.deny_domain("evil.org")], "bypass"), Policy([Rule.allow_domain("good.org")])

    for path in ("reports/evil.org.csv", "good.org/evil.org", "C:/a b.txt", "..", "", "notes: evil"):
        assert "allow" == denied.check(seen(("{path}",), {"path": path})).decision, path
    many = [f"good.org/{n}" for n in range(11_000)]
    assert "deny" == denied.check(seen(("{link}",), {"link": [*many, "evil.org/x"]})).decision
    urls = ["https://good.org/a", "evil.org/b"]
    assert ["allow", "ask"] == [allowed.check(seen(("{url}",), {"url": urls[:n]})).decision for n in (1, 2)]


@pytest.mark.spec("requirements:X70")
@pytest.mark.parametrize("before", ["x/a://", "file://", "https://h/../", "://"])
def test_a_path_that_resembles_a_url_is_judged_as_path(place: Path, before: str) -> None:
    @tool(about="{path}")
    def show(path: str) -> str:
        """Show a file."""
        return Path(os.path.normpath(path)).read_text()

    up = "../" * len([part for part in before.split("/") if part not in {"", ".."}])
    calls = [ToolCall("show", {"path": f"{before}{up}{name}"}) for name in ("vault/ledger.txt", "open/a.txt")]

    denied, _ = run_calls([show], calls, Policy([Rule.allow_tool("*"), DENY]))

    assert "secret" not in denied
    assert "Denied by the rule" in denied


@pytest.mark.spec("requirements:X70", "requirements:X71")
def test_a_name_within_a_place_makes_no_address_of_it() -> None:
    below = seen(("vault/{name}.csv",), {"name": "a://b"})

    assert "deny" == Policy([Rule.allow_tool("*"), DENY]).check(below).decision
    assert ["vault/a://b.csv"] == below.paths
    assert ([], ["https://h/x?y=a://b"]) == (
        seen(("{u}",), {"u": "https://h/x?y=a://b"}).paths,
        seen(("{u}",), {"u": "https://h/x?y=a://b"}).urls,
    )
    writes = Request(tool=ToolSpec("any", category="write", about=("r/{n}",)), input=freeze_object({"n": "a://b"}))
    other = attrs.evolve(writes, input=freeze_object({"n": "a://c"}))
    assert not Call.from_request(writes).matches(other, "allow")


@pytest.mark.spec("requirements:X70")
def test_too_many_possible_files_count_as_denied() -> None:
    many = [f"open/{n}" for n in range(3000)]

    assert (
        "deny"
        == Policy([Rule.allow_tool("*"), DENY])
        .check(seen(("{a}/{b}/{c}",), {"a": many, "b": many, "c": many}))
        .decision
    )
    assert "ask" == Policy([Rule.allow_path("open/**")]).check(seen(("{a}/{b}",), {"a": many, "b": many})).decision


@pytest.mark.spec("requirements:X70")
@given(st.lists(st.sampled_from(["a", "b", "vault", "..", "."]), min_size=1, max_size=5).map("/".join))
def test_declared_and_named_paths_are_judged_equally(path: str) -> None:
    by_member = Request(tool=ToolSpec("any"), input=freeze_object({"path": path}))

    for rule in (DENY, Rule.allow_path("a/**"), Rule.ask_for_path("b/*")):
        policy = Policy([rule])
        assert policy.check(by_member).decision == policy.check(seen(("{x}",), {"x": path})).decision


@pytest.mark.spec("requirements:X70")
@pytest.mark.parametrize(
    ("about", "said"),
    [("{nmae}", r"uses 'nmae' in about=, but has no such parameter; its parameters: name"), (3, "a string or a list of strings"), ([""], "a string or a list"), (["{name}", None], "a string or a list")],
)  # fmt: skip
def test_an_invalid_about_is_refused_where_the_tool_is_made(about: Any, said: str) -> None:
    with pytest.raises(DefinitionError, match=said):
        Tool("show", "", {"type": "object", "properties": {"name": {"type": "string"}}}, lambda given: "", about=about)
