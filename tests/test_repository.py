"""
The house rules that a linter does not know, and the guards of the test suite itself.
"""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 400
PUBLIC_SUBMODULES = (
    "errors", "testing", "journal", "tools", "models", "events", "context", "permissions", "sessions", "mcp", "durable",
)  # fmt: skip

# Written so that no pattern matches its own line.
LEFTOVER = re.compile(r"NotImplemented[E]rror|\bTO[D]O\b|\bFIX[M]E\b|\bX{3}\b")
INDEX = re.compile(
    r"index[-_]url|find[-]links|\bpyp[i]\.(?:org|io)\b|pythonhoste[d]\.|[\"']resolved[\"']: *\"http|url = \"https?://[^\"]*/simple"
)
BLANKET_IGNORE = re.compile(r"# (?:type: ignor[e]|pyright: ignor[e])(?!\[)|# noq[a](?!:)")


def tracked() -> list[Path]:
    """
    Return the files of the repository: what git tracks or would track; without git, everything but caches.
    """
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=False, text=True,
    )  # fmt: skip
    if listing.returncode == 0:
        files = [ROOT / name for name in listing.stdout.split("\0") if name]
    else:
        files = [
            file for file in ROOT.rglob("*") if not re.search(r"/(?:\.?venv|\.\w+_cache|__pycache__|\.git)/", str(file))
        ]
    return sorted(file for file in files if file.is_file())


def python_files(*folders: str) -> list[Path]:
    return [file for file in tracked() if file.suffix == ".py" and file.relative_to(ROOT).parts[0] in folders]


def lines_matching(pattern: re.Pattern[str], files: list[Path]) -> list[str]:
    return [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(read(file).splitlines(), start=1)
        if pattern.search(line)
    ]


def read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="ignore")


def imported_modules(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(read(file))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""


def test_the_repository_has_files_to_check() -> None:
    """
    A listing that comes back empty would make every other test here pass for nothing.
    """
    assert ROOT / "pyproject.toml" in tracked()
    assert python_files("stepengine")
    assert python_files("agents")


def test_no_file_of_the_package_or_the_agents_is_longer_than_400_lines() -> None:
    lengths = {
        str(file.relative_to(ROOT)): len(read(file).splitlines()) for file in python_files("stepengine", "agents")
    }

    assert {} == {name: length for name, length in lengths.items() if length > MAX_LINES}


def test_every_module_says_what_lives_in_it() -> None:
    """
    Each module opens with a docstring, so each package does.
    """
    silent = [
        str(file) for file in python_files("stepengine", "agents") if not ast.get_docstring(ast.parse(read(file)))
    ]

    assert [] == silent


def test_every_folder_of_python_files_in_the_package_is_a_package() -> None:
    folders = {file.parent for file in python_files("stepengine")}

    assert set() == {str(folder) for folder in folders if not (folder / "__init__.py").is_file()}


def test_the_code_holds_no_stubs_or_leftovers() -> None:
    assert [] == lines_matching(LEFTOVER, python_files("stepengine", "agents", "examples", "benchmarks"))


def test_no_ignore_is_blanket() -> None:
    """
    An ignore of the linter or the type checker names its rule.
    """
    everything = [file for file in tracked() if file.suffix == ".py"]

    assert [] == lines_matching(BLANKET_IGNORE, everything)


def test_no_file_names_a_path_of_this_machine() -> None:
    """
    Neither the checkout's folder, nor its parent, nor the home folder or environment of whoever runs this.
    """
    shared = {Path("/"), Path("/home"), Path("/root"), Path("/usr"), Path(tempfile.gettempdir())}
    private = {ROOT, ROOT.parent, Path.home(), Path(sys.prefix)} - shared
    pattern = re.compile("|".join(re.escape(f"{folder}{os.sep}") for folder in sorted(private)))

    assert [] == lines_matching(pattern, tracked())


def test_no_file_names_a_package_index() -> None:
    assert [] == lines_matching(INDEX, tracked())


def test_constraints_are_plain_pins() -> None:
    pins = read(ROOT / "constraints.txt").splitlines()

    assert [] == [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", pin)]


def test_the_agents_folder_is_not_an_import_package() -> None:
    """
    With an `__init__.py` it would shadow openai-agents for everything that runs from the checkout.
    """
    assert [] == [str(file) for file in (ROOT / "agents").rglob("__init__.py")]


@pytest.mark.spec("requirements:Q10")
def test_agent_files_import_only_public_names_of_stepengine() -> None:
    public = {"stepengine", *(f"stepengine.{name}" for name in PUBLIC_SUBMODULES)}
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in python_files("agents")
        for module in imported_modules(file)
        if module.partition(".")[0] == "stepengine" and module not in public
    ]

    assert [] == wrong


def test_pickle_is_imported_nowhere_in_the_package() -> None:
    """
    Unpickling runs code; records are JSON.
    """
    unsafe = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "jsonpickle", "marshal", "shelve"}
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in python_files("stepengine", "agents")
        for module in imported_modules(file)
        if module.partition(".")[0] in unsafe
    ]

    assert [] == wrong


def test_no_test_asserts_a_constant() -> None:
    """
    An assertion about a literal cannot fail, so it tests nothing.
    """
    hollow = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in python_files("tests")
        for node in ast.walk(ast.parse(read(file)))
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant) and node.test.value
    ]

    assert [] == hollow


@pytest.mark.parametrize("address", [("192.0.2.1", 443), ("2001:db8::1", 443)])
def test_the_suite_cannot_connect_to_another_machine(address: tuple[str, int]) -> None:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family) as client, pytest.raises(RuntimeError, match="tests may not reach"):
        client.connect(address)


def test_the_suite_cannot_look_up_a_name() -> None:
    with pytest.raises(RuntimeError, match=r"tests may not look up 'example\.com'"):
        socket.create_connection(("example.com", 443))


def test_the_suite_can_reach_its_own_servers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            client.sendall(b"hello")

            assert b"hello" == accepted.recv(5)


def test_the_suite_sees_no_provider_keys() -> None:
    keys = [name for name in os.environ if name.endswith(("_API_KEY", "_BASE_URL")) or name.startswith("STEPENGINE_")]

    assert [] == keys
