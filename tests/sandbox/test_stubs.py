"""Tools and agents as functions of a program: names, stubs, arguments, and what cannot break out of them."""

from __future__ import annotations

import ast
import itertools
import keyword
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepengine import AgentDefinition
from stepengine.data.tools import ToolSpec
from stepengine.sandbox.program_checks import check_with_monty, find_program_problems
from stepengine.sandbox.stubs import RESERVED, ProgramFunction, make_stubs
from tests.sandbox import corpus
from tests.sandbox.corpus import INTEGER, TEXT, tool


def declared(schema, **fields):
    """Return the stub of one tool with this input."""
    made = make_stubs([ToolSpec("find", fields.pop("description", ""), schema)], (), ask=False, **fields)
    return made.declarations["find"]


def signature(schema, **fields):
    return declared(schema, **fields).splitlines()[-2].strip()


# --- types ----------------------------------------------------------------------------------------------------------

TYPES = [
    (TEXT, "str"),
    (INTEGER, "int"),
    ({"type": "number"}, "float"),
    ({"type": "boolean"}, "bool"),
    ({"type": "null"}, "None"),
    ({"type": "array", "items": TEXT}, "list[str]"),
    ({"type": "array"}, "list[Any]"),
    ({"type": "object"}, "dict[str, Any]"),
    ({"type": "object", "additionalProperties": INTEGER}, "dict[str, int]"),
    ({"enum": ["a", "b", 3, None, True, -1]}, "Literal['a', 'b', 3, None, True, -1]"),
    ({"const": "x"}, "Literal['x']"),
    ({"enum": [1.5]}, "Any"),
    ({"anyOf": [TEXT, {"type": "null"}]}, "str | None"),
    ({"oneOf": [TEXT, INTEGER, TEXT]}, "str | int"),
    ({"type": ["string", "integer"]}, "str | int"),
    ({"type": "string", "nullable": True}, "str | None"),
    ({"allOf": [INTEGER]}, "int"),
    ({"allOf": [INTEGER, {"minimum": 3}]}, "Any"),
    ({}, "Any"),
    (True, "Any"),
    ({"type": "magic"}, "Any"),
    ({"$ref": "#/$defs/Count"}, "int"),
    ({"$ref": "#/$defs/Nothing"}, "Any"),
    ({"$ref": "https://example.org/schema"}, "Any"),
    ({"$ref": "#/$defs/Loop"}, "Any"),
]


@pytest.mark.spec("programs:PG20")
@pytest.mark.parametrize(("schema", "shown"), TYPES)
def test_a_schema_is_shown_as_a_type(schema, shown):
    whole = {
        "type": "object",
        "properties": {"x": schema},
        "required": ["x"],
        "$defs": {"Count": INTEGER, "Loop": {"$ref": "#/$defs/Loop"}},
    }

    assert f"async def find(x: {shown}) -> Any:" == signature(whole)


@pytest.mark.spec("programs:PG20")
def test_objects_are_shown_as_classes_with_optional_members():
    inner = {"type": "object", "properties": {"n": INTEGER, "of": TEXT}, "required": ["n"]}
    text = declared({"type": "object", "properties": {"rows": {"type": "array", "items": inner}}, "required": ["rows"]})

    assert "class FindRowsItem(TypedDict):\n    n: int\n    of: NotRequired[str]" in text
    assert "async def find(rows: list[FindRowsItem]) -> Any:" in text


@pytest.mark.spec("programs:PG20")
def test_members_that_are_no_identifiers_are_shown_in_quotes():
    inner = {"type": "object", "properties": {"a-b": INTEGER, "class": TEXT, "__x": TEXT}}

    text = declared({"type": "object", "properties": {"o": inner}})

    members = "{'a-b': NotRequired[int], 'class': NotRequired[str], '__x': NotRequired[str]}"
    assert f"FindO = TypedDict('FindO', {members})" in text


@pytest.mark.spec("programs:PG20")
def test_required_parameters_come_before_optional_ones():
    schema = tool("x", "", ("item",), deep={"type": "boolean", "default": False}, note=TEXT, item=TEXT).input_schema

    assert "async def find(item: str, deep: bool=False, note: str=...) -> Any:" == signature(schema)


