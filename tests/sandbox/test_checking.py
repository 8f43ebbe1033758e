"""What is looked at before a program runs: what is refused, with its line, and what is let through."""

from __future__ import annotations

import builtins
import importlib
import keyword
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.sandbox.program_checks import (
    MAX_PROGRAM_BYTES,
    ProgramProblem,
    check_with_monty,
    find_defined_names,
    find_program_problems,
    format_problems,
)
from stepengine.sandbox.sandbox import ABSENT, BUILTINS, MODULES
from stepengine.sandbox.stubs import ALIASES
from tests.sandbox import corpus

STUBS = corpus.stubs()
CORPUS = [*corpus.WRITTEN, *corpus.families()]
MOST_FALSE = 0.01

WRONG = {
    # what cannot be read
    "x = 1\ny = = 2": 2,
    "x = 1\nbreak": 2,
    "x = '\x00'": 1,
    # names
    "rows = await query('t')\nprint(row)": 2,
    "[zz for zz in range(3)]\nprint(zz)": 2,
    "class A:\n    n = 1\n\n    def f(self):\n        return n": 5,
    "print(callable(print))": 1,
    "x = {}\nprint(globals())": 2,
    "try:\n    x = nope\nexcept ValueError:\n    pass": 2,
    "from math import sqrt as root\nsqrt(2)": 2,
    # imports: those that there are not
    "import numpy as np\nnp.mean([1])": 1,
    "import json\nimport statistics": 2,
    "from collections import OrderedDict": 1,
    "from math import *": 1,
    "from . import helpers": 1,
    "import collections.abc": 1,
    "import math\nprint(math.squirt(2))": 2,
    "import os\nprint(os.environ)": 2,
    # calls that nobody awaits
    "book('fig', 1)\nprint('booked')": 1,
    "value = lookup('x')['values']": 1,
    "for r in query('t'):\n    pass": 1,
    "total = 1 + add(1, 2)": 1,
    "x = 1\n[book(i, 1) for i in ('a', 'b')]": 2,
    "text = f'{price(\"fig\")}'": 1,
    "import asyncio\nasyncio.gather(lookup('a'))": 2,
    "async def main():\n    return 1\n\nmain()": 4,
    # arguments
    "await price()": 1,
    "x = 1\nawait price('a', 'EUR', 3)": 2,
    "await price(itm='a')": 1,
    "await price('a', item='b')": 1,
    "await book('a')": 1,
    "await list_tool('.')": 1,
    "await mcp_issues()": 1,
    "await mcp_issues(search_for='x')": 1,
    # what the sandbox has not
    "def f():\n    yield 1": 2,
    "def f():\n    yield from [1]": 2,
    "class A(Exception):\n    pass": 1,
    "class A:\n    @property\n    def f(self):\n        return 1": 2,
    "class A:\n    for i in []:\n        pass": 2,
    "x = [1]\ndel x[0]": 2,
    "async def f(xs):\n    async for x in xs:\n        pass": 2,
    "async def f(x):\n    async with x:\n        pass": 2,
    "try:\n    pass\nexcept* ValueError:\n    pass": 1,
    "import asyncio\nasyncio.create_task(lookup('x'))": 2,
    "import asyncio\nawait asyncio.gather(lookup('x'), return_exceptions=True)": 2,
    "async def f():\n    price = await price('x')\n    return price": 2,
}


# --- what is let through --------------------------------------------------------------------------------------------


@pytest.mark.spec("programs:PG24")
def test_ordinary_programs_are_not_refused():
    """
    Under one in a hundred are refused.
    """
    refused = {program: found for program in CORPUS if (found := find_program_problems(program, STUBS))}

    assert len(refused) < MOST_FALSE * len(CORPUS), refused


@pytest.mark.spec("programs:PG24")
@pytest.mark.parametrize("each", [50, pytest.param(1, marks=pytest.mark.deep)])
def test_the_sandbox_accepts_all_ordinary_programs(pool, each):
    refused = {}
    for program in CORPUS[::each]:
        found = check_with_monty(pool.checkout, program, STUBS)
        assert found.is_whole
        if found.refused:
            refused[program] = found.refused

    assert len(refused) < MOST_FALSE * len(CORPUS[::each]), refused


