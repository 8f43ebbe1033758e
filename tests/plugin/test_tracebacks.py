"""
Where a test of an agent fails, the author's own line is the last one shown: no frame of the test kit, with or without the plugin.
"""

from __future__ import annotations

import re

import pytest

pytest_plugins = ["pytester"]

KIT = """
from stepengine import STEP, AgentDefinition, Engine, ToolCall
from stepengine.data.models import ModelRequest
from stepengine.journal import MemoryJournal
from stepengine.testing import Cassette, Fault, ScriptedModel, Walk, assert_prefix_stable, run_script, simulate, text, tool_calls
from stepengine.testing import Clock, failure
from stepengine.testing.cassette_files import Interaction, RecordedRequest, RecordedResponse

def handler(ctx):
    found = yield ToolCall("look")
    yield STEP
    return found.tool_result.data["hits"]

AGENT = AgentDefinition("careless", tools=["look"], handle_steps=handler)

REQUEST = ModelRequest("a/b")
ASKED = RecordedRequest("GET", "https://api.test/v1")

def rewriting(ctx):
    yield STEP
    yield ToolCall("set_messages", {"messages": [{"role": "user", "content": "anew"}]})
    yield STEP

def shrinking():
    journal = MemoryJournal()
    agent = AgentDefinition("a", model="a/b", tools=["set_messages"], handle_steps=rewriting)
    with Engine([agent], models=ScriptedModel(["a", "b"])) as engine:
        engine.run_sync("a", "hi", journal=journal)
    return journal

def unrecorded():
    with Engine([AgentDefinition("a", model="a/b")], models=ScriptedModel(["a"])) as engine:
        return engine.run_sync("a", "hi")

def nothing(request):
    raise LookupError(request)
"""

FAILING = {
    "a walk that has not returned": ("Walk(handler).returned", "AssertionError"),
    "an answer that does not fit": ("Walk(handler).send(object())", "DataError"),
    "an answer after the end": ("Walk(lambda ctx: (yield STEP)).send().send()", "AssertionError"),
    "a walk of a handler that raises": ("Walk(handler).send('no data').send()", "TypeError"),
    "an error that a handler lets out": ("Walk(handler).throw(KeyError('x'))", "KeyError"),
    "no handler": ("Walk('careless')", "DefinitionError"),
    "a fork of a handler that forgets": ("unlike = iter('ab'); Walk(lambda c: (yield ToolCall(next(unlike)))).fork()", "ReplayDivergence"),
    "a script that is not followed": ("run_script(handler, [STEP])", "AssertionError"),
    "a script that is too short": ("run_script(handler, [(ToolCall('look'), 'x')])", "AssertionError"),
    "a script with a handler that raises": ("run_script(handler, [(ToolCall('look'), 'x'), STEP])", "TypeError"),
    "a script that is none": ("run_script(handler, [7])", "DataError"),
    "a simulation": ("simulate(AGENT, [0], faults=[Fault(0, 'failure')])", "SimulationFailed"),
    "a simulation of nothing": ("simulate('careless')", "DataError"),
    "a simulation with a function of the test that raises": ("simulate(AGENT, [0], faults=(), results={'look': nothing})", "LookupError"),
    "replies that are left": ("ScriptedModel(['a']).assert_complete()", "AssertionError"),
    "a script of a model that cannot be played": ("ScriptedModel([7])", "DataError"),
    "calls that cannot be joined": ("tool_calls(7)", "DataError"),
    "a cost that is none": ("text('a', cost='much')", "DataError"),
    "a script that is over": ("ScriptedModel().complete(REQUEST).send(None)", "ModelError"),
    "a reply that is a failure": ("ScriptedModel([failure(OSError())]).complete(REQUEST).send(None)", "OSError"),
    "a function that cannot answer": ("ScriptedModel(nothing).complete(REQUEST).send(None)", "LookupError"),
    "requests that do not grow": ("assert_prefix_stable(shrinking())", "AssertionError"),
    "a result without a journal": ("assert_prefix_stable(unrecorded())", "DataError"),
    "a cassette that is not used": ("Cassette([Interaction(ASKED, RecordedResponse(200))]).assert_all_used()", "CassetteUnused"),
    "a clock that would go back": ("Clock().advance(minutes=-1)", "ValueError"),
}  # fmt: skip


@pytest.mark.deep
@pytest.mark.spec("replay:Y8")
@pytest.mark.parametrize(
    "with_plugin", [pytest.param(True, id="plugin"), pytest.param(False, id="alone", marks=pytest.mark.deep)]
)
def test_the_last_frame_of_a_failure_is_the_authors(run, with_plugin):
    """
    Also where it is a handler, or a function that the test gave; ``--full-trace`` shows all.
    """
    tests = "".join(
        f"\ndef test_{number}():\n    {line}  # {name}\n" for number, (name, (line, _)) in enumerate(FAILING.items())
    )
    options = () if with_plugin else ("-p", "no:stepengine", "-p", "no:stepengine.pytest_plugin")
    said = run(KIT + tests, *options).stdout.str()
    sections = re.split(r"\n_+ test_(\d+) _+\n", said)[1:]
    failed = {int(number): section for number, section in zip(sections[::2], sections[1::2], strict=True)}

    for number, (name, (_, kind)) in enumerate(FAILING.items()):
        places = re.findall(r"^(\S+\.py):\d+: (.*)$", failed[number], re.MULTILINE)
        assert not [place for place, _ in places if "stepengine/testing" in place], name
        assert ("test_it.py", kind) == places[-1], (name, places)
    full = run(KIT + tests, "--full-trace", "-k", "test_0", *options).stdout.str()
    assert "testing/walk.py" in full
