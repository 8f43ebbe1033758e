"""
Workers as processes, and what an operator does: looking, taking over, answering, cleaning up. Each through the command line.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stepengine import AgentCall, AgentDefinition
from stepengine.cli.app import app
from stepengine.durable import DeploymentMaintenance, Operator
from stepengine.durable import maintenance as upkeep_module
from stepengine.durable.database import open_connection
from stepengine.durable.process import LOCK, make_worker_lock_name
from tests import forked_processes
from tests.waits import until

from .shared import worker_of

ROOT = Path(__file__).resolve().parents[2]
AGENTS = '''
import time
from stepengine import AgentCall, AgentDefinition, Ask, ToolCall, call, tool


@tool(idempotent=True)
def count(n: int, seconds: float) -> int:
    """
    Count.

    Args:
        n: A number.
        seconds: How long it takes.
    """
    with open("world.txt", "a") as file:
        file.write(f"began {n}\\n")
    time.sleep(seconds)
    with open("world.txt", "a") as file:
        file.write(f"ended {n}\\n")
    return n


@tool(idempotent=True)
def die() -> str:
    """Kill the process that runs this."""
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


def adding(ctx):
    total = 0
    for n in range(int(ctx.prompt)):
        total += yield from call(count, n, 0.2)
    answer = yield from Ask("Keep it?")
    return f"{total} {answer}"


def dying(ctx):
    yield from call(die)


adder = AgentDefinition("adder", tools=[count], handle_steps=adding)
killer = AgentDefinition("killer", tools=[die], handle_steps=dying)
agents = [adder, killer]
'''


class Deployment:
    """
    Commands and workers of one deployment, in a folder of their own.
    """

    def __init__(self, folder: Path, db: str, running: ExitStack) -> None:
        self.folder = folder
        self.database = db
        self._running = running
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "XDG_RUNTIME_DIR") if name in os.environ}
        self._environment = {**kept, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "STEPENGINE_DB": db}
        (folder / "mine.py").write_text(AGENTS)

    def __call__(self, *arguments: str, code: int = 0) -> str:
        done = forked_processes.run(
            [sys.executable, "-m", "stepengine.cli", *arguments],
            check=False, cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=90,
        )  # fmt: skip
        assert code == done.returncode, done.stdout + done.stderr
        return done.stdout + done.stderr

    def start(self, *arguments: str) -> Any:
        process = forked_processes.Process(
            [sys.executable, "-m", "stepengine.cli", *arguments],
            cwd=self.folder, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._running.callback(ended, process)
        return process

    def worker(self, executor: str, *arguments: str) -> Any:
        process = self.start("deploy", "worker", "mine.py", "--executor", executor, *arguments)
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "executes runs" in line, line + process.stderr.read()
        return process

    def world(self) -> list[str]:
        file = self.folder / "world.txt"
        return file.read_text().splitlines() if file.exists() else []

    def until(self, holds: Callable[[], Any]) -> Any:
        try:
            return until(holds)
        except TimeoutError:
            raise AssertionError(self("deploy", "status", code=1)) from None

    def question(self, run: str) -> str:
        """
        Wait until a run asks something, and return the id that the command shows.
        """
        asyncio.run(wait_for_question(self.database, run))
        (one,) = json.loads(self("deploy", "status", run, "--json"))["questions"]
        return str(one["id"])


async def wait_for_question(db: str, run: str) -> None:
    async with asyncio.timeout(60), await Operator.connect(db) as operator:
        while not await operator.list_questions(run):  # noqa: ASYNC110 - a worker writes it
            await asyncio.sleep(0.05)


def ended(process: Any) -> None:
    process.kill()
    process.communicate()


@pytest.fixture
def deployment(tmp_path: Path, db: str, durable_forks: None) -> Iterator[Deployment]:
    with ExitStack() as running:
        yield Deployment(tmp_path, db, running)


@pytest.mark.deep
@pytest.mark.spec(
    "durable:UC1",
    "durable:UC2",
    "durable:UC3",
    "durable:UC4",
    "durable:UC5",
    "durable:UC8",
    "durable:U31",
    "durable:U28",
    "durable:U30",
    "durable:U33",
    "durable:U41",
)
def test_takeover_finishes_runs_of_a_killed_worker(deployment: Deployment) -> None:
    first = deployment.worker("w1")
    assert "another process already runs as executor 'w1'" in deployment(
        "deploy", "worker", "mine.py", "--executor", "w1", code=4
    )
    assert deployment("deploy", "submit", "adder", "8", "--id", "r1") == "r1\n"
    assert deployment("deploy", "submit", "adder", "8", "--id", "r1") == "r1\n"
    deployment.until(lambda: "ended 2" in deployment.world())
    assert "executor 'w1' is alive" in deployment("deploy", "takeover", "w1", code=4)

    first.kill()
    first.wait()
    told = deployment("deploy", "status", code=1)
    assert "DEAD" in told
    assert "stepengine deploy takeover w1" in told
    assert "has no live worker" in told

    second = deployment.worker("w2")
    assert "would resume  r1  from w1" in deployment("deploy", "takeover", "w1", "--dry-run")
    assert "resumed  r1  from w1" in deployment("deploy", "takeover", "w1")
    assert "executor w1 has no runs" in deployment("deploy", "takeover", "w1")

    question = deployment.question("r1")
    assert "is not an open question" in deployment("send", "r1", "--answer", "q99=yes", code=2)
    deployment("send", "r1", "--answer", f"{question}=yes")
    assert "28 yes" in deployment("deploy", "submit", "adder", "8", "--id", "r1", "--wait")
    twice = [line for line, times in Counter(deployment.world()).items() if times > 1]
    assert len(twice) <= 2, "only the effect in flight may have begun again"
    assert len({line for line in deployment.world() if line.startswith("ended")}) == 8

    assert "does not wait for an answer" in deployment("send", "r1", "--answer", f"{question}=no", code=2)
    assert deployment("deploy", "gc", "--older-than", "1d").startswith("0 runs")
    assert "r1" in deployment("deploy", "gc", "--older-than", "0s", "--dry-run")
    assert deployment("deploy", "gc", "--older-than", "0s").startswith("1 runs were")
    assert "there is no run 'r1'" in deployment("deploy", "status", "r1", code=2)

    second.send_signal(signal.SIGTERM)
    assert second.wait(30) == 0


@pytest.mark.deep
@pytest.mark.spec("durable:UC6", "durable:U34")
def test_watch_takes_over_and_sets_aside_poison_runs(deployment: Deployment) -> None:
    watching = deployment.start("deploy", "takeover", "--watch", "--grace", "0.5")
    standing_by = deployment.start("deploy", "takeover", "--watch", "--grace", "0.5")
    deployment("deploy", "migrate")
    # One that waits gets no further either, and that is nobody's fault.
    deployment("deploy", "submit", "adder", "4", "--id", "good")
    deployment.worker("w0")
    question = deployment.question("good")
    deployment("deploy", "submit", "killer", "--id", "bad")

    def was_set_aside() -> bool:
        return "poison" in deployment("deploy", "status", "bad", "--json")

    for number in range(1, 8):
        if was_set_aside():
            break
        # Not `worker`, which waits for the line that it prints: this one may die before.
        worker = deployment.start("deploy", "worker", "mine.py", "--executor", f"w{number}")
        deployment.until(lambda worker=worker: worker.poll() is not None or was_set_aside())

    told = json.loads(deployment("deploy", "status", "bad", "--json"))["runs"][0]
    assert told["state"] == "CANCELLED"
    assert told["attributes"]["takeover"]["times"] == 6
    assert "poison" in told["attributes"]
    assert "killed their workers" in deployment("deploy", "status", code=1)

    deployment("send", "good", "--answer", f"{question}=yes")
    deployment.worker("last")
    assert "6 yes" in deployment("deploy", "submit", "adder", "4", "--id", "good", "--wait")
    for process in (watching, standing_by):
        process.kill()
    said = [process.communicate()[0] for process in (watching, standing_by)]
    assert sorted(bool(text) for text in said) == [False, True], "one acts, the other stands by"


def told(ctx):
    return {"left": 3}
    yield


@pytest.mark.deep
@pytest.mark.spec("durable:UC4")
async def test_idle_worker_is_listed_while_alive(db: str) -> None:
    """
    One that was killed while it had nothing to do left nothing to do for anybody, and is not shown.
    """
    agent = AgentDefinition("told", handle_steps=told)
    async with await Operator.connect(db) as operator:
        async with worker_of([agent], db, executor="idle-1", release="r1"):
            alive = (await DeploymentMaintenance(operator).overview()).executors
            await operator.deployment.fetch_rows(
                "insert into stepengine.workers values ('stepengine', 'dead-1', 'default', 'r0') returning 1"
            )
            beside = (await DeploymentMaintenance(operator).overview()).executors
        after = (await DeploymentMaintenance(operator).overview()).executors

    assert [("idle-1", True, 0, ("r1",))] == [(e.id, e.is_alive, e.pending, e.releases) for e in alive]
    assert (alive, ()) == (beside, after)


@pytest.mark.deep
async def test_older_database_without_worker_list_works(db: str) -> None:
    agent = AgentDefinition("told", handle_steps=told)
    async with await Operator.connect(db) as operator, worker_of([agent], db, migrate=False) as worker:
        assert () == (await DeploymentMaintenance(operator).overview()).executors
        assert {"left": 3} == (await worker.result(await worker.submit("told"))).unwrap()


@pytest.mark.spec("durable:UC4", "durable:U32")
async def test_rows_that_are_not_portable_json_are_counted(db: str) -> None:
    async with await Operator.connect(db) as operator:
        await operator.submit("nobody", id="a")
        assert (await DeploymentMaintenance(operator).overview(check=True)).unreadable == {}

        await operator.deployment.fetch_rows("update dbos.workflow_status set serialization = 'py_pickle' returning 1")

        assert (await DeploymentMaintenance(operator).overview(check=True)).unreadable == {"workflow_status": 1}
        assert (await DeploymentMaintenance(operator).overview()).unreadable is None


async def died_with(operator: Operator, *runs: str) -> None:
    """
    Submit runs, each as if a worker of its own had taken it and died.
    """
    for run in runs:
        await operator.submit("nobody", id=run)
    mark = "update dbos.workflow_status set status = 'PENDING', executor_id = 'dead-' || workflow_uuid returning 1"
    await operator.deployment.fetch_rows(mark)


async def test_failed_takeover_does_not_block_other_takeovers(db: str, monkeypatch) -> None:
    async with await Operator.connect(db) as operator:
        await died_with(operator, "a", "b")
        maintenance = DeploymentMaintenance(operator)
        takeover = maintenance.takeover

        async def failing(executor: str) -> list[Any]:
            if executor == "dead-a":
                raise RuntimeError("no")
            return await takeover(executor)

        monkeypatch.setattr(maintenance, "takeover", failing)
        watching = maintenance.watch(grace=0, look=0.01)
        taken = await asyncio.wait_for(anext(watching), 50)
        await watching.aclose()

    assert ("b", "dead-b", "resumed") == (taken.run, taken.executor, taken.outcome)


async def test_takeover_waits_until_the_lock_is_released(db: str, monkeypatch) -> None:
    all_rows, looked, answers = upkeep_module._fetch_all, asyncio.Event(), []

    async def looking(own: Any, query: str, *values: Any) -> list[Any]:
        rows = await all_rows(own, query, *values)
        if query == LOCK:
            answers.extend(rows)
            looked.set()
        return rows

    monkeypatch.setattr(upkeep_module, "_fetch_all", looking)
    async with await Operator.connect(db) as operator:
        await died_with(operator, "a")
        maintenance = DeploymentMaintenance(operator)
        async with await open_connection(operator.url) as own:
            await own.execute(LOCK, (make_worker_lock_name("dead-a"),))
            asked = asyncio.create_task(maintenance.takeover("dead-a"))
            await looked.wait()
        (taken,) = await asked

    assert [(False,), (True,)] == [answers[0], answers[-1]]
    assert ("a", "dead-a", "resumed") == (taken.run, taken.executor, taken.outcome)


async def test_takeover_ignores_unreadable_records(db: str) -> None:
    written = (
        "insert into dbos.operation_outputs (workflow_uuid, function_id, function_name, output, serialization) "
        "values ('a', 1, 'tool:x', 'gASVBQ==', 'py_pickle') returning 1"
    )
    async with await Operator.connect(db) as operator:
        await died_with(operator, "a")
        await operator.deployment.fetch_rows(written)
        (taken,) = await DeploymentMaintenance(operator).takeover("dead-a")

    assert ("resumed", 1) == (taken.outcome, taken.times)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("durable:U41")
async def test_tree_with_a_running_member_is_not_deleted(db: str) -> None:
    async with await Operator.connect(db) as operator:
        for run in ("a", "a_b", "aXb", "c"):
            await operator.submit("nobody", id=run)
        mark = "update dbos.workflow_status set status = %s, completed_at = %s where workflow_uuid = %s returning 1"
        for run in ("a", "a_b", "aXb"):
            await operator.deployment.fetch_rows(mark, "SUCCESS", 1, run)
        # A child of `aXb`, which the pattern of `a_b` must not take for its own, is still under way.
        copied = (
            "insert into dbos.workflow_status (workflow_uuid, status, name, created_at, updated_at, application_name) "
            "values ('aXb/0', 'PENDING', 'stepengine.run', 1, 1, 'stepengine') returning 1"
        )
        await operator.deployment.fetch_rows(copied)

        assert await DeploymentMaintenance(operator).collect(0, dry_run=True) == ["a", "a_b"]
        assert await DeploymentMaintenance(operator).collect(10**10) == []
        assert await DeploymentMaintenance(operator).collect(0) == ["a", "a_b"]
        left = await operator.deployment.fetch_rows("select workflow_uuid from dbos.workflow_status order by 1")
        assert [row[0] for row in left] == ["aXb", "aXb/0", "c"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("durable:U41")
async def test_cleanup_deletes_children_with_their_root(db: str) -> None:
    def spawning(ctx: Any) -> Any:
        below, _, rest = ctx.prompt.partition(" ")
        return (yield from AgentCall(below, rest)).output if below else "lowest"

    names = ["first", "second", "third"]
    agents = [AgentDefinition(name, spawnable_agents=names, handle_steps=spawning) for name in names]
    async with worker_of(agents, db) as worker:
        run = (await worker.run("first", "second third")).journal
        made = {view.id for view in await worker.operator.tree(run)}
        deleted = await DeploymentMaintenance(worker.operator).collect(0)
        left = [
            await worker.operator.deployment.fetch_rows(f"select workflow_uuid from dbos.{table}")
            for table in ("workflow_status", "operation_outputs", "workflow_input", "workflow_output")
        ]

    assert {run, f"{run}/0", f"{run}/0.0"} == made
    assert [run] == deleted
    assert [[]] * 4 == left


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("durable:U34")
async def test_poison_run_is_cancelled_with_its_children(db: str) -> None:
    died = (
        "update dbos.workflow_status set status = 'PENDING', executor_id = 'dead' where workflow_uuid = %s returning 1"
    )
    copied = (
        "insert into dbos.workflow_status (workflow_uuid, status, name, executor_id, created_at, updated_at, application_name) "
        "values (%s, %s, 'stepengine.run', 'dead', 1, 1, 'stepengine') returning 1"
    )
    async with await Operator.connect(db) as operator:
        maintenance = DeploymentMaintenance(operator)
        await operator.submit("nobody", id="a")
        for _ in range(upkeep_module.MAX_TAKEOVERS):
            await operator.deployment.fetch_rows(died, "a")
            await maintenance.takeover("dead")
        await operator.deployment.fetch_rows(died, "a")
        for run, state in (("a/0", "PENDING"), ("a/0.1", "PENDING"), ("a/1", "ENQUEUED"), ("a/2", "SUCCESS")):
            await operator.deployment.fetch_rows(copied, run, state)
        taken = await maintenance.takeover("dead")
        states = {view.id: view.state for view in await operator.tree("a")}

    assert ("a", "poison") in [(each.run, each.outcome) for each in taken]
    assert {"a": "CANCELLED", "a/0": "CANCELLED", "a/0.1": "CANCELLED", "a/1": "CANCELLED", "a/2": "SUCCESS"} == states


def test_watch_rejects_options_it_ignores(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dbos")
    monkeypatch.setenv("STEPENGINE_DB", "postgresql://me@127.0.0.1:1/x")

    result = CliRunner().invoke(app, ["deploy", "takeover", "--watch", "--dry-run"])

    assert result.exit_code == 2, result.output
    assert "need one EXECUTOR" in result.stderr


@pytest.mark.spec("durable:UF18", "durable:U46")
@pytest.mark.parametrize(
    "arguments",
    [
        ["deploy", "status"],
        ["send", "r", "--answer", "q=v"],
    ],
)
def test_unreachable_database_is_one_line_and_exit_code_6(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("dbos")
    monkeypatch.setenv("STEPENGINE_DB", "postgresql://me:s3cret@127.0.0.1:1/x")

    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == 6, result.output
    assert result.stderr.count("\n") == 1
    assert "127.0.0.1:1/x" in result.stderr
    assert "s3cret" not in result.output


@pytest.mark.spec("durable:U46")
def test_missing_database_is_explained_and_typed_password_warned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("dbos")
    monkeypatch.delenv("STEPENGINE_DB", raising=False)
    without = CliRunner().invoke(app, ["deploy", "status"])
    typed = CliRunner().invoke(app, ["deploy", "status", "--db", "postgresql://me:s3cret@127.0.0.1:1/x"])

    assert (2, True) == (without.exit_code, "STEPENGINE_DB" in without.stderr)
    assert "other users can read the password of --db in the list of processes" in typed.stderr
    assert "s3cret" not in typed.output


@pytest.mark.spec("durable:U46")
@pytest.mark.parametrize("password", ["a/s3cret", "a?s3cret", "a#s3cret", "[s3cret", "s3cret]", "a@s3cret"])
def test_a_password_with_reserved_characters_is_not_shown(password: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dbos")
    url = f"postgresql://me:{password}@127.0.0.1:1/x"
    monkeypatch.setenv("STEPENGINE_DB", url)

    for words in ([], ["--db", url]):
        result = CliRunner().invoke(app, ["deploy", "status", *words])

        assert (2 if "@" in password else 6) == result.exit_code, result.output
        assert "s3cret" not in result.output
        assert bool(words) == ("other users can read the password" in result.stderr)


NEWER = AGENTS.replace('return f"{total} {answer}"', 'return f"{answer}: {total}"')
OTHER = AGENTS.replace("call(count, n, 0.2)", "call(count, n + 1, 0.2)")


@pytest.mark.deep
@pytest.mark.spec("durable:U36", "durable:UC8", "durable:UC3", "durable:U42")
def test_runs_move_to_another_release_and_into_journals(deployment: Deployment) -> None:
    for name, text in (("newer.py", NEWER), ("other.py", OTHER)):
        (deployment.folder / name).write_text(text)
    old = deployment.worker("old", "--release", "1")
    for run in ("waiting", "answered"):
        deployment("deploy", "submit", "adder", "3", "--id", run, "--release", "1")
    question = {run: deployment.question(run) for run in ("waiting", "answered")}
    old.send_signal(signal.SIGTERM)
    assert old.wait(40) == 0
    deployment("send", "answered", "--answer", f"{question['answered']}=kept")  # nobody lives; it waits in the database

    told = deployment("deploy", "release", "1", "2", "--agents", "other.py", "--check", code=5)
    assert sum(line.startswith("diverges ") for line in told.splitlines()) == 2
    assert "the record has" in told
    assert deployment("deploy", "release", "1", "2", "--agents", "newer.py", "--check").count("would move") == 2
    assert deployment("deploy", "release", "1", "2", "--agents", "newer.py").count("moved") == 2
    assert "release 1 has no runs left" in deployment("deploy", "release", "1", "2", "--agents", "newer.py")

    began = len(deployment.world())
    deployment.worker("new", "--release", "2")  # of mine.py: which code it has is the operator's word
    assert "3 kept" in deployment("deploy", "submit", "adder", "3", "--id", "answered", "--wait")
    assert len(deployment.world()) == began, "nothing that was recorded is done again"

    deployment("journal", "export", "waiting", "--agents", "mine.py", "--into", "waiting.jsonl")
    assert "Keep it?" in deployment("show", "waiting.jsonl")
    assert deployment("journal", "check", "waiting.jsonl").startswith("ok")
    fork = deployment(
        "fork", "waiting", "--at", "0", "--edit", "40", "--allow-repeat",
        "--db", deployment.database, "--agents", "mine.py",
    ).split()[-1]  # fmt: skip
    deployment("send", fork, "--answer", f"{deployment.question(fork)}=forked")
    assert "43 forked" in deployment("deploy", "submit", "adder", "--id", fork, "--wait")

    deployment("cancel", "waiting")
    assert deployment(
        "journal", "import", "waiting.jsonl", "--agents", "mine.py", code=2
    )  # its id is taken, by the run itself


CAREFUL = '''
from stepengine import STEP, AgentDefinition, Ask, call, tool
from stepengine.permissions import Policy, Rule
from stepengine.testing import ScriptedModel, text


@tool
def wipe(disk: str) -> str:
    """
    Wipe a disk.

    Args:
        disk: Which one.
    """
    return f"wiped {disk}"


def wiping(ctx):
    done = yield from call(wipe, ctx.prompt)
    said = yield STEP
    return f"{done}; {said.text}"


def heard(request):
    return text(" | ".join(m.text for m in request.messages if m.role == "user"))


agent = AgentDefinition("wiper", model="test/model", tools=[wipe], handle_steps=wiping)
models = ScriptedModel([heard] * 100)
options = {"permissions": Policy(rules=[Rule.ask_for_tool("wipe")])}
'''


@pytest.mark.deep
@pytest.mark.spec("durable:UC2", "durable:UC3", "durable:UC4", "durable:U37")
def test_session_is_submitted_answered_and_shown_by_the_cli(deployment: Deployment) -> None:
    (deployment.folder / "mine.py").write_text(CAREFUL)
    deployment.worker("w1")
    deployment("deploy", "submit", "wiper", "a", "--session", "s", "--id", "r1")
    question = deployment.question("r1")
    shown = deployment("deploy", "status", "--session", "s")
    deployment("send", "r1", "carefully", "--id", "m1")
    refused = deployment("send", "r1", "--answer", f"{question}=no", "--always", question, code=2)
    deployment("send", "r1", "--always", question)
    first = deployment("deploy", "submit", "wiper", "a", "--session", "s", "--id", "r1", "--wait")
    second = deployment("deploy", "submit", "wiper", "a", "--session", "s", "--id", "r2", "--wait")
    told = json.loads(deployment("deploy", "status", "--session", "s", "--json"))
    listed = json.loads(deployment("deploy", "status", "--sessions", "--json"))
    nothing = deployment("deploy", "status", "--session", "t", code=2)
    late = deployment("send", "r1", "too late", code=2)

    assert f"stepengine send r1 --answer {question}=TEXT" in shown
    assert f"--always {question}: " + 'allow the call wipe {"disk":"a"} by wiper' in shown
    assert f"--answer and --always both answer {question!r}" in refused
    assert "wiped a; a" in first
    assert "wiped a; a" in second
    assert [("r1", 1, "SUCCESS"), ("r2", 2, "SUCCESS")] == [(t["run"], t["number"], t["state"]) for t in told["turns"]]
    assert {"a"} <= {part["text"] for m in told["messages"] for part in m.get("content", ()) if "text" in part}
    assert [("s", 2)] == [(view["id"], view["turns"]) for view in listed]
    assert "there is no session 't'" in nothing
    assert "accepts no messages: it is SUCCESS" in late


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("durable:UF18", "durable:U31")
async def test_worker_survives_lost_connections_while_it_locks(db: str, until) -> None:
    name = make_worker_lock_name("worker-1")
    holder = """
        select pg_terminate_backend(l.pid) from pg_locks l
        where l.locktype = 'advisory' and l.granted and ((l.classid::bigint << 32) | l.objid::bigint) = hashtextextended(%s, 0)
            and l.pid <> %s and l.database = (select oid from pg_database where datname = current_database())
    """
    # Not ended in the condition, which the database may evaluate before that for the name of the database.
    locking = """
        select pid, pg_terminate_backend(pid) from pg_stat_activity
        where datname = current_database() and query like 'select pg_try_advisory_lock%%' and pid <> pg_backend_pid() and pid <> %s
    """

    def plain(ctx: Any) -> Any:
        yield from ()

    ended: set[int] = set()
    async with worker_of([AgentDefinition("plain", handle_steps=plain)], db) as worker:
        async with await open_connection(worker.setting.url) as other:
            waiting = asyncio.create_task(other.execute("select pg_advisory_lock(hashtextextended(%s, 0))", (name,)))
            # The worker loses its lock to another process, and its connection again and again while it waits for the lock.
            async with await Operator.connect(db) as operator:

                async def lock_is_lost() -> bool:
                    await operator.deployment.fetch_rows(holder, name, other.info.backend_pid)
                    return waiting.done()

                async def is_ended_repeatedly() -> bool:
                    found = await operator.deployment.fetch_rows(locking, other.info.backend_pid)
                    ended.update([pid for pid, _ in found])
                    return len(ended) > 2

                await until(lock_is_lost)
                await until(is_ended_repeatedly)
        result = await asyncio.wait_for(worker.run("plain"), 50)

    assert "completed" == result.status.value
