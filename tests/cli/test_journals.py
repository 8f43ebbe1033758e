"""
`run --journal`, `resume`, `replay`, `show`, `fork`, `diff`, `check` and `test` in process: what they print, and exit codes.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stepengine import AgentDefinition, Engine, Hooks, load_agent, tool
from stepengine.cli import bench
from stepengine.cli.app import app
from stepengine.cli.options import Options
from stepengine.cli.perform import format_resume_command
from stepengine.context import summarize
from stepengine.errors import JournalCorrupt, ModelError
from stepengine.journal import FileJournal
from stepengine.journal.records import encode_line
from stepengine.journal.show import make_run_tree, render
from stepengine.testing import ScriptedModel, text, tool_call
from tests.cli.command import command
from tests.cli.recordings import copy_recording, recording

AGENT = """
from stepengine import *

def shout(arguments):
    with open("done.txt", "a") as file:
        file.write(arguments["text"])
    return arguments["text"].upper()

schema = {"type": "object", "properties": {"text": {"type": "string"}}}
tool = Tool(name="shout", description="Shout.", input_schema=schema, run=shout)

def handle_steps(ctx):
    first = yield from ToolCall("shout", {"text": "one"}, include_tool_call=False)
    yield STEP_ALL
    answer = yield from Ask("Ship it?", options=["yes", "no"])
    return f"{first.text} {answer}"

agent = AgentDefinition("desk", system_prompt="You help.", tools=[tool], handle_steps=handle_steps)
"""
REAL_MODELS = bench.make_model_registry
EXTEND = ("resume", "--on-divergence", "extend")
COMMANDS = ("resume", "replay", "show", "fork", "compare diff", "journal check", "test", "journal repair", "undo")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """
    Commands run in a folder that holds nothing but an agent; models are scripted.
    """
    monkeypatch.chdir(tmp_path)
    for name in ("STEPENGINE_MODEL", "ANTHROPIC_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    Path("agents").mkdir()
    Path("agents/desk.py").write_text(AGENT)
    return tmp_path


@pytest.fixture
def scripted() -> Iterator[Any]:
    """
    Let the runs of one command use a scripted model.
    """
    with pytest.MonkeyPatch.context() as patch:

        def use(*replies: Any) -> None:
            patch.setattr(bench, "make_model_registry", lambda *_: ScriptedModel(replies))

        yield use


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    A run that waits for an answer, in the folder ``asked``, and the same one when it has ended, in ``ended``.
    """
    base = tmp_path_factory.mktemp("recorded")
    with recording(base / "ended") as patch:
        Path("agents").mkdir()
        Path("agents/desk.py").write_text(AGENT)
        model = ScriptedModel([tool_call("shout", {"text": "two"}), text("fine")])
        patch.setattr(bench, "make_model_registry", lambda *_: model)
        command("run", "desk", "go", "--model", "test/m", "--journal", "run.jsonl", "-q", code=3)
        shutil.copytree(base / "ended", base / "asked")
        command("resume", "run.jsonl", "--answer", "q4=yes", "-q")
    return base


@pytest.fixture
def asked(recorded: Path, scripted: Any, tmp_path: Path) -> str:
    """
    The journal of a run that waits for an answer.
    """
    scripted()
    copy_recording(recorded / "asked", tmp_path)
    return "run.jsonl"


@pytest.fixture
def ended(recorded: Path, scripted: Any, tmp_path: Path) -> str:
    """
    The journal of a run that has ended.
    """
    scripted()
    copy_recording(recorded / "ended", tmp_path)
    return "run.jsonl"


def edited(old: str, new: str) -> str:
    """
    Return another version of the agent's file.
    """
    assert old in AGENT
    Path("edited.py").write_text(AGENT.replace(old, new))
    return "edited.py"


@pytest.mark.spec("ecosystem:EC141", "requirements:K3", "reliability:R2")
def test_suspended_run_is_resumed_with_an_answer_without_repeated_effects(scripted: Any) -> None:
    scripted(tool_call("shout", {"text": "two"}), text("fine"))
    said = command("run", "desk", "go", "--model", "test/m", "--journal", "run.jsonl", code=3).stderr
    assert "question q4 waits for an answer: Ship it?" in said
    assert "stepengine resume run.jsonl --answer q4=TEXT" in said
    assert command("resume", "run.jsonl", code=3).stdout == ""
    scripted()
    assert command("resume", "run.jsonl", "--answer", "q4=yes").stdout == "ONE yes\n"
    assert command("resume", "run.jsonl").stdout == "ONE yes\n"
    assert Path("done.txt").read_text() == "onetwo"


