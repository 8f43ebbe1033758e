"""
An agent file is rewritten for the sandbox in place: its lines stay, and what cannot be run there is refused with its line.
"""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.errors import DefinitionError
from stepengine.sandbox.source_rewriter import rewrite_for_sandbox

HEAD = "from stepengine import STEP, AgentDefinition, Parallel, StepContext, ToolCall, map_agents\n"


def code_of(body: str) -> str:
    return rewrite_for_sandbox(HEAD + body, "x.py").code.split("\n", 1)[1]


@pytest.mark.spec("programs:PG40")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(c):\n    x = yield STEP\n", "async def f(c):\n    x = _se_got(await _se_yield(( STEP)))\n"),
        ("def f(c):\n    yield\n", "async def f(c):\n    _se_got(await _se_yield(None))\n"),
        ("def f(c):\n    yield 1, 2\n", "async def f(c):\n    await _se_bare(( 1, 2))\n"),
        (
            "def f(c):\n    return (yield (\n        STEP  # so\n    ))\n",
            "async def f(c):\n    return (_se_got(await _se_yield(( (\n        STEP  # so\n    )))))\n",
        ),
        (
            "def f(c):\n    yield from g(c)\n\n\ndef g(c):\n    yield STEP\n",
            "async def f(c):\n    await ( g(c))\n\n\nasync def g(c):\n    await _se_bare(( STEP))\n",
        ),
        (
            "def f(c):\n    return (yield from ToolCall('é')).text\n",
            "async def f(c):\n    return (_se_value(await _se_from(( ToolCall('é'))))).text\n",
        ),
        (
            "def f(c):\n    a = (yield STEP).agent_state.message_history[0]\n",
            "async def f(c):\n    a = _se_lazy(((_se_got(await _se_yield(( STEP)))).agent_state), 'message_history')[0]\n",
        ),
    ],
)
def test_a_yield_becomes_an_await_in_its_place(text: str, expected: str) -> None:
    assert expected == code_of(text)


@pytest.mark.spec("programs:PG40")
def test_a_yield_continued_over_lines_keeps_all_lines() -> None:
    text = "def f(c):\n    x = yield \\\n        from \\\n        map_agents('a', [])\n    yield STEP\n"

    code = code_of(text)

    assert len(text.split("\n")) == len(code.split("\n"))
    assert "    await _se_bare(( STEP))" == code.split("\n")[4]


NAMES = st.sampled_from(["a", "b", "turn", "ctx"])
VALUES = st.recursive(
    st.sampled_from(["STEP", "1", "'yield x'", "f'{a}'", "turn.agent_state.message_history", "{'k': [1]}", "None"]),
    lambda inner: st.one_of(
        inner.map("(yield {})".format),
        inner.map("(yield from g({}))".format),
        inner.map("(yield from ToolCall({}))".format),
        inner.map("[{}]".format),
        inner.map("({}).view".format),
        inner.map("(\n  {}\n)".format),
        st.tuples(inner, inner).map("({0[0]} if {0[1]} else 2)".format),
        st.tuples(inner, inner).map("h({0[0]}, k={0[1]})".format),
    ),
    max_leaves=8,
)
LINES = st.one_of(
    st.tuples(NAMES, VALUES).map("{0[0]} = {0[1]}".format),
    VALUES,
    VALUES.map("yield {}".format),
    VALUES.map("yield from g({})".format),
)


@pytest.mark.deep
@pytest.mark.spec("programs:PG40")
@given(lines=st.lists(LINES, min_size=1, max_size=8))
def test_any_rewritten_text_is_python_with_unchanged_lines(lines: list[str]) -> None:
    body = "\n".join(lines).replace("\n", "\n    ")
    text = f"def g(x):\n    yield x\n\n\ndef h(x, k):\n    return x\n\n\ndef f(ctx, a=0, b=0, turn=0):\n    {body}\n    yield STEP\n"

    code = code_of(text)

    before, after = ast.parse(text), ast.parse(code)
    assert [(type(a).__name__.replace("Async", ""), a.lineno) for a in before.body] == [
        (type(a).__name__.replace("Async", ""), a.lineno) for a in after.body
    ]
    inner: list[list[int]] = [[one.lineno for one in tree.body[-1].body] for tree in (before, after)]  # type: ignore[attr-defined]
    assert inner[0] == inner[1]
    assert not [node for node in ast.walk(after) if isinstance(node, ast.Yield | ast.YieldFrom)]
    yields = [node for node in ast.walk(before) if isinstance(node, ast.Yield | ast.YieldFrom)]
    assert len(yields) == len([node for node in ast.walk(after) if isinstance(node, ast.Await)])