FINE = {
    "a name that is caught": "try:\n    zork\nexcept NameError:\n    pass",
    "an import that is caught by everything": "try:\n    import numpy\nexcept Exception:\n    numpy = None",
    "an attribute that is caught": "import os\ntry:\n    os.environ\nexcept AttributeError:\n    pass",
    "names in annotations": "def f(x: Foo, *y: Bar, **z: Baz) -> Qux:\n    w: Quux = 1\n    return w\n\nf(1)",
    "names that text makes": "exec('made = 1')\nprint(made)",
    "a name that is bound below": "def f():\n    return later()\n\ndef later():\n    return 1\n\nf()",
    "a walrus in a comprehension": "[last := n for n in range(3)]\nprint(last)",
    "a star in the arguments": "rest = ['a']\nfound = await price(*rest)",
    "a name of the class in its body": "class A:\n    n = 1\n    m = [n]\n\nA.m",
    "a name that hides a function": "lookup = 3\nprint(lookup + 1)",
    "a function that hides a function": "def lookup(a, b, c):\n    return a\n\nlookup(1, 2, 3)",
    "a parameter that hides a function": "def f(price):\n    return price()\n\nf(dict)",
    "a loop over what hides a function": "[price(1) for price in [str, int]]",
    "a return at the top": "x = 1\nif x:\n    return x",
    "an await in a plain function": "def f():\n    return lookup('a')\n\nawait f()",
    "an escape that is none": "import re\nre.findall('\\d', 'a1')",
    "names of the module": "print(__name__, __file__)",
    "a module's private name": "import math\nmath.__name__",
    "annotations of the future": "from __future__ import annotations\n\nx: Foo = 1",
    "wrong arguments that are caught": "try:\n    await price()\nexcept TypeError as e:\n    print(e)",
    "a global that a function makes": "def f():\n    global made\n    made = 1\n\nf()\nprint(made)",
    "quotes in an f-string": 'd = {"a": 1}\nprint(f"{d["a"]}")',
    "exceptions without brackets": "try:\n    pass\nexcept ValueError, TypeError:\n    pass",
    "a module that is imported twice": "import os.path\nimport os as system\nsystem.path.join('a', 'b')",
    "a method like an awaited name": "class A:\n    async def run(self):\n        return 1\n\nawait A().run()",
    "exceptions that there are not": "import asyncio\ntry:\n    x = 1\nexcept (asyncio.TimeoutError, ConnectionError):\n    pass",
    "an import over lines": "from os import (\n    path,\n    walk,\n)",
    "a caught import over lines": "try:\n    from asyncio import (\n        timeout,\n    )\nexcept ImportError:\n    pass",
    "text that runs by another name": "run = exec\nrun('made = 1')\nprint(made)",
    "a dotted exception": "import json\ntry:\n    json.loads('x')\nexcept json.JSONDecodeError:\n    print(1)",
}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG24")
@pytest.mark.parametrize("program", FINE.values(), ids=FINE)
def test_possibly_correct_programs_are_accepted(program, pool):
    assert () == find_program_problems(program, STUBS)
    assert () == check_with_monty(pool.checkout, program, STUBS).refused


@pytest.mark.spec("programs:PG24")
def test_names_of_earlier_programs_are_known_and_hide_functions(pool):
    known = ["rows", "_private", "price", "Ärger"]
    program = "print(rows, _private, Ärger)\nprice(1, 2, 3, 4)"

    assert () == find_program_problems(program, STUBS, known)
    assert () == check_with_monty(pool.checkout, program, STUBS, known).refused
    assert [1, 1, 1, 2, 2] == [problem.line for problem in find_program_problems(program, STUBS)]


@pytest.mark.spec("programs:PG24")
def test_defined_names_are_those_of_the_top_level():
    program = (
        "import os.path, json as j\nfrom re import sub\nx, (y, *z) = 1, (2, 3)\n"
        "def f(a):\n    global g\n    g = b = 1\nclass C:\n    m = 1\n[w := i for i in x]\nwith x as v: pass"
    )

    assert {"os", "j", "sub", "x", "y", "z", "f", "g", "C", "w", "v"} == find_defined_names(program)
    assert frozenset() == find_defined_names("x = = 1")


@pytest.mark.spec("programs:PG24")
def test_every_word_of_newer_syntax_counts_as_a_name():
    assert {"d", "found"} <= find_defined_names('d = {"a": 1}\nfound = f"{d["a"]}"')


@pytest.mark.spec("programs:PG24")
def test_keywords_of_earlier_programs_disable_no_check(pool):
    newer = 'def f(x):\n    return f"{", ".join(x)}"'

    for known in (find_defined_names(newer), keyword.kwlist):
        assert [1] == [
            problem.line for problem in check_with_monty(pool.checkout, "await price()", STUBS, known).refused
        ]


