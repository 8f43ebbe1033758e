"""
What users add to redaction and except from it, and the scan of files (replay K7, K9-K12).
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepengine import AgentDefinition, Engine, ToolCall, tool
from stepengine.errors import DataError, SecretFound
from stepengine.journal import FileJournal, Redactor
from stepengine.journal.secret_scan import scan
from stepengine.journal.show import machine_data
from stepengine.redaction import (
    RedactField,
    RedactHeader,
    RedactionRules,
    RedactPattern,
    RedactValue,
    digest_secret,
    make_redactor,
)
from stepengine.testing.cassette_files import RecordedRequest, RecordedResponse
from stepengine.testing.traffic_redaction import Cleaner

KEY = "sk-ant-api03-" + "Ab3" * 12
OTHER = "ghp_" + "x1Y2" * 9


def cleaned(value, *rules, **options):
    return Redactor({}, shapes=True, rules=RedactionRules(given=rules, **options)).value(value)


@pytest.mark.spec("replay:K10")
def test_user_rules_redact_members_texts_and_values():
    body = {
        "run": {"tools": [{"env": {"A": "1"}, "name": "x"}, {"env": "B"}]},
        "say": "ticket T-1234 for bob-the-builder",
    }
    expected = {
        "run": {"tools": [{"env": "<redacted:env>", "name": "x"}, {"env": "<redacted:env>"}]},
        "say": "ticket <redacted:ticket> for <redacted:customer>",
    }
    rules = (RedactField("/tools/*/env"), RedactPattern(r"T-\d+", "ticket"), RedactValue("bob-the-builder", "customer"))

    assert expected == cleaned(body, *rules)
    assert expected == cleaned(expected, *rules)
    coded = base64.b64encode(b"bob-the-builder").decode()
    assert {"x": "<redacted:customer>"} == cleaned({"x": coded}, *rules)


@pytest.mark.spec("replay:K10")
@pytest.mark.parametrize(
    "rule",
    [RedactField("/input/*"), RedactField("/said/0"), RedactField("/gr\u00fc\u00dfe"), RedactPattern("^classified$")],
    ids=repr,
)
def test_rules_apply_to_escaped_and_nested_content(tmp_path, rule):
    @tool
    def keep(value: dict[str, list[str]]) -> str:
        """Keep something."""
        return "kept"

    def handle_steps(ctx):
        yield ToolCall("keep", {"value": {"said": ["classified"], "gr\u00fc\u00dfe": ["classified"]}})

    with Engine([AgentDefinition("a", tools=[keep], handle_steps=handle_steps)]) as engine:
        engine.run_sync("a", journal=FileJournal(tmp_path / "run.jsonl", redact=[rule])).unwrap()

    recorded = (tmp_path / "run.jsonl").read_text("utf-8")
    whole = 0 if isinstance(rule, RedactPattern) or rule.pointer == "/input/*" else 1
    assert whole == recorded.count("classified")
    body = json.dumps({"input": ["classified"], "said": ["classified"], "gr\u00fc\u00dfe": "classified"})
    left = Cleaner(base=make_redactor([rule], {})).clean_body(body.encode())
    assert (0 if isinstance(rule, RedactPattern) else 2) == left.count(b"classified")


@pytest.mark.spec("replay:K10")
def test_user_function_redacts_and_its_failure_prevents_writing(tmp_path):
    def hide(value):
        return {**value, "note": "gone"} if "note" in value else value

    def broken(value):
        raise KeyError(value)

    assert {"note": "gone"} == cleaned({"note": "here"}, hide)
    with pytest.raises(SecretFound, match=r"broken' raised KeyError; nothing was written") as caught:
        cleaned({"note": "here"}, broken)
    assert "here" not in str(caught.value)

    journal = FileJournal(tmp_path / "run.jsonl", redact=[broken])
    with Engine([AgentDefinition("a", handle_steps=_nothing)]) as engine, pytest.raises(SecretFound, match="broken"):
        engine.run_sync("a", "here", journal=journal)
    assert not (tmp_path / "run.jsonl").exists() or b"" == (tmp_path / "run.jsonl").read_bytes()


def _nothing(ctx):
    yield ToolCall("think_deeply", {"thought": ctx.prompt})


@pytest.mark.spec("replay:K9")
def test_allowed_hash_is_neither_redacted_nor_reported():
    text = f"the example key is {KEY}, the real one {OTHER}"
    redactor = Redactor({}, shapes=True, rules=RedactionRules(allowed=[digest_secret(KEY)]))

    assert f"the example key is {KEY}, the real one <redacted:github-token>" == redactor.text(text)
    assert ["github-token"] == [rule for _, rule in redactor.find_secret_pointers({"x": text})]
    assert {"password": "example"} == Redactor(
        {}, shapes=True, rules=RedactionRules(allowed=[digest_secret("example")])
    ).value({"password": "example"})  # fmt: skip
    with pytest.raises(DataError, match="not the secrets themselves"):
        RedactionRules(allowed=[KEY])


@pytest.mark.spec("replay:K10")
def test_user_header_rule_removes_the_header():
    cleaner = Cleaner(base=Redactor({}, shapes=True, rules=RedactionRules(given=[RedactHeader("Anthropic-Beta")])))
    headers = [("anthropic-beta", "x"), ("content-type", "text/plain")]

    assert [("content-type", "text/plain")] == list(
        cleaner.clean_request(RecordedRequest("GET", "http://h/", headers, b"")).headers
    )
    assert [("content-type", "text/plain")] == list(
        cleaner.clean_response(RecordedResponse(200, "OK", headers, b"")).headers
    )


@pytest.mark.parametrize("rule", ["x-tenant", None, 3, RedactField])
def test_invalid_rule_type_is_rejected(rule):
    with pytest.raises(DataError, match="redact must contain RedactHeader, RedactField"):
        make_redactor([rule], {})


def test_invalid_rule_value_is_rejected():
    with pytest.raises(DataError, match="must point to a member"):
        RedactField("/")
    with pytest.raises(DataError, match="the regex of a RedactPattern is not valid"):
        RedactPattern("(")
    with pytest.raises(DataError, match="must be a non-empty string"):
        RedactValue("")
    assert "sesame" not in repr(RedactValue("sesame"))


@settings(max_examples=20)
@given(st.sampled_from(["T-12 ", "/place/code/a", "plain", KEY, "env"]), st.recursive(st.text(max_size=8), st.lists))
def test_redaction_with_rules_is_idempotent(text, tree):
    redactor = Redactor(
        {"plain-known": "K"},
        shapes=True,
        rules=RedactionRules(given=[RedactPattern(r"T-\d+"), RedactField("/env")], machine={"/place/code": "<cwd>"}),
    )
    once = redactor.value({"env": text, "tree": tree, text: text})

    assert once == redactor.value(once)
    assert once == json.loads(json.dumps(once))


@pytest.mark.spec("replay:K7")
def test_machine_data_is_replaced_in_the_record_only(tmp_path):
    @tool
    def where() -> str:
        """Say where."""
        return f"{tmp_path}/a.py, {tmp_path}x, {tmp_path}.y and {tmp_path}."

    def handle_steps(ctx):
        turn = yield ToolCall("where")
        return turn.tool_result.text

    with Engine([AgentDefinition("a", tools=[where], handle_steps=handle_steps)]) as engine:
        journal = FileJournal(tmp_path / "run.jsonl", redact="all", machine={str(tmp_path): "<cwd>"})
        live = engine.run_sync("a", journal=journal)
        replayed = engine.replay_sync(FileJournal(journal.path, redact="all", machine={str(tmp_path): "<cwd>"}))

    assert live.unwrap().startswith(f"{tmp_path}/a.py")
    assert f"<cwd>/a.py, {tmp_path}x, {tmp_path}.y and <cwd>." == replayed.unwrap()


@pytest.mark.spec("replay:K7")
def test_machine_data_covers_folders_and_names_only(monkeypatch):
    monkeypatch.setenv("HOME", "/people/ada")
    monkeypatch.setattr("socket.gethostname", lambda: "ada-laptop")
    monkeypatch.setattr("getpass.getuser", lambda: "root")
    found = machine_data("/place/project")

    assert "<cwd>" == found["/place/project"]
    assert "<home>" == found["/people/ada"]
    assert "<host>" == found["ada-laptop"]
    assert "root" not in found
    assert "<tmp>" in found.values()


@pytest.mark.spec("replay:K7")
def test_machine_data_needs_no_home_folder(monkeypatch):
    """As in a container whose user is only a number."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])

    assert "<home>" not in machine_data("/place/project").values()


