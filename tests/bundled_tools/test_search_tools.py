"""Finding files and text: the same answers from ripgrep and from Python."""

from __future__ import annotations

import asyncio
import glob
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.tools import ToolRegistry
from stepengine.tools.bundled import search_tools
from stepengine.tools.bundled.search import ripgrep as ripgrep_module
from stepengine.tools.bundled.search.hits import SearchFlags
from stepengine.tools.bundled.search.ripgrep import find_ripgrep
from stepengine.workspace.guard import GUARD, CallGuard
from stepengine.workspace.patterns import GlobPattern, get_max_search_columns
from tests.phrases import OUTSIDE_ROOT

HAS_RG = find_ripgrep(("nowhere",)) is not None
ENGINES = [
    pytest.param(False, id="ripgrep", marks=pytest.mark.skipif(not HAS_RG, reason="ripgrep is missing")),
    pytest.param(True, id="python"),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    files = {
        "a.py": "def main():\n    pass\n\n# main, main\n",
        "sub/b.py": "x\r\ndef main(x):\r\n",
        "sub/c.txt": "Main\nmainly\n",
        "skipped/x.py": "main\n",
        ".gitignore": "skipped/\n*.log\n",
        "sub/.gitignore": "!kept.log\n",
        "sub/kept.log": "main\n",
        "gone.log": "main\n",
        ".github/ci.yml": "main\n",
        ".hidden/z.py": "main\n",
        "sub/.github/no.yml": "main\n",
    }
    for name, text in files.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(text.encode())
    (made / "u16.txt").write_bytes("main\n".encode("utf-16"))
    (made / "bin").write_bytes(b"main\0main\n")
    (made / "link.py").symlink_to("a.py")
    return made


async def search(root: Path, prefer_python: bool, **arguments: Any) -> Any:
    return await ToolRegistry(search_tools(root, prefer_python=prefer_python)).execute("code_search", arguments)


def found(stdout: str) -> dict[str, list[str]]:
    """
    Return file to lines of a search's text.
    """
    files: dict[str, list[str]] = {}
    last = ""
    for line in stdout.splitlines()[1:]:
        if line.startswith("  "):
            files[last].append(line.strip())
        else:
            last = line.removesuffix(":")
            files[last] = []
    return files


@pytest.mark.spec("reliability:FS27", "generator-contract:T13", "ecosystem:EC32", "ecosystem:EC33")
@pytest.mark.parametrize("prefer_python", ENGINES)
@pytest.mark.parametrize(
    ("flags", "cwd", "expected"),
    [
        ("", None, {"a.py": ["Line 1: def main():", "Line 4: # main, main"], "sub/b.py": ["Line 2: def main(x):"],
                    "sub/c.txt": ["Line 2: mainly"], "sub/kept.log": ["Line 1: main"], ".github/ci.yml": ["Line 1: main"],
                    "u16.txt": ["Line 1: main"]}),
        ("-w -g '*.py'", "sub", {"sub/b.py": ["Line 2: def main(x):"]}),
        ("-i -t txt", None, {"sub/c.txt": ["Line 1: Main", "Line 2: mainly"], "u16.txt": ["Line 1: main"]}),
        ("-x", "sub", {"sub/kept.log": ["Line 1: main"], "sub/.github/no.yml": ["Line 1: main"]}),
        ("-v -g c.txt", "sub", {"sub/c.txt": ["Line 1: Main"]}),
        ("-c -g '*.py'", None, {"a.py: 2": [], "sub/b.py: 1": []}),
        ("-l -T py -g '!*.yml'", "sub", {"sub/c.txt": [], "sub/kept.log": []}),
        ("-C1 -g b.py", None, {"sub/b.py": ["Line 1- x", "Line 2: def main(x):"]}),
        ("-A1 -m1 -g a.py", None, {"a.py": ["Line 1: def main():", "Line 2-     pass"]}),
        ("-S", "sub/.github", {"sub/.github/no.yml": ["Line 1: main"]}),
    ],
    ids=str,
)  # fmt: skip
async def test_both_engines_find_the_same(
    root: Path, prefer_python: bool, flags: str, cwd: str | None, expected: Any
) -> None:
    result = await search(root, prefer_python, pattern="main", flags=flags, cwd=cwd)

    assert expected == found(result.data["stdout"])
    assert {"stdout", "message", "count", "matches"} == set(result.data) - {"stderr"}
    assert_data_says_what_the_text_says(result.data)


def assert_data_says_what_the_text_says(data: Any) -> None:
    told = [
        (path, int(line.split()[1].rstrip(":")))
        for path, lines in found(data["stdout"]).items()
        for line in lines
        if line.split()[1].endswith(":")
    ]
    files = [f"{m['path']}: {m['count']}" if "count" in m else m["path"] for m in data["matches"] if "line" not in m]

    assert told == [(m["path"], m["line"]) for m in data["matches"] if "line" in m]
    assert files == ([] if told else list(found(data["stdout"])))
    assert len(data["matches"]) == data["count"] == int(data["message"].split()[1])


@pytest.mark.spec("reliability:FS27", "reliability:FS23")
@pytest.mark.parametrize("prefer_python", ENGINES)
async def test_a_search_says_when_it_was_cut(tmp_path: Path, prefer_python: bool) -> None:
    for n in range(40):
        (tmp_path / f"f{n:02}").write_text("match\n" * 20)

    many = (await search(tmp_path, prefer_python, pattern="match")).data
    few = (await search(tmp_path, prefer_python, pattern="match", max_results=2, flags="-g f00")).data
    assert many["stdout"].startswith("Found 250 matches\n")
    assert_data_says_what_the_text_says(many)
    assert "only the first 15 matches are shown in 17 of the files; stopped at 250 matches" in many["message"]
    assert ["Line 1: match", "Line 2: match"] == found(few["stdout"])["f00"]
    assert "only the first 2 matches are shown in 1 of the files" in few["message"]
    (tmp_path / "wide").write_text(("match" + "x" * 3_000 + "\n") * 20)
    wide = (await search(tmp_path, prefer_python, pattern="match", flags="-g wide -m 5")).data
    assert "1,005 more characters" in wide["stdout"]
    wide = (await search(tmp_path, prefer_python, pattern="match", flags="-g wide")).data
    assert "stopped at 20,000 characters" in wide["message"]


ATTACKS = [
    "--pre ./x", "--pre=./x", "--pre-glob=*", "--hostname-bin=./x", "-z", "-f pattern.txt", "-f/etc/passwd", "--follow", "-L", "--no-ignore",
    "--hidden", "-u", "-uuu", "-.", "--", "-- -i", "a.py", "-i a.py", "-", "-iz", "-i --pre x", "-A x", "-A -1", "-m 0", "-t ../x", "-g",
    "-A 99999", "'unclosed", "-e x", "-r x", "--json", "-t=py --pre", "-é",
]  # fmt: skip


LONG_LINES = st.lists(
    st.builds(lambda before, what, after: "b" * before + what + "b" * after,
              st.sampled_from([0, 5, 290, 296, 297, 299, 1_990, 1_999]), st.sampled_from(["abc", "a-c", "q" * 2_000, "-"]),
              st.sampled_from([0, 1, 400, 2_500])),
    min_size=1, max_size=4,
)  # fmt: skip


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.skipif(not HAS_RG, reason="ripgrep is missing")
@pytest.mark.spec("reliability:FS27")
@given(
    LONG_LINES,
    st.sampled_from(["abc", "a.*c", "a.*b.*c", "c$", "q+", "b*", r"c\b"]),
    st.sampled_from(["", "-x", "-v", "-w", "-F"]),
)
def test_python_finds_no_line_that_ripgrep_does_not(lines: list[str], pattern: str, flags: str) -> None:
    async def use(folder: str) -> tuple[Any, Any]:
        return tuple([(await search(Path(folder), way, pattern=pattern, flags=flags)).data for way in (True, False)])

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "long.txt").write_text("\n".join(lines))
        ours, theirs = asyncio.run(use(folder))
    by_us, by_ripgrep = ({match["line"] for match in data["matches"]} for data in (ours, theirs))

    if len(theirs["stdout"]) < 15_000:
        assert by_us <= by_ripgrep
        assert by_us == by_ripgrep or "longer lines were left out: without ripgrep" in ours["message"]