@pytest.mark.spec("programs:PG24")
@pytest.mark.parametrize("program", ["exec('made = 1')", "run = exec\nrun('ma' + 'de = 1')"])
def test_any_name_is_known_after_a_program_with_exec(program, pool):
    known = find_defined_names(program)

    assert () == find_program_problems("made", STUBS, known)
    assert () == check_with_monty(pool.checkout, "made", STUBS, known).refused


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.spec("programs:PG24")
@pytest.mark.parametrize(("program", "line"), WRONG.items())
def test_a_certain_failure_is_refused_at_its_line(program, line):
    found = find_program_problems(program, STUBS)

    assert found
    assert line == found[0].line, found
    assert found[0].column >= 1


MONTY_TOO = {
    "x = 1\nx = ]": 2,
    "class A(B):\n    pass": 1,
    "def f():\n    yield 1": 2,
    "x = 1\ndel x": 2,
    "print(later)\nlater = 1": 1,
    "import numpy": 1,
    "try:\n    import numpy\nexcept ImportError:\n    pass\nprint(zork)": 5,
    "äöü = 1\nprint(äöü, foo)": 2,
    "book('a', 1)": 1,
    "await price()": 1,
    "await price('a', itm=1)": 1,
    "await price('a', 'EUR', 3)": 1,
}


@pytest.mark.spec("programs:PG24")
@pytest.mark.parametrize(("program", "line"), MONTY_TOO.items())
def test_the_sandbox_refuses_at_the_same_line_without_running(program, line, pool):
    found = check_with_monty(pool.checkout, program, STUBS)

    assert [line] == sorted({problem.line for problem in found.refused})


@pytest.mark.spec("programs:PG24")
def test_possible_errors_are_reported_without_refusal(pool):
    program = "found = await price('a')\nprint(found['valeu'])\nprint(found + 1)\nawait add('1', 2)"

    found = check_with_monty(pool.checkout, program, STUBS)

    assert () == found.refused
    assert [2, 3, 4] == [problem.line for problem in found.told]
    assert "invalid-key" in found.told[0].text


@pytest.mark.spec("programs:PG24")
def test_a_program_is_not_run_while_it_is_checked(pool):
    assert check_with_monty(pool.checkout, "while True:\n    pass", STUBS).refused == ()
    assert check_with_monty(pool.checkout, "raise ValueError\n", STUBS).refused == ()


@pytest.mark.spec("programs:PG24")
def test_stubs_with_an_accepted_canary_count_as_unchecked(pool, monkeypatch):
    monkeypatch.setattr("stepengine.sandbox.program_checks._run_checker", lambda *_: [])
    other = corpus.make_stubs(corpus.TOOLS[:1], (), ask=False)

    found = check_with_monty(pool.checkout, "print(zork)", other)

    assert not found.is_whole
    assert () == found.refused


@pytest.mark.speed
@pytest.mark.spec("programs:PG24")
@pytest.mark.parametrize(
    "line",
    [
        ";".join([f"q{n}" for n in range(9_000)]),
        "'é'; " + ";".join([f"q{n}" for n in range(9_000)]),
        "def f(" + ",".join([f"é{n}: int" for n in range(4_000)]) + "): pass",
        "def f(): price = (" + ",".join(["price()"] * 7_900) + ")",
        ";".join([f"naame{n} = 1" for n in range(4_000)]) + ";" + ";".join([f"naamee{n}" for n in range(100)]),
    ],
    ids=["names", "wide", "annotations", "calls", "near"],
)
def test_checking_time_grows_linearly_with_length(line):
    began = time.process_time()

    find_program_problems(line, STUBS)

    assert time.process_time() - began < 5