@pytest.mark.spec("requirements:X54", "ecosystem:EC141")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--answer", "q9=yes"], "'q9' is not a question of this run; open are: 'q4'"),
        (["--answer", "yes"], "--answer 'yes' is not ID=TEXT"),
        (["--in-doubt", "pray"], "--in-doubt 'pray' is unknown; valid values: fail, retry, ask"),
        (["--agent", "nowhere.py"], "there is no agent file 'nowhere.py'"),
        (["--cwd", "nowhere"], "--cwd 'nowhere' is not a folder"),
    ],
)
def test_invalid_resume_options_change_nothing(asked: str, arguments: list[str], said: str) -> None:
    before = Path(asked).read_bytes()
    assert said in command("resume", asked, *arguments, code=2).stderr
    assert Path(asked).read_bytes() == before


@pytest.mark.spec("reliability:I3")
def test_replay_calls_no_model_and_performs_no_tool(ended: str) -> None:
    before, done = Path(ended).read_bytes(), Path("done.txt").read_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "make_model_registry", REAL_MODELS)
        assert command("replay", ended).stdout == "ONE yes\n"
        told = json.loads(command("replay", ended, "--json", "-q").stdout)
    assert (told["status"], told["output"], len(told["tool_calls"])) == ("completed", "ONE yes", 2)
    assert (Path(ended).read_bytes(), Path("done.txt").read_text()) == (before, done)


@pytest.mark.spec("replay:D1", "ecosystem:EC141")
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("You help.", "You hinder.", ["step 1", "/system_prompt", "You hinder."]),
        ("{first.text} {answer}", "{answer}", ["at its end", '"ONE yes"', '"yes"']),
        ('return f"{first', 'raise KeyError; f"{first', ["at its end", '"completed"', '"failed"', "KeyError"]),
    ],
)
def test_divergence_exits_with_5_and_names_step_line_field(ended: str, old: str, new: str, said: list[str]) -> None:
    agent = edited(old, new)
    for name in ("replay", "resume"):
        message = command(name, ended, "--agent", agent, "-q", code=5).stderr
        assert all(part in message for part in [*said, "edited.py:"]), message
    tested = command("test", ended, "--agent", agent, code=5).stdout
    assert "DIVERGED  run.jsonl" in tested
    assert "0 of 1 as recorded, 1 diverged, 0 failed" in tested


def test_replay_with_another_model_explains_the_option(asked: str) -> None:
    message = command("replay", asked, "--model", "test/other", "-q", code=5).stderr
    assert "to use the recorded model, leave out --model" in message


@pytest.mark.spec("requirements:O7", "generator-contract:T34")
def test_show_prints_requests_and_results_step_by_step(ended: str) -> None:
    shown = command("show", ended).stdout
    assert shown.endswith(render(make_run_tree(FileJournal(ended))))
    positions = [
        shown.index(part)
        for part in ("desk  run ", "run desk  completed  5 effects", "#0  tool shout", "ONE", "model test/m  step 1",
                     "-> call shout", 'text: "two"', "TWO", "step 2", "fine", "#4  ask", "Ship it?", '-> "yes"', "output")
    ]  # fmt: skip
    assert positions == sorted(positions)
    step = command("show", ended, "--step", "2").stdout
    assert "before #3: 3 effects, 1 model calls, " in step
    assert json.loads(command("show", ended, "--step", "2", "--json").stdout)["so_far"]["effects"] == 3
    assert all(part in step for part in ("sent to test/m", "You help.", "go", "TWO", "came back", "fine"))
    assert "ONE" not in step.partition("came back")[2]
    assert "Ship it?" in json.dumps(json.loads(command("show", ended, "--step", "#4", "--json").stdout))
    assert "use a step from 0 to 2" in command("show", ended, "--step", "7", code=2).stderr


@pytest.mark.spec("requirements:O7")
def test_show_as_json_holds_every_effect_and_the_open_questions(asked: str) -> None:
    told = json.loads(command("show", asked, "--json").stdout)
    assert (told["agent"], told["status"], told["prompt"]) == ("desk", "suspended", "go")
    assert [(e["address"], e["step"], e["kind"]) for e in told["effects"]] == [
        ("#0", 0, "tool_call"),
        ("#1", 1, "model_call"),
        ("#2", 1, "tool_call"),
        ("#3", 2, "model_call"),
        ("#4", 2, "ask"),
    ]
    (question,) = told["questions"]
    assert (question["id"], question["text"], question["options"]) == ("q4", "Ship it?", ["yes", "no"])
    assert [choice["label"] for choice in question["choices"]] == ["yes", "no", "No answer"]
    assert told["effects"][-1]["outcome"] is None