@pytest.mark.spec("reliability:FS27")
@pytest.mark.parametrize("prefer_python", ENGINES)
@pytest.mark.parametrize("flags", ["", "-C 20", "-B 1000 -A 1000", "-l", "-c"])
async def test_search_result_has_as_many_long_lines_as_fit(tmp_path: Path, prefer_python: bool, flags: str) -> None:
    lines = [f"{'hit' if number % 40 == 20 else 'nothing'} {'x' * 3_000}\n" for number in range(600)]
    (tmp_path / "app.min.js").write_text("".join(lines))
    (tmp_path / "z.js").write_text("hit\n")
    data = (await search(tmp_path, prefer_python, pattern="hit", flags=flags)).data

    matches = [line for line in data["stdout"].splitlines() if re.match(r"  Line \d+: hit", line)]
    assert len(data["stdout"]) <= 20_100
    if flags in {"-l", "-c"}:
        assert 2 == data["count"]
    else:
        assert {"": 9, "-C 20": 1, "-B 1000 -A 1000": 1}[flags] == data["count"] == len(matches)
        assert [match["line"] for match in data["matches"]] == [21 + 40 * number for number in range(data["count"])]
        assert "stopped at 20,000 characters; there may be more" in data["message"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:FS27")
async def test_an_unlisted_flag_is_refused_and_nothing_is_started(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ripgrep_module.subprocess, "Popen", None)

    for flags in ATTACKS:
        result = await search(root, False, pattern="main", flags=flags)
        assert result.is_error, flags
        assert "NoneType" not in result.text, flags


@pytest.mark.parametrize("prefer_python", ENGINES)
async def test_file_removed_during_a_search_is_left_out(tmp_path: Path, prefer_python: bool) -> None:
    for name in ("a.py", "b.py", "c.py"):
        (tmp_path / name).write_text("main\n")

    def remove_next_file(_root: Any, parts: Any) -> str:
        if parts == ("a.py",):
            (tmp_path / "b.py").unlink(missing_ok=True)
        return ""

    token = GUARD.set(CallGuard(file=remove_next_file))
    try:
        result = await search(tmp_path, prefer_python, pattern="main")
    finally:
        GUARD.reset(token)

    assert ["a.py", "c.py"] == [match["path"] for match in result.data["matches"]]


@pytest.mark.spec("reliability:FS27")
@pytest.mark.parametrize("prefer_python", ENGINES)
async def test_neither_pattern_nor_folder_smuggles_anything(root: Path, prefer_python: bool) -> None:
    (root / "x").write_text("#!/bin/sh\ntouch ran\n")
    (root / "x").chmod(0o755)
    for arguments in (
        {"pattern": "--pre=./x"}, {"pattern": "-e"}, {"pattern": "main", "flags": "-g --pre=./x"}, {"pattern": "main", "flags": "-g '-e'"},
    ):  # fmt: skip
        result = await search(root, prefer_python, **arguments)
        assert not (root / "ran").exists()
        assert (0, []) == (result.data["count"], result.data["matches"])
    assert OUTSIDE_ROOT in (await search(root, prefer_python, pattern="x", cwd="../")).text


@pytest.mark.spec("reliability:PM26")
@pytest.mark.parametrize("prefer_python", ENGINES)
async def test_names_and_patterns_resembling_options_are_taken_literally(root: Path, prefer_python: bool) -> None:
    for name in ("-rf", "--help", "--files-with-matches", "@sub"):
        (root / name).write_text("needle --pre=./x\n")
        (root / f"{name}.d").mkdir()
        (root / f"{name}.d" / name).write_text("needle\n")
    listed = ["--files-with-matches", "--help", "-rf", "@sub"]
    whole = await search(root, prefer_python, pattern="needle")
    dashed = await search(root, prefer_python, pattern="--pre=./x")

    assert sorted([*listed, *[f"{n}.d/{n}" for n in listed]]) == sorted(found(whole.data["stdout"]))
    assert listed == sorted(found(dashed.data["stdout"]))
    for name in listed:
        inside = await search(root, prefer_python, pattern="needle", cwd=f"{name}.d")
        assert 1 == len(found(inside.data["stdout"]))


@pytest.mark.spec("reliability:FS23")
@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a?){30}a{30}",
        "a?" * 30 + "a" * 30,
        r"(a)\1",
        "(.*)(.*)(.*)x",
        "(",
    ],
)
async def test_python_refuses_patterns_that_could_take_for_ever(root: Path, pattern: str) -> None:
    (root / "evil.txt").write_text("a" * 5_000)
    result = await search(root, True, pattern=pattern)

    assert result.is_error