@pytest.mark.spec("programs:PG20")
def test_a_declared_output_is_the_shown_return_type():
    output = {"type": "object", "properties": {"n": INTEGER}, "required": ["n"]}

    text = declared({"type": "object", "properties": {}}, outputs={"find": output})

    assert "class FindResult(TypedDict):\n    n: int" in text
    assert "async def find() -> FindResult:" in text


@pytest.mark.spec("programs:PG20")
def test_descriptions_become_a_short_docstring():
    schema = tool("x", "", (), item={**TEXT, "description": "The item.\nNot its   id."}).input_schema

    tree = ast.parse(declared(schema, description="Find it.\n\nUsage: once."))

    assert "Find it. Usage: once.\nitem: The item. Not its id." == ast.get_docstring(tree.body[0])


# --- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.spec("programs:PG20")
def test_positional_arguments_become_an_input_and_defaults_are_left_out():
    function = ProgramFunction("price", "tool", "price", ("item", "currency"), required=1)

    assert {"item": "fig"} == function.make_tool_input(("fig",), {})
    assert {"item": "fig", "currency": "USD"} == function.make_tool_input(("fig",), {"currency": "USD"})


@pytest.mark.spec("programs:PG20")
def test_wrong_arguments_are_refused_in_pythons_own_words():
    keywords = [words for size in range(4) for words in itertools.permutations(["alpha", "beta", "zzz"], size)]
    for count, required in itertools.combinations_with_replacement(range(4, -1, -1), 2):
        names = ["alpha", "beta", "gamma", "delta"][:count]
        parameters = [name if n < required else f"{name}=None" for n, name in enumerate(names)]
        space = {}
        exec(f"def find({', '.join(parameters)}): return locals()", space)
        function = ProgramFunction("find", "tool", "find", tuple(names), required=required)
        for positional, words in itertools.product(range(7), keywords):
            args, kwargs = range(positional), dict.fromkeys(words, 0)
            expected, said = (
                refusal(space["find"], *args, **kwargs),
                refusal(function.make_tool_input, tuple(args), kwargs),
            )
            # Later Pythons may add what was meant.
            assert said == expected or (said and expected and expected.startswith(said))


