"""The caps of the tools: each stands where it is obeyed, once, and nothing changes one unnoticed."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from stepengine import tools, workspace
from stepengine.data import result_cuts

FOLDERS = [Path(package.__file__).parent for package in (workspace, tools)]
FILES = [*[file for folder in FOLDERS for file in folder.rglob("*.py")], Path(result_cuts.__file__)]
MIB = 1024 * 1024
CAPS = {
    "TOOL_SECONDS": 120,
    "COMMAND_SECONDS": 30,
    "CANCEL_GRACE_SECONDS": 5,
    "RETRY_WAIT_SECONDS": 0.1,
    "RETRY_WAIT_SECONDS_MAX": 5,
    "THREADS": 32,
    "RESULT_CHARS": 100_000,
    "ERROR_CHARS": 4_000,
    "IMAGE_BYTES": 5 * MIB,
    "DOCUMENT_BYTES": 32 * MIB,
    "READ_CHARS": 100_000,
    "READ_LINES": 2_000,
    "READ_LINE_CHARS": 2_000,
    "READ_WHOLE_BYTES": 10_000_000,
    "READ_PATHS": 50,
    "WRITE_BYTES": 4 * MIB,
    "UNDO_BYTES": 4 * MIB,
    "PROPOSED_BYTES": 8 * MIB,
    "LIST_ENTRIES": 20_000,
    "LIST_SECONDS": 10,
    "SYMLINK_HOPS": 8,
    "PATH_BYTES": 4_096,
    "SHOWN_DIFFS": 1_000,
    "SEARCH_MATCHES_PER_FILE": 15,
    "SEARCH_MATCHES": 250,
    "SEARCH_SECONDS": 10,
    "SEARCH_CHARS": 20_000,
    "SEARCH_FILE_BYTES": 4 * MIB,
    "SEARCH_PATTERN_CHARS": 512,
    "SEARCH_COLUMNS": 2_000,
    "GLOB_RESULTS": 100,
    "FIND_RESULTS": 12,
    "FIND_RESULTS_MAX": 30,
    "FIND_PROMPT_CHARS": 2_000,
    "FIND_SOURCES": 3_000,
    "SUBTREE_TOKENS": 4_000,
    "SUBTREE_TOKENS_MAX": 20_000,
    "SUBTREE_SOURCES": 3_000,
    "COMMAND_MAX_SECONDS": 600,
    "COMMAND_WORDS": 1_000,
    "COMMAND_BYTES": 128 * 1024,
    "COMMAND_CHARS": 50_000,
    "COMMAND_OUTPUT_BYTES": 64 * MIB,
    "COMMAND_DRAIN_SECONDS": 0.2,
    "COMMAND_TERM_SECONDS": 1.5,
    "COMMANDS_AT_ONCE": 16,
    "JOBS_PER_RUN": 4,
    "JOB_OUTPUT_BYTES": 16 * MIB,
    "WEB_BYTES": 2_000_000,
    "WEB_HEADER_BYTES": 65_536,
    "WEB_RATIO": 100,
    "WEB_CONNECT_SECONDS": 10,
    "WEB_IDLE_SECONDS": 10,
    "WEB_SECONDS": 20,
    "WEB_REDIRECTS": 5,
    "WEB_PARSE_SECONDS": 5,
    "WEB_PARSE_BYTES": 1024 * MIB,
    "WEB_FETCHES_PER_RUN": 200,
    "WEB_FETCHES_PER_HOST": 4,
    "WEB_CHARS": 20_000,
    "WEB_CHARS_MIN": 1_000,
    "WEB_CHARS_MAX": 50_000,
    "WEB_SEARCH_RESULTS": 5,
    "WEB_SEARCH_RESULTS_DEEP": 20,
    "DOCS_TOKENS": 10_000,
    "DOCS_TOKENS_MAX": 20_000,
    "DOCS_PAGES": 5,
}


ASSIGNED = re.compile(rf"^(?:{'|'.join(CAPS)})\b", re.MULTILINE)
"""A line that may assign one of them: the other modules need not be parsed."""


def constants(tree: ast.Module) -> set[str]:
    return {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in CAPS
    }


def test_every_limit_has_its_listed_value_in_one_module() -> None:
    found: list[tuple[str, Any]] = []
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        if not ASSIGNED.search(text):
            continue
        tree = ast.parse(text)
        read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        module = ".".join(("stepengine", *file.relative_to(FOLDERS[0].parent).with_suffix("").parts))
        found += [(name, getattr(import_module(module), name)) for name in constants(tree) & read]

    assert sorted(CAPS.items()) == sorted(found)