@pytest.mark.spec("reliability:FS23")
@pytest.mark.skipif(not HAS_RG, reason="ripgrep is missing")
async def test_ripgrep_matches_hostile_patterns_in_linear_time(root: Path) -> None:
    (root / "evil.txt").write_text("a" * 5_000 + "b")

    assert not (await search(root, False, pattern="(a+)+$")).is_error
    assert "regex parse error" in (await search(root, False, pattern="(")).text


@pytest.mark.parametrize(
    "pattern", [r"def \w+\(", "https?://.*", r"\d{1,3}\.\d{1,3}", "a|b|c", "(foo|bar)baz", "[a-z]+ = .*"]
)
def test_ordinary_patterns_are_fine(pattern: str) -> None:
    assert get_max_search_columns(pattern) >= 300


@pytest.mark.spec("reliability:R17")
@pytest.mark.skipif(not HAS_RG, reason="ripgrep is missing")
async def test_ripgrep_hits_are_shown_only_if_our_walk_confirms_them(root: Path, tmp_path: Path) -> None:
    """
    A stand-in for ripgrep reports lines from outside, as the real one could when a folder is swapped for a link.
    """
    (tmp_path / "outside").write_text("stolen\n")
    fake = tmp_path / "rg"
    events = [
        '{"type":"begin","data":{"path":{"text":"./a.py"}}}',
        '{"type":"match","data":{"path":{"text":"./a.py"},"lines":{"text":"stolen\\n"},"line_number":1,"submatches":[]}}',
        '{"type":"match","data":{"path":{"text":"./a.py"},"lines":{"text":"# main, main\\n"},"line_number":4,"submatches":[]}}',
        '{"type":"end","data":{"path":{"text":"./a.py"},"stats":{"matched_lines":2}}}',
        '{"type":"begin","data":{"path":{"text":"./../outside"}}}',
        '{"type":"match","data":{"path":{"text":"./../outside"},"lines":{"text":"stolen\\n"},"line_number":1,"submatches":[]}}',
        '{"type":"end","data":{"path":{"text":"./../outside"},"stats":{"matched_lines":1}}}',
    ]
    lines = "\n".join(events)
    fake.write_text(f"#!{sys.executable}\nprint({lines!r})\n")
    fake.chmod(0o755)
    from stepengine.workspace.path_policy import PathPolicy
    from stepengine.workspace.root import Root
    from stepengine.workspace.walk import LIST_ENTRIES, WalkBudget

    held = Root(root, PathPolicy())
    base = held.open_folder(".")
    hits = list(ripgrep_module.Ripgrep(str(fake), held, base).search("x", SearchFlags(), 15, WalkBudget(LIST_ENTRIES)))
    os.close(base.fd)
    held.close()

    assert [(("a.py",), [(3, 1)])] == [(h.parts, h.spans) for h in hits]


