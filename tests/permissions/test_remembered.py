"""
What a person allowed for good is what was seen: thousands of calls that only look like it are asked about again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest

from stepengine.data.json import freeze_object
from stepengine.data.tools import ToolSpec
from stepengine.permissions import Call, Request
from stepengine.permissions.commands import WIDENABLE
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


def by_value() -> Iterator[Attack]:
    for category, (one, other) in itertools.product(
        ("", "mcp", "execute", "READ", "read"), itertools.permutations(NUMBERS, 2)
    ):
        yield Attack(category, {"x": one}, {"x": other})
    for command in OTHER_COMMANDS:
        yield Attack("execute", {"command": COMMAND}, {"command": command})
    for beside in BESIDE:
        yield Attack("execute", {"command": COMMAND}, {"command": COMMAND, **beside})
    yield Attack("write", {}, {}, ("{a}",))._replace(seen={"a": "x"}, other={"a": "y"})
    yield Attack("write", {"a": "x", "b": "y"}, {"a": "y", "b": "x"}, ("{a}", "{b}"))
    yield Attack("write", {"a": "x"}, {"a": HERE}, ("{a}",))


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
    for method in ("GET", "DELETE", "PUT ", "", "\u00a0POST", None, 5, ["POST"], {"a": "POST"}):
        for member in ("method", "http_method", "verb"):
            yield Attack("network", {"url": HERE, member: "POST"}, {"url": HERE, member: method})
            if method not in (None, ""):
                yield Attack("network", {"url": HERE}, {"url": HERE, member: method})


@pytest.mark.spec("requirements:X71")
def test_destinations_and_addresses_narrow_a_remembered_call() -> None:
    moved = {"path": "a", "to": "b"}
    sent = {"endpoint": HERE, "method": "post", "body": "hi"}

    assert Call("t", agent="a", paths=["a", "to: b"]) == Call.from_request(request("write", {**moved, "content": "x"}))
    assert Call("t", agent="a", origins=["POST endpoint: https://api.example.org"]) == Call.from_request(
        request("network", sent)
    )
    assert is_covered(Attack("network", sent, {**sent, "body": "other"}))


SAMPLED = [by_address, by_file, by_role]
"""Their rows repeat after 110, 31 and 24, which 13 does not divide: each thirteenth row reaches each member of the lists."""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X71")
@pytest.mark.parametrize(
    ("attacks", "step"),
    [
        *[(attacks, 13) for attacks in SAMPLED],
        (by_value, 1),
        (by_method, 1),
    ],
)
def test_no_similar_call_is_covered_by_a_remembered_one(attacks: Any, step: int) -> None:
    rows = list(attacks())
    assert len(rows) > 200

    tried = rows[::step]
    distinct = {(one.category, repr(one.seen), one.about): one for one in tried}.values()
    assert [] == [one for one in tried if is_covered(one)]
    assert all(is_covered(one._replace(other=one.seen)) for one in distinct if one.seen.get("x") != 2**53 + 1)


@pytest.mark.spec("requirements:X71")
@pytest.mark.parametrize(
    ("tool", "agent"),
    [("t2", "a"), ("T", "a"), ("t_", "a"), ("mcp__t", "a"), ("t*", "a"), ("t", "b"), ("t", "A"), ("t", "")],
)
def test_a_permission_covers_only_its_tool_and_agent(tool: str, agent: str) -> None:
    assert not Call.from_request(request("", {"x": 1})).matches(request("", {"x": 1}, tool=tool, agent=agent), "allow")


def widened(*commands: Any) -> list[str | None]:
    """
    Return the command that is offered to be allowed with other options, for each command.
    """
    found = [Call.list_broader_matchers(request("execute", {"command": command})) for command in commands]
    assert all(call.any_input and len(rest) <= 1 for *rest, call in found)
    return [" ".join(rest[0].prefix or ()) if rest else None for *rest, _ in found]


@pytest.mark.spec("requirements:X71")
def test_a_widened_command_covers_no_shell_launcher_or_other_member() -> None:
    (rule, _) = Call.list_broader_matchers(request("execute", {"command": COMMAND}))
    others = [request("execute", {"command": command}) for command in OTHER_COMMANDS]
    beside = [request("execute", {"command": COMMAND, **more}) for more in BESIDE]

    covered = [r.input["command"] for r in others if rule.matches(r, "allow")]

    assert {"git log", "git log -p", "git log -50"} <= {c for c in covered if isinstance(c, str)}
    assert [] == [r for r in beside if rule.matches(r, "allow")]
    for command in covered:
        words = command.split() if isinstance(command, str) else command
        assert ["git", "log"] == words[:2]
        assert not any(x in word for word in words for x in (*";&|><$`{\r\n", "--output"))


WRITING = [
    "--output=made", "--output", "-o", "-omade", "--outp=made", "--outpu", "-delete", "-fprint", "-fprintf", "-fls", "-fprint0", "-exec", "-execdir", "-ok", "-okdir", "--pre", "--pre=./evil",
    "--hostname-bin=./evil", "--compress-program=./evil", "--compress-prog=sh", "-T.", "--temporary-directory=.", "--ext-diff", "--textconv", "-O./evil", "-Oevil", "--open-files-in-pager=./evil",
    "--in-place", "-i.bak", "--files0-from=x", "--no-index", "--exec-path=.", "--git-dir=x", "--junitxml=made", "--junit-xml=made", "--basetemp=made", "-pevil", "--rootdir=/", "--debug", "--report-log=made",
    "--log-file=made", "--cov-report=xml:made", "--pdb", "--pdbcls=evil:x", "--pastebin=all", "--override-ini=x=y", "-oaddopts=x", "--confcutdir=/", "--edit-description", "-D", "-dmain", "--set-upstream-to=x", "--unset-upstream",
    "--follow=name", "--pid=1", "--file=x", "-fx", "--hidden", "--search-zip", "-z", "--config=x", "--import-mode=x", "--cache-clear", "--basetem=made",
]  # fmt: skip
"""Options of programs that are offered to be widened, by which they write, start others, or read what says to."""
EXAMPLES = {
    "pwd": "pwd", "echo": "echo a", "ls": "ls -la src", "cat": "cat a", "head": "head -5 a", "tail": "tail -n 5 a", "wc": "wc -l a", "sort": "sort -r a", "find": "find . -name a", "rg": "rg -n x src",
    "git status": "git status -s", "git diff": "git diff HEAD", "git log": "git log -5", "git show": "git show HEAD", "git grep": "git grep -n x", "git branch": "git branch -a", "du": "du -sh src", "grep": "grep -n x src",
    "stat": "stat a", "pytest": "pytest -q", "python -m pytest": "python -m pytest -x tests", "python3 -m pytest": "python3 -m pytest", "uv run pytest": "uv run pytest -k a", "poetry run pytest": "poetry run pytest",
}  # fmt: skip


@pytest.mark.spec("requirements:X71")
def test_each_form_that_is_offered_has_an_example() -> None:
    assert sorted(EXAMPLES) == sorted(" ".join(form.prefix) for form in WIDENABLE)
    assert list(EXAMPLES) == widened(*EXAMPLES.values())


@pytest.mark.spec("requirements:X71", "reliability:PM12")
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.deep)], ids=["some", "every"])
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "echo"])
def test_no_option_behind_a_widened_command_writes_or_starts_others(name: str, step: int) -> None:
    """
    At no place in the command, behind no option that may take ``--`` as its value, and behind ``--``.
    """
    words, first = EXAMPLES[name].split(), len(name.split())
    (rule, _) = Call.list_broader_matchers(request("execute", {"command": words}))
    values = [[flag, "--"] for form in WIDENABLE if " ".join(form.prefix) == name for flag in form.flags or ()]
    tried = [
        [*words[:at], *before, option, *more, *words[at:]]
        for at in range(first, len(words) + 1)
        for before in ([], ["--"], *values)
        for option in WRITING
        for more in ([], ["made"])
    ]

    assert len(tried) > 100
    assert [] == [c for c in tried[::step] if rule.matches(request("execute", {"command": c}), "allow")]


@pytest.mark.spec("requirements:X71", "reliability:PM12")
def test_commands_that_may_write_or_start_others_are_offered_exactly() -> None:
    commands = [
        "git push", "git commit -m x", "git add a", "git log --output=x", "git -C a log", "git -c a.b=c log", "git diff --no-index a b", "git branch new", "/usr/bin/git log", "GIT log", "uv sync", "uv run x",
        "uv run --with x pytest", "npm test", "cargo test", "make", "make check", "python x.py", "python -m pdb x", "python -c 1", "node x.js", "sed -n p a", "sed -i s/a/b/ a", "awk 1 a", "tree", "tree -o x", "tar tf a",
        "curl https://a.org", "wget x", "tee a", "uniq a b", "less a", "man ls", "sort -o a b", "sort -t -- -o a", "find . -delete", "find . -name -- -delete", "find . -fprint x", "rg --pre x a", "rg -g -- --pre=./x a",
        "env ls", "sudo ls", "xargs ls", "sh -c ls", "pytest @args", "pytest /tmp/x.py", "pytest ../x.py", "pytest -p x", "pytest --junitxml=x", "cat .env", "cat /etc/passwd", "date -s x", "file -C -m x", "xxd a b", "mypy a", "ls; ls",
        "tmux new ls", "git x", "ruff check --fix", "diff a b", "docker ps", "pip list", "jq . a", "vim a", "dd if=a",
    ]  # fmt: skip

    assert [] == [(c, found) for c, found in zip(commands, widened(*commands), strict=True) if found is not None]


@pytest.mark.spec("requirements:X71")
@pytest.mark.parametrize("more", [{"proxy": "https://evil.com"}, {"options": {"callback": "http://evil.com/x"}}, {"hooks": ["https://evil.com"]}])  # fmt: skip
def test_approval_of_a_host_covers_no_other_address_field(more: dict[str, Any]) -> None:
    seen, same = request("network", {"url": HERE, "note": "see https://x.org/a"}), request("network", {"url": HERE})

    assert Call.from_request(seen).matches(same, "allow")
    assert not Call.from_request(seen).matches(request("network", {"url": HERE, **more}), "allow")
    assert not Call.from_request(request("write", {"path": "a"})).matches(
        request("write", {"path": "a", **more}), "allow"
    )
    assert Call.from_request(request("network", {"url": HERE, **more})).matches(
        request("network", {"url": HERE, **more}), "allow"
    )
