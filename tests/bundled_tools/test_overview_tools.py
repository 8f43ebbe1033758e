"""``read_subtree`` and ``find_files``: what they show of a project, and what they leave out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepengine.data.estimate import estimate_tokens
from stepengine.tools import ToolRegistry
from stepengine.tools.bundled import file_tools, search_tools
from stepengine.tools.bundled.search.overview import rank_files
from stepengine.tools.bundled.search.symbols import find_top_level_names, split_singular_words
from tests.phrases import OUTSIDE_ROOT

PROJECT = {
    "README.md": "# shop",
    "logo.png": "\x89PNG",
    "uv.lock": "x",
    ".env": "KEY=1",
    ".gitignore": "build/\n",
    "build/out.py": "hidden = 1\n",
    "src/shop.py": "import os\n\nclass PriceList:\n    inner = 1\n\n\ndef total(prices):\n    local = 1\n    return sum(prices)\n",
    "src/http/retry.py": "async def fetch_again(url):\n    ...\n\nMAX_ATTEMPTS = 4\n",
    "src/web/cart.ts": "export default class Cart {}\nexport const addItem = () => 1\nfunction hidden() {}\n",
    "tests/test_shop.py": "def test_total(): ...\n",
    "deep/a/b/c/d.go": "func (s *Server) Listen() {}\ntype Server struct{}\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "link").symlink_to("src")
    return tmp_path


async def tree(root: Path, **input: Any) -> list[dict[str, Any]]:
    result = await ToolRegistry(file_tools(root)).execute("read_subtree", input)
    assert not result.is_error, result.text
    return result.data  # type: ignore[return-value]


async def find(root: Path, prompt: str, **input: Any) -> dict[str, Any]:
    result = await ToolRegistry(search_tools(root)).execute("find_files", {"prompt": prompt, **input})
    assert not result.is_error, result.text
    return result.data  # type: ignore[return-value]


@pytest.mark.spec("generator-contract:T0")
async def test_a_subtree_that_fits_is_shown_whole_with_symbol_names(root: Path) -> None:
    (shown,) = await tree(root)

    expected = """\
.gitignore
README.md
deep/
 a/
  b/
   c/
    d.go Listen Server
logo.png
src/
 http/
  retry.py fetch_again MAX_ATTEMPTS
 shop.py PriceList total
 web/
  cart.ts Cart addItem hidden
tests/
 test_shop.py test_total