@pytest.mark.spec("reliability:FS27")
def test_a_ripgrep_below_the_root_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rg").write_text("#!/bin/sh\n")
    (tmp_path / "rg").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    assert shutil.which("rg") == str(tmp_path / "rg")
    assert find_ripgrep([p for p in os.path.realpath(tmp_path).split("/") if p]) is None
    assert find_ripgrep(("elsewhere",)) == os.path.realpath(tmp_path / "rg")


@pytest.mark.spec("generator-contract:T11", "ecosystem:EC33")
async def test_glob_sorts_by_path_and_counts_all_files(root: Path) -> None:
    os.utime(root / "sub/b.py", (4_000_000_000, 4_000_000_000))
    tools = ToolRegistry(search_tools(root))

    result = await tools.execute("glob", {"pattern": "**/*.{py,txt}", "max_results": 2})
    assert {
        "files": ["a.py", "sub/b.py"],
        "count": 4,
        "message": "Found 4 files; the first 2 are shown",
    } == result.data


def ordinary_glob(root: Path, cwd: str, pattern: str) -> list[str]:
    """
    Return the files that Python's ``glob`` finds. It reads patterns as a shell does: wildcards match no dot in front of a name.
    """
    found = glob.glob(pattern, root_dir=root / cwd, recursive=True)  # noqa: PTH207  (`Path.glob` matches dots)
    paths = [os.path.normpath(Path(cwd, path)) for path in found]
    return sorted([path for path in paths if (root / path).is_file()], key=lambda path: path.split("/"))