@pytest.mark.spec("requirements:DM21a")
def test_show_left_out_lists_each_compaction_in_full(ended: str) -> None:
    """
    Texts are whole, secrets go, and nothing steers a terminal; a person and a program are shown the same.
    """
    long = f"\x1b[2Jword {'x' * 5_000} last"

    @tool(in_thread=False)
    def dig(depth: int) -> str:
        """
        Dig.
        """
        return f"{depth} {long}"

    prune = summarize(2_000, summarizer=lambda _: "What mattered.")
    agent = AgentDefinition("digger", model="t/m", tools=[dig], hooks=Hooks(pre_step=[prune]))
    digs = [tool_call("dig", {"depth": n}) for n in range(5)]
    Engine([agent], models=ScriptedModel([*digs, text("done")])).run_sync("digger", "Dig.", journal="dug.jsonl")
    told = json.loads(command("show", "dug.jsonl", "--left-out", "--json").stdout)["compactions"]
    shown = command("show", "dug.jsonl", "--left-out").stdout

    assert ["#4", "#8"] == [one["address"] for one in told]
    assert ["user", "assistant", "tool", "assistant", "tool"] == [m["role"] for m in told[0]["left_out"]]
    assert f"1 {long}" in told[0]["left_out"][-1]["text"]
    assert "What mattered." in told[0]["instead"][0]["text"]
    first = shown.partition("before #8")[0]
    assert f"{told[0]['tokens']} tokens left out, 1 message of {told[0]['tokens_instead']} tokens" in first
    assert ["user", "assistant", "tool", "assistant", "tool"] == re.findall(r"^  left out: (\w+)", first, re.MULTILINE)
    assert f"word {'x' * 5_000} last" in first
    assert "  in their place: user SUMMARY\n" in first
    assert "\x1b" not in shown
    assert "Nothing was left out of the conversation.\n" == command("show", ended, "--left-out").stdout
    assert [] == json.loads(command("show", ended, "--left-out", "--json").stdout)["compactions"]
    assert "leave out --step" in command("show", ended, "--left-out", "--step", "1", code=2).stderr


@pytest.mark.spec("requirements:O7", "reliability:UI01")
def test_show_escapes_control_characters_of_a_journal(scripted: Any) -> None:
    scripted(text("\x1b[2Jgone\u202e"))
    command("run", "desk", "\x1b[31mred", "--model", "t/m", "--journal", "run.jsonl", "-q", code=3)
    for arguments in (["show", "run.jsonl"], ["show", "run.jsonl", "--step", "1"], ["show", "run.jsonl", "--json"]):
        assert not {"\x1b", "\u202e"} & set(command(*arguments).stdout)


@pytest.mark.spec("replay:D11")
def test_fork_records_another_outcome_in_a_new_file(ended: str, scripted: Any) -> None:
    before = Path(ended).read_bytes()
    scripted(text("changed"))
    said = command("fork", ended, "--at", "2", "--edit", "nothing", code=3).stderr
    assert "the new run is recorded in run.fork-2.jsonl" in said
    assert "stepengine resume run.fork-2.jsonl --answer q4=TEXT" in said
    assert command("resume", "run.fork-2.jsonl", "--answer", "q4=no", "-q").stdout == "ONE no\n"
    assert "exists already" in command("fork", ended, "--at", "2", code=2).stderr
    shown = command("show", "run.fork-2.jsonl").stdout
    assert all(part in shown for part in ("forked from run", "nothing", "changed"))
    fork, parent = [json.loads(command("show", file, "--json").stdout)["run"] for file in ("run.fork-2.jsonl", ended)]
    assert fork != parent
    assert f"  run {fork} of " in shown.splitlines()[0]
    assert f"forked from run {parent} at " in shown
    assert Path(ended).read_bytes() == before


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG7", "evaluation:JG8", "evaluation:JG9")
def test_fork_calls_models_again_and_answers_tools_from_the_record(ended: str, scripted: Any) -> None:
    agent = edited("You help.", "You hinder.")
    scripted(tool_call("shout", {"text": "two"}), text("fine"))
    said = command("fork", ended, "--agent", agent, "--tools", "recorded")
    assert said.stdout == "ONE yes\n"
    assert (
        "from #1 on: 2 model calls, 0 reused; tool calls: 1 answered from the record, 0 simulated, 0 performed"
        in said.stderr
    )
    assert "the new run is recorded in run.fork-difference.jsonl" in said.stderr
    assert Path("done.txt").read_text() == "onetwo"
    assert command("replay", "run.fork-difference.jsonl", "--agent", agent, "-q").stdout == "ONE yes\n"

    scripted(tool_call("shout", {"text": "three"}), text("fine"))
    stopped = command("fork", ended, "--at", "0", "--tools", "recorded", "--fresh", "--into", "b.jsonl", code=5)
    assert "tool_call shout with this input is not recorded" in stopped.stderr
    scripted(tool_call("shout", {"text": "three"}), text("fine"))
    command("fork", ended, "--at", "0", "--tools", "working-copy", "--fresh", "--into", "c.jsonl", "-q")
    assert Path("done.txt").read_text() == "onetwothree"
    assert (
        "nothing differs from the record" in command("fork", ended, "--tools", "recorded", "--into", "d.jsonl").stderr
    )