uv.lock
"""
    assert {
        "path": ".",
        "type": "directory",
        "printed_tree": expected,
        "token_count": estimate_tokens(expected),
        "truncation_level": "none",
    } == shown


@pytest.mark.spec("generator-contract:T0")
async def test_a_large_tree_loses_files_then_names_then_depth(root: Path) -> None:
    whole = (await tree(root))[0]["token_count"]
    tools = ToolRegistry(file_tools(root))
    results = [await tools.execute("read_subtree", {"max_tokens": n}) for n in range(1, whole + 1)]
    found: list[Any] = [result.data[0] for result in results]  # type: ignore[index,call-overload]
    levels = [f["truncation_level"] for f in found]

    assert [*dict.fromkeys(levels)] == ["depth-based", "tokens", "unimportant-files", "none"]
    assert all(f["token_count"] <= n for n, f in enumerate(found, 1))
    assert all(("message" in f) == (f["truncation_level"] != "none") for f in found)
    lean = next(f for f in found if f["truncation_level"] == "unimportant-files")
    assert "logo.png" not in lean["printed_tree"]
    assert "dropped: 2 unimportant files" == lean["message"]
    flat = next(f for f in found if f["printed_tree"].endswith("\nsrc/ ...\ntests/ ...\n"))
    assert flat["printed_tree"].startswith(".gitignore\nREADME.md\ndeep/ ...\n")
    assert "more than 1 levels down" in flat["message"]
    assert "all but the first" in found[10]["message"]


@pytest.mark.spec("generator-contract:T0", "reliability:FP1")
async def test_paths_of_a_subtree_give_names_or_their_own_error(root: Path) -> None:
    file, folder, missing, outside, secret = await tree(root, paths=["src/shop.py", "src/web/", "no", "../x", ".env"])

    assert {"path": "src/shop.py", "type": "file", "variables": ["PriceList", "total"]} == file
    assert ("src/web", "cart.ts Cart addItem hidden\n") == (folder["path"], folder["printed_tree"])
    assert "'no' does not exist" == missing["error"]
    assert OUTSIDE_ROOT in outside["error"]
    assert "may hold secrets" in secret["error"]


@given(
    st.dictionaries(
        st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(tuple), st.integers(0, 30), min_size=1, max_size=12
    ),
    st.integers(1, 200),
)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
async def test_no_tree_is_larger_than_its_budget(
    tmp_path_factory: pytest.TempPathFactory, files: dict[tuple[str, ...], int], max_tokens: int
) -> None:
    folder = tmp_path_factory.mktemp("tree")
    for parts, names in files.items():
        path = folder.joinpath(*[f"folder_{p}" for p in parts[:-1]], f"{parts[-1]}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"def name_{n}(): ...\n" for n in range(names)))
    (shown,) = await tree(folder, max_tokens=max_tokens)

    assert shown["token_count"] <= max_tokens
    assert ("message" in shown) == (shown["truncation_level"] != "none")
    if shown["truncation_level"] == "none":
        assert shown["printed_tree"].count(".py") == len(files)


@pytest.mark.spec("generator-contract:T0")
@pytest.mark.parametrize(
    ("prompt", "first"),
    [
        ("price list", "src/shop.py"),
        ("where is PriceList defined?", "src/shop.py"),
        ("retries of http requests", "src/http/retry.py"),
        ("fetchAgain", "src/http/retry.py"),
        ("shoping", "src/shop.py"),
        ("add an item to the cart", "src/web/cart.ts"),
        ("tests of the total", "tests/test_shop.py"),
        ("deep/a/b/c/d.go", "deep/a/b/c/d.go"),
        ("the readme", "README.md"),
    ],
)
async def test_find_files_ranks_the_described_file_first(root: Path, prompt: str, first: str) -> None:
    found = await find(root, prompt)

    assert first == found["files"][0]
    assert len(found["files"]) <= 12


@pytest.mark.spec("generator-contract:T0", "reliability:FP4")
async def test_secret_ignored_and_linked_files_are_not_found(root: Path) -> None:
    for prompt in ("env key", "out hidden build", "link"):
        found = await find(root, prompt)
        assert not [f for f in found["files"] if f.startswith((".env", "build", "link"))]

    assert {"files": [], "symbols": {}, "message": "no file fits the description"} == await find(root, "xylophone")
    assert {"src/shop.py": ["PriceList"]} == (await find(root, "price", max_results=1))["symbols"]


@given(
    st.dictionaries(
        st.lists(st.text("abAB_1", min_size=1, max_size=5), min_size=1, max_size=3).map(tuple),
        st.lists(st.text("abcAB_", min_size=1, max_size=6), max_size=3),
        max_size=5,
    ),
    st.text(max_size=30),
)
def test_ranking_is_deterministic_and_finds_a_spelled_out_path(files: dict[Any, list[str]], prompt: str) -> None:
    hits = rank_files(prompt, files)
    assert len({h.place for h in hits}) == len(hits) <= len(files)
    assert sorted(-h.score for h in hits) == [-h.score for h in hits]
    assert hits == rank_files(prompt, dict(reversed(files.items())))
    for place in files:
        assert place in [h.place for h in rank_files("/".join(place), files)]


def test_words_are_split_at_case_and_separators() -> None:
    assert ("http", "server", "2", "name", "class") == split_singular_words("HTTPServer2_names-class")


@pytest.mark.spec("generator-contract:T0")
@pytest.mark.parametrize(
    ("name", "text", "names"),
    [
        ("a.py", "X: int = 1\ny == 2\nif x:\n  z = 1\n@a\nasync def f(): ...\nclass C: ...\n", ["X", "f", "C"]),
        ("a.ts", "export interface A {}\n  const b = 1\nexport async function c() {}\n", ["A", "c"]),
        ("a.rs", "pub(crate) async fn run() {}\nimpl X {}\npub struct S;\n", ["run", "S"]),
        ("a.java", "public final class A {\n  void b() {}\n}\n", ["A"]),
        ("a.c", "#define N 1\nstatic int add(int a) {\nstruct point {\n", ["N", "add", "point"]),
        ("a.sh", "build() {\n", ["build"]),
        ("a.txt", "class A\n", []),
        ("no", "class A\n", []),
    ],
)
def test_top_level_names_are_found_by_language(name: str, text: str, names: list[str]) -> None:
    assert names == find_top_level_names(text, name)


@pytest.mark.spec("reliability:I12")
async def test_a_cancelled_call_stops_walking(root: Path) -> None:
    import threading

    from stepengine import ToolContext

    gone = threading.Event()
    gone.set()
    ctx = ToolContext.for_test(cancelled=gone)
    tools = {t.name: t for t in [*file_tools(root), *search_tools(root)]}

    (shown,) = tools["read_subtree"].fn(ctx)
    assert "stopped because the call was cancelled" in shown["message"]
    assert "cancelled" in tools["find_files"].fn(ctx, "shop")["message"]


@pytest.mark.spec("reliability:FP1")
async def test_nothing_is_read_through_a_folder_that_became_a_link(root: Path, tmp_path_factory: Any) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret.py").write_text("class Secret: ...\n")
    tools = ToolRegistry([*file_tools(root), *search_tools(root)])
    os.rename(root / "src", root / "old")  # noqa: PTH104
    (root / "src").symlink_to(outside)

    assert "Secret" not in (await tools.execute("read_subtree", {})).text
    assert "secret" not in (await tools.execute("find_files", {"prompt": "secret"})).data["files"]  # type: ignore[index,call-overload,operator]
