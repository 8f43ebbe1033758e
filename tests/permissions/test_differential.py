"""
What the rules for commands that only look let through is run for real, in a folder full of canaries.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from stepengine.workspace.argv import Script, parse_command
from tests.permissions.test_commands import ALLOWED, DENIED, NOT_ALLOWED, POLICY, decision

COMMANDS = 2_000
CANARIES = (
    "rm", "sh", "bash", "dash", "zsh", "curl", "wget", "nc", "ssh", "scp", "python", "python3", "perl", "ruby", "node", "npm", "npx",
    "make", "vim", "vi", "nano", "less", "more", "man", "pager", "editor", "awk", "xargs", "env", "tee", "dd", "cp", "mv", "ln",
    "chmod", "touch", "mkdir", "kill", "sudo", "su", "id", "x", "evil", "git-upload-pack", "git-receive-pack", "nslookup", "dig", "host", "ping",
)  # fmt: skip
"""Programs that nothing allowed may start: each writes down that it was."""
WORDS = (
    "-exec", "-execdir", "-ok", "-delete", "-fprint", "-fls", "--output=made", "--output", "-o", "made", "--ext-diff", "--textconv",
    "-O./evil", "--open-files-in-pager=./evil", "--upload-pack=./evil", "--pre", "--pre=./evil", "--hostname-bin=./evil", "-z",
    "--compress-program=./evil", "-T", "-f", "--files0-from=list", "-i", "-n", "w made", "e", "s/a/b/w made", "-c", "core.pager=./evil",
    "alias.x=!evil", "--exec-path=.", "--no-index", "--edit-description", "-d", "-D", "-m", "new", "main", "HEAD", "HEAD:.env", "-C", "sub",
    "--", "./evil", "evil", "rm", "{}", ";", "+", "a.txt", ".env", "../outside", "/etc/hostname", "~", "*", "$(evil)", "`evil`", "| evil",
    "&& evil", "> made", "2>made", "\nevil", "--color=always", "--stat", "-p", "--all", "--since=1.day", "-S", "--show-signature", "--paginate",
)  # fmt: skip
LOOKING = (
    "ls", "ls -la sub", "cat a.txt", "head a.txt", "tail -n 2 a.txt", "sort list", "uniq a.txt", "wc -l a.txt b.txt", "cut -c 1 a.txt", "find .",
    "find sub -name c.py", "rg a", "rg -n alpha a.txt", "grep -rn a sub", "diff a.txt b.txt", "git status", "git diff", "git log", "git log -p a.txt",
    "git show", "git branch", "git blame a.txt", "git grep alpha", "git ls-files", "git rev-parse HEAD", "date", "echo a", "file a.txt", "stat a.txt",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """
    A repository with a secret that is not in it, beside a file that it must not leave for; programs of its own stand first
    on the path.
    """
    made = tmp_path / "project"
    (made / "sub").mkdir(parents=True)
    (tmp_path / "outside").write_text("CANARY outside\n")
    for name, text in {
        "a.txt": "alpha\n",
        "b.txt": "beta\n",
        "sub/c.py": "c = 1\n",
        ".env": "CANARY=env\n",
        "list": "a.txt\0",
    }.items():
        (made / name).write_text(text)
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
    for argv in (["init", "-q"], ["add", "a.txt", "b.txt", "sub"], ["commit", "-qm", "first"]):
        subprocess.run(["git", *who, *argv], cwd=made, check=True, capture_output=True)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in CANARIES:
        program = programs / name
        program.write_text(f'#!/bin/sh\necho "$0 $*" >> {tmp_path}/started\n')
        program.chmod(0o755)
    shutil.copy(programs / "evil", made / "evil")
    return made


def corpus() -> list[str]:
    """
    Return known attacks and harmless commands, and what becomes of them when words are put in, left out and joined.
    """
    known = [c for row in NOT_ALLOWED.values() for c in row if isinstance(c, str) and len(c) < 500]
    known += [c for c in (*ALLOWED, *DENIED) if isinstance(c, str)]
    found, random = list(known), Random(11)
    while len(found) < COMMANDS:
        words = random.choice(known if random.random() < 0.2 else LOOKING).split(" ")
        for _ in range(random.randint(1, 3)):
            at = random.randint(1, len(words))
            words[at:at] = [random.choice([*WORDS, random.choice(known).split(" ")[-1]])]
            if random.random() < 0.2 and len(words) > 2:
                del words[random.randrange(1, len(words))]
        found.append(" ".join(words))
    return found


def content(folder: Path) -> dict[str, bytes]:
    """Return every file but what git notes of times."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "index"]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("git") is None, reason="runs git")
@pytest.mark.spec("reliability:R7", "reliability:PM12")
def test_no_allowed_command_of_2000_starts_changes_or_leaks_anything(folder: Path, tmp_path: Path) -> None:
    # ripgrep is installed beside the interpreter, which need not be on the path.
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"], str(Path(sys.executable).parent)])
    environment = {"PATH": path, "HOME": str(tmp_path), "LC_ALL": "C.UTF-8", "CANARY_VARIABLE": "CANARY variable"}
    before, started, ran = content(folder), tmp_path / "started", 0
    for command in corpus():
        if decision(command, POLICY) != "allow":
            continue
        argv = parse_command(command)
        assert not isinstance(argv, Script), command
        if argv[0] == "npm":  # allowed by a rule of its own
            continue
        ran += 1
        done = subprocess.run(
            argv, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False
        )
        assert not started.exists(), f"{command!r} started {started.read_text()}"
        assert b"CANARY" not in done.stdout + done.stderr, f"{command!r} showed what is secret"
        assert before == content(folder), f"{command!r} changed something"

    assert ran > 100