@pytest.mark.spec("programs:PG24")
def test_programs_beyond_a_size_or_depth_are_refused():
    too_long = "x = 1\n" * (MAX_PROGRAM_BYTES // 6 + 1)
    deep = [
        "x = " + "(" * 5_000 + ")" * 5_000,
        "x = " + "-" * 50_000 + "1",
        "x = " + "+".join(["1"] * 30_000),
        "x = a" + ".b" * 20_000,
        "x = a" + "[0]" * 10_000,
        "".join([f"{' ' * n}if 1:\n" for n in range(90)]) + " " * 90 + "pass\n" + "x = " + "not " * 2_000 + "1",
    ]

    assert "at most 65,536 are read" in find_program_problems(too_long, STUBS)[0].text
    assert all(len(find_program_problems(program, STUBS)) >= 1 for program in deep)
    assert find_program_problems("x = '\ud800'", STUBS)[0].text.startswith("a program is text")


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG24")
@given(st.one_of(st.text(), st.lists(st.sampled_from(CORPUS)).map("\n".join)), st.integers(0, 400), st.text(max_size=3))
def test_any_text_yields_problems_in_order(text, place, put):
    program = text[:place] + put + text[place:]

    found = find_program_problems(program, STUBS)

    assert list(found) == sorted(found, key=lambda problem: (problem.line, problem.column))
    assert isinstance(format_problems(found, program), str)
    assert all(problem.line >= 1 and problem.column >= 1 for problem in found)


@pytest.mark.spec("programs:PG24")
def test_problems_suggest_valid_alternatives():
    def said(program):
        return find_program_problems(program, STUBS)[0].text

    assert "did you mean `query`?" in said("await qery('t')")
    assert "there is no `read`" in said("read-file")
    assert "`json` is not imported" == said("json.dumps(1)")
    assert "programs have no `callable`" == said("callable(1)")
    assert "write `await book(...)`" in said("book('a', 1)")
    assert "price() missing 1 required positional argument: 'item'" == said("await price()")


# --- how it is shown ------------------------------------------------------------------------------------------------


@pytest.mark.spec("programs:PG24")
def test_a_problem_shows_its_line_and_a_caret():
    program = "x = 1\n\tprint(äöü, zork)\n"

    assert "line 2, column 13: there is no such name\n    \tprint(äöü, zork)\n    \t           ^" == format_problems(
        [ProgramProblem(2, 13, "there is no such name")], program
    )


@pytest.mark.spec("programs:PG24")
def test_columns_count_characters():
    (found,) = find_program_problems("print('äöü', zork)", STUBS)

    assert 14 == found.column


@pytest.mark.spec("programs:PG24")
def test_at_most_twenty_problems_are_shown_and_the_rest_counted():
    program = "\n".join([f"unknown_{n}" for n in range(50)])

    text = format_problems(find_program_problems(program, STUBS), program)

    assert 20 == text.count("^")
    assert text.endswith("... and 30 more.")


@pytest.mark.spec("programs:PG24")
def test_a_long_line_is_shown_around_the_place():
    program = f"x = [{'1, ' * 2_000}zork]"

    text = format_problems(find_program_problems(program, STUBS), program)

    _, line, caret = text.split("\n")
    assert len(line) < 200
    assert "zork" == line[caret.index("^") :][:4]


@pytest.mark.spec("programs:PG24")
def test_problems_beyond_the_text_are_shown_without_a_line():
    assert "line 9, column 1: x" == format_problems([ProgramProblem(9, 1, "x")], "y")


# --- the table of what the sandbox has ------------------------------------------------------------------------------


@pytest.mark.spec("programs:PG24")
def test_the_table_lists_the_builtins_of_the_installed_sandbox(pool):
    import pydantic_monty as monty

    def has(text):
        with pool.checkout() as session:
            try:
                session.feed_run(text)
            except monty.MontyError:
                return False
            return True

    names = {name for name in dir(builtins) if not name.startswith("_")} | BUILTINS | ABSENT
    dotted = {"os.path", "collections.abc", "json.decoder", "urllib.parse", "xml.etree", "importlib.metadata"}
    modules = {*sys.stdlib_module_names, *MODULES, *dotted}

    assert BUILTINS == {name for name in names if has(name)}
    assert set(MODULES) == {module for module in modules if has(f"import {module}")}
    for module, members in MODULES.items():
        tried = {*[name for name in dir(importlib.import_module(module)) if not name.startswith("_")], *members}

        assert members == {name for name in tried if has(f"from {module} import {name}")}, module


@pytest.mark.spec("programs:PG24")
def test_the_checker_knows_all_builtins_that_the_sandbox_has(pool):
    known = "\n".join(sorted(BUILTINS | set(ALIASES)))
    imports = "\n".join([f"from {module} import {', '.join(sorted(of))}" for module, of in MODULES.items() if of])

    assert () == check_with_monty(pool.checkout, known, STUBS).refused
    assert () == check_with_monty(pool.checkout, imports, STUBS).refused


@pytest.mark.spec("programs:PG24")
@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("import asyncio\nasyncio.sleep(1)", "`asyncio.sleep(...)` is never awaited, so nothing happens"),
        ("import asyncio\nx = asyncio.gather(price('a'))[0]", "write `(await asyncio.gather(...))`"),
    ],
)
def test_an_asyncio_call_without_await_is_named(program, text):
    (found,) = find_program_problems(program, STUBS)

    assert text in found.text