def refusal(call, *args, **kwargs):
    """Return the words of the TypeError that a call raises."""
    try:
        call(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


@pytest.mark.spec("programs:PG20")
def test_names_that_are_no_identifiers_go_by_one_parameter():
    spec = tool("find", "", ("from",), **{"from": TEXT, "max-n": INTEGER})
    function = make_stubs([spec], (), ask=False).functions["find"]

    assert function.takes_args
    assert ("args",) == function.parameters
    assert {"from": "a"} == function.make_tool_input(({"from": "a"},), {})
    assert {"from": "a"} == function.make_tool_input((), {"args": {"from": "a"}})
    with pytest.raises(TypeError, match=r"find\(\) missing 1 required positional argument: 'args'"):
        function.make_tool_input((), {})
    with pytest.raises(TypeError, match=r"argument 'args' must be a dict, not int"):
        function.make_tool_input((3,), {})
    with pytest.raises(TypeError, match=r"keys of type str, not int"):
        function.make_tool_input(({3: 3},), {})


@pytest.mark.spec("programs:PG20")
def test_an_input_of_any_members_is_given_as_one_dict():
    function = make_stubs([ToolSpec("find", "", {"type": "object"})], (), ask=False).functions["find"]

    assert {} == function.make_tool_input((), {})
    assert {"x": 1} == function.make_tool_input(({"x": 1},), {})


@pytest.mark.spec("programs:PG20")
def test_a_tool_that_takes_more_than_it_names_takes_keywords():
    schema = {"type": "object", "properties": {"x": TEXT, "more": TEXT}, "additionalProperties": INTEGER}

    assert "async def find(x: str=..., more: str=..., **more_2: int) -> Any:" == signature(schema)
    function = make_stubs([ToolSpec("find", "", schema)], (), ask=False).functions["find"]
    assert {"x": "a", "n": 3} == function.make_tool_input(("a",), {"n": 3})


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("programs:PG20")
@pytest.mark.parametrize("name", ["list", "json", "class", "match", "search", "ask"])
def test_a_name_that_a_program_has_already_gets_an_ending(name):
    made = make_stubs([ToolSpec(name)], (), ask=True)

    assert [f"{name}_tool", "ask"] == list(made.functions)
    assert name == made.functions[f"{name}_tool"].of


@pytest.mark.spec("programs:PG20")
def test_the_sandbox_calls_each_tool_by_its_given_name(pool):
    """
    The sandbox takes a builtin of its own without a word, so none may have the name of a tool.
    """
    import pydantic_monty as monty

    made = make_stubs([ToolSpec(name) for name in sorted(RESERVED - {"_"}) if len(name) <= 58], (), ask=False)
    for name in made.functions:
        with pool.checkout() as session:
            snapshot = session.feed_start(f"{name}()")

            assert isinstance(snapshot, monty.FunctionSnapshot), name
            assert name == snapshot.function_name


@pytest.mark.spec("programs:PG20")
def test_name_clashes_resolve_equally_in_any_tool_order():
    names = ["a-b", "a_b", "a.b", "list", "list_tool", "_x", "tool__x", "3d", "tool_3d"]

    def named(order):
        made = make_stubs([ToolSpec(name) for name in order], [AgentDefinition("a-b", model="t/m")], ask=False)
        return {(f.kind, f.of): name for name, f in made.functions.items()}

    expected = named(names)
    assert "a_b" == expected["tool", "a_b"]
    assert "list_tool" == expected["tool", "list_tool"]
    assert len(names) + 1 == len(set(expected.values()))
    for seed in range(10):
        assert expected == named(random.Random(seed).sample(names, len(names)))


@pytest.mark.spec("programs:PG20")
def test_an_agent_is_a_function_of_its_prompt_and_params():
    params = {"type": "object", "properties": {"depth": INTEGER}, "required": ["depth"]}
    agent = AgentDefinition(
        "deep-finder",
        model="t/m",
        description="Finds.",
        input_schema={"prompt": "What to find.", "params": params},
        output_schema={"type": "object", "properties": {"found": TEXT}, "required": ["found"]},
    )

    made = make_stubs((), [agent, AgentDefinition("plain", model="t/m")], ask=False)

    function = made.functions["deep_finder"]
    assert ("agent", "deep-finder") == (function.kind, function.of)
    assert {"params": {"depth": 1}, "prompt": "x"} == function.make_tool_input(({"depth": 1},), {"prompt": "x"})
    assert "-> DeepFinderResult:" in made.declarations["deep_finder"]
    assert "-> Any:" in made.declarations["plain"]
    assert {"prompt": "x"} == made.functions["plain"].make_tool_input(("x",), {})


@pytest.mark.spec("programs:PG20")
def test_a_person_is_asked_where_that_is_offered():
    made = make_stubs((), (), ask=True)

    assert "async def ask(question: str, options: list[str] | None=None) -> str:" in made.text
    assert {} == dict(make_stubs((), (), ask=False).functions)


# --- what the model reads -------------------------------------------------------------------------------------------


@pytest.mark.spec("programs:PG20")
def test_the_description_lists_stubs_and_missing_features():
    made = corpus.stubs()

    assert all(text in made.description for text in made.declarations.values())
    for word in ("class inheritance", "return_exceptions", "create_task", "wait_for", "`del`", "ToolError", "await"):
        assert word in made.description
    assert len(made.description) < 6_000


@pytest.mark.spec("programs:PG20")
def test_over_thirty_functions_there_is_a_catalogue_instead_of_stubs():
    tools = [tool(f"find_{n}", f"Finds thing {n}. And more.", ("x",), x=TEXT) for n in range(40)]

    made = make_stubs(tools, (), ask=True)

    assert 43 == len(made.functions)
    assert ["ask", "search", "describe"] == [name for name, f in made.functions.items() if f.kind != "tool"]
    assert "async def find_7" in made.text
    assert "async def find_7" not in made.description
    assert "find_7" in made.description
    assert "async def search(query: str) -> list[str]:" in made.description
    assert ["async def find_7(x: str) -> Any  # Finds thing 7. And more."] == [
        line for line in made.search("find_7") if "find_7(" in line
    ]
    assert 10 == len(made.search("thing"))
    assert [] == made.search("nothing")
    assert made.declarations["find_7"] == made.describe("find_7")
    assert made.describe("find_77").startswith("There is no function of this name; there is find_")


@pytest.mark.deep
@pytest.mark.spec("programs:PG20")
def test_thousands_of_tools_leave_a_description_that_can_be_read():
    made = make_stubs([ToolSpec(f"tool_number_{n}") for n in range(2_000)], (), ask=False)

    assert len(made.description) < 8_000
    assert "and others." in made.description


# --- strangers ------------------------------------------------------------------------------------------------------

HOSTILE = [
    '"""\nimport os\nos.system("x")\n"""',
    "'''\n\"\"\"\\",
    '\\"\\"\\" \\N{DASH} \\x',
    "x\n    ...\n\nimport os",
    "\u202eevil\u2066\x00\x1b[2J",
    "\\",
    '"',
    "...\r\nasync def other(): ...",
    "``` end\n# Ignore the above",
    "{modules}{0}%s",
    "a" * 1_000,
    "\x0cform\x0bfeed\x85next\u2028line",
]
WORDS = st.one_of(
    st.sampled_from(HOSTILE), st.text(max_size=30), st.sampled_from(["x", "class", "a-b", "__x", "ﬁ", "None"])
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False), WORDS
)


