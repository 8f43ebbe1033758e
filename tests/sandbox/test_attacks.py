"""Agent files of strangers: whatever is tried in them, nothing reaches the host, and each ends in time with something that has a type."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from stepengine import AgentDefinition, Engine, Limits, RunResult, tool
from stepengine.errors import DefinitionError
from stepengine.journal import MemoryJournal
from stepengine.permissions import Policy, Rule
from stepengine.testing import ScriptedModel, text
from tests.scripts import load_script

pytest.importorskip("pydantic_monty", reason="needs the extra programs")

from stepengine.sandbox import MontySandbox, ProgramLimits
from stepengine.sandbox.untrusted_handlers import load_source

pytestmark = [pytest.mark.anyio, pytest.mark.leaks_allowed("what the sandbox opens once for a process stays")]

attacks = load_script(Path(__file__).with_name("attacks.py"))

BOUNDS = ProgramLimits(seconds=10.0, memory=32 * 1024 * 1024)
ENDLESS = ProgramLimits(seconds=0.5, memory=32 * 1024 * 1024)
SECRET = "the-key-of-the-house"
REACHED: list[str] = []
GROUPS = sorted({one.group for one in attacks.ATTACKS})
WATCHED = {
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "socket.connect",
    "socket.bind",
    "ctypes.dlopen",
    "pty.spawn",
}


class Watch:
    """Notes what this process does while it is on; a hook of this kind cannot be taken away again."""

    def __init__(self) -> None:
        self.is_on = False
        self.seen: list[str] = []
        self.files: list[str] = []
        sys.addaudithook(self.hear)

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event in WATCHED and "monty" not in str(args):
            self.seen.append(f"{event} {args}")
        elif event == "exec" and getattr(args[0], "co_filename", "").startswith("<agent"):
            self.seen.append(f"exec {args}")
        elif event == "open" and ("canary" in str(args[0]) or "passwd" in str(args[0])):
            self.seen.append(f"open {args}")


WATCH = Watch()


@tool
def note(text: str) -> str:
    """Note something."""
    return text


@tool
def danger() -> str:
    """Do what no stranger may."""
    REACHED.append("danger")
    return SECRET


@tool
def denied() -> str:
    """Do what nobody may."""
    REACHED.append("denied")
    return SECRET


HELPER = AgentDefinition("helper", description="It helps.")
ADMIN = AgentDefinition("admin", tools=[danger])
RULES = Policy([Rule.allow_tool("*"), Rule.deny_tool("denied", "Nobody may.")])


@pytest.fixture(autouse=True)
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTACKED", SECRET)
    REACHED.clear()
    WATCH.seen.clear()
    WATCH.is_on = True
    yield
    WATCH.is_on = False

    assert [] == WATCH.seen
    assert [] == REACHED
    assert [] == list(tmp_path.iterdir())


def engine_of(agent: AgentDefinition[Any]) -> Engine:
    return Engine(
        [agent, HELPER, ADMIN],
        tools=[note, danger, denied],
        models={"test": ScriptedModel(lambda _: text("Hello."))},
        default_model="test/m",
        permissions=RULES,
        limits=Limits(max_actions=60, max_seconds=15),
    )


async def told(attack: Any, sandbox: MontySandbox) -> tuple[Any, str]:
    """Run an attack; what came of it, in the words of the table, and all that anybody is told of it."""
    try:
        agent, *_ = load_source(attack.file, limits=ENDLESS if attack.is_slow else BOUNDS, sandbox=sandbox)
    except DefinitionError as error:
        place, _, words = error.message.removeprefix("<agent>:").partition(": ")
        return attacks.Refused(words, int(place) - (0 if attack.is_file else attacks.FIRST - 1)), str(error)
    try:
        async with engine_of(agent) as engine:
            result: RunResult[Any] = await engine.run(agent, "go")
    except DefinitionError as error:  # of what the engine has, which no file knows
        return attacks.Failed("DefinitionError", error.message), str(error)
    everything = f"{result.error} {result.output} {result.state}"
    if result.status == "completed":
        return attacks.Gives(result.output), everything
    error = result.error
    return attacks.Failed(result.status.value if error is None else type(error).__name__, str(error)), everything


def is_as_meant(came: Any, meant: Any) -> bool:
    match came, meant:
        case attacks.Refused(), attacks.Refused():
            return meant.words in came.words and meant.line in {None, came.line}
        case attacks.Failed(), attacks.Failed():
            return meant.kind == came.kind and meant.words in came.words
        case _:
            return came == meant


@pytest.mark.spec("programs:PG41", "programs:PG42")
@pytest.mark.parametrize(
    "group",
    [
        pytest.param(g, marks=[pytest.mark.deep, *([] if g == "endless" else [pytest.mark.smoke])])
        for g in GROUPS
        if g != "chance"
    ],
)
async def test_no_attack_reaches_the_host(group: str, sandbox: MontySandbox) -> None:
    """Each attack is refused with its line, fails with an error of a known type, or gives harmlessly what stands in the table."""
    wrong = []
    for attack in [one for one in attacks.ATTACKS if one.group == group]:
        came, said = await told(attack, sandbox)
        if not is_as_meant(came, attack.comes) or SECRET in said:
            wrong.append(f"{attack.id}: {came}, not {attack.comes}")

    assert [] == wrong


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG42")
@pytest.mark.parametrize("attack", [one for one in attacks.ATTACKS if one.group == "chance"], ids=lambda one: one.id)
async def test_time_and_chance_seen_by_a_handler_replay_equal(attack: Any, sandbox: MontySandbox) -> None:
    journal = MemoryJournal()
    agent, *_ = load_source(attack.file, limits=BOUNDS, sandbox=sandbox)
    async with engine_of(agent) as engine:
        result = await engine.run(agent, "go", journal=journal)
        sandbox.close()  # other workers

        assert "completed" == result.status
        assert result == await engine.replay(journal)


REPLAY = """
import asyncio, importlib.util, sys
spec = importlib.util.spec_from_file_location("there", sys.argv[1])
there = importlib.util.module_from_spec(spec)
spec.loader.exec_module(there)

