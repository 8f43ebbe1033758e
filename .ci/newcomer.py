#!/usr/bin/env python3
"""
Walks the path of a newcomer: install, first screen, demo, a project, its studio, an agent of one's own, record, replay, break, debug, view.

    .ci/newcomer.py WHEEL [constraints.txt]

Everything happens in a temporary folder with a home of its own, without keys and, once pip is done, without need of a
network. Two things are held: no step takes a minute, and every command that is typed was on the screen before, in the
README of the repository, in what a command printed, or in a file that it made. Only the standard library is needed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MINUTE = 60
KEPT = re.compile(r"PATH|LANG|TMPDIR|PIP_\w+|SSL_CERT_\w+|(?i:https?_proxy|no_proxy)")
"""What leads to packages; everything else of whoever runs this is taken away."""
JOURNAL = "tests/journals/test_longest/test_the_longest_file_is_split.jsonl"


class Newcomer:
    """
    Somebody at a terminal who types only what the screen said.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.screen = (ROOT / "README.md").read_text(encoding="utf-8")
        kept = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
        pip = Path.home() / ".config" / "pip" / "pip.conf"
        if pip.exists():
            kept.setdefault("PIP_CONFIG_FILE", str(pip))
        path = f"{folder / '.venv' / 'bin'}{os.pathsep}{kept['PATH']}"
        (folder / "home").mkdir()
        self.variables = {
            **kept, "HOME": str(folder / "home"), "PATH": path, "TERM": "dumb", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }  # fmt: skip

    def types(
        self,
        step: str,
        command: str,
        *,
        said: str | None = None,
        code: int = 0,
        keys: str = "",
        shows: tuple[str, ...] = (),
    ) -> None:
        """
        Type a command, and hold it to its promises.

        Args:
            step: What it is for.
            command: What a shell gets.
            said: The words that were on the screen for it; by default the command itself.
            code: What it leaves with.
            keys: What is typed into it.
            shows: What the screen must say now.
        """
        if (said or command) not in self.screen:
            give_up(step, f"no screen said {said or command!r}", self.screen[-3000:])
        began = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=self.variables, input=keys,
            capture_output=True, text=True, check=False, timeout=5 * MINUTE,
        )  # fmt: skip
        took = time.monotonic() - began
        shown = done.stdout + done.stderr
        print(f"{took:6.1f} s  {step}: {command}", flush=True)
        if done.returncode != code:
            give_up(step, f"left with {done.returncode}, not with {code}", shown)
        if missing := [text for text in shows if text not in shown]:
            give_up(step, f"the screen does not say {missing}", shown)
        if took > MINUTE:
            give_up(step, f"took {took:.0f} s, and none may take a minute", shown)
        self.screen += shown

    def starts(self, step: str, command: str, *, said: str, run: dict[str, str], shows: str) -> None:
        """
        Type a command that serves agents, start a run with the token that it says, and end the server.

        Args:
            step: What it is for.
            command: What a shell gets.
            said: The words that were on the screen for it.
            run: What is asked for.
            shows: What the run must come to.
        """
        if said not in self.screen:
            give_up(step, f"no screen said {said!r}", self.screen[-3000:])
        began = time.monotonic()
        with subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=self.folder, env=self.variables, stderr=subprocess.PIPE, text=True
        ) as server:
            late = threading.Timer(MINUTE, server.kill)
            late.start()
            shown, look = "", dict[str, Any]()
            assert server.stderr is not None
            try:
                while not (ready := re.search(r"Bearer (\S+)'(?s:.*) (http://\S+)/runs\n", shown)):
                    line = server.stderr.readline()
                    if not line:
                        give_up(step, f"left with {server.wait()} before it served anything", shown)
                    shown += line
                look = asks(ready[2], ready[1], "/runs", run)
                while look.get("status") not in ("completed", "failed"):
                    time.sleep(0.05)
                    look = asks(ready[2], ready[1], f"/runs/{look['run_id']}")
            except OSError as error:
                give_up(step, str(error), shown)
            finally:
                late.cancel()
                server.terminate()
        print(f"{time.monotonic() - began:6.1f} s  {step}: {command}", flush=True)
        if shows not in look["text"]:
            give_up(step, f"the run came to {look}", shown)

    def saves(self, path: str) -> None:
        """
        Save the block of the screen that stands behind the name of this file.
        """
        found = re.search(
            rf"`{re.escape(path)}`[^\n]*:\n\n```python\n(.*?)^```$", self.screen, re.DOTALL | re.MULTILINE
        )
        if found is None:
            give_up("save", f"no screen showed {path}", self.screen[-3000:])
        else:
            (self.folder / path).write_text(found[1], encoding="utf-8")

    def changes(self, path: str, old: str, new: str) -> None:
        """
        Change a file with an editor.
        """
        text = (self.folder / path).read_text(encoding="utf-8")
        if old not in text:
            give_up("change", f"{path} does not say {old!r}", text)
        (self.folder / path).write_text(text.replace(old, new), encoding="utf-8")


