"""
What a person allowed for good is what was seen: thousands of calls that only look like it are asked about again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.data.json import freeze_object
from stepengine.data.tools import ToolSpec
from stepengine.permissions import Call, Request
from stepengine.permissions.rules import METHODS, PLACES

HERE = "https://api.example.org/v1/items"
ELSEWHERE = [
    "http://api.example.org/v1/items", "https://api.example.org:8443/v1", "https://api.example.org.evil.com/", "https://evil.com/api.example.org",
    "https://api.example.org@evil.com/", "https://evil.com#@api.example.org", "https://evil.com?x=api.example.org", "https://user@evil.com/",
    "https://xapi.example.org/", "https://example.org/", "ftp://api.example.org/", "ws://api.example.org/", "wss://api.example.org/", "file:///etc/passwd",
    "//evil.com/x", "https:evil.com", "https:///evil.com", "https:/\\evil.com", "https://api.example.org\\@evil.com/", "https://api.example.org\t.evil.com",
    "https://api.example.org%2eevil.com/", "https://api.example.org%00.evil.com", "https://127.0.0.1/", "https://0x7f.1/", "https://2130706433/",
    "https://[::1]/", "https://[::ffff:127.0.0.1]/", "https://localhost/", "https://api.example.org..evil.com", "https://\u0430pi.example.org/",
    "https://api.example.org\u3002evil.com", "https://\uff41pi.example.org.evil.com/", "HTTPS://EVIL.COM", "javascript:alert(1)", "data:text/plain,x",
    "gopher://api.example.org/", "https://api.example.org:0443.evil.com/", "https://api.example.org:443@evil.com/", "https://api.example.org;.evil.com/",
    "https://api.example.org,evil.com/", "https://api.example.org evil.com/", "", "api.example.org", "https://", "https://api.example.org:80/",
    "http://api.example.org:443/", "https://api.example.org:99999/", "https://api.example.org:-1/", "mailto:a@b.c", "ssh://api.example.org/",
    "https://api-example.org/", "https://api.example.com/", "https://api.example.orgx/", "https://*.example.org/", "https://api.example.org\n.evil.com/",
]  # fmt: skip
OTHER_FILES = [
    "../src/app.py", "/src/app.py", "src/app.py2", "SRC/app.py", "src/App.py", "src/app.py ", "src/app.py/../x", "src/../src/app.py", "src", "src/", "src/*",
    "**", "src/app.py\n", "src/app.py\0", "./../src/app.py", "~/src/app.py", "src\\app.py", "src/app.p\u0443", "src//../etc", "a/src/app.py", "", ".", "..", "/",
    "/proc/self/cwd/src/app.py", "file:src/app.py", "src/app.py:stream", "$HOME/src/app.py", "{src,x}/app.py", "destination: src/app.py", "cwd: src/app.py",
]  # fmt: skip
FILES = ("path", "paths", "file", "files", "file_path", "folder", "directory", "directories", "cwd")
EITHER = (
    "destination",
    "target",
    "endpoint",
    "to",
    "from",
    "dest",
    "dst",
    "src",
    "output",
    "filename",
    "new_path",
    "host",
    "recipient",
)
NUMBERS = [
    0,
    1,
    -1,
    1.0,
    True,
    False,
    None,
    "0",
    "1",
    "",
    "true",
    [],
    [1],
    [True],
    {},
    {"a": 1},
    {"a": True},
    2**53,
    2**53 + 1,
    float(2**53),
    1e300,
]
COMMAND = "git log -5"
OTHER_COMMANDS: list[Any] = [
    "git log", "git log -p", "git log --output=x", "git  log\t-5;ls", "git log -5 && rm x", "git log -5\nrm x", "git log -5 | sh", "A=1 git log -5",
    "env git log -5", "/usr/bin/git log -5", "./git log -5", "GIT log -5", "git log -5 > x", "git log -5 &", "git -c a=b log -5", "git log -50",
    "git log '-5 x'", "git log -5 ''", 'git log "-5" x', "git log -5 #x", "$(git log -5)", "git log -5 $(x)", "sudo git log -5", "git log \u22125",
    "git\u00a0log -5", "git log -5\r", "git log -5\\\nx", "git log {-5,x}", "git log -5 ~", "git log -5;", "time git log -5", "git log -5 --",
    "git log -- -5", "git pull", "git", ["git log -5"], ["git", "log", "-5", ""], ["sh", "-c", "git log -5"], "git log -5 <x", "git log -5 `x`",
    "git log -5 !!", "git log -5\x00", "git log -5\u2028rm x", ["git", "log", "-5\n"], ["git ", "log", "-5"],
]  # fmt: skip
BESIDE = [
    {"cwd": "x"},
    {"cwd": ".."},
    {"process_type": "BACKGROUND"},
    {"env": {"A": "1"}},
    {"stdin": "x"},
    {"shell": True},
    {"argv": ["rm"]},
    {"user": "root"},
]


class Attack(NamedTuple):
    """
    A call that was allowed for good, and one that must be asked about all the same.
    """

    category: str
    seen: Mapping[str, Any]
    other: Mapping[str, Any]
    about: tuple[str, ...] | None = None


def request(
    category: str, given: Mapping[str, Any], about: tuple[str, ...] | None = None, tool: str = "t", agent: str = "a"
) -> Request:
    return Request(
        tool=ToolSpec(tool, category=category, about=about), input=freeze_object(dict(given)), agent_id=agent
    )


def is_covered(one: Attack) -> bool:
    return Call.from_request(request(one.category, one.seen, one.about)).matches(
        request(one.category, one.other, one.about), "allow"
    )


def by_address() -> Iterator[Attack]:
    for member, category, url in itertools.product(("url", "urls", *EITHER), ("network", "read", "write"), ELSEWHERE):
        yield Attack(category, {member: [HERE]}, {member: [url]})
        if member != "url":
            yield Attack(category, {"url": HERE}, {"url": HERE, member: url})
    for method in ("GET", "DELETE", "PUT ", "", "\u00a0POST", None, 5, ["POST"], {"a": "POST"}):
        for member in ("method", "http_method", "verb"):
            yield Attack("network", {"url": HERE, member: "POST"}, {"url": HERE, member: method})
            if method not in (None, ""):
                yield Attack("network", {"url": HERE}, {"url": HERE, member: method})


def by_file() -> Iterator[Attack]:
    seen = "src/app.py"
    for member, category, path in itertools.product((*FILES, *EITHER), ("read", "write", "network"), OTHER_FILES):
        yield Attack(category, {member: [seen]}, {member: [path]})
    for category, (one, other) in itertools.product(
        ("read", "write", "network"), itertools.permutations((*FILES, *EITHER), 2)
    ):
        yield Attack(category, {one: [seen]}, {one: [seen], other: "b"})
        yield Attack(category, {one: [seen]}, {one: [seen], other: HERE})
        if one in EITHER or other in (*EITHER, "cwd"):
            yield Attack(category, {one: seen, other: "b"}, {one: "b", other: seen})
    yield Attack("write", {}, {}, ("{a}",))._replace(seen={"a": "x"}, other={"a": "y"})
    yield Attack("write", {"a": "x", "b": "y"}, {"a": "y", "b": "x"}, ("{a}", "{b}"))
    yield Attack("write", {"a": "x"}, {"a": HERE}, ("{a}",))


def by_value() -> Iterator[Attack]:
    for category, (one, other) in itertools.product(
        ("", "mcp", "execute", "READ", "read"), itertools.permutations(NUMBERS, 2)
    ):
        yield Attack(category, {"x": one}, {"x": other})
    for command in OTHER_COMMANDS:
        yield Attack("execute", {"command": COMMAND}, {"command": command})
    for beside in BESIDE:
        yield Attack("execute", {"command": COMMAND}, {"command": COMMAND, **beside})


def by_role() -> Iterator[Attack]:
    for member, category in itertools.product(PLACES, ("network", "read", "write")):
        for text, (beside, one, other) in itertools.product(
            ("prod", "a@b.c", "a/b", "a://b"), (("sql", "SELECT 1", "DROP TABLE users"), ("body", "hi", "pay me"))
        ):
            yield Attack(category, {member: text, beside: one}, {member: text, beside: other})
            yield Attack(category, {member: [text], beside: one}, {member: [text]})
            yield Attack(category, {"path": "a", member: text, beside: one}, {member: text, beside: other})


def by_method() -> Iterator[Attack]:
    for target in ({"path": "/users"}, {"host": "h", "path": "/users"}, {"file": "a", "to": "b"}, {"host": "h"}):
        for category, member in itertools.product(("network", "read", "write"), METHODS):
            for method in ("DELETE", "get ", "", None, ["GET"], {"a": "GET"}, 5):
                yield Attack(category, {**target, member: "GET"}, {**target, member: method})
                if method not in ("", None):
                    yield Attack(category, target, {**target, member: method})
            yield Attack(category, {**target, member: "GET"}, target)
            for other in {*METHODS} - {member}:
                yield Attack(category, {**target, member: "GET"}, {**target, member: "GET", other: "DELETE"})
    yield Attack("network", {"id": "/users", "method": "GET"}, {"id": "/users", "method": "DELETE"}, ("{id}",))
    yield Attack("network", {"id": "/users"}, {"id": "/users", "method": "DELETE"}, ("{id}",))


@pytest.mark.spec("requirements:X71")
def test_a_file_beside_a_destination_and_an_address_under_any_name_narrow_what_is_allowed_to_them() -> None:
    moved = {"path": "a", "to": "b"}
    sent = {"endpoint": HERE, "method": "post", "body": "hi"}

    assert Call("t", agent="a", paths=["a", "to: b"]) == Call.from_request(request("write", {**moved, "content": "x"}))
    assert Call("t", agent="a", origins=["POST endpoint: https://api.example.org"]) == Call.from_request(
        request("network", sent)
    )
    assert is_covered(Attack("network", sent, {**sent, "body": "other"}))


@pytest.mark.spec("requirements:X71", "reliability:PM29")
@pytest.mark.parametrize("attacks", [by_address, by_file, by_value, by_role, by_method])
def test_nothing_that_is_only_like_what_was_seen_is_allowed_with_it(attacks: Any) -> None:
    tried = list(attacks())

    assert len(tried) > 200
    assert [] == [one for one in tried if is_covered(one)]
    assert all(is_covered(one._replace(other=one.seen)) for one in tried if one.seen.get("x") != 2**53 + 1)


@pytest.mark.spec("requirements:X71")
@pytest.mark.parametrize(
    ("tool", "agent"),
    [("t2", "a"), ("T", "a"), ("t_", "a"), ("mcp__t", "a"), ("t*", "a"), ("t", "b"), ("t", "A"), ("t", "")],
)
def test_what_was_allowed_to_one_tool_of_one_agent_is_allowed_to_no_other(tool: str, agent: str) -> None:
    assert not Call.from_request(request("", {"x": 1})).matches(request("", {"x": 1}, tool=tool, agent=agent), "allow")


@pytest.mark.spec("requirements:X71")
def test_a_beginning_of_a_command_covers_no_shell_no_launcher_and_nothing_beside_the_command() -> None:
    offered = Call.wider_than(request("execute", {"command": COMMAND}))[:-1]
    others = [request("execute", {"command": command}) for command in OTHER_COMMANDS]
    beside = [request("execute", {"command": COMMAND, **more}) for more in BESIDE]

    covered = [r.input["command"] for rule in offered for r in others if rule.matches(r, "allow")]

    assert 2 == len(offered)
    assert [] == [r for rule in offered for r in beside if rule.matches(r, "allow")]
    assert [] == [
        c
        for c in covered
        if isinstance(c, str) and ((not c.startswith("git ") and c != "git") or any(x in c for x in ";&|\n><$`{\r"))
    ]


@pytest.mark.spec("requirements:X71", "reliability:PM19")
@pytest.mark.parametrize(
    "program",
    [
        "python",
        "python3",
        "python3.13",
        "/usr/bin/python3",
        "pypy3",
        "node",
        "ruby",
        "perl",
        "perl5.36",
        "php",
        "lua",
        "Rscript",
        "PYTHON.EXE",
    ],
)
def test_an_interpreter_is_offered_with_anything_behind_its_file_and_never_alone(program: str) -> None:
    def offered(*words: str) -> list[tuple[str, ...]]:
        found = Call.wider_than(request("execute", {"command": [program, *words]}))
        return [call.prefix[1:] for call in found if call.prefix is not None]

    assert [("x.py", "a"), ("x.py",)] == offered("x.py", "a")
    assert [] == [
        p for words in (["-c", "1"], ["-"], ["-e", "1"], ["-u", "x.py"], [""], [], ["-i"]) for p in offered(*words)
    ]
    is_python = "py" in program.casefold()
    assert ([("-m", "pytest")] if is_python else []) == offered("-m", "pytest", "-q")
    assert [] == offered("-m", "-c")


@pytest.mark.spec("requirements:X71", "reliability:PM19")
@given(st.sampled_from(["awk", "sed", "ed", "vim", "gdb", "docker", "kubectl", "ssh", "npx", "uvx", "deno", "bun", "env", "sudo", "sh", "bash", "xargs", "nohup", "flock", "su", "tmux", "screen", "parallel", "eval", ".", "source", "psql", "sqlite3", "m4", "find", "fd", "fdfind", "rg", "cmd", "cmd.exe", "tar", "rsync", "sort", "make"]), st.lists(st.sampled_from(["run", "x", "-e", "p", "exec"]), max_size=4))  # fmt: skip
def test_what_runs_whatever_its_arguments_say_is_offered_with_nothing_behind_it(program: str, words: list[str]) -> None:
    found = Call.wider_than(request("execute", {"command": [program, *words]}))

    assert [None] == [call.prefix for call in found]


@pytest.mark.spec("requirements:X71", "reliability:PM19")
@pytest.mark.parametrize(
    "command",
    [
        "git", "git -c alias.x=!id x", "git -C a log", "git grep x", "git rebase -x", "git bisect run", "git submodule foreach", "git push origin", "GIT",
        "/usr/bin/git", "uv", "uv run", "uv run python", "uv run -m x", "uv run --with x", "uv run find .", "uv run -", "uv tool run", "uv --directory x",
        "npm", "npm exec x", "npm x y", "npm init x", "pnpm dlx x", "yarn exec x", "poetry run", "poetry run python", "pipenv run", "pipenv shell",
        "bundle exec", "bundle exec ruby", "conda run x", "conda run -n", "nix run x", "nix shell x", "cargo run", "go run x", "go test -exec",
        "coverage run", "python -m pdb", "python3 -m code", "python -m timeit x", "python -m runpy x", "python -m trace x", "python -m cProfile x",
        "python -m profile x", "pypy3 -m idlelib.idle x", "python -m CPROFILE", "python -m coverage run", "python3.13 -m asyncio",
        "cmd /c x", "CMD.EXE /c x", "hyperfine x", "hg",
    ],
)  # fmt: skip
def test_no_beginning_of_a_command_behind_which_any_program_may_stand_is_offered(command: str) -> None:
    words = command.split()

    offered = [call.prefix for call in Call.wider_than(request("execute", {"command": [*words, "a", "b"]}))]

    assert [] == [p for p in offered if p is not None and len(p) <= len(words)]


@pytest.mark.spec("requirements:X71", "reliability:PM19")
@pytest.mark.parametrize(
    ("command", "offered"),
    [
        ("git log -5", ["git log -5", "git log"]),
        ("git status", ["git status"]),
        ("uv run pytest -q", ["uv run pytest"]),
        ("uv sync", ["uv sync"]),
        ("npm test", ["npm test"]),
        ("poetry run mypy x", ["poetry run mypy"]),
        ("python -m pytest -q", ["python -m pytest"]),
        ("pytest -q", ["pytest -q", "pytest"]),
        ("ls src", ["ls src", "ls"]),
        ("cargo test", ["cargo test"]),
    ],
)
def test_beginnings_that_say_what_runs_are_still_offered(command: str, offered: list[str]) -> None:
    found = Call.wider_than(request("execute", {"command": command}))

    assert offered == [" ".join(call.prefix) for call in found if call.prefix is not None]