@pytest.mark.spec("evaluation:JG7")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "pass --at with the last effect to keep"),
        (["--tools", "all"], "--tools 'all' is unknown; valid values: recorded, idempotent, working-copy"),
        (["--at", "0", "--budget", "1"], "--budget needs --tools"),
        (["--at", "0", "--fresh"], "--fresh needs --tools"),
        (["--tools", "recorded", "--edit", "x"], "--edit cannot be combined with --tools"),
        (["--tools", "recorded", "--budget", "much"], "--budget: "),
        (["--tools", "recorded", "--at", "99"], "has no effect after #99"),
    ],
)
def test_invalid_fork_is_rejected_and_leaves_no_file(ended: str, words: list[str], said: str) -> None:
    before = set(Path().iterdir())
    assert said in command("fork", ended, *words, code=2).stderr
    assert before == set(Path().iterdir())


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:D11")
def test_fork_edit_takes_text_and_whole_json_values(ended: str, scripted: Any) -> None:
    scripted()
    command("fork", ended, "--at", "3", "--edit", "42", "--into", "a.jsonl", "-q", code=3)
    assert "42" in command("show", "a.jsonl", "--step", "#3").stdout
    outcome = json.loads(command("show", ended, "--step", "#3", "--json").stdout)["effects"][0]["outcome"]["value"]
    Path("reply.json").write_text(json.dumps(outcome).replace("fine", "finer"))
    command("fork", ended, "--at", "3", "--edit", "@reply.json", "--into", "b.jsonl", "-q", code=3)
    assert "finer" in command("show", "b.jsonl", "--step", "#3").stdout
    command("fork", ended, "--at", "4", "--edit", "no", "--into", "c.jsonl", "-q")
    assert "ONE no" in command("replay", "c.jsonl", "-q").stdout


@pytest.mark.spec("replay:D10")
def test_fork_repeats_side_effects_only_if_allowed(ended: str, scripted: Any) -> None:
    scripted(text("short"))
    message = command("fork", ended, "--at", "1", "-q", code=1).stderr
    assert "#2 tool_call shout" in message
    assert Path("done.txt").read_text() == "onetwo"
    command("fork", ended, "--at", "0", "--allow-repeat", "-q", code=3)


@pytest.mark.spec("replay:D13")
def test_diff_exits_with_1_and_names_the_difference(ended: str, scripted: Any) -> None:
    scripted()
    assert command("compare", "diff", ended, ended).stdout == "no difference\n"
    command("fork", ended, "--at", "4", "--edit", "no", "--into", "b.jsonl", "-q")
    assert '"yes"  ->  "no"' in command("compare", "diff", ended, "b.jsonl", code=1).stdout
    told = json.loads(command("compare", "diff", ended, "b.jsonl", "--json", code=1).stdout)
    assert [change["kind"] for change in told["changes"]] == ["outcome", "end"]