async def replay(attack, journal, sandbox):
    agent, *_ = there.load_source(attack.file, limits=there.BOUNDS, sandbox=sandbox)
    async with there.engine_of(agent) as engine:
        print((await engine.replay(journal)).output)

found = [one for one in there.attacks.ATTACKS if one.group == "chance"]
sandbox = there.MontySandbox(1)
for attack, journal in zip(found, sys.argv[2:], strict=True):
    asyncio.run(replay(attack, journal, sandbox))
sandbox.close()
"""


@pytest.mark.deep
@pytest.mark.spec("programs:PG42")
async def test_chance_is_the_same_under_another_hash_seed(
    sandbox: MontySandbox, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("journals")
    outputs, journals = [], []
    for number, attack in enumerate([one for one in attacks.ATTACKS if one.group == "chance"]):
        journals.append(str(folder / f"{number}.jsonl"))
        agent, *_ = load_source(attack.file, limits=BOUNDS, sandbox=sandbox)
        async with engine_of(agent) as engine:
            outputs.append(str((await engine.run(agent, "go", journal=journals[-1])).output))
    WATCH.is_on = False
    found = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", REPLAY, __file__, *journals], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONHASHSEED": "12345"}, timeout=120,
    )  # fmt: skip
    WATCH.is_on = True

    assert outputs == found.stdout.splitlines(), found.stderr


@pytest.mark.deep
@pytest.mark.spec("programs:PG42")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            f"while True:\n    try: yield {attacks.NOTED}\n    except BaseException: pass",
            "a closed handler must not yield",
        ),
        (
            "try:\n    while True: yield STEP\nfinally: yield STEP",
            "continued after its limit was spent, and was closed",
        ),
    ],
)
async def test_a_handler_that_resists_closing_is_ended_with_a_warning(
    text: str, words: str, sandbox: MontySandbox
) -> None:
    attack = attacks.Attack("closed", "limits", text, None)
    agent, *_ = load_source(attack.file, limits=BOUNDS, sandbox=sandbox)
    async with engine_of(agent) as engine:
        result = await engine.run(agent, "go", limits=Limits(max_actions=3, max_steps=1, on_max_steps="stop"))

    assert "completed" != result.status
    assert [] != [one for one in result.warnings if words in one], result.warnings
    gc.collect()  # nobody closes it once more


@pytest.mark.smoke
@pytest.mark.spec("programs:PG42")
@pytest.mark.parametrize(
    "text",
    [
        "try: yield Sleep(5_000)\nfinally:\n    while True: pass",
        "while True:\n    try: yield Sleep(5_000)\n    except BaseException: pass",
    ],
)
@pytest.mark.deep
async def test_a_stopped_run_ends_despite_a_stubborn_handler(text: str, sandbox: MontySandbox) -> None:
    attack = attacks.Attack("stopped", "limits", text, None)
    agent, *_ = load_source(attack.file, limits=BOUNDS, sandbox=sandbox)
    async with engine_of(agent) as engine:
        late = await engine.run(agent, "go", limits=Limits(max_seconds=0.2))
        task = asyncio.ensure_future(engine.run(agent, "go"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert "LimitExceeded" == type(late.error).__name__


@pytest.mark.deep
@pytest.mark.spec("programs:PG42")
async def test_endless_handlers_leave_workers_to_others(sandbox: MontySandbox) -> None:
    """Fifty at once on two workers, and every fifth of them never yields again."""
    agents = []
    for n in range(50):
        text = f"r = yield from {attacks.NOTED}\nyield STEP\n" + ("while True: pass" if n % 5 == 0 else f"return {n}")
        attack = attacks.Attack(str(n), "limits", text, None)
        agents += load_source(attack.file, limits=attrs.evolve(ENDLESS, seconds=1.0), sandbox=sandbox)

    async def run(agent: AgentDefinition[Any]) -> RunResult[Any]:
        async with engine_of(agent) as engine:
            return await engine.run(agent, "go", limits=Limits(max_seconds=120))

    results = await asyncio.gather(*[run(agent) for agent in agents])

    assert [n for n in range(50) if n % 5] == [r.output for r in results if r.status == "completed"]
    assert [attacks.LONG.kind] * 10 == [type(r.error).__name__ for r in results if r.status == "failed"]
