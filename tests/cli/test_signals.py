"""
Signals while effects are under way: what happens is recorded within a grace, and the run can go on.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepengine.engine.trust import trust_folder
from stepengine.journal import FileJournal
from stepengine.journal.questions import list_effects_in_doubt
from tests import forked_processes
from tests.waits import until

pytestmark = pytest.mark.usefixtures("forks")

SECONDS = 60
AGENT = """
import asyncio
import time
from pathlib import Path
from stepengine import AgentCall, AgentDefinition, Parallel, Perform, ToolCall, tool

def act(name):
    Path(f"{name}.began").write_text("")
    time.sleep(SLEEP)
    with open("acts.txt", "a") as file:
        file.write(f"{name};")
    return name

async def act_on_loop(name):
    Path(f"{name}.began").write_text("")
    await asyncio.sleep(SLEEP)
    with open("acts.txt", "a") as file:
        file.write(f"{name};")
    return name

@tool
def pay(name: str) -> str:
    "Pay."
    return act(name)

@tool
async def book(name: str) -> str:
    "Book."
    return await act_on_loop(name)

YIELDS = {
    "thread": lambda: ToolCall("pay", {"name": "a"}),
    "loop": lambda: ToolCall("book", {"name": "a"}),
    "function": lambda: Perform(act, "a"),
    "coroutine": lambda: Perform(act_on_loop, "a"),
    "child": lambda: AgentCall("thread", "go"),
    "grandchild": lambda: AgentCall("child", "go"),
    "parallel": lambda: Parallel(ToolCall("pay", {"name": "a"}), Perform(act_on_loop, "b")),
    "children": lambda: Parallel(AgentCall("loop", "go"), Perform(act, "b")),
}

def of(name):
    def handle_steps(ctx):
        yield YIELDS[name]()
        yield Perform(len, "what follows")
        return "done"
    return AgentDefinition(name, handle_steps=handle_steps, tools=[pay, book], spawnable_agents=["thread", "child", "loop"])

family = {name: of(name) for name in YIELDS}
"""
SHAPES = ("thread", "loop", "function", "coroutine", "child", "grandchild", "parallel", "children")


def written(folder: Path, sleep: float) -> None:
    (folder / "agents").mkdir()
    common = AGENT.replace("SLEEP", repr(sleep))
    for shape in SHAPES:
        (folder / "agents" / f"{shape}.py").write_text(f"{common}\nagent = family[{shape!r}]\n")
    trust_folder(folder / "agents")


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "stepengine.cli", *arguments]
    return forked_processes.Process(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    until(lambda: path.exists() or process.poll() is not None)
    assert path.exists(), process.communicate()


def killed(folder: Path, shape: str, number: int) -> subprocess.Popen[str]:
    process = started(folder, "run", shape, "go", "--journal", "run.jsonl")
    wait_for(folder / "a.began", process)
    if shape in ("parallel", "children"):
        wait_for(folder / "b.began", process)
    process.send_signal(number)
    return process


def goes_on(folder: Path, shape: str, number: int) -> None:
    folder.mkdir(exist_ok=True)
    written(folder, 0.3)
    process = killed(folder, shape, number)
    _, said = process.communicate(timeout=SECONDS)

    assert 128 + number == process.returncode, said
    assert "waiting up to 5 s for" in said
    assert "press Ctrl-C again to stop at once" in said
    assert [] == list_effects_in_doubt(FileJournal(folder / "run.jsonl").history())
    resumed = started(folder, "resume", "run.jsonl", "-q")
    out, said = resumed.communicate(timeout=SECONDS)
    assert (0, "done\n") == (resumed.returncode, out), said
    acts = sorted((folder / "acts.txt").read_text().split(";")[:-1])
    assert (["a", "b"] if shape in ("parallel", "children") else ["a"]) == acts


@pytest.mark.deep
@pytest.mark.spec("requirements:X73")
@pytest.mark.parametrize(("shape", "number"), [*zip(SHAPES, itertools.cycle([signal.SIGINT, signal.SIGTERM]))])
def test_run_signalled_during_an_effect_can_be_resumed(tmp_path: Path, shape: str, number: int) -> None:
    goes_on(tmp_path, shape, number)


def killed_twice(tmp_path: Path, shape: str, number: int) -> float:
    """Return how long a run takes to end after its second signal, seeing that it does nothing more."""
    written(tmp_path, 30.0)
    process = killed(tmp_path, shape, number)
    assert process.stderr is not None
    while "waits up to" not in process.stderr.readline():
        pass
    began = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=SECONDS)
    took = time.monotonic() - began

    assert process.returncode in (128 + number, -number)
    assert not (tmp_path / "acts.txt").exists()
    return took


@pytest.mark.speed
@pytest.mark.spec("requirements:X73")
@pytest.mark.parametrize(
    ("shape", "number"), list(itertools.product(["loop", "coroutine", "children"], [signal.SIGINT, signal.SIGTERM]))
)
def test_a_second_signal_ends_at_once(tmp_path: Path, shape: str, number: int) -> None:
    assert killed_twice(tmp_path, shape, number) < 2.9


LOADING = """
import os, signal, sys

class Presses:
    def find_spec(self, name, *_):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Presses())
sys.argv = ["stepengine", "runs"]
from stepengine.cli import main
main()
"""


@pytest.mark.spec("ecosystem:EC141")
@pytest.mark.parametrize(
    "module",
    ["stepengine.cli.app", *[pytest.param(m, marks=pytest.mark.deep) for m in ("stepengine.cli.exits", "typer")]],
)
@pytest.mark.parametrize(("ignored", "code", "said"), [(False, 130, "stepengine: interrupted\n"), (True, 0, "")])
def test_ctrl_c_while_loading_exits_cleanly_unless_ignored(
    tmp_path: Path, module: str, ignored: bool, code: int, said: str
) -> None:
    before = "signal.signal(signal.SIGINT, signal.SIG_IGN)" if ignored else ""
    text = LOADING.replace("MODULE", repr(module)).replace(
        "import os, signal, sys", f"import os, signal, sys\n{before}"
    )
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=tmp_path,
        env={**os.environ, "STEPENGINE_STATE_DIR": str(tmp_path / "state")},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )

    assert (code, said) == (done.returncode, "" if ignored else done.stderr), done.stderr
    assert "Traceback" not in done.stderr