PATTERNS = ["*", "**/*", "**/*.py", ".*", "**/.*", ".github/*", ".github/**/*", "*/.github/*", "[.]*", "?gitignore", "**/*.yml", "c*"]  # fmt: skip


@pytest.mark.spec("generator-contract:T11", "generator-contract:T13")
@pytest.mark.parametrize("cwd", [".", "sub", ".github"])
async def test_glob_lists_the_same_files_as_python_glob(root: Path, cwd: str) -> None:
    left_out = ("skipped/x.py", "gone.log", "link.py")
    tools = ToolRegistry(search_tools(root))
    for pattern in PATTERNS:
        expected = [path for path in ordinary_glob(root, cwd, pattern) if path not in left_out]
        result = await tools.execute("glob", {"pattern": pattern, "cwd": cwd})
        assert expected == result.data["files"], pattern  # type: ignore[index,call-overload]


@pytest.mark.spec("reliability:FS23")
@pytest.mark.parametrize("pattern", ["../**", "/etc/*", "a/../../b", "{a,b}" * 7, "x" * 600, "/".join("a" * 70)])
async def test_patterns_that_leave_the_root_or_explode_are_refused(root: Path, pattern: str) -> None:
    result = await ToolRegistry(search_tools(root)).execute("glob", {"pattern": pattern})

    assert result.is_error
    assert "cannot be used" in result.text


@pytest.mark.spec("generator-contract:T11")
async def test_glob_rejects_a_pattern_of_folders(root: Path) -> None:
    glob = ToolRegistry(search_tools(root))
    result = await glob.execute("glob", {"pattern": "*/"})

    assert "Write '*/*'" in result.text
    assert "a.py" not in (await glob.execute("glob", {"pattern": "*/*"})).data["files"]  # type: ignore[index,call-overload,operator]


@pytest.mark.spec("generator-contract:T11")
async def test_glob_reads_both_forms_of_a_negated_class(root: Path) -> None:
    (root / "^").write_text("")
    glob = ToolRegistry(search_tools(root))
    found = [
        (await glob.execute("glob", {"pattern": pattern})).data["files"] for pattern in ("[!^a]*", "[^^a]*", "[^]")
    ]  # type: ignore[index,call-overload]

    assert [["bin", "u16.txt"], ["bin", "u16.txt"], ["^"]] == found


