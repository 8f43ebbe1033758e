"""
A durable engine in a process that was forked from the one which opened it.
"""

from __future__ import annotations

import os
import warnings

import pytest

from stepengine import AgentDefinition, StepContext
from stepengine.durable import DurableEngine
from stepengine.errors import StepEngineError


def done(ctx: StepContext):
    yield from ()
    return "done"


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:SS14")
async def test_forked_child_must_open_its_own_engine(db: str) -> None:
    agent = AgentDefinition("quick", handle_steps=done)
    async with DurableEngine([agent], db=db, works=False) as engine:
        read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of threads beside a fork
            child = os.fork()
        if not child:
            try:
                engine.operator
                said = "nothing"
            except StepEngineError as error:
                said = error.message
            os.write(write, said.encode())
            os._exit(0)
        os.close(write)
        said = os.read(read, 10_000).decode()
        os.close(read)
        os.waitpid(child, 0)  # noqa: ASYNC222  (it has written its last word)
        run = await engine.submit(agent, "")

        assert "create and open an engine in each process, after the fork" in said
        assert run
