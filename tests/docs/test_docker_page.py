"""
`docs/docker.md` shows the Dockerfile of `examples/deploy`, and commands that the command line understands.
"""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from tests.examples.test_deploying import DEPLOY, parsed

from .pages import blocks_of, page

BLOCKS = blocks_of(page("docker.md"))
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
LINES = [shlex.split(line) for block in BLOCKS if block.kind == "sh" for line in block.text.splitlines()]
INSIDE = [line[line.index("stepengine") :] for line in LINES if line[0] == "docker" and "stepengine" in line]


def test_the_page_shows_the_dockerfile_of_the_examples() -> None:
    assert {"sh", "dockerfile"} == {block.kind for block in BLOCKS}
    assert [DOCKERFILE] == [block.text for block in BLOCKS if block.kind == "dockerfile"]


@pytest.mark.parametrize("line", INSIDE, ids=[" ".join(line[1:3]) for line in INSIDE])
def test_every_command_inside_a_container_parses(line: list[str]) -> None:
    assert parsed(line[1:])["command"]


def test_commands_use_folders_and_services_of_the_examples() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
    folders = {name for line in LINES for name in re.findall(r"(?<=[ :@])/(\w+)", " ".join(line))}

    assert {"agents", "data", "run"} == folders
    assert all(f"/{name}" in DOCKERFILE for name in ("agents", "data", "work"))
    assert {line[line.index("exec") + 1] for line in LINES if "exec" in line} <= set(services)
    assert {"@/run/secrets/db_url"} == {line[line.index("--db") + 1] for line in INSIDE if "--db" in line}