@pytest.mark.spec("reliability:JR02")
def test_check_names_the_damaged_record_and_commands_reject_the_file(ended: str) -> None:
    assert "ok  run.jsonl  15 records, complete" in command("journal", "check", ended).stdout
    content = bytearray(Path(ended).read_bytes())
    content[len(content) // 2] ^= 1
    Path("bad.jsonl").write_bytes(content)
    assert "is damaged" in command("journal", "check", ended, "bad.jsonl", code=1).stdout
    told = json.loads(command("journal", "check", ended, "bad.jsonl", "--json", code=1).stdout)
    assert [entry["ok"] for entry in told] == [True, False]
    with pytest.raises(JournalCorrupt):
        FileJournal("bad.jsonl").history()
    for arguments in (["show"], ["replay", "-q"], ["resume", "-q"], ["fork", "--at", "1", "-q"], ["test"]):
        result = command(arguments[0], "bad.jsonl", *arguments[1:], code=1)
        assert "is damaged" in result.stderr + result.stdout


def test_test_replays_whole_folders_and_counts(ended: str) -> None:
    Path("kept").mkdir()
    Path("kept/one.jsonl").write_bytes(Path(ended).read_bytes())
    Path("kept/two.jsonl").write_bytes(Path(ended).read_bytes())
    assert "2 of 2 as recorded, 0 diverged, 0 failed" in command("test", "kept").stdout
    agent = edited("Ship it?", "Sink it?")
    told = json.loads(command("test", "kept", "--json", "--agent", agent, code=5).stdout)
    assert [(t["outcome"], t["step"]) for t in told] == [("diverged", 2)] * 2
    Path("agents/desk.py").unlink()
    assert "--agent PATH" in command("test", "kept", code=2).stdout
    Path("empty").mkdir()
    assert "there is no *.jsonl" in command("test", "empty", code=2).stderr


@pytest.mark.spec("reliability:R2")
def test_agent_is_found_by_id_and_never_by_recorded_path(ended: str) -> None:
    Path("agents/desk.py").rename("elsewhere.py")
    assert "Name its file with --agent PATH" in command("replay", ended, "-q", code=2).stderr
    assert command("replay", ended, "--agent", "elsewhere.py", "-q").stdout == "ONE yes\n"
    Path("evil.py").write_text("raise SystemExit('it ran')")
    crc, content = 0, b""
    for line in FileJournal(ended).content().replace(b'"desk"', b'"evil.py"').splitlines():
        members = json.loads(line)
        del members["crc"]
        made, crc = encode_line(members, crc)
        content += made
    Path("evil.jsonl").write_bytes(content)
    message = command("replay", "evil.jsonl", "-q", code=2).stderr
    assert "is a run of 'evil.py'; name its agent with --agent PATH" in message


def test_existing_journal_is_never_overwritten(ended: str) -> None:
    before = Path(ended).read_bytes()
    message = command("run", "desk", "--journal", ended, code=2).stderr
    assert "stepengine resume run.jsonl" in message
    assert Path(ended).read_bytes() == before


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_examples_and_rejects_a_missing_file(name: str) -> None:
    shown = command(*name.split(), "--help").stdout
    assert "Examples:" in shown
    assert f"stepengine {name} " in shown
    more = {"fork": ["--at", "1"], "compare diff": ["other.jsonl"], "journal repair": ["--until", "1"]}.get(name, [])
    result = CliRunner().invoke(app, [*name.split(), "nowhere.jsonl", *more])
    assert "there is no journal 'nowhere.jsonl'" in result.stderr + result.stdout
    assert result.exit_code == (1 if name == "test" else 2)


# --- what to do next ------------------------------------------------------------------------------------------------


@pytest.mark.spec("ecosystem:EC141", "requirements:K3")
def test_resume_hint_has_every_needed_option(scripted: Any) -> None:
    Path("agents/desk.py").rename("elsewhere.py")
    scripted(tool_call("shout", {"text": "two"}), text("fine"))
    said = command("run", "elsewhere.py", "go", "--model", "test/m", "--journal", "run.jsonl", "-q", code=3).stderr
    (hint,) = [line for line in said.splitlines() if "answer it with: " in line]
    assert hint.endswith("stepengine resume run.jsonl --agent elsewhere.py --answer q4=TEXT")
    assert "Ship it? (yes, no)" in said
    words = hint.partition("answer it with: stepengine ")[2].replace("TEXT", "yes").split()
    scripted()
    assert command(*words, "-q").stdout == "ONE yes\n"


def test_format_resume_command_repeats_only_needed_options(elsewhere: Path) -> None:
    Path("sub").mkdir()
    options = Options(agent="agents/desk.py", journal="a run.jsonl", model="t/m", quiet=True)
    assert format_resume_command(options, "desk") == "stepengine resume 'a run.jsonl'"
    assert format_resume_command(options) == "stepengine resume 'a run.jsonl' --agent agents/desk.py"
    options = Options(agent="desk", journal="r", base_url="http://x/v1", cwd=Path("sub"), write=True)
    assert format_resume_command(options, "desk") == "stepengine resume r --base-url http://x/v1 --cwd sub --write"


@pytest.mark.spec("replay:D10", "replay:D1", "replay:Y18")
def test_commands_suggested_after_a_divergence_work(ended: str, scripted: Any) -> None:
    agent = edited("Ship it?", "Sink it?")
    message = command("replay", ended, "--agent", agent, "-q", code=5).stderr
    extend, fork = re.findall(
        r"or  (stepengine (?:resume|fork) [^ ]+ (?:--at '[^']+'|--on-divergence extend) --agent edited.py)", message
    )
    scripted()
    forked = command(*shlex.split(fork)[1:], "--answer", "Sink it?=yes", "-q", "--into", "fork.jsonl")
    assert forked.stdout == "ONE yes\n"
    before = Path(ended).read_bytes()
    said = command(*shlex.split(extend)[1:], "--answer", "Sink it?=no")
    assert (said.stdout, "kept 4 of 5 effects, recorded 1 new ones" in said.stderr) == ("ONE no\n", True)
    assert Path(ended).read_bytes() != before
    assert command("replay", ended, "--agent", agent, "-q").stdout == "ONE no\n"
    assert Path("done.txt").read_text() == "onetwo"
    assert "stepengine compare diff A B" in message


NAMES = pytest.mark.parametrize("name", ["my run.jsonl", "it's.jsonl", "d#1/run.jsonl", "a;b$c.jsonl"])


@NAMES
def test_commands_suggested_after_a_divergence_fit_any_name(ended: str, name: str) -> None:
    agent = edited("Ship it?", "Sink it?")
    Path(name).parent.mkdir(exist_ok=True)
    Path(ended).rename(name)
    message = command("replay", name, "--agent", agent, "-q", code=5).stderr
    advised = [shlex.split(words) for words in re.findall(r"or  (stepengine .+? --agent edited\.py)", message)]

    assert ["resume", "fork"] == [words[1] for words in advised]
    assert [name] * 2 == [words[2] for words in advised]


@NAMES
def test_forks_and_repaired_journals_are_next_to_their_source(ended: str, scripted: Any, name: str) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(ended).rename(name)
    scripted()
    words = command("fork", name, "--at", "3", "--answer", "q4=yes", "-q", code=0).stdout
    command("journal", "repair", name, "--until", "3")
    refused = command("journal", "repair", name, "--until", "3", code=2).stderr

    assert "ONE yes\n" == words
    made = [Path(name).with_name(f"{Path(name).stem}.{what}.jsonl") for what in ("fork-3", "repaired")]
    assert [True, True] == [path.is_file() for path in made]
    assert f"`stepengine show {shlex.quote(str(made[1]))}` shows it" in refused


LONG = "word " * 100_000
"""More than the policy of the command line would let a prompt have."""


@pytest.fixture
def programs() -> str:
    """
    The journal of a run that a program began, without any hook, and that waits for an answer.
    """
    replies = ScriptedModel([tool_call("shout", {"text": "two"}), text("fine")])
    with Engine([load_agent("agents/desk.py")], models=replies, default_model="test/m") as engine:
        engine.run_sync("desk", LONG, journal="run.jsonl")
    return "run.jsonl"


@pytest.mark.deep
@pytest.mark.smoke
def test_run_of_a_program_continues_without_command_line_hooks(programs: str, scripted: Any) -> None:
    scripted()
    assert "1 can be resumed as they are" in command("replay", "--waiting", programs).stdout
    said = command("resume", programs, "--answer", "q4=yes", "-q")
    assert ("ONE yes\n", "") == (said.stdout, said.stderr)

    for words in (["replay"], ["resume", "--on-divergence", "extend"]):
        said = command(*words, programs, "-q")
        assert ("ONE yes\n", "") == (said.stdout, said.stderr), words
    command("test", programs)
    command("compare", "impact", programs, "--yes")


@pytest.mark.spec("replay:D10")
def test_extend_asks_before_repeating_tools_and_keeps_a_backup(ended: str, scripted: Any) -> None:
    agent, before = edited("You help.", "You hinder."), Path(ended).read_bytes()
    scripted(tool_call("shout", {"text": "two"}), text("fine"))
    said = command(*EXTEND, ended, "--agent", agent, "--answer", "q3=yes", code=1).stderr
    assert "may happen again" in said
    assert "--allow-repeat" in said
    assert (Path("done.txt").read_text(), Path(ended).read_bytes()) == ("onetwo", before)
    said = command(*EXTEND, ended, "--agent", agent, "--answer", "Ship it?=yes", "--allow-repeat").stderr
    assert "kept 1 of 5 effects, recorded 4 new ones; the original: run.before-1.jsonl" in said
    assert (Path("done.txt").read_text(), Path("run.before-1.jsonl").read_bytes()) == ("onetwotwo", before)
    assert "needs --on-divergence extend" in command("resume", ended, "--allow-repeat", code=2).stderr


@pytest.mark.spec("replay:D10")
def test_failed_extend_leaves_the_file_unchanged(ended: str, scripted: Any) -> None:
    def refuse(request: Any) -> Any:
        msg = "no"
        raise ModelError(msg)

    before = Path(ended).read_bytes()
    scripted(refuse)
    said = command(*EXTEND, ended, "--agent", edited("You help.", "You hinder."), "--allow-repeat", code=1).stderr
    assert "run.jsonl was not changed" in said
    assert Path(ended).read_bytes() == before


@pytest.mark.spec("ecosystem:EC141")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fork", "--at", "99"], "has no effect #99: the run there has the effects 0 to 4"),
        (["fork", "--at", "9" * 5_000], "an address must be the number of an effect"),
    ],
)
def test_unknown_address_is_rejected_and_leaves_no_file(ended: str, arguments: list[str], said: str) -> None:
    before = set(Path().iterdir())
    name, *options = arguments
    assert said in command(name, ended, *options, code=2).stderr
    assert set(Path().iterdir()) == before


