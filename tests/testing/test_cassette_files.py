"""
Cassette files: what is read, what is refused, and that plain vcrpy and we read what the other writes.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
from http.client import IncompleteRead
from pathlib import Path
from random import Random

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.errors import DataError
from stepengine.testing import Cassette
from stepengine.testing.cassette_files import (
    Interaction,
    RecordedRequest,
    RecordedResponse,
    dump_cassette,
    parse_cassette,
)
from stepengine.testing.recorded_errors import error_to_json
from stepengine.workspace.atomic import replace_path

JSON = (("content-type", "application/json"),)
SSE = (("content-type", "text/event-stream"),)
URL = "https://api.example.com/v1/messages"


def talk(asked: object, answered: object, **response: object) -> Interaction:
    request = RecordedRequest("POST", URL, JSON, json.dumps(asked).encode())
    return Interaction(request, RecordedResponse(200, "OK", JSON, json.dumps(answered).encode(), **response))


def file_of(request: str = "body: ''", response: str = "body: {string: ok}", more: str = "") -> bytes:
    return (
        f"interactions:\n- request:\n    method: POST\n    uri: {URL}\n    headers: {{}}\n    {request}\n"
        f"  response:\n    status: {{code: 200, message: OK}}\n    headers: {{}}\n    {response}\n{more}version: 1\n"
    ).encode()


def one(data: bytes) -> Interaction:
    (interaction,) = parse_cassette(data, "c.yaml")
    return interaction


@pytest.mark.spec("replay:C1")
@pytest.mark.parametrize(
    ("written", "bytes_"),
    [
        ('body: \'{"a": "\\u00e4"}\'', b'{"a": "\\u00e4"}'),
        ("body: null", b""),
        ("body: !!binary /9j/", b"\xff\xd8\xff"),
        (
            "parsed_body: {a: [2.5, null, true, ä]}",
            '{\n  "a": [\n    2.5,\n    null,\n    true,\n    "ä"\n  ]\n}'.encode(),
        ),
        ("parsed_body: {day: 2024-01-02}", b'{\n  "day": "2024-01-02"\n}'),
        ("body: {type: json, content: {a: 1}}", b'{\n  "a": 1\n}'),
        ("body: {type: text, content: ä}", "ä".encode()),
        ("body: {type: binary, content: ff00}", b"\xff\x00"),
        ("body: {type: binary, content: !!binary /9j/}", b"\xff\xd8\xff"),
        ("body: {type: none}", b""),
    ],
)
def test_every_known_form_of_a_body_is_read(written, bytes_):
    """
    vcrpy's text and binary, and bodies with a type, give the bytes that went over the wire; of trees, whose bytes nobody knows, those
    of our own files.
    """
    asked = one(file_of(request=written))
    as_response = (
        written
        if written.startswith("parsed") or "type:" in written
        else written.replace("body:", "body: {string:") + "}"
    )
    answered = one(file_of(response=as_response))

    assert bytes_ == asked.request.body
    assert bytes_ == answered.response.body


@pytest.mark.spec("replay:C1")
def test_headers_are_read_in_every_form_and_case():
    data = file_of().replace(
        b"headers: {}", b"headers: {X-One: a, X-Two: [b, !!binary Yw==], set-cookie: !!binary ZA==}", 1
    )

    assert (("x-one", "a"), ("x-two", "b"), ("x-two", "c"), ("set-cookie", "d")) == one(data).request.headers


@pytest.mark.spec("replay:C1", "reliability:R20")
@pytest.mark.parametrize(
    "tagged",
    [
        "!!python/object/apply:os.system [echo hi]",
        "!custom a",
    ],
)
def test_tags_of_any_language_are_refused(tagged):
    with pytest.raises(DataError, match=r"c\.yaml cannot be read as plain YAML"):
        parse_cassette(file_of(request=f"body: {tagged}"), "c.yaml")


def bomb(levels: int, width: int) -> bytes:
    lines = ["a0: &a0 lol"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return ("\n".join(lines) + "\ninteractions: []\n").encode()


@pytest.mark.spec("replay:C1")
@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"interactions: " + b"[" * 1_000_000, "levels of nesting"),
        (b"a: &a x\nb: [" + b"*a, " * 1_001 + b"]\ninteractions: []\n", "aliases"),
        (bomb(12, 10), "characters with its aliases expanded"),
        (b"interactions: &a [*a]\n", "aliases inside their own value"),
    ],
    ids=["deep", "aliases", "expanding", "endless"],
)
def test_a_file_that_would_exhaust_stack_or_memory_is_refused(data, what):
    with pytest.raises(DataError, match=what):
        parse_cassette(data, "c.yaml")


@pytest.mark.spec("replay:C1")
def test_a_file_beyond_the_size_cap_is_refused(monkeypatch):
    data = file_of()
    monkeypatch.setattr("stepengine.testing.cassette_files.MAX_BYTES", len(data) - 1)

    with pytest.raises(DataError, match=f"has {len(data)} bytes"):
        parse_cassette(data, "c.yaml")


@pytest.mark.spec("replay:C1")
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not a cassette"),
        (b"interactions: [", "cannot be read as plain YAML"),
        (b"\xff\xfe\x00", "cannot be read as plain YAML"),
        (b"interactions: []\nversion: 2", "has cassette version 2"),
        (b"interactions: []\nsurprise: 2", r"\$ has the unknown key 'surprise'"),
        (b"interactions: [3]", r"interactions\[0\] is 3; use a mapping"),
        (file_of(more="  surprise: 1\n"), r"interactions\[0\] has the unknown key 'surprise'"),
        (file_of("body: [a]"), r"interactions\[0\]\.request\.body is \['a'\]"),
        (file_of("parsed_body: {a: .nan}"), r"interactions\[0\]\.request\.parsed_body is not JSON"),
        (file_of("parsed_body: {1: a}"), r"interactions\[0\]\.request\.parsed_body is not JSON"),
        (file_of("body: {type: json5, content: a}"), r"interactions\[0\]\.request\.body\.type is 'json5'"),
        (file_of("body: {type: binary, content: xyz}"), r"interactions\[0\]\.request\.body\.content is 'xyz'"),
        (file_of(response="body: ok"), r"interactions\[0\]\.response\.body is 'ok'"),
        (file_of(response="body: {base64: ok}"), r"interactions\[0\]\.response\.body has the unknown key 'base64'"),
        (file_of().replace(b"code: 200", b"code: ok"), r"interactions\[0\]\.response\.status is"),
        (file_of().replace(b"headers: {}", b"headers: {a: 3}", 1), r"interactions\[0\]\.request\.headers\.a is 3"),
        (file_of().replace(b"method: POST", b"method: 3"), r"interactions\[0\]\.request\.method is 3"),
        (file_of("body: !!int x"), "a value does not match its type"),
        (file_of(f"body: {'9' * 5_000}"), "a value does not match its type"),
        (
            file_of().replace(b".com/", b".com:port/"),
            r"interactions\[0\]\.request\.uri is .*; use an address such as 'https://host/path'",
        ),
        (
            file_of().replace(b"//api", b"//[api"),
            r"interactions\[0\]\.request\.uri is .*; use an address such as 'https://host/path'",
        ),
    ],
)
def test_an_invalid_cassette_is_refused_with_file_interaction_and_key(data, message):
    with pytest.raises(DataError, match=f"c.yaml.*{message}"):
        parse_cassette(data, "c.yaml")


@pytest.mark.deep
@pytest.mark.smoke
def test_every_prefix_of_a_file_is_read_or_refused():
    data = dump_cassette([talk({"n": n}, {"ä": "b\n"}) for n in range(2)])

    for end in range(len(data)):
        try:
            assert len(parse_cassette(data[:end], "c.yaml")) <= 2
        except DataError:
            continue


ODD = (
    b"&a ", b"*a", b"!!binary ", b"!!python/object ", b"{", b"[", b"- ", b": ", b"? ", b"|", b">", b"'", b'"', b"\t", b"%", b"---\n", b"\0",
    b"\xff", b"9" * 5_000, b".inf", b".nan", b"null", b"<<: ", b"0x", b"1e999", b"2020-01-01", b"\r", b"[]", b"{}", b"!!int x", b"!!float y",
    b"!!set {a}", b"!!omap [a: 1]", b"!!timestamp x", b"!!bool x", b"1:30", b"? {a: 1} : b", b"http://[", b"http://a:b/",
)  # fmt: skip


def mutant(data: bytes, random: Random) -> bytes:
    """
    Return another file: one to four things in it are changed, left out, repeated or replaced by something odd.
    """
    for _ in range(random.randint(1, 4)):
        lines, at = data.split(b"\n"), random.randrange(len(data) or 1)
        line = random.randrange(len(lines))
        match random.randrange(5):
            case 0:
                data = data[:at] + random.choice(ODD) + data[at + random.randint(0, 12) :]
            case 1:
                data = data[:at] + data[at + random.randint(1, 60) :]
            case 2:
                data = data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :] if data else b"x"
            case 3:
                lines[line] = random.choice(lines)
                data = b"\n".join(lines)
            case _:
                lines[line] = lines[line].partition(b": ")[0] + b": " + random.choice(ODD)
                data = b"\n".join(lines)
    return data


@pytest.mark.spec("replay:C1", "reliability:R22")
def test_a_changed_file_round_trips_or_is_refused_by_name():
    base = dump_cassette([talk({"n": n, "text": "one\ntwo"}, {"n": n}) for n in range(2)])
    refusals, read = [], 0
    for number in range(250):
        try:
            found = parse_cassette(mutant(base, Random(number)), "c.yaml")
        except DataError as error:
            refusals.append(error.message)
            continue
        dump_cassette(Cassette(found).interactions)
        read += 1

    assert [] == [message for message in refusals if "c.yaml" not in message]
    assert min(read, len(refusals)) > 5


@pytest.mark.spec("replay:C2")
def test_json_bodies_are_written_one_member_per_line():
    line = "ein langer Satz mit ä und — und 語, " * 20

    plain = Interaction(RecordedRequest("POST", URL, (), line.encode()), RecordedResponse(200))
    assert f"body: '{line}'" in dump_cassette([plain]).decode()

    written = dump_cassette([talk({"z": line, "a": {"emoji": "😀", "sep": "\u2028", "del": "\x7f"}}, {})]).decode()

    assert (
        "    body: |-\n"
        "      {\n"
        f'        "z": "{line}",\n'
        '        "a": {\n'
        '          "emoji": "\\ud83d\\ude00",\n'
        '          "sep": "\\u2028",\n'
        '          "del": "\\u007f"\n'
        "        }\n"
        "      }\n"
    ) in written


texts = st.text() | st.text("ab: -#\n\r\t'\"\\{}[]&*!|>%@`\x85\u2028\ufeff😀")
trees = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)
bodies = st.one_of(
    trees.map(lambda tree: (JSON, json.dumps(tree).encode())),
    st.text().map(lambda text: (SSE, text.encode())),
    st.binary().map(lambda data: ((("content-type", "image/png"),), data)),
    st.binary().map(lambda data: ((("content-encoding", "gzip"),), gzip.compress(data))),
)


def value_of(message) -> object:
    try:
        return json.loads(message.body)
    except ValueError:
        return message.body


@pytest.mark.deep
@pytest.mark.spec("replay:C2", "replay:C4")
@given(bodies, bodies)
def test_written_files_read_back_equal_here_and_in_vcrpy(asked, answered):
    """
    Replies come back byte for byte, and requests as JSON, with all headers; through vcrpy's reader JSON has one member per line.
    """
    from vcr.serialize import deserialize
    from vcr.serializers import yamlserializer

    interaction = Interaction(
        RecordedRequest("POST", URL, *asked),
        RecordedResponse(201, "Made", (*answered[0], ("x-a", "1"), ("x-a", "2")), answered[1]),
    )

    data = dump_cassette([interaction])
    ours = one(data)
    (request,), (response,) = deserialize(data.decode(), yamlserializer)

    assert value_of(interaction.request) == value_of(ours.request)
    assert interaction.response.body == ours.response.body
    assert (interaction.request.headers, interaction.response.headers) == (ours.request.headers, ours.response.headers)
    assert ("POST", URL, ours.request.body) == (request.method, request.uri, request.body or b"")
    assert value_of(ours.response) == value_of(attrs.evolve(ours.response, body=response["body"]["string"] or b""))
    assert (201, "Made", ["1", "2"]) == (
        response["status"]["code"],
        response["status"]["message"],
        response["headers"]["x-a"],
    )


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:C1")
@given(bodies, bodies)
def test_files_of_plain_vcrpy_are_read_the_same(asked, answered):
    from vcr.request import Request
    from vcr.serialize import deserialize, serialize
    from vcr.serializers import yamlserializer

    request = Request("POST", URL, asked[1], dict(asked[0]))
    headers = {**{n: [v] for n, v in answered[0]}, "set-cookie": ["a=1", "b=2"]}
    response = {"status": {"code": 404, "message": "No"}, "headers": headers, "body": {"string": answered[1]}}

    text = serialize({"requests": [request], "responses": [response]}, yamlserializer)
    (theirs,), (reply,) = deserialize(text, yamlserializer)
    ours = one(text.encode())

    assert (theirs.body or b"") == ours.request.body
    assert (reply["body"]["string"] or b"") == ours.response.body
    kept = "content-encoding" in headers and any(n == "content-encoding" for n, _ in ours.response.headers)
    assert [(n, v) for n, values in headers.items() for v in values if n != "content-encoding" or kept] == list(
        ours.response.headers
    )
    assert (404, "No") == (ours.response.status, ours.response.reason)


@pytest.mark.spec("replay:C4")
def test_compressed_bodies_keep_their_header_and_decompressed_ones_lose_it():
    """
    The header says how the stored bytes are to be read, whatever the recorder left in the file.
    """
    packed = gzip.compress(b"hello")
    plain = file_of().replace(
        b"    headers: {}\n    body: {string", b"    headers: {content-encoding: gzip}\n    body: {string"
    )
    binary = plain.replace(b"string: ok", b"string: !!binary " + base64.b64encode(packed))

    assert () == one(plain).response.headers
    assert ((("content-encoding", "gzip"),), packed) == (one(binary).response.headers, one(binary).response.body)


@pytest.mark.spec("replay:C5")
def test_a_file_is_replaced_atomically(tmp_path, monkeypatch):
    path = Cassette([talk(1, 2)]).save(tmp_path / "deep" / "c.yaml")
    before = path.read_bytes()

    def full(_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        replace_path(path, b"half")

    assert before == path.read_bytes()
    assert [path] == list(path.parent.iterdir())


def test_saving_needs_a_path_and_loading_needs_a_file(tmp_path):
    with pytest.raises(DataError, match="pass one to save"):
        Cassette().save()
    with pytest.raises(FileNotFoundError):
        Cassette.load(Path(tmp_path / "none.yaml"))


@pytest.mark.spec("replay:C2")
@pytest.mark.parametrize("error", [IncompleteRead(b"half of \xff", 20), IncompleteRead(b""), OSError(111, "no")])
def test_a_recorded_error_reads_as_the_program_met_it(error: Exception, tmp_path: Path) -> None:
    told = {"error": error_to_json(error)}
    request = RecordedRequest("GET", "http://h.test/")
    path = Cassette([Interaction(request, RecordedResponse(0, ""), extras=told)]).save(tmp_path / "c.yaml")

    replayed = Cassette.load(path).interactions[0].error

    assert (type(error), str(error), error.__dict__) == (type(replayed), str(replayed), replayed.__dict__)
