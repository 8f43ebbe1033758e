"""How a typed function, or a JSON Schema and a body, become a tool."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from stepengine import Depends, Tool, ToolContext, tool
from stepengine.data.definition import AgentDefinition
from stepengine.data.json import JsonDict, freeze_object
from stepengine.data.tools import ToolAnnotations, ToolLike
from stepengine.engine.schemas import compile_schemas
from stepengine.errors import DefinitionError, ToolInputError
from stepengine.tools import ToolPreview, ToolRegistry
from stepengine.tools.agent_tools import get_params_schema
from stepengine.tools.bundled import file_tools


class Node(BaseModel):
    name: str
    children: list[Node] = []


def validate(made: Tool[..., Any], value: Any) -> Any:
    return made.binding().validate(freeze_object(value))


LIMITED = """
from __future__ import annotations
from typing import Annotated
from pydantic import Field

MOST = {most}

def look(number: Annotated[int, Field(le=MOST)]) -> str:
    'Look.'
    return str(number)
"""


def test_only_bundled_signatures_are_cached_across_roots(tmp_path: Path) -> None:
    """
    A session or an evaluation makes them for each of its roots; other people's annotations may mean something else by then.
    """

    def loaded(most: int) -> Tool[..., Any]:
        names: dict[str, Any] = {}
        exec(LIMITED.format(most=most), names)
        return tool(names["look"])

    (first, second), (few, many) = [
        [
            next(t for t in file_tools(root, write=True) if t.name == "write_file")
            for root in (tmp_path, tmp_path.parent)
        ],
        [loaded(1), loaded(2)],
    ]

    assert first.spec == second.spec
    assert first.binding() is not second.binding()
    assert 2 == validate(many, {"number": 2}).arguments["number"]
    assert ("number: Input should be less than or equal to 1",) == issues_of(few, {"number": 2})


def issues_of(made: Tool[..., Any], value: Any) -> tuple[str, ...]:
    with pytest.raises(ToolInputError) as caught:
        validate(made, value)
    return caught.value.issues


@pytest.mark.spec("requirements:E1", "requirements:E2", "ecosystem:EC28", "ecosystem:EC29")
@pytest.mark.parametrize(
    "doc",
    [
        "Find.\n\n    Args:\n        where: The folder,\n            relative.\n        limit: At most.\n\n    Returns:\n        Things.\n    ",
        "Find.\n\n    Parameters\n    ----------\n    where : str\n        The folder, relative.\n    limit : int\n        At most.\n    ",
        "Find.\n\n    :param where: The folder, relative.\n    :param limit: At most.\n    :returns: Things.\n    ",
    ],
    ids=["google", "numpy", "rest"],
)
def test_schema_and_descriptions_come_from_signature_and_docstring(doc: str) -> None:
    def find(where: str, limit: int = 5, kind: Literal["a", "b"] = "a") -> str:
        return where

    find.__doc__ = doc
    made = tool(find)

    assert ("find", "Find.") == (made.spec.name, made.spec.description)
    assert {
        "type": "object",
        "properties": {
            "where": {"type": "string", "description": "The folder, relative."},
            "limit": {"type": "integer", "default": 5, "description": "At most."},
            "kind": {"enum": ["a", "b"], "type": "string", "default": "a"},
        },
        "required": ["where"],
        "additionalProperties": False,
    } == made.spec.input_schema


@pytest.mark.spec("requirements:E26")
def test_a_description_omits_sections_on_parameters_and_results() -> None:
    @tool
    def find(where: str) -> str:
        """
        Find.

        Usage:
            Do this.

        Args:
            where: Place.

        Notes:
            End.

        Raises:
            OSError: never.
        """
        return where

    assert "Find.\n\nUsage:\n    Do this.\n\nNotes:\n    End." == find.spec.description
    assert "Place." == find.spec.input_schema["properties"]["where"]["description"]


def test_a_recursive_model_keeps_its_description_without_titles() -> None:
    @tool
    def show(node: Node, title: Annotated[str, Field(description="Mine.")] = "") -> str:
        """
        Show.

        Args:
            title: The docstring's.
        """
        return node.name

    schema = show.spec.input_schema
    assert {"$ref": "#/$defs/Node"} == schema["properties"]["node"]
    assert {"type": "string", "default": "", "description": "Mine."} == schema["properties"]["title"]
    assert "title" not in schema["$defs"]["Node"]
    assert "x" == validate(show, {"node": {"name": "x", "children": [{"name": "y"}]}}).arguments["node"].name


class Titled(BaseModel):
    title: str = "a default"
    data: dict[str, str] = Field(
        default={"title": "x"}, examples=[{"title": "y"}], json_schema_extra={"x-ui": {"title": "z"}}
    )
    many: list[dict[str, int]] | None = Field(default=None, title="Gone")


@pytest.mark.parametrize("where", ["input", "params", "output"])
def test_only_schema_titles_are_removed_not_data_named_title(where: str) -> None:
    @tool
    def show(shown: Titled) -> str:
        """Show."""
        return shown.title

    agent = AgentDefinition("a", input_schema=Titled, output_schema=Titled)
    schemas: dict[str, Any] = {
        "input": show.spec.input_schema["$defs"]["Titled"],
        "params": get_params_schema(agent),
        "output": compile_schemas(agent).output.json_schema,
    }
    string = {"type": "string"}
    many = {
        "anyOf": [
            {"items": {"additionalProperties": {"type": "integer"}, "type": "object"}, "type": "array"},
            {"type": "null"},
        ]
    }
    expected = {
        "properties": {
            "title": {**string, "default": "a default"},
            "data": {
                "additionalProperties": string,
                "default": {"title": "x"},
                "examples": [{"title": "y"}],
                "type": "object",
                "x-ui": {"title": "z"},
            },
            "many": {**many, "default": None},
        },
        "type": "object",
    }
    assert expected == schemas[where]


@pytest.mark.spec("requirements:E2", "requirements:E23")
def test_context_and_dependencies_are_no_part_of_the_schema() -> None:
    @tool
    def add(ctx: ToolContext, a: int, b: Annotated[int, Depends(lambda: 2)], c: int = Depends(lambda: 3)) -> int:
        return a + b + c

    assert {"a"} == set(add.spec.input_schema["properties"])
    assert "6" == asyncio.run(add.execute({"a": 1}, ToolContext.for_test())).text


def stars(*args: int) -> None: ...
def double_stars(**kwargs: int) -> None: ...
def untyped(a, b: int = 1) -> None: ...  # type: ignore[no-untyped-def]
def bare_context(ctx, a: int) -> None: ...  # type: ignore[no-untyped-def]
def bare_context_of_a_body(ctx, a: int):  # type: ignore[no-untyped-def]
    yield a


def late_context(a: int, ctx: ToolContext) -> None: ...
async def generator(a: int):  # type: ignore[no-untyped-def]
    yield a


def not_json(a: ToolRegistry) -> None: ...
def missing(a: NotThere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.spec("requirements:E2")
@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (stars, r"takes '\*args'"),
        (double_stars, r"takes '\*\*kwargs'"),
        (untyped, "no type for parameter 'a'"),
        (bare_context, "write ctx: ToolContext"),
        (bare_context_of_a_body, "write ctx: StepContext"),
        (late_context, "make it the first parameter"),
        (generator, "is an async generator"),
        (not_json, "have no JSON Schema"),
        (missing, "names 'NotThere'"),
    ],
)
def test_an_unsupported_function_is_refused_with_file_and_line(fn: Any, said: str) -> None:
    with pytest.raises(DefinitionError, match=said) as caught:
        tool(fn)

    assert f"{__file__}:{fn.__code__.co_firstlineno}" in caught.value.message


@pytest.mark.spec("reliability:TL20", "requirements:E1")
@pytest.mark.parametrize("name", ["", "two words", "x" * 65, "é"])
def test_a_name_that_providers_refuse_is_refused(name: str) -> None:
    with pytest.raises(DefinitionError, match="letters, digits"):
        tool(name=name)(lambda: 1)
    with pytest.raises(DefinitionError, match="letters, digits"):
        Tool(name, "", {}, lambda value: value)


@pytest.mark.spec("requirements:E15")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"retries": 1}, "idempotent"),
        (
            {"retries": -1, "annotations": ToolAnnotations(idempotent=True)},
            "retries must be a whole number of at least 0, not -1",
        ),
        (
            {"retries": 1, "idempotent": False},
            "has retries= but is not idempotent; set idempotent=True if it is safe to repeat",
        ),
        ({"retry": 1}, "'x' has no option retry; valid options: .*retries"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": 3, "in_thread": False}, "cannot be timed out"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: Any, said: str) -> None:
    with pytest.raises(DefinitionError, match=said):
        tool(name="x", **options)(lambda: 1)


@pytest.mark.spec("requirements:E15", "requirements:E17")
def test_idempotent_is_short_for_the_annotation_and_leaves_the_others() -> None:
    quiet = ToolAnnotations(read_only=True)

    assert tool(name="x", retries=2, idempotent=True)(lambda: 1).spec.annotations == ToolAnnotations(idempotent=True)
    both = Tool("x", "", {}, lambda value: value, retries=2, idempotent=True, annotations=quiet)
    assert both.spec.annotations == ToolAnnotations(read_only=True, idempotent=True)


@pytest.mark.spec("requirements:E17", "requirements:E18", "reliability:TL21")
def test_all_options_of_a_tool_are_in_its_spec() -> None:
    annotations = ToolAnnotations(read_only=True)
    options: Any = {
        "category": "read", "annotations": annotations, "parallel_safe": True, "ends_turn": True, "forces_next_step": False,
        "requires_permission": False, "ephemeral": 3, "timeout": math.inf,
    }  # fmt: skip

    @tool(name="other", description="Mine.", **options)
    def f() -> None: ...

    assert {"name": "other", "description": "Mine.", **options} == {
        key: getattr(f.spec, key) for key in ("name", "description", *options)
    }
    assert isinstance(f, ToolLike)


@pytest.mark.spec("generator-contract:G32", "reliability:TL14")
def test_an_input_error_lists_every_field_and_the_input() -> None:
    @tool
    def f(a: int, b: date, c: str) -> None: ...

    with pytest.raises(ToolInputError) as caught:
        validate(f, {"a": "x", "b": "tomorrow", "d": 1})

    error = caught.value
    assert ["a", "b", "c", "d"] == sorted(issue.partition(":")[0] for issue in error.issues)
    assert error.message.startswith("Invalid parameters for f: ")
    assert '{"a":"x","b":"tomorrow","d":1}' in error.message


@pytest.mark.spec("reliability:TL14", "generator-contract:G32")
def test_the_validated_value_is_recorded_and_executed() -> None:
    @tool
    def f(n: int, day: date, tags: set[str], flag: bool = True) -> None: ...

    done = validate(f, {"n": "5", "day": "2026-01-02", "tags": ["x"]})

    assert {"n": 5, "day": date(2026, 1, 2), "tags": {"x"}, "flag": True} == done.arguments
    assert {"n": 5, "day": "2026-01-02", "tags": ["x"], "flag": True} == done.input
    assert done.input == validate(f, done.input).input


@pytest.mark.spec("reliability:I5")
def test_a_valid_input_is_recorded_unchanged_and_copied_for_execution() -> None:
    @tool
    def f(paths: list[str], options: dict[str, int], n: int) -> None: ...

    given_input = freeze_object({"paths": ["a"], "options": {"x": 1}, "n": 1})
    done = f.binding().validate(given_input)
    done.arguments["paths"].append("b")
    done.arguments["options"]["y"] = 2

    assert done.input is given_input
    assert {"paths": ["a"], "options": {"x": 1}, "n": 1} == given_input


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@tool
def anything(value: Any, more: list[Any] = [], rest: dict[str, Any] = {}) -> None:  # noqa: B006
    """Take anything."""


@pytest.mark.deep
@pytest.mark.smoke
@given(json_values, st.lists(json_values, max_size=2), st.dictionaries(st.text(max_size=3), json_values, max_size=2))
def test_validating_any_json_again_changes_nothing(value: Any, more: Any, rest: Any) -> None:
    done = validate(anything, {"value": value, "more": more, "rest": rest})

    assert {"value": value, "more": more, "rest": rest} == done.input
    assert done.input == validate(anything, done.input).input


@pytest.mark.spec("requirements:E1", "requirements:E2")
async def test_a_tool_with_a_json_schema_receives_the_whole_input() -> None:
    schema = {"properties": {"n": {"type": "integer"}, "from": {"type": "string"}}, "required": ["n"]}
    plain = Tool(name="plain", description="", input_schema=schema, run=lambda value: value)
    with_context = Tool("ctx", "", schema, _with_context)

    given_input = {"n": 1, "from": "here"}
    assert given_input == (await plain.execute(validate(plain, given_input).arguments, ToolContext.for_test())).data
    assert "c1 1" == (await with_context.execute(given_input, ToolContext.for_test())).text
    assert ("n: is required",) == issues_of(plain, {})


async def _with_context(ctx: ToolContext, value: dict[str, Any], scale: int = Depends(lambda: 1)) -> str:
    return f"{ctx.tool_call_id} {value['n'] * scale}"


@pytest.mark.parametrize("run", [lambda: 1, lambda a, b: 1, 3], ids=["none", "two", "no function"])
def test_a_body_that_does_not_take_one_input_is_refused(run: Any) -> None:
    with pytest.raises(DefinitionError):
        Tool("x", "", {}, run)


@pytest.mark.spec("requirements:E19")
def test_a_tool_describes_one_call_before_it_happens() -> None:
    @tool(preview=lambda given: ToolPreview(f"Delete {given['path']}", {"why": "asked"}))
    def delete(path: str) -> None: ...

    shown = delete.preview(JsonDict({"path": "x"}))
    assert ToolPreview("Delete x", {"why": "asked"}) == shown
    assert anything.preview(JsonDict()) is None


def test_positional_only_parameters_reach_the_body() -> None:
    @tool(in_thread=False)
    def f(a: int, /, b: int) -> str:
        return f"{a}-{b}"

    assert "1-2" == asyncio.run(f.execute({"a": 1, "b": 2}, ToolContext.for_test())).text


def test_calling_a_tool_directly_names_the_correct_form() -> None:
    with pytest.raises(TypeError, match=r"yield from call\(anything"):
        anything(1)
    with pytest.raises(DefinitionError, match="already"):
        tool(anything)


@pytest.mark.spec("ecosystem:EC216")
def test_importing_the_tools_loads_no_heavy_package() -> None:
    heavy = ("pydantic", "docstring_parser", "jsonschema", "httpx2", "justhtml", "idna")
    code = f"import sys, stepengine.tools.bundled; print([m for m in {heavy!r} if m in sys.modules])"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[]" == done.stdout.strip()
