"""
A handler's threads: they may look at what they were given, and say nothing to the run.
"""

from __future__ import annotations

from threading import Thread

import attrs
import pytest

from stepengine import AgentDefinition, Engine
from stepengine.errors import AgentError


@pytest.mark.spec("reliability:GN14")
@pytest.mark.parametrize("speak", ["notify", "logger"])
async def test_handler_thread_cannot_affect_the_run_or_its_inputs(speak):
    raised = []

    def in_thread(ctx):
        for act in (
            lambda: ctx.notify("hello") if speak == "notify" else ctx.logger.info("hello"),
            lambda: setattr(ctx, "prompt", "other"),
        ):
            try:
                act()
            except Exception as error:
                raised.append(error)

    def handle(ctx):
        thread = Thread(target=in_thread, args=(ctx,))
        thread.start()
        thread.join()
        ctx.notify("from the handler itself")
        return "done"
        yield

    events = []
    result = await Engine(observers=[events.append]).run(AgentDefinition("threaded", handle_steps=handle))

    assert "done" == result.unwrap()
    assert [AgentError, attrs.exceptions.FrozenInstanceError] == [type(error) for error in raised]
    assert "from another thread" in str(raised[0])
    assert ["from the handler itself"] == [e.message for e in events if e.type == "notification"]


@pytest.mark.spec("reliability:GN14")
def test_run_advanced_in_the_engines_thread_may_use_its_context():
    def handle(ctx):
        ctx.logger.info("fine")
        return "said"
        yield

    with Engine() as engine:
        assert "said" == engine.run_sync(AgentDefinition("speaker", handle_steps=handle)).unwrap()
