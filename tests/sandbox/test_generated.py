"""Random programs are run, cut off at a random record or killed in a random call, gone on with, and replayed: nothing of it shows."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from stepengine import Engine, RunStatus
from stepengine.journal import FileJournal

pytest.importorskip("pydantic_monty", reason="needs the extra programs")

from stepengine.sandbox import MontySandbox

from .generated import ALIKE, POLICY, agent_of, model_of, said, to_end

MANY = int(os.environ.get("STEPENGINE_TESTS_PROGRAMS", "80"))
"""How many programs are generated; 2,000 take some minutes on two cores."""
PARTS = 8

pytestmark = [pytest.mark.anyio, pytest.mark.leaks_allowed("what the sandbox opens once for a process stays")]


async def expect_nothing_to_show(seed: int, sandbox: MontySandbox, folder: Path) -> None:
    done: Counter[str] = Counter()
    agent = agent_of(seed, lambda what: done.update([what]), sandbox)
    path, copy = folder / f"{seed}.jsonl", folder / f"{seed}-cut.jsonl"
    whole = await to_end(seed, agent, path)
    assert RunStatus.COMPLETED is whole.status, (seed, whole.error)
    assert not any("Nothing was run" in text for text in said(whole)), (seed, said(whole))
    happened = +done

    lines = path.read_bytes().splitlines(keepends=True)
    copy.write_bytes(b"".join(lines[: random.Random(-seed - 1).randint(3, len(lines) - 1)]))
    done.clear()
    async with Engine([agent], models=model_of(seed), permissions=POLICY) as engine:
        assert whole == await engine.replay(path), seed
        await engine.replay(copy)  # it ends where its record does
        assert not done, seed
    resumed = await to_end(seed, agent, copy)
    assert said(whole) == said(resumed), seed
    assert done <= happened, (seed, done - happened)
    done.clear()
    async with Engine([agent], models=model_of(seed), permissions=POLICY) as engine:
        assert resumed == await engine.replay(copy), seed
    assert not done, seed


@pytest.mark.deep
@pytest.mark.spec("programs:PG22", "programs:PG23", "programs:PG26", "programs:PG27")
@pytest.mark.parametrize("part", range(PARTS))
async def test_generated_programs_cut_anywhere_resume_to_the_same_result(
    part: int, sandbox: MontySandbox, tmp_path: Path
) -> None:
    for seed in range(part, 10 + MANY, PARTS):
        await expect_nothing_to_show(seed, sandbox, tmp_path)


@pytest.mark.deep
@pytest.mark.spec("programs:PG26")
@pytest.mark.parametrize("part", range(2))
def test_generated_programs_of_a_killed_process_resume_in_another(part: int, tmp_path: Path) -> None:
    killed = 0
    for seed in range(ALIKE + part, ALIKE + max(8, MANY // 20), 2):
        at = random.Random(seed).randint(1, 6)
        words = [sys.executable, "-m", "tests.sandbox.generated"]
        alone, cut = [
            [str(tmp_path / f"{seed}{end}.jsonl"), str(tmp_path / f"{seed}{end}.log"), str(seed)] for end in "ab"
        ]
        whole = subprocess.run([*words, *alone, "-1"], check=True, capture_output=True, text=True, timeout=60)
        died = subprocess.run([*words, *cut, str(at)], check=False, capture_output=True, text=True, timeout=60)
        ended = subprocess.run([*words, *cut, "-1"], check=True, capture_output=True, text=True, timeout=60)

        killed += died.returncode == -signal.SIGKILL
        once, twice = [
            Counter(Path(log).read_text().split("\n") if Path(log).exists() else []) for _, log, _ in (alone, cut)
        ]
        assert (whole.stdout, "") == (ended.stdout, ended.stderr), seed
        assert json.loads(ended.stdout), seed
        # What was cut off in the middle is done again, and nothing else.
        assert 0 <= (twice - once).total() <= 5, (seed, twice - once)
        assert not once - twice, seed
        assert FileJournal(cut[0]).history().is_complete
    assert killed