REFUSED = {
    "async def f(c):\n    await c\n": (2, "handlers are not async"),
    "x = yield STEP\n": (2, "`yield` is outside a function"),
    "f = lambda c: (yield STEP)\n": (2, "write a function with `def`"),
    "class A:\n    def m(self):\n        yield STEP\n": (4, "write a function outside the class"),
    "def d(f):\n    return f\n\n\n@d\ndef f(c):\n    yield STEP\n": (7, "has a decorator"),
    "def g(c):\n    yield STEP\n\n\ndef f(c):\n    g(c)\n    yield STEP\n": (7, "only directly after `yield from`"),
    "def g(c):\n    yield STEP\n\n\nx = [g]\n": (6, "only directly after `yield from`"),
    "def f(c):\n    return map_agents('a', [])\n": (3, "only directly after `yield from`"),
    "def f(c):\n    yield g\n\n\ndef g(c):\n    return 1\n\n\ndef f(c):\n    return 2\n": (
        2,
        "two functions are called 'f'",
    ),
    "_se_yield = 1\n": (2, "are reserved for the sandbox"),
    "def f(c):\n    c._se_number = 3\n": (3, "are reserved for the sandbox"),
    "import subprocess\n": (2, "there is no module 'subprocess'"),
    "from enum import Enum\n": (2, "write `Literal['low', 'high']`"),
    "import enum\n": (2, "write `Literal['low', 'high']`"),
    "import stepengine\n": (2, "from stepengine import"),
    "from os.path import *\n": (2, "import the names that you use"),
    "from stepengine import Perform\n": (2, "let a tool do it"),
    "from stepengine import Hooks\n": (2, "hooks are code of whoever runs the agent"),
    "from stepengine import tool\n": (2, "tools=['read_files']"),
    "from stepengine import Engine\n": (2, "a file in the sandbox may import from stepengine: "),
    "from .other import helper\n": (2, "copy 'helper' into this file"),
    "from string import Template\n": (2, "has only the constants of the module 'string'"),
    "def f(c):\n    yield unknown\n": (3, "unknown"),
    "def f(c):\n    yield f'{(yield STEP)}'\n": (3, "does not work inside an f-string"),
    "def f(c):\n    yield f'{c.agent_state.view}'\n": (3, "does not work inside an f-string"),
    "def f(c:\n": (2, "syntax error"),
    "agent = 1\nagents = 2\n": (3, "both `agent` and `agents`"),
}


@pytest.mark.spec("programs:PG40")
@pytest.mark.parametrize("text", REFUSED)
def test_unsupported_code_is_refused_with_file_and_line(text: str) -> None:
    line, why = REFUSED[text]

    with pytest.raises(DefinitionError) as refused:
        rewrite_for_sandbox(HEAD + text, "theirs.py")

    assert refused.value.message.startswith(f"theirs.py:{line}: ")
    assert why in refused.value.message


@pytest.mark.spec("programs:PG40")
def test_imports_for_annotations_only_are_not_run() -> None:
    text = "from __future__ import annotations\nfrom collections.abc import (\n    Mapping,\n)\nfrom typing import Any, cast as c\n\nx: Any = c('Any', 1)\n"

    assert "pass\npass\n\n\nc = cast\n\nx: Any = c('Any', 1)\n" == rewrite_for_sandbox(text, "x.py").code


@pytest.mark.spec("programs:PG40")
def test_schema_classes_are_replaced_and_keep_their_lines() -> None:
    text = 'from pydantic import BaseModel\n\n\nclass A(BaseModel):\n    """Says."""\n\n    x: int = 1\n\n\nB = 2\n'

    made = rewrite_for_sandbox(text, "x.py")

    assert "pass\n\n\nA = _se_class('A')\n\n\n\n\n\nB = 2\n" == made.code
    assert {"x": 1} == dict(made.schemas["A"].defaults)