def schemas():
    leaves = st.one_of(
        st.booleans(),
        st.fixed_dictionaries(
            {"type": st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "odd"])}
        ),
        st.fixed_dictionaries({"enum": st.lists(SCALARS, max_size=5)}),
        st.fixed_dictionaries({"const": SCALARS}),
        st.fixed_dictionaries(
            {"$ref": st.one_of(WORDS, st.sampled_from(["#", "#/properties/x", "#/$defs/a/b", "#/%"]))}
        ),
    )
    return st.recursive(leaves, grown, max_leaves=12)


def grown(inner):
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.one_of(SCALARS, st.sampled_from(["object", "array"]), st.lists(WORDS, max_size=3)),
            "properties": st.one_of(st.dictionaries(WORDS, inner, max_size=4), SCALARS),
            "required": st.one_of(st.lists(SCALARS, max_size=3), SCALARS),
            "items": inner,
            "additionalProperties": inner,
            "anyOf": st.one_of(st.lists(inner, max_size=3), SCALARS),
            "allOf": st.lists(inner, max_size=2),
            "nullable": st.booleans(),
            "default": SCALARS,
            "description": SCALARS,
            "$defs": st.dictionaries(WORDS, inner, max_size=2),
        },
    )


@pytest.mark.spec("programs:PG20")
@settings(max_examples=200, deadline=None)
@given(WORDS, WORDS, schemas(), schemas())
@pytest.mark.deep
def test_any_schema_and_words_give_only_valid_stubs(name, words, schema, output):
    spec = ToolSpec(name, words, schema if isinstance(schema, dict) else {"type": "object"})

    made = make_stubs([spec, ToolSpec("other")], (), ask=False, outputs={name: output})

    (called,) = [n for n, f in made.functions.items() if f.of == name and n != "other"] or ["other_2"]
    tree = ast.parse(made.text)
    functions = [node for node in tree.body if isinstance(node, ast.AsyncFunctionDef)]
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.Assign)]
    assert sorted(made.functions) == sorted([node.name for node in functions])
    assert len(functions) + len(classes) + 1 == len(tree.body)
    for node in functions:
        *docstring, last = node.body
        assert ast.dump(ast.Expr(ast.Constant(...))) == ast.dump(last)
        assert len(docstring) <= 1
        assert all(isinstance(each.value, ast.Constant) for each in docstring)
        assert [*made.functions[node.name].parameters] == [arg.arg for arg in node.args.args]
    assert all(type(node.value) is ast.Call for node in classes if isinstance(node, ast.Assign))
    assert not keyword.iskeyword(called)
    assert called.isidentifier()
    assert called not in RESERVED
    assert () == find_program_problems(f"fn = {called}", made)
    assert len(made.text) < 60_000


@pytest.mark.spec("programs:PG20", "programs:PG24")
def test_with_hostile_stubs_the_checker_still_refuses(pool):
    properties = {word: {"description": word, "enum": [word]} for word in HOSTILE}
    specs = [ToolSpec(f"find{n}", word, {"type": "object", "properties": properties}) for n, word in enumerate(HOSTILE)]
    specs.append(tool("last", HOSTILE[0], ("x",), x={**TEXT, "description": HOSTILE[1], "default": HOSTILE[2]}))

    found = check_with_monty(pool.checkout, "await last()\nprint(zork)", make_stubs(specs, (), ask=True))

    assert found.is_whole
    assert [1, 2] == [problem.line for problem in found.refused]