def asks(url: str, token: str, path: str, body: dict[str, str] | None = None) -> dict[str, Any]:
    """
    Ask a server something, or tell it.
    """
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    request = urllib.request.Request(f"{url}{path}", None if body is None else json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=MINUTE) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def give_up(step: str, why: str, shown: str) -> None:
    """
    Say where the path ends, and leave.
    """
    print(f"{shown}\n\nthe newcomer is stuck at {step!r}: {why}", file=sys.stderr)
    raise SystemExit(1)


def main(wheel: str, constraints: str | None = None) -> None:
    """
    Walk the path.
    """
    held = f" -c {Path(constraints).resolve()}" if constraints else ""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stepengine-newcomer-") as name:
        me = Newcomer(Path(name))
        me.types("an environment", f"{sys.executable} -m venv .venv", said="python3 -m venv .venv")
        me.types("install", f".venv/bin/pip install -q {Path(wheel).resolve()}{held}", said=".venv/bin/pip install")
        me.types(
            "the first screen", "stepengine", said="stepengine", shows=("stepengine demo", "stepengine init my-agent")
        )
        me.types("the demo", "stepengine demo", shows=("def handle_steps(", "What changed"))
        me.types("a project", "stepengine init my-agent", shows=("agents/todos.py",))
        me.folder /= "my-agent"
        me.types(
            "its wheel", f"python -m pip wheel --no-deps -w vendor {Path(wheel).resolve()}",
            shows=(f"vendor/{Path(wheel).name}",),
        )  # fmt: skip
        me.types(
            "the test kit",
            f'python -m pip install -q "$(ls vendor/stepengine-*.whl)[test]"{held}',
            said='python -m pip install "$(ls vendor/stepengine-*.whl)[test]"',
        )
        me.types("its tests", "python -m pytest", shows=("4 passed",))
        me.types(
            "its recorded run", "stepengine show tests/journals/test_todos/test_a_run.jsonl", shows=("find_todos",)
        )
        me.types("what is missing", "stepengine config doctor", shows=("no problems found",))
        me.types("its README", "cat README.md")
        me.types(
            "what the studio needs",
            f'python -m pip install -q "$(ls vendor/stepengine-*.whl)[serve]"{held}',
            said='python -m pip install "$(ls vendor/stepengine-*.whl)[serve]"',
        )
        me.starts(
            "the studio, without a key", "stepengine studio --script tests/replies.json --no-open --port 0",
            said="stepengine studio --script tests/replies.json", run={"agent": "todos", "prompt": "src"},
            shows="1. Round the total.",
        )  # fmt: skip
        me.changes("agents/todos.py", "Sort the TODO", "List the TODO")
        me.types(
            "what a change does", "stepengine compare impact tests/journals/test_todos --script tests/replies.json",
            shows=("repeated from step 1",),
        )  # fmt: skip
        me.changes("agents/todos.py", "List the TODO", "Sort the TODO")

        me.saves("agents/longest.py")
        me.saves("tests/test_longest.py")
        me.types("record", "python -m pytest --stepengine-record=once", shows=(f"recorded {JOURNAL}", "5 passed"))
        me.types("its tests again", "python -m pytest", shows=("5 passed",))
        me.types("replay", f"stepengine replay {JOURNAL}", shows=("Move charge() to billing.py.",))

        me.changes("agents/longest.py", "split the longest", "shorten the longest")
        me.types(
            "break it, and read what differs", "python -m pytest", code=1,
            shows=("agents/longest.py:", "/system_prompt", "Suggest how to split", "Suggest how to shorten", "1 failed, 4 passed"),
        )  # fmt: skip
        me.types(
            "what differs, as one reads it alone", f"stepengine replay {JOURNAL}", code=5, shows=("/system_prompt",)
        )
        me.types(
            "debug it", f"stepengine debug {JOURNAL}", keys="next\nquit\n", code=5,
            shows=("sizes = yield from", "/system_prompt"),
        )  # fmt: skip
        me.types("it was meant", "python -m pytest --stepengine-record=rewrite", shows=("5 passed",))
        me.types(
            "debug the new run", f"stepengine debug {JOURNAL}", keys="next\nprint sizes\nquit\n", shows=("src/shop.py",)
        )
        me.types("view it", f"stepengine show {JOURNAL} --html -o run.html", shows=("run.html",))
        if "<title>longest" not in (me.folder / "run.html").read_text(encoding="utf-8"):
            give_up("view it", "run.html is no page of this run", "")
    print(f"the newcomer has arrived after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