@pytest.mark.spec("replay:K11", "replay:K5")
def test_scan_reports_file_line_and_rule_without_the_value(tmp_path: Path):
    (tmp_path / "run.jsonl").write_text(json.dumps({"text": f"first\n{KEY}"}) + "\n" + json.dumps({"t": "none"}) + "\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.txt").write_text(f"one\ntwo {OTHER}\n")
    (tmp_path / "deep" / "c.bin").write_bytes(b"\0\xff" + b"hunter2-hunter2" + KEY.encode())
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text(KEY)
    (tmp_path / "almost.txt").write_text("task-type-ignored-because-of-x sk-learn-is-a-library")

    leaks = list(scan([tmp_path], environment={"MY_SECRET": "hunter2-hunter2"}))
    told = [(Path(leak.path).name, leak.line, leak.rule) for leak in leaks]

    assert [("run.jsonl", 1, "provider-key"), ("b.txt", 2, "github-token"), ("c.bin", 0, "MY_SECRET")] == told
    assert not any(value in str(leak) + leak.digest for leak in leaks for value in (KEY, OTHER, "hunter2"))
    assert [] == list(scan([tmp_path / "deep" / "b.txt"], allow_secrets=[leaks[1].digest], environment={}))
    with pytest.raises(DataError, match="there is no"):
        list(scan([tmp_path / "nothing"]))