@pytest.mark.spec("replay:D12")
def test_a_replay_may_let_tools_or_models_be_live(ended: str, scripted: Any) -> None:
    assert command("replay", ended, "--live", "tool_call", "-q").stdout == "ONE yes\n"
    assert Path("done.txt").read_text() == "onetwoonetwo"
    message = command(
        "replay", ended, "--live", "tool_call", "--agent", edited(".upper()", ".title()"), "-q", code=5
    ).stderr
    assert "tool_call shout has a different result than the recorded one" in message
    scripted(text("short cut"))
    assert command("replay", ended, "--live", "model_call", "-q").stdout == "ONE yes\n"
    scripted(tool_call("shout", {"word": "never heard of"}))
    refused = command("replay", ended, "--live", "model_call", "-q", code=5).stderr
    assert "tool_call shout with this input is not recorded" in refused
    both = command("replay", ended, "--live", "model_call", "--live", "tool_call", code=2).stderr
    assert "live='model_call' cannot be combined" in both
    assert "live='luck' is not a kind" in command("replay", ended, "--live", "luck", code=2).stderr


def test_replay_at_a_speed_shows_the_run_and_its_end(ended: str) -> None:
    result = command("replay", ended, "--speed", "1000")
    assert (result.stdout, "shout ok" in result.stderr) == ("ONE yes\n", True)
    assert command("replay", ended, "--speed", "-1", code=2).stdout == ""


