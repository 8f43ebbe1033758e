"""
Foreign text (of models, pages, files, servers, journals) meets no expression that can backtrack, and no codec or parser
without a cap.

`PLACES` is the table of where the package reads such text: what runs, hostile shapes of n characters, and the files that
it covers. Each file with a call of `re`, a codec, JSON, HTML, YAML, `shlex` or `difflib` is in it, or in `APART` with a reason.

    python -m pytest tests/test_foreign_text.py                # every file is known
    python -m pytest tests/test_foreign_text.py -m speed       # linear time, and cancels within a second
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import gzip
import json
import re
import struct
import sys
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from zlib import crc32

import attrs
import httpx2
import pytest

import stepengine
from stepengine import Tool, tool
from stepengine.adapters.acp.stdio import parse_message
from stepengine.adapters.acp.updates import _make_code_block
from stepengine.adapters.ag_ui import parse_run_input
from stepengine.adapters.external import remote
from stepengine.adapters.mcp.lenient_messages import MessageRepair
from stepengine.adapters.mcp.results import make_result
from stepengine.adapters.mcp.stdio import ANSWER, ID, ServerProcess, ServerProgram
from stepengine.cli.commands.fork import _make_edit_function
from stepengine.cli.commands.send import parse_json_message
from stepengine.cli.screen.prompt import PASTE
from stepengine.cli.settings import UsageProblem
from stepengine.context.project import TAGS
from stepengine.data.alike import find_nearest
from stepengine.data.codec import plain
from stepengine.data.json import JsonDict, freeze_object, replace_lone_surrogates
from stepengine.data.json import parse_json_answer as answer_in
from stepengine.data.matching import BoundedMatcher
from stepengine.data.media_types import normalize_media_type, parse_data_url
from stepengine.data.models import ModelReply, TextChunk
from stepengine.data.provenance import Provenance, Source
from stepengine.data.questions import Question, to_answer
from stepengine.data.secret_names import is_secret_name, may_name_secret_member
from stepengine.data.thoughts import split_thoughts
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.data.visible import visible
from stepengine.debugging.viewer.payload import _escape_invisible as shown_on_a_page
from stepengine.durable.deployment import parse_recorded_json
from stepengine.durable.messages import parse_message_json
from stepengine.durable.step_names import NAMES as NAMES_OF_STEPS
from stepengine.engine import load_agent
from stepengine.engine.packages import ID as PUBLISHER
from stepengine.engine.packages import VALUE, parse_declaration
from stepengine.engine.settings import Settings
from stepengine.errors import DataError, DefinitionError, ExternalAgentError, ModelError, StepEngineError, WorkspaceLost
from stepengine.evaluation.criteria import _parse_judge_verdict as judged_text
from stepengine.journal.alterations import describe_record_changes
from stepengine.journal.encoding import _describe_error
from stepengine.journal.line_reader import (
    JournalBytes,
    parse_members,
    parse_members_strictly,
    parse_record_lazily,
    read_lines,
)
from stepengine.journal.mailbox import StoredMessage
from stepengine.journal.records import encode_line, verify_checksum
from stepengine.journal.secret_scan import scan
from stepengine.journal.show import redact_and_shorten_tree
from stepengine.journal.signing import JournalSignature
from stepengine.machine.blocks import split_blocks
from stepengine.machine.child_effects import find_matching_id
from stepengine.machine.tool_search import search_hidden_tools
from stepengine.models._aws_events import AWSParser
from stepengine.models._call_arguments import can_start_json
from stepengine.models._failures import RequestLabel, error_from_body
from stepengine.models._json import make_call_part, parse_json
from stepengine.models._schemas import remove_references_and_nulls
from stepengine.models._sse import SSEParser
from stepengine.models._wire import make_safe_tool_name
from stepengine.models.bedrock_converse.encode import make_document_name
from stepengine.models.google.calls import _parse_json_path
from stepengine.models.keys import Credentials, make_safe_excerpt
from stepengine.models.openai_chat.written_calls import (
    WrittenThoughtFilter,
    parse_written_calls,
    parse_written_thoughts,
)
from stepengine.permissions.commands import (
    READ_ONLY,
    CommandForm,
    explain_possible_match,
    matches_allow_rule,
    matches_deny_rule,
)
from stepengine.permissions.policy import Policy
from stepengine.permissions.rules import Domain, Regex, Request
from stepengine.permissions.rules import Path as PathRule
from stepengine.redaction import Redactor, StreamRedactor, make_redactor, parse_if_json
from stepengine.sandbox.program_checks import find_defined_names, find_program_problems
from stepengine.sandbox.program_checks import format_problems as program_shown
from stepengine.sandbox.source_rewriter import rewrite_for_sandbox
from stepengine.sandbox.stubs import make_stubs
from stepengine.server.access import HOST, ORIGIN, _parse_entries, _RequestFacts
from stepengine.server.bodies import parse_strict_json, validate_as
from stepengine.server.problems import Problem
from stepengine.server.reports import _parse_report as parsed_report
from stepengine.server.routes import StartRun
from stepengine.server.webhooks import (
    Topic,
    Webhooks,
    _find_event_run_id,
    _get_event_id_or_hash,
    _make_message_id,
    _parse_event,
)
from stepengine.sessions.stores import _parse_json, _parse_messages, _read_json
from stepengine.testing.cassette_bodies import decode_body, indent_json
from stepengine.testing.cassette_files import RecordedRequest, parse_cassette
from stepengine.testing.cassette_matching import COUNTED_MARK, MARK, find_boundary
from stepengine.testing.cassette_requests import parse_model_call
from stepengine.testing.httpx_exchanges import EVENT
from stepengine.testing.package_checks import HOMES, HOSTS
from stepengine.testing.stream_ends import is_stream_complete
from stepengine.testing.traffic_redaction import Cleaner, clean_events, join_event_texts_by_path
from stepengine.tools import ToolRegistry
from stepengine.tools.bundled import file_tools, search_tools, shell_tools
from stepengine.tools.bundled.files.edits import TextReplacement, apply_replacements, unified_diff
from stepengine.tools.bundled.memory import _parse_notes, _split_folded_words
from stepengine.tools.bundled.search.hits import SearchFlags, _clean_and_cut_line, parse_flags
from stepengine.tools.bundled.search.overview import rank_files
from stepengine.tools.bundled.search.ripgrep import EXIT, _adapt_pattern_to_line_ends, _LineTest
from stepengine.tools.bundled.search.symbols import find_top_level_names, split_singular_words
from stepengine.tools.bundled.shell.output import Capture
from stepengine.tools.bundled.web.fetcher import Fetched
from stepengine.tools.bundled.web.pages import CODECS, read_page
from stepengine.tools.bundled.web.search_queries import _cut_excerpt, _parse_links
from stepengine.tools.conversion import replace_surrogates
from stepengine.tools.repair import make_repairer
from stepengine.tools.schemas import JsonSchema
from stepengine.workspace.argv import parse_command
from stepengine.workspace.connection import _Broken
from stepengine.workspace.connection import _parse_frame_head as parsed_frame
from stepengine.workspace.contained_paths import find_paths_in_text
from stepengine.workspace.line_ends import apply_old_line_ends
from stepengine.workspace.path_rules import PROTECTED, SECRETS, PathRules, possible_paths
from stepengine.workspace.paths import printable_name
from stepengine.workspace.patterns import GlobPattern, IgnorePattern, find_pattern_problem, get_max_search_columns
from stepengine.workspace.remote_files import RemotePlace as FarPlace
from stepengine.workspace.remote_files import RemoteSystem, _parse_entry, _parse_listing
from stepengine.workspace.repository import _parse_git_status
from stepengine.workspace.skills import _parse_skill_head
from stepengine.workspace.text import decode_text, read_line_range
from stepengine.workspace.urls import parse_url, resolve_redirect

PACKAGE = Path(stepengine.__file__).parent
AGENTS = Path(__file__).resolve().parent.parent / "agents"
SECONDS = 1.0
MEASURABLE = 0.02
GROWTH = 9.0
ROUNDS = 5

Shape = Callable[[int], Any]


@attrs.frozen
class Place:
    """
    A place where foreign text is read.

    Attributes:
        name: Its name.
        run: Takes what a shape makes.
        shapes: Each takes a number of characters and makes that much hostile text.
        covers: The files behind it, below the package or in `agents/`.
        most: How many characters it can meet, where a cap stands before it.
    """

    name: str
    run: Callable[[Any], Any]
    shapes: tuple[Shape, ...]
    covers: tuple[str, ...] = ()
    most: int = 1 << 23


def of(unit: str, before: str = "", after: str = "") -> Shape:
    """
    Return the shape that repeats a unit; one that is closed, or of lines, is of whole units: cut ones would be right at some sizes
    alone, and what reads right and wrong texts takes other ways.
    """

    def shape(n: int) -> str:
        room = max(0, n - len(before) - len(after))
        whole = room // len(unit) * len(unit) if after or unit.endswith("\n") else room
        return before + (unit * (n // len(unit) + 1))[:whole] + after

    return shape


def ofb(unit: str, before: str = "", after: str = "") -> Shape:
    return lambda n: of(unit, before, after)(n).encode("utf-8", "surrogateescape")


def finished(awaited: Awaitable[Any]) -> Any:
    """Run what never waits for anything to its end."""
    try:
        awaited.__await__().send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError


# --- what runs ------------------------------------------------------------------------------------------------------


REMOTE = remote._ServerClient(
    remote._RemoteSettings(
        id="x", url="http://localhost:1", agent="x", token=None, token_env="T", permissions="people", away_seconds=1
    )
)


def remote_said(data: bytes) -> None:
    for read in (REMOTE._parse_event, lambda data: REMOTE._parse_reply("GET /", httpx2.Response(200), data, ())):
        with contextlib.suppress(ExternalAgentError):
            read(data)
    remote.RUN_ID.fullmatch(data.decode("utf-8", "replace"))


def page(content_type: str) -> Callable[[bytes], Any]:
    return lambda body: finished(read_page(Fetched("http://x.test/", 200, content_type, body)))


def captured(data: bytes) -> str:
    capture = Capture(50_000)
    for start in range(0, len(data), 65_536):
        capture.feed(data[start : start + 65_536])
    capture.end()
    return capture.text()


def parsed_events(data: bytes) -> None:
    parser = SSEParser()
    for start in range(0, len(data), 4_096):
        parser.feed(data[start : start + 4_096])
    _ = parser.tail


def aws_messages(count: int, payload: bytes) -> bytes:
    """Return messages with a header that fills half of each."""
    header = b"\x0d:message-type\x07\x00\x05other"
    prelude = struct.pack(">II", 16 + len(header) + len(payload), len(header))
    body = prelude + struct.pack(">I", crc32(prelude)) + header + payload
    return (body + struct.pack(">I", crc32(body))) * count


def parsed_messages(data: bytes) -> None:
    parser = AWSParser(CALL)
    with contextlib.suppress(ModelError):
        for start in range(0, len(data), 4_096):
            parser.feed(data[start : start + 4_096])
    _ = parser.tail


def ignores(line: str) -> Callable[[str], Any]:
    pattern = IgnorePattern.parse(line)
    assert pattern is not None
    return lambda name: pattern.match((name,), is_folder=False)


def ignored(lines: str) -> None:
    for pattern in [p for p in map(IgnorePattern.parse, lines.split("\n")) if p]:
        pattern.match(("a",) * 3 + ("a" * 255,), is_folder=False)


def globbed(pattern: str) -> None:
    made = GlobPattern(pattern)
    made.match(("a" * 255,) * 100)


def compared(lines: str) -> None:
    unified_diff(lines, "\n".join(reversed(lines.split("\n"))), "f")


def fallback(pattern: str) -> Callable[[str], Any]:
    test = _LineTest(pattern, SearchFlags())
    return lambda text: [test.matches(line) for line in text.split("\n")]


def schema_pattern(pattern: str) -> Callable[[str], Any]:
    schema = {"type": "string", "pattern": pattern}
    return JsonSchema("take", schema).issues


def schema_content(encoding: str) -> Callable[[str], Any]:
    words = {"contentMediaType": "application/json", "contentEncoding": encoding}
    check = JsonSchema("take", {"$schema": "http://json-schema.org/draft-07/schema#", **words}).issues
    encode = {"base64": base64.b64encode, "base32": base64.b32encode}.get(encoding, bytes)
    return lambda text: check(encode(text.encode()).decode())


def mended_input(text: str) -> Any:
    repair = make_repairer({"type": "object", "properties": {"x": {"type": "array", "items": {"type": "object"}}}}, {})
    return repair(JsonDict(x=text))


@cache
def typed_tool() -> Tool[..., Any]:
    @tool
    def take(when: list[int]) -> list[int]:
        """Take numbers."""
        return when

    return take


def validated(text: str) -> Any:
    return typed_tool()._binding.validate(JsonDict(when=text))


CALL = RequestLabel(provider="x", model="x/y", credentials=Credentials(None, "no key"))
KNOWN = {"sk-abcdefghijklmnop": "X_API_KEY"}
SIGNED = '{"kind":"input","path":"","seq":-1,"at":1,"input":{"type":"signature","key":"' + "A" * 68 + '"'


@contextlib.contextmanager
def file_of(data: bytes) -> Iterator[Path]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "f").write_bytes(data)
        yield Path(folder) / "f"


def scanned(data: bytes) -> None:
    with file_of(data) as path:
        list(scan([path], environment=dict(zip(KNOWN.values(), KNOWN, strict=True))))


def streamed(data: bytes) -> None:
    with file_of(data) as path, path.open("rb") as file:
        read_line_range(file.fileno(), 0, 100)


def glimpse(line: bytes) -> None:
    parse_record_lazily(line, JournalBytes(line, "x"), 0)


def differing(prints: str) -> None:
    BoundedMatcher([*prints], [*prints, "x"], autojunk=False).get_opcodes()


def cleaned_stream(text: str) -> None:
    join_event_texts_by_path(text)
    clean_events(text, Redactor(KNOWN, shapes=True))


def request_of_a_cassette(text: str) -> None:
    """Read a body, a message and a list of messages of this text, in each of the four protocols."""
    member = {"url": text}
    for path, name in (
        ("chat/completions", "messages"),
        ("responses", "input"),
        ("messages", "messages"),
        ("models/m:generateContent", "contents"),
    ):
        listed = f'{{"{name}":[{{"type":"message","role":"user","content":"a"{text}}}]}}'
        linked = {name: [{"role": "user", "content": [{"type": "image_url", "image_url": member}]}]}
        for body in (text, listed, json.dumps(linked)):
            parse_model_call(RecordedRequest("POST", f"https://a.test/v1/{path}", (), body.encode()))


def trickled(text: str) -> None:
    trickle = StreamRedactor(Redactor(KNOWN, shapes=True))
    for start in range(0, len(text), 16):
        trickle.feed(text[start : start + 16])
    trickle.flush()


def thoughts_in_stream(text: str) -> None:
    """Take the text of a stream a few letters at a time."""
    told = WrittenThoughtFilter()
    for start in range(0, len(text), 8):
        told.convert_delta(TextChunk(text[start : start + 8]))
    told.flush()


def loaded(read: Callable[[Path], Any]) -> Callable[[bytes], None]:
    """Return what reads a file of these bytes."""

    def run(data: bytes) -> None:
        with file_of(data) as path:
            read(path)

    return run


def settings_of(folder: Path, variables: Mapping[str, str]) -> None:
    with contextlib.suppress(DefinitionError):
        Settings.load(folder, variables, config=folder / "f" if (folder / "f").exists() else None)


def imported_call(arguments: str) -> Any:
    call = {"id": "1", "type": "function", "function": {"name": "x", "arguments": arguments}}
    return Transcript.from_dicts([{"role": "assistant", "content": None, "tool_calls": [call]}])


def judged(command: str) -> None:
    words = parse_command(command)
    for form in (*READ_ONLY, CommandForm(("git", "push"))):
        matches_allow_rule(form, words)
        matches_deny_rule(form, words)
        explain_possible_match(form, words)


def asked(text: str) -> None:
    spec = ToolSpec("x", "", JsonDict(type="object", properties=JsonDict()))
    request = Request(tool=spec, input=JsonDict(x=text, path=text, url=text))
    for matcher in (Regex("(a+)+b"), PathRule("src/*/**/a"), Domain("*.a.test")):
        matcher.matches(request, "deny")


@cache
def agents() -> tuple[ModuleType, ModuleType]:
    """Return the modules of the bundled agents that read foreign text themselves."""
    editor, picker = [load_agent(name).handle_steps for name in ("editor", "file-picker")]
    return sys.modules[editor.__module__], sys.modules[picker.__module__]


def parses(suffix: str) -> Callable[[str], Any]:
    def run(text: str) -> None:
        with warnings.catch_warnings(action="ignore"):
            agents()[0].find_parse_problem(f"f.{suffix}", text)

    return run


def listed(text: str) -> Any:
    return agents()[1].parse_listed_paths(text)


def schema_tool(schema: dict[str, Any]) -> Tool[..., Any]:
    return Tool("x", "", {"type": "object", **schema}, lambda value: value)


def offered(schema: dict[str, Any]) -> None:
    """Take a tool of somebody else, and show it to a provider that knows no references."""
    made = schema_tool(schema)
    remove_references_and_nulls(made.spec.input_schema)
    give(made, {"x": {"x": 1}})


def keys_of_path(text: str) -> None:
    with contextlib.suppress(ValueError, StepEngineError):
        _parse_json_path(text)


def refused_reference(text: str) -> None:
    """Give a schema that leads out of itself; it is refused with the place of its reference, and nothing is fetched."""
    with pytest.raises(DefinitionError, match=r"at #/properties/x/\$ref: "):
        schema_tool({"properties": {"x": {"$ref": text}}})


def judged_by_an_agent(text: str) -> None:
    with contextlib.suppress(DataError):
        judged_text(text)


def give(made: Tool[..., Any], value: Any) -> None:
    given = freeze_object(value)
    made._binding.validate(made._binding.repair(given) if made._binding.repair else given)


@cache
def tool_with(words: str) -> Tool[..., Any]:
    """Return a tool whose parameter ``x`` refers to itself through every one of these keywords."""
    return schema_tool({"properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": referring("A", words.split(), 3)}})


def referring(name: str, words: list[str], times: int) -> dict[str, Any]:
    """Return a schema that leads to a definition *times* for each keyword; the forms differ, so each has its own message."""
    below = {"properties": {"x": {"$ref": f"#/$defs/{name}"}}}
    return {"type": "object", **{word: [{**below, "minProperties": n + 2} for n in range(times)] for word in words}}


def doubling(word: str) -> Shape:
    """A row of definitions each of which leads to the next one twice: 2 ** n ways."""

    def shape(n: int) -> dict[str, Any]:
        count = min(60, n // 100)
        row = {f"A{i}": {word: [{"$ref": f"#/$defs/A{i + 1}"}] * 2} for i in range(count)}
        return {"properties": {"x": {"$ref": "#/$defs/A0"}}, "$defs": {**row, f"A{count}": {"type": "string"}}}

    return shape


def nested_schema(word: str) -> Shape:
    def shape(n: int) -> dict[str, Any]:
        made: dict[str, Any] = {"type": "string"}
        for _ in range(min(30, n // 100)):
            made = {word: [made, {"type": "integer"}]}
        return {"properties": {"x": made}}

    return shape


def wide_schema(member: Callable[[int], Any]) -> Shape:
    return lambda n: {"properties": {f"a{i}": member(i) for i in range(n // 64)}}


def nested_value(n: int) -> Any:
    value: Any = 1
    for _ in range(min(60, n // 100)):
        value = {"x": value}
    return {"x": value}


def schema_check(words: str) -> Callable[[Any], Any]:
    return lambda value: give(tool_with(words), value)


def json_lines(unit: str) -> Shape:
    return ofb(unit + "\n")


BRACKETS = (of("["), of('{"a":'), of("[1,"), of('"'), of("\\"), of('"\\ud800', '"'), of("9"), of("1e"), of("-"))
OPENERS = ("\x9d", "\x90", "\x98", "\x9b", "\x1b]", "\x1b[", "\x1b[0;", "\x1b ", "\x1b]0;\x1b", "\x9d0;", "\x1b[ ")
SECRET_SHAPES = (
    of("sk"), of("sk-"), of("sk-a"), of("-----BEGIN PRIVATE KEY-----"), of("-----BEGIN "), of("eyJ"), of("eyJhbGciOiJ.eyJ."),
    of("a"), of("<redacted:"), of("Bearer "), of("https://a:"), of("b", "@://a:"), of("b:", "@://a:"), of("sk-a***"), of("sk\u2026"), of("AKIA"), of("{"), of('{\\"'),
)  # fmt: skip
HOSTILE_NAMES = (of("a"), of("aB"), of("_a"), of("é"), of("A"), of("a."))

JSON_SHAPES = tuple(lambda n, shape=shape: shape(n).encode("utf-8", "surrogatepass") for shape in BRACKETS)


def served(text: str) -> Any:
    """Read a line of an MCP server."""
    return ServerProcess(ServerProgram(("server",)), bool)._parse_line(text.encode("utf-8", "surrogatepass"))


def reread(text: str) -> Any:
    """Read a list of an MCP server again that its client could not parse."""
    repair = MessageRepair(lambda: None)
    repair.record_request(SimpleNamespace(id=1, method="tools/list"))
    return repair.repair_list_reply(text.encode("utf-8", "surrogatepass"), 1)


def last_words(text: str) -> Any:
    pipe = ServerProcess(ServerProgram(("server",)), bool)
    pipe._errors += text.encode("utf-8", "surrogatepass")
    return pipe.get_stderr_tail()


def result_text(text: str) -> Any:
    return make_result({"content": [{"type": "text", "text": text}], "structuredContent": {"n": 1}})


def framed(head: bytes) -> Any:
    with contextlib.suppress(_Broken):
        return parsed_frame(head)


def far_listing(data: bytes) -> Any:
    with contextlib.suppress(WorkspaceLost):
        return [_parse_entry(one) for one in _parse_listing(data, RemoteSystem(FarPlace(name="x", argv=tuple, env={})))]


def _sent(text: str) -> None:
    with contextlib.suppress(UsageProblem):
        parse_json_message(text)


FUNCTIONS = make_stubs([ToolSpec("price")], (), ask=True)


def looked_at(text: str) -> None:
    program_shown(find_program_problems(text, FUNCTIONS), text)
    find_defined_names(text)


def as_headers(text: str) -> None:
    value = text.encode("latin-1", "replace")
    names = (b"cookie", b"authorization", b"host", b"origin")
    asked = _RequestFacts({
        "type": "http", "path": "/", "method": "GET", "query_string": value, "headers": [(name, value) for name in names],
    })  # fmt: skip
    asked.find_bearer_token(), asked.find_header("origin"), asked.get_query()
    with contextlib.suppress(Problem):
        asked.parse_host()


SENDER = Topic.model_validate(
    {"secrets": ["sixteen characters and more", "whsec_MDEyMzQ1Njc4OWFiY2RlZg=="], "run": "/a/b"}
)


def as_signatures(text: str) -> None:
    standard = {"webhook-id": [text], "webhook-timestamp": ["1"], "webhook-signature": [text]}
    for headers in ({"stepengine-signature": [text]}, {"stripe-signature": [text]}, standard):
        assert SENDER.verify_and_get_message_id(headers, b"{}", 1.0) is None


def as_an_event(data: bytes) -> None:
    with contextlib.suppress(StepEngineError):
        value = _parse_event(data)
        _find_event_run_id(value, SENDER), _make_message_id("go", _get_event_id_or_hash(value, SENDER, data))


def as_a_file(text: str) -> None:
    with contextlib.suppress(DefinitionError):
        rewrite_for_sandbox(text, "theirs.py")


def as_a_function(text: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            "x": {"description": text, "default": text, "enum": [text]},
            "o": {"properties": {text: {"const": text}, text[:70]: {"$ref": f"#/{text}"}}},
        },
        "required": [text],
        "description": text,
    }
    made = make_stubs([ToolSpec(text, text, schema), ToolSpec("find", text, schema)], (), ask=True)
    made.search(text)
    made.describe(text)


def received(text: str) -> None:
    index = Provenance()
    index.add(Source("tool"), text)
    index.add(Source("prompt", "trusted"), text)
    index.find_sources(text)
    for value in (text, f"{text} z"):
        index.is_trusted(value)
        index.make_child_index([value])


PLACES = (
    # --- what a model writes over its tools, and what strangers say of these
    Place(
        "program",
        looked_at,
        (
            *(of("("), of("a."), of("not "), of("-"), of("\n"), of("q;"), of("'"), of("f'{")),
            *(of("price();"), of("äö;"), of("import x\n"), of("if 1:x\n"), of("try:x\nexcept:x\n"), of("lambda:")),
            *(of("é: int,", "def f(", "): pass"), of("price(),", "def f(): price = (", ")"), of("\t"), of("\\\n")),
            *(of(" async ", " "), of("ff", after="'"), of("except "), of("9"), of("x=x+1\r")),
        ),
        ("sandbox/program_checks.py",),
        most=1 << 16,
    ),
    Place(
        "result whose values are looked up",
        received,
        (
            *map(of, ("a", "a-", "a@", "a@a.", "x://", "x://a", "a://a.a/", "(", "1", "1 ")),
            *map(of, ("12 ", "12 12-", "1,111", "AB12 ", "AB12 1234 ", "june 1 ", "1 june ")),
            *map(of, ("<redacted:", "<a@a.b>", "'", "\u2019", "'s ", "\n", " ", "é", "\u0130", "%", "_")),
            *(
                of("a.", "a@", "!"),
                of("a-", "x://", "!"),
                of("12 ", "AB12 ", "x"),
                of("0", "0."),
                of("1.", "+"),
                of("a", "x://", ")"),
                of(")", "x://a"),
                of("].", "x://a"),
                of("a)", "x://"),
            ),
        ),
        ("data/provenance.py",),
    ),
    Place(
        "agent file of a stranger",
        as_a_file,
        (
            *(
                of("("),
                of("a."),
                of("yield "),
                of("yield from "),
                of("\n"),
                of(" "),
                of("'"),
                of("x=x+1\r"),
                of("\\\n"),
            ),
            *(of("yield x;", "def f(c): "), of("yield from f(c);", "def f(c): "), of("c.view;", "def f(c): yield\n")),
            *(
                of("(yield ", "def f(c): "),
                of(".view", "c"),
                of("x: 'int'\n ", "from pydantic import BaseModel\nclass A(BaseModel):\n "),
            ),
            *(
                of("|int", "from pydantic import BaseModel\nclass A(BaseModel):\n x: '", "'"),
                of("from string import digits\n"),
            ),
        ),
        ("sandbox/source_rewriter.py", "sandbox/schemas.py"),
        most=1 << 16,
    ),
    Place(
        "tool as a function of a program",
        as_a_function,
        (of("a"), of("_"), of(" "), of('"""'), of("\\"), of("é"), of("["), of("{'a':"), of("-"), of("\n"), of("a b")),
        ("sandbox/stubs.py",),
        most=1 << 20,
    ),
    # --- what another end of a connection says
    Place(
        "what a supervisor elsewhere says of a search",
        EXIT.fullmatch,
        (ofb("9"), ofb("9", "exit "), ofb("pid 9\n"), ofb("9", "pid ")),
        ("tools/bundled/search/ripgrep.py",),
        most=1 << 20,
    ),
    # --- what a repository and earlier runs say
    Place(
        "head of a skill",
        _parse_skill_head,
        tuple([of(unit) for unit in ("[", "a: ", "&a ", "*a ", "? ", "!!x ", '"', "'", "a: b\n", "|\n", "\\")]),
        ("workspace/skills.py",),
        most=16 * 1024,
    ),
    Place(
        "publisher of a package",
        PUBLISHER.fullmatch,
        (of("a"), of("a-"), of("-"), of("a", "", "!")),
        ("engine/packages.py",),
    ),
    Place(
        "where a package has its agents",
        VALUE.fullmatch,
        (of("a"), of("a."), of("a:"), of("a", "", "!"), of(".a", "a", "!")),
        ("engine/packages.py",),
    ),
    Place(
        "paths and hosts in the files of a package",
        lambda text: (HOMES.search(text.encode()), HOSTS.findall(text)),
        (of("/home/"), of("C:\\Users\\"), of("a", "/home/"), of("http://"), of("a.", "https://"), of("h")),
        ("testing/package_checks.py",),
    ),
    Place(
        "name of a skill that is not there",
        lambda name: find_nearest(name, [f"{name[:40]}{n}" for n in range(200)]),
        (of("a"), of("ab"), of("a-")),
        ("data/alike.py", "tools/bundled/skill_tool.py"),
        most=64,
    ),
    Place(
        "tags in instructions",
        lambda text: TAGS.sub("&lt;", text),
        (of("<"), of("< "), of("</ "), of("<   /   "), of("<env"), of("< /  skills")),
        ("context/project.py",),
    ),
    Place(
        "file of notes",
        lambda text: _parse_notes(text.split("\n")),
        tuple(
            [
                of(f"{unit}{end}")
                for unit in ("- [m1] 2026-01-01", " #a", "- [m", " run a", ": a", "#")
                for end in ("", "\n")
            ]
        ),
        ("tools/bundled/memory.py",),
        most=1 << 19,
    ),
    Place(
        "words for pastes",
        lambda text: PASTE.sub("", text),
        (of("[paste "), of("1", "[paste "), of("[paste 1: ")),
        ("cli/screen/prompt.py",),
    ),
    Place(
        "search of tools",
        lambda text: search_hidden_tools({"a": ToolSpec("a", text[:4096], defer_loading=True)}, text),
        (of("a"), of("a "), of("_"), of("a_"), of("\u0300"), of("\ufdfa")),
        ("machine/tool_search.py",),
    ),
    Place(
        "words of notes",
        _split_folded_words,
        (of("a"), of("a-"), of(" "), of("\u0300"), of("\ufdfa")),
        ("tools/bundled/memory.py",),
    ),
    Place(
        "status of git",
        partial(_parse_git_status, top=PACKAGE),
        (ofb("1 "), ofb("2 a\0"), ofb("? a\0"), ofb("# branch.head "), ofb("\xff")),
        ("workspace/repository.py",),
    ),
    # --- ignore files, globs, paths
    Place(
        "ignore line",
        ignored,
        (of("*a"), of("*a", "", "*b"), of("**/a/"), of("[a-"), of("[[:"), of("[!b]*", "", "b"), of("\\")),
        ("workspace/patterns.py", "tools/bundled/search/ignore.py"),
        most=4_096,
    ),
    Place(
        "ignore file", ignored, (of("*a*a*a*a*a*a*a*b\n"), of("[a]*[a]*b\n"), of("**/a/**/b\n"), of(" \n"), of("!/\n"))
    ),
    *(
        Place(f"name against {line}", ignores(line), (of("a"), of("ab"), of("ba")), most=1 << 20)
        for line in ("*a" * 30 + "*b", "*?" * 30 + "*b", "*[!c]a" * 30 + "*b")
    ),
    Place(
        "glob",
        globbed,
        (of("*a"), of("**/a/"), of("{a,"), of("{a,b}"), of("[a"), of("?*"), of("{[,]"), of("[{]{"), of("[}]")),
        ("workspace/patterns.py",),
        most=512,
    ),
    Place(
        "patterns of rules and paths in calls",
        lambda text: (find_pattern_problem(text), possible_paths(text), find_paths_in_text(text)),
        (of("%25"), of("%"), of("file:"), of("\\"), of(" "), of("[\\"), of("[\\]"), of("file:%5C")),
    ),
    Place(
        "secret and protected paths",
        lambda text: [
            PathRules(rules, ["tests/**/conftest.py"]).match(text.split("/")) for rules in (SECRETS, PROTECTED)
        ],
        (of("tests/"), of("a/"), of("id_"), of(".env."), of("journals/a"), of("\u0300"), of("tests/conftest.py/")),
        ("workspace/path_rules.py", "workspace/contained_paths.py"),
        most=4_096,
    ),
    Place(
        "path of a piece of a call's arguments",
        keys_of_path,
        (of("a", "$."), of("['", "$"), of("\\\\", "$['"), of("\\'", "$['"), of('["a', "$"), of("\\\\", '$["')),
        ("models/google/calls.py",),
    ),
    Place(
        "reply of a server that is not a message",
        lambda line: (ANSWER.search(line), list(ID.finditer(line))),
        (ofb("a"), ofb('"id" '), ofb('"id":1'), ofb('"id":"'), ofb('"id":"a", '), ofb('"result"'), ofb("1", '"id":')),
        ("adapters/mcp/stdio.py",),
    ),
    Place(
        "text that an editor shows as a block",
        lambda text: _make_code_block("", text),
        (of("`"), of("` "), of("```\n"), of("`a"), of("a", "`", "`")),
        ("adapters/acp/updates.py",),
    ),
    # --- pages
    *(
        Place(
            f"page {kind or 'without type'}",
            page(kind),
            (ofb("<!---->"), ofb("<!--"), ofb("-->"), ofb("<"), ofb("\u200b"), ofb("<!doctype ")),
            ("tools/bundled/web/pages.py",),
            most=2_000_000,
        )
        for kind in ("", "text/plain", "text/plain; charset=utf-8", "application/json")
    ),
    Place(
        "content type",
        lambda text: page(f"text/plain;{text}")(b"x"),
        (of("charset"), of("charset="), of("charset "), of("charset=a"), of("charset='"), of(" ", "charset")),
        ("tools/bundled/web/pages.py",),
        most=65_536,
    ),
    *(
        Place(
            f"charset {codec}",
            page(f"text/plain; charset={codec}"),
            (lambda n: b"\xff\x81" * (n // 2), lambda n: b"a\x1b$B" * (n // 4)),
            most=2_000_000,
        )
        for codec in sorted({*CODECS, "punycode", "idna", "utf_7", "unicode_escape"})
    ),
    Place(
        "links of documentation",
        lambda text: _parse_links(text, "http://x.test/"),
        (of("["), of("[a]("), of("[a](http://x "), of("[a](http://x) "), of("[a](<"), of("](("), of("[a](//]")),
        ("tools/bundled/web/search_queries.py",),
        most=2_000_000,
    ),
    Place(
        "part of a long page",
        lambda text: _cut_excerpt(text, "topic " * 20, 40_000),
        (of("# \n"), of("#"), of("topic "), of("# topic\n"), of("topic"), of("\n")),
        ("tools/bundled/web/search_queries.py",),
        most=2_000_000,
    ),
    Place(
        "address",
        lambda text: (parse_url(text), resolve_redirect(parse_url("http://x.test/"), text)),
        (
            of("a", "http://"),
            of("\u0300", "http://"),
            of("a.", "http://"),
            of("[", "http://"),
            of(":", "http://"),
            of("%", "http://x/"),
            of("../", "http://x/"),
            of("xn--", "http://"),
        ),
        ("workspace/urls.py",),
        most=4_096,
    ),
    # --- output of commands
    Place(
        "output",
        captured,
        tuple(ofb(unit) for unit in (*OPENERS, "\x07", "a\n", "\x00")),
        ("tools/bundled/shell/output.py",),
    ),
    Place(
        "output that is not text",
        captured,
        (lambda n: b"\xff" * n, lambda n: b"\xf0\x9f" * (n // 2), lambda n: b"\xc2" * n),
    ),
    # --- commands and flags
    Place(
        "command",
        parse_command,
        (of("a "), of("'"), of("''"), of('"a'), of("\\"), of("a'b'"), of("$("), of("A=")),
        ("workspace/argv.py",),
        most=131_072,
    ),
    Place(
        "flags of a search",
        parse_flags,
        (of("-"), of("-i "), of("-g '"), of("a", "-g "), of("\\"), of("-A1 "), of("-ii"), of("[a", "-g ")),
        ("tools/bundled/search/hits.py",),
        most=2_000,
    ),
    # --- searches
    Place(
        "pattern of a search",
        get_max_search_columns,
        (of("("), of("a*"), of("a?"), of("(?="), of("a|"), of("[\x01-\U0010ffff-]", "(?i)"), of("(?:a|"), of("a{9}")),
        ("workspace/patterns.py",),
        most=512,
    ),
    *(
        Place(
            f"search for {pattern}",
            fallback(pattern),
            (of("a" * 300 + "\n"), of("x" * 2_000 + "\n"), of("a\n")),
            ("tools/bundled/search/ripgrep.py",),
            most=1 << 13,  # the time is checked between long lines
        )
        for pattern in ("a*b", "a.*b", r"\w+\d", "a?a?a?b")
    ),
    Place(
        "line of a search",
        _clean_and_cut_line,
        (of("\udcff"), of("a"), of("é")),
        ("tools/bundled/search/hits.py",),
        most=1 << 22,
    ),
    *(
        Place(
            f"names in {name}",
            lambda text, name=name: find_top_level_names(text, name),
            (
                of("a"),
                of("def "),
                of("a:"),
                of("(" * 250 + "\n"),
                of("pub(a" * 50 + "\n"),
                of("a" * 290 + "\n"),
                of("public " * 40 + "\n"),
                of("a b" * 95 + "\n"),
                of("export \n"),
            ),
            ("tools/bundled/search/symbols.py",),
            most=524_288,
        )
        for name in ("a.py", "a.ts", "a.go", "a.rs", "a.java", "a.c", "a.sh")
    ),
    Place("words", split_singular_words, HOSTILE_NAMES, ("tools/bundled/search/symbols.py",)),
    Place(
        "description of files",
        lambda text: rank_files(text, {("a.py",): ["aa"]}),
        (*HOSTILE_NAMES, of("abcd ")),
        ("tools/bundled/search/overview.py",),
        most=2_000,
    ),
    Place(
        "names of many files",
        lambda text: rank_files(
            "abcdefgi " + "b" * 30, {(text[i : i + 250], f"{i}"): [] for i in range(0, len(text), 250)}
        ),
        (*HOSTILE_NAMES, of("abcdefg."), of("b" * 29 + ".")),
        most=1 << 20,
    ),
    # --- files
    Place(
        "text of a file",
        lambda data: (found := decode_text(data)) and found.displayable_text,
        (ofb("é"), lambda n: b"\xff" * n, lambda n: b"\xff\xfe" + b"\xd8" * n, lambda n: b"\xff\xfe\0\0" + b"\1" * n),
        ("workspace/text.py",),
    ),
    Place(
        "window of a file", streamed, (ofb("a"), ofb("\n"), ofb("\r"), lambda n: b"\xff" * n), ("workspace/text.py",)
    ),
    Place("file name", printable_name, (of("\udcff"), of("a")), ("workspace/paths.py",)),
    Place(
        "replacement",
        lambda text: apply_replacements(text, [TextReplacement(text[: len(text) // 2], "x")], "f"),
        (of("a"), of("ab"), of("\r\n"), of("a\r\n"), of("\n")),
        ("tools/bundled/files/edits.py",),
    ),
    Place(
        "replacement of all",
        lambda text: apply_replacements(text, [TextReplacement(text[:2], "x", allow_multiple=True)], "f"),
        (of("a"), of("ab"), of("\n\r")),
    ),
    Place(
        "diff of texts",
        compared,
        (
            of("a\n"),
            of("a\nb\n"),
            lambda n: "\n".join(f"{i % 150}" for i in range(n // 4)),
            lambda n: "\n".join(f"{i}" for i in range(n // 6)),
            lambda n: "\n".join(f"u{i}\ny{i % 110}" for i in range(n // 10)),
        ),
        most=1 << 20,
    ),
    # --- tools
    *(
        Place(
            f"pattern {pattern} of a schema",
            schema_pattern(pattern),
            (of("a"), of("a", "", "!"), of("ab")),
            most=1 << 22,
        )
        for pattern in ("^(a+)+$", "(a|aa)+$", "(.*)*x", "a{0,50}b", "(a{200}){100}", r"(\w{0,9}\d){0,5}b")
    ),
    *(
        Place(
            f"content of a schema, {encoding or 'as it is'}",
            schema_content(encoding),
            BRACKETS,
            ("tools/schemas.py",),
            most=1 << 22,
        )
        for encoding in ("", "base64", "base32")
    ),
    Place(
        "patterns in a schema",
        lambda text: JsonSchema("x", {"pattern": text}),
        (of("("), of("a{9}"), of("(a{9}){9}"), of(r"\w{0,99}"), of("[a"), of("(" * 99 + "a" + "){99}" * 99)),
        ("tools/schemas.py",),
        most=1 << 17,
    ),
    Place(
        "schema of a tool",
        offered,
        (
            *(make(word) for make in (doubling, nested_schema) for word in ("anyOf", "oneOf", "allOf")),
            wide_schema(lambda i: {"pattern": f"^(a+)+{i}$"}),
            wide_schema(lambda i: {"anyOf": [{"$ref": "#"}] * 2}),
            wide_schema(lambda i: {"$ref": "#/properties/a0"}),
            wide_schema(lambda i: {"enum": [*range(9)]}),
            wide_schema(lambda i: {"items": {"$ref": f"#/properties/a{i // 2}"}, "unevaluatedItems": False}),
        ),
        most=1 << 18,
    ),
    Place(
        "references out of a schema",
        refused_reference,
        (of("http://a.test/"), of("file:///"), of("a#"), of("#/a"), of("#%41"), of("//a.test/"), of("urn:a:")),
    ),
    *(
        Place(
            f"input against a schema of {words}",
            schema_check(words),
            (
                nested_value,
                lambda n: {"x": {f"a{i}": i for i in range(n // 8)}},
                lambda n: {"x": {"x": [0] * (n // 3)}},
            ),
            most=1 << 20,
        )
        for words in ("anyOf", "oneOf", "allOf", "anyOf oneOf allOf")
    ),
    Place("text of a result", replace_surrogates, (of("\ud800"), of("a")), ("tools/conversion.py",)),
    # --- models
    Place(
        "events of a stream",
        parsed_events,
        (ofb("data: x\n"), ofb("data: x\n\n"), ofb("\r"), ofb("a"), ofb("event: ")),
        ("models/_sse.py",),
    ),
    Place(
        "messages of an AWS event stream",
        parsed_messages,
        (
            lambda n: aws_messages(n // 40, b"{}"),
            lambda n: aws_messages(1, b'{"message": "' + b"x" * n + b'"}'),
            lambda n: aws_messages(n // 40, b"{}")[:-1],
            ofb("\x00"),
            ofb("a"),
        ),
        ("models/_aws_events.py",),
    ),
    Place("JSON of a provider", parse_json, JSON_SHAPES, ("models/_json.py",)),
    Place(
        "calls in a text",
        lambda text: parse_written_calls(ModelReply(text)),
        (
            *(
                of(word)
                for word in ("<tool_call>", "<tool_call></tool_call>", "<tool_call><function=a>", "<parameter=")
            ),
            *(of(word, "<tool_call><function=a>") for word in ("<parameter=", "<parameter=a>\n", "</parameter>", ">")),
            of("[", "<tool_call>"),
            of("[", "<tool_call><function=a><parameter=b>"),
            *(of(word) for word in ("<codebuff_tool_call>", "<codebuff_tool_call></tool_call>")),
            of('{"a":', "<codebuff_tool_call>"),
        ),
        ("models/openai_chat/written_calls.py",),
    ),
    Place(
        "thoughts that a model wrote",
        lambda text: parse_written_thoughts(ModelReply(text)),
        (
            *(of(word) for word in ("<think>", "<think></think>", "[THINK]", " ", "</think>\n", "`")),
            of("a", "[THINK]"),
            of(" ", "<think>", "</think>x"),
        ),
    ),
    Place(
        "thoughts in a stream",
        thoughts_in_stream,
        (
            *(of(word) for word in ("<think>", " ", "[THINK]", "<think></think>", "a")),
            of("a", "<think>"),
            of(" ", "<think></think>"),
        ),
    ),
    Place(
        "name of a document",
        make_document_name,
        (of("é"), of("a"), of(" a"), of("."), of("a.")),
        ("models/bedrock_converse/encode.py",),
    ),
    Place("name of a tool", make_safe_tool_name, (of("é"), of("a"), of(" a")), ("models/_wire.py",)),
    Place("beginning of the arguments of a call", can_start_json, BRACKETS, ("models/_call_arguments.py",)),
    Place(
        "line ends of a changed text",
        lambda text: apply_old_line_ends(text, f"x\n{text}"),
        (of("\r"), of("\n"), of("\r\n"), of("\n\r\n"), of("a\nb\r\n")),
        ("workspace/line_ends.py",),
    ),
    Place(
        "pattern of a search of several lines",
        lambda text: [
            _adapt_pattern_to_line_ends(text, SearchFlags(multiline=True, fixed=fixed)) for fixed in (True, False)
        ],
        (of("["), of("[]"), of("[^\\n"), of("\\"), of("\\r"), of("\r"), of("\\n"), of("a\n."), of("[a]")),
        ("tools/bundled/search/ripgrep.py",),
    ),
    Place(
        "data address",
        lambda text: parse_data_url(f"data:{text},{text}"),
        (of("%"), of("%4"), of("%41"), of(";"), of("a;base64"), of("=")),
        ("data/media_types.py",),
    ),
    Place(
        "type of a medium",
        normalize_media_type,
        (of("image/"), of("audio/l"), of(";"), of("application/pdf"), of(" ")),
        ("data/media_types.py",),
    ),
    Place(
        "error reply",
        lambda data: error_from_body(data, 500, {}, CALL),
        (
            *(ofb(u) for u in ("a", "\x1b", "input token count", "thinking", "sk-", "[", '{"a":')),
            ofb("sk-a", '{"error":{"message":"', '"}}'),
            ofb("a", '{"error":{"code":"', '"}}'),
        ),
        ("models/_failures.py",),
        most=1 << 21,
    ),
    Place(
        "key in a message",
        lambda text: make_safe_excerpt(text, 2_000),
        (of("sk-"), of("sk-a"), of("key-" * 3 + " "), of("sk"), of("gsk-a-")),
        ("models/keys.py",),
    ),
    # --- the machine and the views
    Place(
        "what a judge says",
        judged_by_an_agent,
        tuple([of(unit, '{"score": 1, "a": ', "}") for unit in ("[", '{"a":', "1", "{", "}")]),
        ("evaluation/criteria.py",),
    ),
    Place(
        "text on a page",
        shown_on_a_page,
        (of("a"), of("a\n"), of("\r\n"), of("\x1b"), of("\u202e\n"), of("a", "", "\x1b"), of("\u0300")),
        ("debugging/viewer/payload.py",),
    ),
    Place(
        "tool calls in text",
        split_blocks,
        (
            of("<tool_call>"),
            of("<tool_call>{"),
            of("```"),
            of("<tool_call>[</tool_call>"),
            of("<tool_call>{}</tool_call>"),
            of("</tool_call>", "<tool_call>"),
            of("[", "<tool_call>", "</tool_call>"),
            of('{"a":', "<codebuff_tool_call>"),
            of(" ", "<tool_call>{}"),
        ),
        ("machine/blocks.py",),
    ),
    Place(
        "words of an error that are compared",
        lambda text: _describe_error(StepEngineError(text)),
        (of("/a"), of("/"), of("(a:1"), of(":1", "("), of("1", "(:"), of("<a"), of("0", "at 0x"), of("/a", after="'")),
        ("journal/encoding.py",),
    ),
    Place(
        "JSON of an answer",
        answer_in,
        (*BRACKETS, of("```\n"), of("```json\n[\n"), of("[", "```\n", "\n```"), of("`"), of(" ```\n")),
        ("data/json.py",),
    ),
    Place(
        "several options in an answer",
        lambda text: to_answer(text, Question("q", "Which?", ["a", "a, b", "b"], multi_select=True)),
        (
            of("a"),
            of(","),
            of(" ", after="a"),
            of(" ", "a, b", "c"),
            *(of(u, after="c") for u in ("a, ", "a, b, ", "a,  b ,")),
        ),
        ("data/questions.py",),
    ),
    Place(
        "id of an agent",
        lambda text: find_matching_id(text, ["a/b@1", "c"]),
        (of("a"), of("a/"), of("@"), of("/"), of("_")),
        ("data/definition.py",),
    ),
    Place(
        "thoughts in a text",
        split_thoughts,
        (
            *(of(u) for u in ("<think>", "</think>", "<think></thinking>", "<", "</think> ", "\n")),
            *(of(u, "", "</think>\n") for u in ("`", "`a``a", "```\n", "~~~\n", "<think>", "` ", " ", "`\n\n")),
            of("<think>a</think>"),
            of(" ", "</think>", "a"),
        ),
    ),
    Place(
        "what a terminal shows",
        lambda text: visible(text, strict=True),
        (of("\u0300"), of("\ufe00"), of("\x1b"), of("é")),
        ("data/visible.py",),
    ),
    Place(
        "message of an error",
        lambda text: (replace_lone_surrogates(text), StepEngineError(text)),
        (of("\ud800"), of("é")),
        ("data/json.py", "errors.py"),
        most=1 << 22,
    ),
    # --- journals
    Place(
        "redaction of known values",
        lambda text: Redactor(KNOWN, shapes=False).redact_json_text(text),
        SECRET_SHAPES,
        ("redaction.py",),
    ),
    Place("redaction of all", lambda text: make_redactor("all", {}).value({"a": text}), SECRET_SHAPES),
    Place("redaction of what trickles in", trickled, SECRET_SHAPES, most=1 << 18),
    Place(
        "list of an MCP server that no parser takes",
        reread,
        (*BRACKETS, of('\\"'), of('"\\ud800",'), of('"a"[')),
        ("adapters/mcp/lenient_messages.py",),
        most=1 << 24,
    ),
    Place(
        "last words of an MCP server",
        last_words,
        (of("\x1b[8m"), of("\u0300"), of("\n")),
        ("adapters/mcp/stdio.py",),
        most=1 << 16,
    ),
    Place("redaction in bytes", lambda text: Redactor(KNOWN, shapes=True).redact_binary(text.encode()), SECRET_SHAPES),
    Place(
        "search for secrets",
        scanned,
        tuple(lambda n, shape=shape: shape(n).encode() for shape in SECRET_SHAPES),
        ("journal/secret_scan.py",),
    ),
    Place(
        "line of a journal",
        lambda line: (parse_members(line, "x"), parse_members_strictly(line, "x")),
        JSON_SHAPES,
        ("journal/line_reader.py",),
    ),
    Place(
        "form of a line",
        lambda line: (glimpse(line), verify_checksum(line, 0)),
        (
            ofb("0.", '{"kind":"intent","path":"'),
            ofb("0", '{"kind":"result","path":"","seq":'),
            ofb(',"program_line":1', '{"kind":"intent","path":"","seq":1,"fp":"' + "0" * 32 + '","effect":{"type":"A"'),
            ofb(',"gather":', '{"kind":"intent","path":"","seq":1,"fp":"' + "0" * 32 + '","effect":{"type":"A"'),
            ofb(',"crc":"0'),
        ),
        ("journal/line_reader.py", "journal/records.py"),
    ),
    Place(
        "signature in a journal",
        JournalSignature.from_line,
        (
            ofb("0123456789abcdef", f'{SIGNED},"records":1,"digest":"{"0" * 64}","marks":"'),
            ofb("0", f'{SIGNED},"records":'),
            ofb("{"),
        ),
        ("journal/signing.py",),
    ),
    Place(
        "marks of a journal",
        lambda text: (
            describe_record_changes(text, text[::-1], 1),
            describe_record_changes(text, text[1:] + text[:1], 1),
        ),
        (of("a"), of("ab"), of("0123456789")),
        most=1 << 18,
    ),
    Place(
        "journal",
        lambda data: read_lines(data, "x"),
        (json_lines("{}"), json_lines(""), json_lines('{"kind":"head"'), ofb("a"), json_lines("[")),
    ),
    Place(
        "letter of a mailbox",
        lambda line: StoredMessage.parse(line, "x"),
        tuple(
            lambda n, name=name, shape=shape: encode_line(f'{{"run":"r","kind":"message","{name}":{shape(n)}}}', 0)[0][
                :-1
            ]
            for name in ("topic", "path", "sent", "value")
            for shape in (of("a", '"', '"'), of("1.", '"', '"'), of("[1,"), of("9"))
        ),
    ),
    Place(
        "tree of a journal",
        lambda text: redact_and_shorten_tree({"a": text}, portable=True),
        (of("<tmp>"), of("<tmp>/pytest-of-"), of("<tmp>/pytest-of-a/pytest-"), of("<tmp>/pytest-of-a/pytest-1")),
        ("journal/show.py",),
        most=1 << 21,
    ),
    # --- sessions, policies, settings
    Place(
        "command before rules",
        judged,
        tuple(
            of(unit, before)
            for unit, before in (
                ("a ", "env "),
                ("-a ", "git "),
                ("git ", "env git "),
                ("a/", "cat "),
                ("../", "cat "),
                ("=", "cat "),
                ("git;", ""),
                ("é", "cat "),
                ("'a  bc' ", "sh -c a "),
                ("bwrap ", ""),
                ("env -S ", ""),
                ("<<a\n", "cat "),
                ("$(", ";"),
                (";/", "sed "),
                ("\n ", "sed x "),
                ("|a ", "awk "),
                ("sh -c '", ""),
            )
        ),
        ("permissions/commands.py", "permissions/script_commands.py", "permissions/wrappers.py"),
        most=131_072,
    ),
    Place(
        "input before rules",
        asked,
        (of("a"), of("a/"), of("ab"), of(".a", "https://"), of("/", "https://"), of("src/a/"), of("\u0300")),
        ("permissions/rules.py",),
        most=1 << 18,
    ),
    Place(
        "settings",
        loaded(lambda path: settings_of(path.parent, {})),
        (
            *(
                ofb(*parts)
                for parts in (
                    ("a.",),
                    ("a.", "", "=1"),
                    ("a.", "[", "a]"),
                    ("[",),
                    ("a={",),
                    ("a=1\n",),
                    ("[[a]]\n",),
                    ("a.b=1\n",),
                    ("9", "a="),
                    ("key", "", "=1"),
                )
            ),
            lambda n: "".join([f"[permissions.a{i}]\nb = {i}\n" for i in range(n // 25)]).encode(),
        ),
        ("engine/settings.py",),
        most=1 << 18,
    ),
    Place(
        "variable in settings",
        lambda text: settings_of(Path("/"), {"STEPENGINE_PROVIDERS__X__KEY": text, f"STEPENGINE_{text}__X": "1"}),
        (of("a"), of("{"), of("A_"), of("__"), of("secrets")),
        ("engine/settings.py",),
        most=131_072,
    ),
    # --- deployments
    Place(
        "names of steps in an error of the database",
        lambda text: [*NAMES_OF_STEPS.finditer(text)],
        (of("a"), of("tool:"), of("a:0"), of("tool:" + "0" * 31), of("DBOS."), of("A", "DBOS."), of("recorde")),
        ("durable/step_names.py",),
    ),
    # --- bundled agents
    *(
        Place(
            f"edited file {suffix}",
            parses(suffix),
            tuple(of(*parts) for parts in units),
            ("agents/editor.py",),
            most=1 << 21,
        )
        for suffix, units in {
            "py": (
                ("(",),
                ("-",),
                ("lambda:",),
                ("x;",),
                ('f"{',),
                ("()", "", "!"),
                ("if a:\n ",),
                ("a if a else ",),
                ("\\\n",),
                ("@a\n",),
            ),
            "json": (("[",), ('{"a":',), ("9",), ('"',), ("[1,",)),
            "toml": (
                ("a.",),
                ("a.", "", "=1"),
                ("a." * 90 + "b=1\n",),
                ("[",),
                ("a=1\n",),
                ("[[a]]\n",),
                ("a={",),
                ("9", "a="),
            ),
        }.items()
    ),
    Place(
        "listing of files",
        listed,
        (of("1"), of("1."), of("- "), of("1 "), of("a\n"), of("../"), of("1. a\n"), of("`"), of("-", "", "a")),
        ("agents/file_picker.py",),
    ),
    Place("comparison of journals", differing, (of("a"), of("ab"), of("abcdefghijklmnop")), most=1 << 17),
    # --- recordings
    Place(
        "cassette",
        lambda data: parse_cassette(data, "x"),
        (ofb("["), ofb("&a "), ofb("a: &a\n- *a\n"), ofb("a: "), ofb("? "), ofb("!"), ofb('"\\u')),
        ("testing/cassette_files.py",),
        most=1 << 20,
    ),
    Place(
        "stream of a cassette",
        cleaned_stream,
        (of("data: {\n"), of('data: {"a":"sk-"}\n\n'), of("\r"), of("data:"), of("data: [[[\n")),
        ("testing/traffic_redaction.py",),
        most=1 << 16,
    ),
    Place(
        "request of a cassette",
        request_of_a_cassette,
        (
            of("["),
            of("data:image/a;a"),
            of("data:a;base64,"),
            of('},{"role":"user","content":"a"'),
            of('},{"role":"tool","tool_call_id":"a","content":"a"'),
            of('},{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"a"}}]'),
            of('},{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"a","input":{}}]'),
            of('},{"type":"function_call","call_id":"a","name":"a","arguments":"{}"'),
            of('},{"type":"function_call_output","call_id":"b","output":"a"'),
        ),
        ("testing/cassette_requests.py",),
        most=1 << 20,
    ),
    Place(
        "address of a cassette",
        lambda text: parse_model_call(
            RecordedRequest("POST", f"https://a.test{text}", (), b'{"messages":[],"contents":[]}')
        ),
        (of("/models/"), of("/models/a:g"), of("/deployments/a"), of("/chat/completions"), of("a:"), of("/")),
        most=1 << 20,
    ),
    Place(
        "events of a cassette",
        EVENT.findall,
        (ofb("\n"), ofb("\r"), ofb("a"), ofb("\r\n"), ofb("a\n")),
        ("testing/httpx_exchanges.py",),
    ),
    Place(
        "end of a recorded stream",
        lambda text: is_stream_complete(text, read_to_end=True),
        (of("data: {\n"), of("\r"), of("data: [[["), of('data: {"candidates":[{}]}\n\n')),
        ("testing/stream_ends.py",),
    ),
    Place(
        "compressed body of a recorded reply",
        lambda data: decode_body(data, "gzip"),
        (lambda n: gzip.compress(b"") * (n // 20), lambda n: gzip.compress(b"a" * n), ofb("\x1f")),
    ),
    Place(
        "placeholder of a cassette",
        MARK.findall,
        (of("<redacted:"), of("<redacted:a~"), of("a"), of("~0")),
        ("testing/cassette_matching.py",),
    ),
    Place(
        "placeholder of a cassette for what always counts",
        COUNTED_MARK.findall,
        (of("<redacted:"), of("<redacted:a="), of("a"), of("=0", "<redacted:")),
        ("testing/cassette_matching.py",),
    ),
    Place(
        "what is nearly JSON, in a cassette",
        lambda text: Cleaner(KNOWN).clean_body(f'f({{"password": 1, {text}'.encode(), "text/javascript"),
        (of('"password":'), of('"'), of('\\"'), of('"a\\'), of("["), of("a"), of("?"), of("?a"), of("&a=b"), of("1")),
        ("redaction.py", "testing/traffic_redaction.py"),
        most=1 << 18,
    ),
    Place(
        "boundary of a multipart message",
        lambda text: find_boundary(f"multipart/form-data; {text}"),
        (of("boundary="), of("a", "boundary="), of(" ", "boundary="), of("b")),
        ("testing/cassette_matching.py",),
    ),
    Place(
        "multipart body of a cassette",
        lambda data: Cleaner(KNOWN).clean_body(data, "multipart/form-data; boundary=b"),
        (
            ofb("--b\r\n"),
            ofb('--b\r\nContent-Disposition: form-data; name="token"\r\n\r\nx\r\n'),
            ofb("\r\n"),
            ofb(";name=", "--b\r\n", "\r\n\r\nx"),
            ofb("a-", "--b\r\n;name=", "\r\n\r\nx"),
            ofb("content-type: ", "--b\r\n", "\r\n\r\nx"),
        ),
        ("testing/traffic_redaction.py",),
    ),
    Place(
        "names of members",
        may_name_secret_member,
        (of("token"), of("token1"), of("key_-."), of("\\", '"key'), of("passw"), of('"'), of("\u0130")),
        ("data/secret_names.py",),
    ),
    Place(
        "name of a secret",
        lambda text: (is_secret_name(text, "member"), is_secret_name(text, "variable")),
        (of("a"), of("a_"), of("aA"), of("AAa"), of("1"), of("[]"), of("\u0130")),
        ("data/secret_names.py",),
    ),
    Place(
        "body of a cassette",
        lambda data: Cleaner(KNOWN).clean_body(data, "text/plain"),
        tuple(lambda n, shape=shape: shape(n).encode() for shape in SECRET_SHAPES),
        ("testing/traffic_redaction.py",),
    ),
    # --- what another server of runs says
    # --- what clients of a server of runs send
    Place(
        "signature of an event",
        as_signatures,
        (of("t=1,"), of("v1=a,"), of(",", "t=1"), of("9", "t=1,v1="), of("v1,a "), of("whsec_")),
        ("server/webhooks.py",),
        most=1 << 16,
    ),
    Place(
        "headers of a request",
        lambda text: (HOST.fullmatch(text), ORIGIN.fullmatch(f"https://{text}"), as_headers(text)),
        (of("a"), of("["), of(":"), of("a.", "[", "]"), of(";"), of("stepengine=a;"), of("9", "a:")),
        ("server/access.py",),
        most=1 << 16,
    ),
)

APART = {
    "what this package, or a process or server of its own, has just written": """
        adapters/acp/program.py cli/app.py cli/debug_forks.py cli/debug_navigation.py cli/journals.py
        data/object_codec.py data/spellings.py data/typed_values.py debugging/debugger.py debugging/desk.py
        debugging/edits.py debugging/jobs.py debugging/viewer/page.py debugging/walks.py durable/register.py durable/sessions.py
        durable/wire.py engine/session_journals.py evaluation/case_runs.py evaluation/reply_book.py
        evaluation/report_pages.py helpers/calls.py models/_reply.py models/openai/encode.py
        machine/plan.py models/openai_chat/encode.py server/ledger.py server/problems.py server/processes.py server/stored_states.py
        testing/cassette_misses.py testing/conformance/journals.py testing/installation_checks.py
        testing/processes/broker.py testing/processes/channel.py testing/processes/forms.py
        testing/recordings.py tools/bundled/names.py tools/bundled/reference.py tools/bundled/shell/sandbox.py
        tools/bundled/web/html_worker.py workspace/installation.py workspace/worker.py
    """,
    "the code, names, words and secrets of whoever runs this process": """
        adapters/mcp/names.py cli/code_trust.py cli/commands/debug.py cli/deployment.py
        cli/options.py cli/running_studios.py cli/screen/confirm.py cli/screen/console.py cli/state_folder.py
        data/placeholders.py debugging/expressions.py evaluation/improvement_search.py
        data/tools.py durable/database.py engine/catalog.py engine/handler_sources.py engine/projects.py
        engine/schedules.py evaluation/alterations.py evaluation/checks.py evaluation/impact.py evaluation/origins.py
        evaluation/result_folders.py evaluation/scoring.py journal/line_macs.py journal/recorded_part.py journal/verification.py machine/author.py
        models/anthropic/encode.py models/known_models.py pytest_plugin/places.py testing/patching/httpcore_pools.py
        testing/patching/wire.py testing/processes/child_commands.py testing/processes/frozen_values.py
        testing/snapshots.py tools/signatures.py workspace/network.py workspace/workspace.py
    """,
    "the name of a model, which its author gave: a few characters, of which no class repeats inside another": """
        evaluation/prices.py models/_limits.py models/_programs.py models/_settings.py models/_thinking_levels.py
        models/anthropic/families.py models/anthropic/request.py models/base.py models/bedrock_converse/families.py
        models/google/encode.py models/google/request.py models/openai/__init__.py models/openai_chat/__init__.py
        models/openai_chat/request.py models/pricing.py
    """,
    "at most some kilobytes in one class of characters, or bytes whose error of decoding is caught": """
        adapters/acp/kept.py adapters/acp/prompts.py adapters/acp/servers.py adapters/acp/workplace.py
        adapters/mcp/owned_sessions.py cli/commands/impact.py cli/commands/runs.py cli/commands/undo.py
        cli/perform.py debugging/texts.py data/origins.py data/quantities.py data/schemas.py data/state.py
        engine/neighbour_imports.py engine/trust.py evaluation/pinned_tests.py journal/files.py journal/mailbox.py
        journal/journal_repair.py journal/journal_files.py journal/provenance.py journal/recorded_runs.py journal/sqlite.py
        models/_byte_reader.py models/bedrock_converse/stream.py models/google/interactions/decode.py
        runtime/logs.py sandbox/untrusted_handlers.py testing/conformance/providers.py testing/exchanges.py
        testing/patching/aiohttp_sessions.py testing/recorded_errors.py testing/simulation.py
        tools/bundled/note_tools.py tools/bundled/search/tools.py tools/bundled/shell/process.py tools/definition.py
        workspace/containers.py workspace/file_formats.py workspace/guard.py workspace/guarded_database.py
        pytest_plugin/messages.py workspace/whole_files.py workspace/writes.py
    """,
}
"""Files that parse other text, by what text it is. Each of their expressions takes time in proportion to it."""


def of_bytes(read: Callable[[bytes], Any]) -> Callable[[str], Any]:
    """Return what reads a text as its bytes."""
    return lambda text: read(text.encode("utf-8", "surrogatepass"))


JSON_READERS: tuple[tuple[str, Callable[[str], Any]], ...] = (
    ("workspace/connection.py", of_bytes(framed)),
    ("workspace/remote_files.py", of_bytes(far_listing)),
    ("adapters/acp/stdio.py", of_bytes(parse_message)),
    ("adapters/ag_ui", of_bytes(lambda data: parse_run_input(plain(parse_strict_json(data))))),
    ("adapters/external/remote.py", of_bytes(remote_said)),
    ("adapters/mcp/http.py", served),
    ("adapters/mcp/results.py", result_text),
    ("cli/commands/fork.py", _make_edit_function),
    ("cli/commands/send.py", _sent),
    ("data/wire.py", imported_call),
    ("durable/deployment.py", lambda text: parse_recorded_json(text, "x")),
    ("durable/messages.py", parse_message_json),
    ("engine/packages.py", of_bytes(parse_declaration)),
    ("models/_json.py", lambda text: make_call_part("x", text, {})),
    ("permissions/policy.py", of_bytes(loaded(Policy.load))),
    ("redaction.py", parse_if_json),
    ("server/access.py", of_bytes(lambda data: _parse_entries(data, Path("tokens.json")))),
    ("server/bodies.py", of_bytes(lambda data: validate_as(StartRun, parse_strict_json(data)))),
    ("server/reports.py", of_bytes(parsed_report)),
    ("server/webhooks.py", of_bytes(as_an_event)),
    ("server/webhooks.py, its file", of_bytes(lambda data: Webhooks.parse(data, "webhooks.json"))),
    ("sessions/stores.py", of_bytes(lambda data: _parse_messages(iter([data]), "x"))),
    ("sessions/stores.py, a file", of_bytes(loaded(_read_json))),
    ("sessions/stores.py, a row", lambda text: _parse_json(text, "x")),
    ("testing/cassette_bodies.py", indent_json),
    ("tools/arguments.py", validated),
    ("tools/repair.py", mended_input),
)
"""What reads JSON with a parser in C, whose time is linear: all that can happen is that it is nested too deep, or none."""


@pytest.mark.spec("reliability:R23")
@pytest.mark.parametrize("read", [read for _, read in JSON_READERS], ids=[file for file, _ in JSON_READERS])
def test_hostile_json_is_read_or_refused_by_its_reader(read: Callable[[str], Any]) -> None:
    for shape in BRACKETS:
        with contextlib.suppress(StepEngineError, ValueError):
            read(shape(100_000))


# --- one test over the table ----------------------------------------------------------------------------------------

EACH_PLACE = pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)


def seconds_of(place: Place, text: Any) -> float:
    """
    Return the time on a processor; refusing the text is fine. The collector is off: what it walks is the whole test process,
    which is also why nothing is collected first: 0.2 s, before each of thousands of measurements.
    """
    gc.disable()
    try:
        before = time.process_time()
        with contextlib.suppress(StepEngineError, ValueError):
            place.run(text)
        return time.process_time() - before
    finally:
        gc.enable()


@pytest.mark.speed
@pytest.mark.spec("reliability:RS12", "reliability:R23")
@EACH_PLACE
def test_doubling_the_text_at_most_doubles_the_time(place: Place) -> None:
    grown = [figures for shape in place.shapes if (figures := growth_of(place, shape))]

    assert not grown, grown


def growth_of(place: Place, shape: Shape) -> str:
    """Return the figures of a shape with which the time grows faster than the text; nothing when it does not."""
    n = min(1_024, place.most // 4)
    while seconds_of(place, shape(n)) < MEASURABLE and 8 * n <= place.most:
        n *= 2
    texts = [shape(n), shape(2 * n), shape(4 * n)]
    taken = [seconds_of(place, text) for text in texts]
    for _ in range(ROUNDS - 1):
        if not grows(taken):
            return ""
        time.sleep(0.2)  # whatever disturbed these figures may be over then
        taken = [min(took, seconds_of(place, text)) for took, text in zip(taken, texts, strict=True)]
    figures = ", ".join(f"{size:,}: {took * 1000:.1f} ms" for size, took in zip((n, 2 * n, 4 * n), taken, strict=True))
    return f"shape {place.shapes.index(shape)}: {figures}" if grows(taken) else ""


def grows(taken: list[float]) -> bool:
    """
    Return whether four times the text takes about sixteen times the time; what is too short to be measured counts as 20 ms.
    Two doublings are judged together: a cache that gets too small for the text makes one of them dear.
    """
    # A longer text that took less shows that something else took the time of the shorter one.
    first, *_, last = [min(taken[number:]) for number in range(len(taken))]
    return last >= GROWTH * max(first, MEASURABLE)


# --- a cancel is obeyed within a second -----------------------------------------------------------------------------


async def searching(folder: Path, name: str, prefer_python: bool) -> Any:
    (folder / ".gitignore").write_text("\n".join(["*[!b]" * 100 + f"*b{n}" for n in range(1_500)]))
    for number in range(300):
        (folder / f"{'ab' * 100}{number}.py").write_text("x" * 2_000 + "\n")
    tools = ToolRegistry([*file_tools(folder), *search_tools(folder, prefer_python=prefer_python)])
    given = {
        "code_search": {"pattern": "x.*x.*y" if prefer_python else "x"},
        "read_subtree": {},
    }
    return tools.execute(name, given[name])


async def html(folder: Path) -> Any:
    return read_page(Fetched("http://x.test/", 200, "text/html", b"<b>" * 600_000))


async def flooding(folder: Path) -> Any:
    (folder / "f").write_bytes("\x9d".encode() * 1_000_000)
    return ToolRegistry(shell_tools(folder, shell="bash")).execute(
        "run_terminal_command", {"command": "while true; do cat f; done", "timeout_seconds": 20}
    )


CANCELLED: dict[str, Callable[[Path], Awaitable[Any]]] = {
    **{
        f"{name} with {'Python' if python else 'ripgrep'}": lambda folder, name=name, python=python: searching(
            folder, name, python
        )
        for name in ("code_search", "read_subtree")
        for python in (False, True)
    },
    "HTML": html,
    "output": flooding,
}


@pytest.mark.spec("reliability:R23")
@pytest.mark.parametrize("name", CANCELLED)
@pytest.mark.speed
async def test_a_cancellation_takes_effect_within_a_second(tmp_path: Path, name: str) -> None:
    """
    Shortest of three, for machines that have other work.
    """
    taken = []
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        running = asyncio.ensure_future(await CANCELLED[name](folder))
        await asyncio.sleep(0.2)
        before = time.monotonic()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        taken.append(time.monotonic() - before)
        if taken[-1] < SECONDS:
            break

    assert min(taken) < SECONDS, taken


# --- no file is left out --------------------------------------------------------------------------------------------

CALLED = re.compile(r"(?<!def )(?<![\w.])[\w.]++(?=\()")
PARSER = re.compile(
    r"(?:re\.(?!escape$)|difflib\.(?!Match)|html\.(?!escape)|xml\.|pickle\.|plistlib\.)[\w.]+"
    r"|(?:jiter\.|pydantic_core\.)?from_json|[\w.]*(?:\.decode|\.raw_decode|validate_json|get_close_matches)"
    r"|(?:[\w.]*\.)?(?:json\.loads?|shlex\.split|tomllib\.loads?|fnmatch\.f\w*|glob\.glob|ast\.parse|ast\.literal_eval"
    r"|yaml\.(?:load|safe_load|parse|scan|compose)\w*|codecs\.(?:decode|getdecoder|getincrementaldecoder|lookup)"
    r"|JSONDecoder|JustHTML|HTMLParser|BeautifulSoup|SequenceMatcher|SchemaValidator)"
)
"""Calls of expressions, codecs and parsers."""


@pytest.mark.deep
@pytest.mark.smoke
def test_every_parsing_file_is_listed() -> None:
    found = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    found |= {path.relative_to(AGENTS.parent).as_posix(): path for path in AGENTS.rglob("*.py")}
    called = {name: {*CALLED.findall(path.read_text(encoding="utf-8"))} for name, path in found.items()}
    parsing = {name for name, names in called.items() if any(map(PARSER.fullmatch, names))}
    covered = {file for place in PLACES for file in place.covers} | {file for file, _ in JSON_READERS if file in found}
    apart = {file for files in APART.values() for file in files.split()}

    assert sorted(parsing - covered - apart) == [], "untrusted text? then into PLACES, else into APART"
    assert sorted((covered | apart) - parsing) == [], "nothing is parsed there any more"
    assert covered & apart == set()