@pytest.mark.spec("generator-contract:T11")
async def test_glob_rejects_the_syntax_of_other_globs(root: Path) -> None:
    (root / "a(b)[1].py").write_text("")
    glob = ToolRegistry(search_tools(root))
    for pattern in ("*.py?(x)", "@(a|b).py", "!(a).py", "!*.py", "f{1..3}.py", "f{a..c}.py"):
        result = await glob.execute("glob", {"pattern": pattern})
        assert "has no special meaning here" in result.text, pattern
    for pattern in ("a(b)*.py", "a[(]b)*", "?[(]b)*"):
        result = await glob.execute("glob", {"pattern": pattern})
        assert ["a(b)[1].py"] == result.data["files"], pattern  # type: ignore[index,call-overload]


@pytest.mark.spec("reliability:FS23", "reliability:FP5")
async def test_a_walk_stops_at_its_entry_limit_and_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stepengine.tools.bundled.search import tools as module

    for n in range(30):
        (tmp_path / f"f{n}").write_text("")
    monkeypatch.setattr(module, "WalkBudget", lambda **_: budget(10))
    result = await ToolRegistry(search_tools(tmp_path)).execute("glob", {"pattern": "*"})

    assert 10 == result.data["count"]  # type: ignore[index,call-overload]
    assert "incomplete: stopped after 10 entries" in result.data["message"]  # type: ignore[index,call-overload,operator]


def budget(entries: int) -> Any:
    from stepengine.workspace.walk import WalkBudget

    return WalkBudget(entries)


names = st.text(alphabet="ab.", min_size=1, max_size=4).filter(lambda n: n not in {".", ".."})
globs = st.sampled_from(["*", "**", "a*", "*.b", "?", "[ab]", "a", "*a*"])


def slow_match(form: list[str], parts: list[str]) -> bool:
    """
    Match the way the words of the description say it.
    """
    import fnmatch

    if not form:
        return not parts
    if form[0] == "**":
        return any(slow_match(form[1:], parts[n:]) for n in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], form[0]) and slow_match(form[1:], parts[1:])


@given(st.lists(globs, min_size=1, max_size=4), st.lists(names, min_size=1, max_size=4))
def test_a_pattern_matches_component_by_component(form: list[str], parts: list[str]) -> None:
    assert slow_match(form, parts) == GlobPattern("/".join(form)).match(parts)


LINES = ["def main():", "    pass", "", "main()", "a.b"]
SEARCHES = [
    (r"main\(\):?$", ""), ("^$", ""), ("main()", "-x -F"), ("pass$", "-v"), (r"\)$|:$", "-c"), (".$", "-l"),
    (r":\n    pass$", "-U"), ("pass\r\n\r\nmain", "-U -F"), ("pass\n\nmain", "-U -F"), (r"[:\n]\r?\n", "-U"),
    ("main()\na.b", "-U -F"), (r"\\\n", "-U"),
]  # fmt: skip


@pytest.mark.spec("reliability:FS27")
@pytest.mark.parametrize("prefer_python", ENGINES)
async def test_searches_find_the_same_with_any_line_ends(tmp_path: Path, prefer_python: bool) -> None:
    for name, end in (("lf.py", "\n"), ("crlf.py", "\r\n")):
        (tmp_path / name).write_bytes("".join([line + end for line in LINES]).encode())
    for pattern, flags in SEARCHES:
        result = await search(tmp_path, prefer_python, pattern=pattern, flags=flags)
        if prefer_python and "-U" in flags:
            assert "needs ripgrep" in result.text, pattern
            continue

        assert result.status == "ok", pattern
        assert "\r" not in result.text, pattern
        files: dict[str, list[Any]] = {}
        for match in result.data["matches"]:
            files.setdefault(match["path"], []).append({**match, "path": ""})
        assert files.get("lf.py") == files.get("crlf.py"), pattern
        assert bool(files) is (pattern != r"\\\n"), pattern