@pytest.mark.spec("replay:J37")
def test_edited_file_is_sealed_by_the_suggested_command(ended: str) -> None:
    before = Path(ended).read_text()
    Path("before.jsonl").write_text(before)
    Path(ended).write_text(before.replace('"text":"fine"', '"text":"finer"', 1))
    refusal = command("replay", ended, "-q", code=1).stderr
    assert "`stepengine journal repair run.jsonl --seal`" in refusal
    said = command("journal", "repair", ended, "--seal", "--dry-run").stdout
    assert "result of #3" in said
    command("journal", "check", ended, code=1)
    sealed = command("journal", "repair", ended, "--seal", "--against", "before.jsonl")
    assert '"fine"  ->  "finer"' in sealed.stdout
    assert "sealed run.jsonl: 1 records were edited" in sealed.stderr
    command("journal", "check", ended)
    assert "finer" in command("show", ended, "--step", "2").stdout
    assert "is valid as it is" in command("journal", "repair", ended, "--seal").stdout


@pytest.mark.spec("replay:J37", "reliability:JR02")
def test_damaged_file_is_repaired_by_the_suggested_command(ended: str, scripted: Any) -> None:
    lines = Path(ended).read_bytes().splitlines(keepends=True)
    Path("bad.jsonl").write_bytes(b"".join([*lines[:9], lines[9].replace(b"TWO", b"TWA"), *lines[10:]]))
    (number,) = re.findall(
        r"stepengine journal repair bad.jsonl --until (\d+)", command("show", "bad.jsonl", code=1).stderr
    )
    said = command("journal", "repair", "bad.jsonl", "--until", number).stderr
    assert "resume it with: stepengine resume bad.repaired.jsonl" in said
    assert Path("bad.repaired.jsonl").read_bytes() == b"".join(lines[: int(number)])
    assert "exists already" in command("journal", "repair", "bad.jsonl", "--until", number, code=2).stderr
    assert "--until 9" in command("journal", "repair", "bad.jsonl", "--until", "99", "--into", "x.jsonl", code=1).stderr
    for options in (
        [],
        ["--until", number, "--seal"],
        ["--seal", "--into", "x.jsonl"],
        ["--until", number, "--dry-run"],
    ):
        assert "or --seal (optionally" in command("journal", "repair", "bad.jsonl", *options, code=2).stderr


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X58", "reliability:R2")
def test_answer_after_an_edit_needs_on_divergence_keep(asked: str, scripted: Any) -> None:
    agent = edited('"You help."', '"You help a lot."')
    before = Path(asked).read_bytes()
    scripted()
    said = command("resume", asked, "--answer", "q4=yes", "--agent", agent, code=5).stderr
    assert f"stepengine resume run.jsonl --on-divergence keep --agent {agent}" in said
    said = command("replay", "--waiting", asked, "--agent", agent, code=5).stdout
    assert f"keep      {asked}  desk\n  ? q4: Ship it?\n" in said
    assert "/system_prompt" in said
    assert (
        "1 waiting: 0 can be resumed as they are, 1 with --on-divergence keep, 0 would diverge, 0 could not be checked"
        in said
    )
    (told,) = json.loads(
        command("replay", "--waiting", asked, "--agent", agent, "--on-divergence", "keep", "--json").stdout
    )
    assert ("keep", "changed", "#1", "/system_prompt") == (
        told["outcome"], told["kind"], told["address"], told["diff"][0]["pointer"]
    )  # fmt: skip
    assert before == Path(asked).read_bytes()

    again = ("--on-divergence", "keep", "--agent", agent)
    assert "ONE yes\n" == command("resume", asked, "--answer", "q4=yes", *again).stdout
    assert "onetwo" == Path("done.txt").read_text()
    assert "ONE yes\n" == command("replay", asked, "--agent", agent).stdout


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X58")
def test_replay_waiting_reports_diverged_failed_and_ended_runs(asked: str, scripted: Any) -> None:
    assert "1 waiting: 1 can be resumed as they are" in command("replay", "--waiting", asked).stdout
    agent = edited("    yield STEP_ALL\n", "")
    said = command("replay", "--waiting", asked, "--agent", agent, "--on-divergence", "keep", code=5).stdout
    assert "diverges  run.jsonl  desk" in said
    assert "ask instead of model_call" in said
    assert "to continue from here" not in said

    Path("more").mkdir()
    Path("more/a.jsonl").write_bytes(Path(asked).read_bytes())
    scripted()
    command("resume", asked, "--answer", "q4=yes", "-q")
    Path("more/b.jsonl").write_bytes(Path(asked).read_bytes())
    Path("more/c.jsonl").write_bytes(b"no journal\n" * 2)
    found = json.loads(command("replay", "--waiting", "more", "--json", code=1).stdout)
    assert ["ready", "ended", "failed"] == [entry["outcome"] for entry in found]
    assert "; 1 have ended" in command("replay", "--waiting", "more", code=1).stdout
    assert (
        "valid values: raise, stop, keep"
        in command("replay", "--waiting", "more", "--on-divergence", "x", code=2).stderr
    )
    assert (
        "there is no journal 'gone.jsonl'"
        in json.loads(command("replay", "--waiting", "gone.jsonl", "--json", code=1).stdout)[0]["message"]
    )
    assert "name different runs" in command("replay", "--waiting", "more", "--last", code=2).stderr
    assert "--live is for one run" in command("replay", "--waiting", "--live", "perform", code=2).stderr
    assert "--on-divergence needs --waiting" in command("replay", "more", "--on-divergence", "keep", code=2).stderr
    assert "are several runs" in command("replay", "more/a.jsonl", "more/b.jsonl", code=2).stderr


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X58", "requirements:X55")
def test_replay_waiting_without_names_checks_the_runs_of_the_folder(
    scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPENGINE_STATE_DIR", str(Path("state").absolute()))
    assert "0 waiting" in command("replay", "--waiting").stdout
    assert (
        "this folder has no run that waits or was interrupted"
        in command("replay", "--waiting", "--last", code=2).stderr
    )
    for _ in range(2):
        scripted(tool_call("shout", {"text": "two"}), text("fine"))
        command("run", "desk", "go", "--model", "test/m", "-q", code=3)
    scripted()
    assert "2 waiting: 2 can be resumed" in command("replay", "--waiting").stdout
    command("resume", "--last", "--answer", "q4=yes", "-q")
    assert "1 waiting: 1 can be resumed" in command("replay", "--waiting").stdout
    assert "1 waiting: 1 can be resumed" in command("replay", "--waiting", "--last").stdout


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:L42")
def test_warnings_of_a_child_are_printed_by_each_command() -> None:
    Path("lead.py").write_text("""
from stepengine import AgentCall, AgentDefinition, Ask, ToolCall

def note(ctx):
    yield ToolCall("set_output", {"found": 1})

def handle_steps(ctx):
    yield from AgentCall(noting)
    return (yield from Ask("Ship it?", key="ship"))

noting = AgentDefinition("noting", tools=["set_output"], handle_steps=note)
agent = AgentDefinition("lead", spawnable_agents=[noting], handle_steps=handle_steps)
""")
    said = "warning: run 0 (noting): agent 'noting' calls set_output"
    runs = [
        command("run", "lead.py", "go", "--journal", "lead.jsonl", "-q", code=3),
        command("resume", "lead.jsonl", "--agent", "lead.py", "--answer", "ship=yes", "-q"),
        command("replay", "lead.jsonl", "--agent", "lead.py", "-q"),
    ]

    assert [1, 1, 1] == [run.stderr.count(said) for run in runs]
    assert 1 == command("show", "lead.jsonl").stdout.count(said)
    (warning,) = json.loads(command("show", "lead.jsonl", "--json").stdout)["warnings"]
    assert warning.startswith(said.removeprefix("warning: "))


@pytest.mark.spec("replay:D16")
def test_diverged_resume_keeps_the_list_of_runs(scripted: Any) -> None:
    scripted(tool_call("shout", {"text": "two"}), text("fine"))
    command("run", "desk", "go", "--model", "test/m", code=3)
    listed = json.loads(command("runs", "--json").stdout)
    assert "suspended" == listed[0]["status"]

    command("resume", "--last", "--agent", edited("Ship it?", "Sink it?"), "--on-divergence", "stop", "-q", code=5)

    assert listed == json.loads(command("runs", "--json").stdout)
    assert "suspended" in command("show", "--last").stdout
