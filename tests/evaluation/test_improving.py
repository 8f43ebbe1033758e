"""
`stepengine compare improve`: a better version of an agent is found, proved and paid for once (evaluation JG140-JG148).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepengine import Limits, Usage, UserMessage
from stepengine.cli.exits import Exit
from stepengine.data.transcript import Transcript
from stepengine.engine.loader import AgentLocation, load_module
from stepengine.errors import DataError, DefinitionError, LimitExceeded
from stepengine.evaluation import improve_sync, improvement_search
from stepengine.evaluation.alterations import AgentFile
from stepengine.evaluation.evaluation_files import load_evaluation
from stepengine.evaluation.reply_book import CachingProvider, ReplyBook
from stepengine.models import ModelReply, ModelRequest, Models, Provider
from stepengine.models.pricing import LIST_PRICES
from stepengine.testing import ScriptedModel, text, tool_call
from tests.phrases import NO_AGENT

ROOT = Path(__file__).resolve().parents[2]
GREETER = """
from stepengine import AgentDefinition

agent = AgentDefinition("greeter", model="t/m", system_prompt="Greet people.")
"""
GREETING = '''
import os, signal
from pathlib import Path
from stepengine import AgentDefinition
from stepengine.evaluation import *
from stepengine.testing import text

NAMES = ["Ann", "Bob", "Carla", "Doris", "Emil", "Fritz", "Gustav", "Hanna", "Ingrid", "Zoe", "Max", "Uwe"]

def noted(what):
    """Write a call down, and die with the one that DIES names, the first time."""
    with open("asked.txt", "a") as file:
        file.write(what + "\\n")
    number = len(Path("asked.txt").read_text().splitlines())
    if os.environ.get("DIES") == str(number):
        os.kill(os.getpid(), signal.SIGKILL)

def answer(request):
    """Greet by name who is told to; who is told to shout does."""
    noted("agent")
    name = request.messages[0].text.split()[-1]
    said = f"Hello {name}!" if "by name" in request.system_prompt else "Hello!"
    return text(said.upper() if "loud" in request.system_prompt else said, cost="0.002")

def is_loud(run):
    return Verdict(float(run.text.isupper()), reason="lacks: loudness")

evaluation = Evaluation(
    "greeting",
    cases=[Case(name.lower(), f"Greet {name}", checks=[contains(name), is_loud], replies=answer) for name in NAMES],
    agents={"greeter": "greeter.py"},
)
'''
REFLECTING = '''
from stepengine.testing import text, tool_call
from greeting import noted

def replies(request):
    """Add what is asked for, one thing at a time; the second only to what has the first."""
    noted("reflecting")
    prompt = request.messages[0].text
    now = prompt.partition("<part name='system_prompt'>\\n")[2].partition("\\n</part>")[0]
    value = now + (" Say it loud." if "by name" in now else " Do it by name.")
    if "tried part" not in prompt and "by name" not in now:
        value = now + " Be nice."
    return tool_call("change", {"part": "system_prompt", "value": value, "why": "It is asked for."}, cost="0.01")
'''
BASE = ["compare", "improve", "greeter.py", "--eval", "greeting.py", "--script", "reflecting.py", "-q"]
BOTH = ["compare", "improve", "both.py", "--eval", "both.py", "--script", "both.py", "-q", "--seed", "1", "--out", "o"]


@pytest.fixture
def greeting(folder: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(folder.path))
    monkeypatch.delitem(sys.modules, "greeting", raising=False)
    folder.write("greeter.py", GREETER)
    folder.write("greeting.py", GREETING.replace("checks=[contains(name), is_loud]", "checks=[contains(name)]"))
    folder.write("reflecting.py", REFLECTING)
    yield folder
    sys.modules.pop("greeting", None)


def improve(folder: Any, *words: str, code: int = 0, out: str = "o") -> Any:
    """
    Type the command, and return what it says: its results where it has some, else what stands on stderr.
    """
    place = () if "--continue" in words else ("--out", out)
    result = folder.type(*BASE, *place, *words, code=code)
    file = Path(out, "results.json")
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else result.stderr


def without_places(report: Any) -> Any:
    """
    Leave out what differs from one time to the next: seconds, folders, and what was cut off.
    """
    kept = {name: value for name, value in report.items() if name not in ("folder", "spent")}
    text = json.dumps(kept)
    for name in ("seconds", "reused"):
        text = "".join([part if i == 0 else part.partition(",")[2] for i, part in enumerate(text.split(f'"{name}":'))])
    return text.replace(f'"spent": "{report["spent"]}"', "")


# --- a better one -----------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG140", "evaluation:JG144")
def test_a_better_prompt_is_found_and_written_only_on_request(greeting: Any) -> None:
    before = Path("greeter.py").read_text()
    made = improve(greeting, "--budget", "1", "--seed", "1")

    assert made["is_better"]
    assert {"system_prompt": "Greet people. Do it by name."} == made["changes"]
    (pair,) = [pair for pair in made["held_out"]["pairs"] if pair["check"] == "pass"]
    assert (1.0, 0.4) == (pair["difference"], pytest.approx(pair["low"]))
    assert before == Path("greeter.py").read_text()
    assert Path("o/improvement.diff").read_text() == made["diff"]
    assert '-agent = AgentDefinition("greeter", model="t/m", system_prompt="Greet people.")\n' in made["diff"]
    assert (
        '+agent = AgentDefinition("greeter", model="t/m", system_prompt="Greet people. Do it by name.")\n'
        in made["diff"]
    )
    page = Path("o/report.html").read_text()
    assert all(word in page for word in ("before", "after", "Greet people. Do it by name.", "It is asked for."))
    assert "<script" not in page
    assert Path("o", made["held_out"]["cases"][0]["samples"][1]["journal"]).is_file()

    improve(greeting, "--budget", "1", "--seed", "1", "--write", out="again")

    assert before.replace("people.", "people. Do it by name.") == Path("greeter.py").read_text()


@pytest.mark.spec("evaluation:JG146")
@pytest.mark.deep
def test_a_search_replays_for_free_and_seeds_are_deterministic(greeting: Any) -> None:
    first = improve(greeting, "--budget", "1", "--seed", "4")
    asked = Path("asked.txt").read_text()
    replayed = greeting.json("replay", "o/improver.jsonl")

    assert first["changes"] == replayed["output"]["changes"]
    assert asked == Path("asked.txt").read_text()
    assert without_places(first) == without_places(improve(greeting, "--budget", "1", "--seed", "4", out="p"))


@pytest.mark.spec("evaluation:JG146")
@pytest.mark.deep
@pytest.mark.parametrize("dies", [1, 10, 20])
def test_a_killed_search_continues_to_the_same_end_and_cost(greeting: Any, dies: int) -> None:
    """
    It dies inside of a model call, which nobody has the answer of: that one alone is asked again.
    """
    whole = improve(greeting, "--budget", "1", "--seed", "2", "--concurrency", "1", out="whole")
    asked = Path("asked.txt").read_text().splitlines()
    Path("asked.txt").unlink()
    typed = [sys.executable, "-m", "stepengine", *BASE]
    more = ["--budget", "1", "--seed", "2", "--concurrency", "1", "--out", "o"]
    environment = {**os.environ, "DIES": str(dies), "PYTHONPATH": f"{ROOT}{os.pathsep}{greeting.path}"}
    done = subprocess.run([*typed, *more], check=False, capture_output=True, env=environment, timeout=120)
    assert -signal.SIGKILL == done.returncode, done.stderr
    made = improve(greeting, "--continue", "o")

    assert without_places(whole) == without_places(made)
    assert Decimal(whole["spent"]) == Decimal(made["spent"])
    again = Path("asked.txt").read_text().splitlines()
    assert [*asked[: dies - 1], asked[dies - 1], *asked[dies - 1 :]] == again


# --- from Python ------------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG151")
def test_improve_in_python_resumes_for_free_and_writes(greeting: Any) -> None:
    value = "Greet people. Do it by name."
    found = improve_sync("greeter.py", "greeting.py", replies=change_prompt(value), budget=1, seed=1, folder="o")
    asked = Path("asked.txt").read_text()
    lines: list[str] = []
    written = improve_sync(
        "greeter.py", "greeting.py", replies=change_prompt(value), resume="o", write=True, on_progress=lines.append
    )

    assert {"system_prompt": value} == found.found["changes"] == written.found["changes"]
    assert (True, False, True) == (found.is_better, found.is_written, written.is_written)
    assert f'system_prompt="{value}"' in Path("greeter.py").read_text()
    assert asked == Path("asked.txt").read_text()
    assert found.diff == Path("o/improvement.diff").read_text()
    assert found.to_json() == json.loads(Path("o/results.json").read_text()) | {"held_out": found.to_json()["held_out"]}
    assert "seed 1; to continue after a crash: --continue o" == lines[0]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG151")
def test_results_are_written_before_the_agent(greeting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write = improvement_search.replace_file

    def write_all_but_the_agent(path: Path, content: bytes) -> None:
        if path.name == "greeter.py":
            msg = "no space left"
            raise OSError(msg)
        write(path, content)

    monkeypatch.setattr(improvement_search, "replace_file", write_all_but_the_agent)
    value = "Greet people. Do it by name."
    with pytest.raises(OSError, match="no space left"):
        improve_sync(
            "greeter.py", "greeting.py", replies=change_prompt(value), budget=1, seed=1, folder="o", write=True
        )

    assert {"system_prompt": value} == json.loads(Path("o/results.json").read_text())["changes"]
    assert value in Path("o/improvement.diff").read_text()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG151")
def test_a_better_version_is_written_through_a_link(greeting: Any) -> None:
    Path("linked.py").symlink_to("greeter.py")
    value = "Greet people. Do it by name."
    made = improve_sync(
        "linked.py", "greeting.py", replies=change_prompt(value), budget=1, seed=1, folder="o", write=True
    )

    assert made.is_written
    assert Path("linked.py").is_symlink()
    assert value in Path("greeter.py").read_text()


@pytest.mark.spec("evaluation:JG148", "evaluation:JG151")
def test_improve_in_python_needs_a_budget(greeting: Any) -> None:
    with pytest.raises(DataError, match=r"budget= or --budget must be an amount of US dollars above 0"):
        improve_sync("greeter.py", "greeting.py", replies=change_prompt("Hi."), folder="o")
    assert not Path("o").exists()


def change_prompt(value: str) -> Any:
    return lambda _: tool_call(
        "change", {"part": "system_prompt", "value": value, "why": "It is asked for."}, cost="0.01"
    )


# --- money ------------------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG142")
@pytest.mark.parametrize(
    ("budget", "code"),
    [
        ("0.011", Exit.LIMIT),
        ("0.05", Exit.FAILED),
        ("0.5", Exit.COMPLETED),
    ],
)
def test_the_budget_is_exceeded_by_no_more_than_one_call(greeting: Any, budget: str, code: int | None) -> None:
    """
    With next to nothing it is undecided, with a little nothing is tried, with enough it is found.
    """
    result = greeting.type(*BASE, "--out", "o", "--seed", "1", "--budget", budget, code=code)
    made = json.loads(Path("o/results.json").read_text())
    lines = [json.loads(line) for line in Path("o/bought.jsonl").read_text().splitlines()]
    paid = [Decimal(line["paid"]) for line in lines if "paid" in line]

    assert Decimal(made["spent"]) == sum(paid)
    assert sum(paid[:-1], Decimal(0)) < Decimal(budget)
    assert made["is_better"] is (result.exit_code == Exit.COMPLETED)
    assert ("undecided" in result.stdout) is (result.exit_code == Exit.LIMIT)


class Slow(Provider):
    """Costs a cent a call, and says how many calls were under way at once."""

    name = "slow"

    def __init__(self) -> None:
        self.now = self.most = 0

    async def complete(self, request: ModelRequest) -> ModelReply:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now -= 1
        return ModelReply("Yes.", usage=Usage(input_tokens=1), cost=Decimal("0.01"))


def asking(number: int) -> ModelRequest:
    return ModelRequest("anthropic/claude-sonnet-4-5", messages=Transcript([UserMessage(f"Question {number}")]))


@pytest.mark.spec("evaluation:JG142")
@pytest.mark.parametrize(("most", "together"), [("0.01", 10), ("0.05", 2), ("9", 1)])
async def test_calls_run_concurrently_while_all_fit_in_the_budget(most: str, together: int, tmp_path: Path) -> None:
    """
    What a call can cost at most is set aside; one that may not fit is made alone, so that at most one goes beyond.
    """
    model = Slow()
    with ReplyBook(tmp_path / "book.jsonl", Decimal("0.105")) as book:
        provider = CachingProvider(book, "page", Models.from_value(model), lambda *_: Decimal(most))
        done = await asyncio.gather(*[provider.complete(asking(n)) for n in range(20)], return_exceptions=True)

    assert together == model.most
    assert {ModelReply, LimitExceeded} == {type(one) for one in done}
    assert 10 <= sum(isinstance(one, ModelReply) for one in done) <= 11
    assert Decimal("0.10") <= book.spent <= Decimal("0.115")
    assert provider.refused is not None


@pytest.mark.spec("evaluation:JG142", "evaluation:JG146")
async def test_a_book_keeps_replies_and_counts_interrupted_calls(tmp_path: Path) -> None:
    file = tmp_path / "book.jsonl"
    with ReplyBook(file, Decimal(1)) as book:
        await CachingProvider(
            book, "a", Models.from_value(ScriptedModel([text("one", cost="0.2")])), LIST_PRICES, may_be_unpriced=True
        ).complete(asking(1))
    with file.open("a") as torn:
        torn.write('{"number": 7, "most": "0.5"}\n{"number": 8, "mo')
    with ReplyBook(file, Decimal(1)) as book:
        again = CachingProvider(book, "a", Models.from_value(ScriptedModel()), LIST_PRICES)
        other = CachingProvider(book, "b", Models.from_value(ScriptedModel()), LIST_PRICES, before=["a"])

        assert Decimal("0.7") == book.spent
        assert "one" == (await again.complete(asking(1))).text == (await other.complete(asking(1))).text
        assert (1, 0, 1) == (again.served, again.bought, other.served)
        with pytest.raises(LimitExceeded, match="price of 'x/y' is unknown"):
            await other.complete(ModelRequest("x/y"))
    with ReplyBook(file, Decimal(1)) as book:
        assert "one" == book.replies_by_request_key("b")[book.make_request_key(asking(1))][0].text


@pytest.mark.spec("evaluation:JG148")
@pytest.mark.parametrize("line", ["nothing", '{"number": 1, "paid": "x", "reply": null}'])
def test_a_book_that_holds_something_else_is_refused(line: str, tmp_path: Path) -> None:
    file = tmp_path / "book.jsonl"
    started = '{"number":1,"most":"0"}'
    file.write_text(f"{started}\n{line}\n")

    with pytest.raises(DataError, match="line 2, is not a line of a reply book"):
        ReplyBook(file, Decimal(1))


@pytest.mark.spec("reliability:JR49")
def test_file_of_another_program_is_no_book(tmp_path: Path) -> None:
    text = '{"a": 1}'
    file = tmp_path / "book.jsonl"
    file.write_text(text)

    with pytest.raises(DataError, match="is not a reply book of stepengine and was left unchanged"):
        ReplyBook(file, Decimal(1))
    assert text == file.read_text()


TWO_CALLS = '''
from pathlib import Path
from stepengine import *
from stepengine.evaluation import *
from stepengine.testing import text, tool_call

def replies(request):
    """The first call of a run asks for a plan, which no part that can be changed is in."""
    with open("asked.txt", "a") as file:
        file.write(("plan" if request.system_prompt == "Plan." else "do") + "\\n")
    if request.tools:
        return tool_call("change", {"part": "system_prompt", "value": "Do it well.", "why": "w"}, cost="0.01")
    return text("good" if "well" in request.system_prompt else "bad", cost="0.002")

def plan_first(ctx):
    plan = yield from Complete(ctx.prompt, system_prompt="Plan.")
    done = yield from Complete(plan.text, system_prompt=agent.system_prompt)
    yield StepText(done.text)

agent = AgentDefinition("planner", model="t/m", system_prompt="Do it.", handle_steps=plan_first)
evaluation = Evaluation("e", [Case(f"c{n}", f"Task {n}", replies=replies) for n in range(10)], {"planner": "x"}, [contains("good")])
'''


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG143")
def test_calls_untouched_by_a_change_are_not_paid_again(folder: Any) -> None:
    """
    Versions of the second prompt share the calls of the first one; of the cases that decide those are made once, too.
    """
    folder.write("both.py", TWO_CALLS)
    folder.type(*BOTH, "--budget", "1")
    asked = Path("asked.txt").read_text().split()

    assert 10 == asked.count("plan")
    assert 20 + 1 == asked.count("do")


# --- what is no improvement -------------------------------------------------------------------------------------------


def reflecting_with(folder: Any, body: str) -> None:
    folder.write(
        "reflecting.py",
        f"from stepengine.testing import failure, text, tool_call\nfrom stepengine.errors import ModelError\n\ndef replies(request):\n    {body}\n",
    )


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG148")
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return text('I would say: be nice.', cost='0.001')", "did not name a part and its new value"),
        ("return tool_call('change', {'part': 'system_prompt', 'value': 7, 'why': ''}, cost='0.001')", "gave a int for system_prompt"),
        ("return tool_call('change', {'part': 'system_prompt', 'value': 'Greet people.', 'why': ''}, cost='0.001')", "was tried already"),
        ("return failure(ModelError('it is down', kind='server', retryable=False))", "it is down"),
    ],
)  # fmt: skip
def test_unusable_answers_end_the_search_early(greeting: Any, body: str, said: str) -> None:
    reflecting_with(greeting, body)
    made = improve(greeting, "--budget", "1", "--seed", "1", code=Exit.FAILED)

    assert not made["is_better"]
    assert "5 answers in a row could not be used" in made["why"]
    assert said in made["why"]
    assert not Path("o/improvement.diff").exists()
    assert len(Path("asked.txt").read_text().splitlines()) == 7


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG144")
def test_an_agent_that_passes_everything_is_left_as_it_is(greeting: Any) -> None:
    greeting.write("greeter.py", GREETER.replace("Greet people.", "Greet people by name."))
    made = improve(greeting, "--budget", "1", "--seed", "1", code=Exit.FAILED)

    assert "the agent as it is passes every case that is searched with" == made["why"]
    assert "no better version was found" in made["told"]


@pytest.mark.spec("evaluation:JG144", "evaluation:JG148")
@pytest.mark.deep
def test_a_random_judge_makes_no_version_better(greeting: Any) -> None:
    """
    Its verdicts depend on what it is shown, and on nothing that is good; a version that was lucky is not better where it counts.
    """
    dice = (
        "from hashlib import sha256\n\n"
        "def dice(run):\n    return sha256((run.text + run.case.id + run.result.state.system_prompt).encode()).digest()[0] % 2 == 0\n\nevaluation"
    )
    greeting.write(
        "greeting.py", GREETING.replace("\nevaluation", "\n" + dice, 1).replace("contains(name), is_loud", "dice")
    )
    reflecting_with(
        greeting,
        "return tool_call('change', {'part': 'system_prompt', 'value': f'Greet {len(request.messages[0].text)}', 'why': ''}, cost='0.01')",
    )
    made = improve(greeting, "--budget", "0.4", "--seed", "1", code=Exit.FAILED)

    assert "no better version was found" in made["told"]
    assert len(made["versions"]) > 2


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG148")
def test_a_broken_check_is_reported_and_ends_the_search(greeting: Any) -> None:
    greeting.write(
        "greeting.py",
        GREETING.replace('return Verdict(float(run.text.isupper()), reason="lacks: loudness")', "return 1 / 0"),
    )
    made = improve(greeting, "--budget", "1", "--seed", "1", code=Exit.FAILED)

    assert "could not be measured: the check is_loud has no verdict for case" in made["why"]
    assert "ZeroDivisionError" in made["why"]
    assert 7 == len(Path("asked.txt").read_text().splitlines())


# --- what is refused before anything is spent -------------------------------------------------------------------------


@pytest.mark.spec("evaluation:JG148")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--budget", "0"), "--budget must be an amount of US dollars above 0"),
        (("--budget", "nan"), "--budget must be an amount of US dollars above 0"),
        ((), "--budget must be an amount of US dollars above 0"),
        (("--budget", "1", "--eval", "nowhere.py"), "there is no evaluation file 'nowhere.py'"),
        (("--budget", "1", "--by", "beauty"), "--by 'beauty' is not a check; checks: pass, contains"),
        (("--budget", "1", "--only", "tools.*"), "has no changeable part of 'greeter'"),
        (("--budget", "1", "--continue", "nowhere"), "'nowhere' contains no search"),
    ],
)
def test_an_invalid_search_is_refused_before_any_cost(greeting: Any, words: tuple[str, ...], said: str) -> None:
    assert said in " ".join(str(improve(greeting, *words, code=Exit.USAGE)).split())
    assert not Path("asked.txt").exists()
    assert not Path("o").exists()


@pytest.mark.spec("evaluation:JG148")
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("for name in NAMES]", "for name in []]", "it has no cases; add cases=[Case(...)]"),
        ("for name in NAMES]", "for name in NAMES[:7]]", "2 cases for the search and 5 held-out cases"),
        ("replies=answer)", "replies=answer, tags=['held-out'])", "0 cases for the search and 12 held-out cases"),
        ("checks=[contains(name)]", "checks=[]", "it has no check"),
        ("checks=[contains(name)]", "checks=[judge('j.py', 'good?')]", "which do not count for pass; choose one with by= or --by"),
    ],
)  # fmt: skip
def test_an_evaluation_that_cannot_decide_is_refused(greeting: Any, old: str, new: str, said: str) -> None:
    source = Path("greeting.py").read_text()
    assert old in source
    greeting.write("greeting.py", source.replace(old, new))

    assert said in " ".join(str(improve(greeting, "--budget", "1", code=Exit.USAGE)).split())
    assert not Path("asked.txt").exists()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG141", "evaluation:JG148")
@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("SystemPrompt()", "code computes it (line 4); write it as a string literal"),
        ("''", ""),
    ],
)
def test_an_agent_with_a_computed_prompt_is_refused(greeting: Any, prompt: str, said: str) -> None:
    head = "from stepengine import AgentDefinition\nfrom stepengine.context import SystemPrompt\nWORDS = ' '.join(['Greet'])\n"
    greeting.write("greeter.py", f'{head}agent = AgentDefinition("greeter", model="t/m", system_prompt={prompt})\n')
    made = str(improve(greeting, "--budget", "0.0001", code=Exit.USAGE if said else Exit.LIMIT))

    assert said in " ".join(made.split())
    assert Path("asked.txt").exists() is not bool(said)


@pytest.mark.spec("evaluation:JG148")
def test_an_unknown_agent_model_or_price_is_refused(greeting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "x")
    live = GREETING.replace(", replies=answer", "")
    greeting.write("greeting.py", live)
    typed = ("--eval", "greeting.py", "--budget", "1", "-q", "--out", "o")
    unknown = greeting.type("compare", "improve", "nobody", *typed, code=Exit.USAGE).stderr
    unserved = greeting.type("compare", "improve", "greeter.py", *typed, code=Exit.USAGE).stderr
    unpriced = greeting.type(
        "compare", "improve", "greeter.py", *typed, "--model", "anthropic/claude-of-nobody", code=Exit.USAGE
    ).stderr

    assert f"{NO_AGENT} 'nobody'" in unknown
    assert "'t/m'" in unserved
    assert "the price of 'anthropic/claude-of-nobody' is unknown" in " ".join(unpriced.split())
    assert not Path("o").exists()


@pytest.mark.spec("evaluation:JG146", "evaluation:JG148")
@pytest.mark.deep
def test_a_search_continues_only_with_its_original_inputs(greeting: Any) -> None:
    improve(greeting, "--budget", "1", "--seed", "1")
    for option, value in {"--seed": "2", "--versions": "9", "--reflect-model": "a/b"}.items():
        said = greeting.type(*BASE, "--continue", "o", option, value, code=Exit.USAGE).stderr
        assert f"{option} of o is" in " ".join(said.split())
    budget = greeting.type(*BASE, "--continue", "o", "--budget", "2", code=Exit.USAGE).stderr
    again = greeting.type(*BASE, "--out", "o", "--budget", "1", code=Exit.USAGE).stderr
    asked = Path("asked.txt").read_text()
    ended = improve(greeting, "--continue", "o")
    greeting.write("greeter.py", GREETER.replace("people", "persons"))
    other = greeting.type(*BASE, "--continue", "o", code=Exit.USAGE).stderr

    assert "the budget of o is 1 US dollars" in " ".join(budget.split())
    assert "already contains a search" in again
    assert "greeter.py, the evaluation, n, by, only or model differs from the search in" in " ".join(other.split())
    assert ended["is_better"]
    assert asked == Path("asked.txt").read_text()


@pytest.mark.spec("evaluation:JG146")
@pytest.mark.deep
@pytest.mark.smoke
def test_a_search_does_not_continue_with_changed_cases(greeting: Any) -> None:
    greeting.write("repo/a.txt", "x")
    evaluation = attrs.evolve(load_evaluation(Path("greeting.py")), files="repo")
    replies = change_prompt("Greet people. Do it by name.")
    made = improve_sync("greeter.py", evaluation, replies=replies, budget=1, seed=1, folder="o")
    first, *others = evaluation.cases

    for changes in (
        {"limits": Limits(max_steps=3)},
        {"files": {"a.txt": "y"}},
        {"cases": [attrs.evolve(first, answers="yes"), *others]},
        {"cases": [attrs.evolve(first, replies=["Hello Ann!"]), *others]},
    ):
        with pytest.raises(DataError, match="the evaluation, n, by, only or model differs from the search in"):
            improve_sync("greeter.py", attrs.evolve(evaluation, **changes), replies=replies, resume="o")
    greeting.write("repo/a.txt", "y")
    with pytest.raises(DataError, match="the evaluation, n, by, only or model differs from the search in"):
        improve_sync("greeter.py", evaluation, replies=replies, resume="o")
    greeting.write("repo/a.txt", "x")
    assert made.found == improve_sync("greeter.py", evaluation, replies=replies, resume="o").found


@pytest.mark.spec("evaluation:JG146")
@pytest.mark.parametrize("lines", [0, 1])
@pytest.mark.deep
def test_a_search_killed_before_its_first_record_starts_over(greeting: Any, lines: int) -> None:
    improve(greeting, "--budget", "1", "--seed", "1")
    left = Path("o/improver.jsonl").read_text().splitlines(keepends=True)[:lines]
    Path("p").mkdir()
    Path("p/improver.jsonl").write_text("".join(left))
    refused = greeting.type(*BASE, "--continue", "p", code=Exit.USAGE).stderr

    assert "'p' contains no search" in " ".join(refused.split())
    assert improve(greeting, "--budget", "1", "--seed", "1", out="p")["is_better"]


@pytest.mark.spec("evaluation:JG140")
@pytest.mark.deep
def test_an_agent_edited_during_the_search_is_not_overwritten(greeting: Any) -> None:
    edited = GREETER.replace("people", "people and animals")
    edits = f'noted("reflecting")\n    Path("greeter.py").write_text({edited!r})'
    greeting.write("reflecting.py", "from pathlib import Path\n" + REFLECTING.replace('noted("reflecting")', edits))
    said = greeting.type(*BASE, "--budget", "1", "--seed", "1", "--out", "o", "--write", code=Exit.FAILED)

    assert edited == Path("greeter.py").read_text()
    assert "it was edited during the search" in " ".join(said.stdout.split())
    assert "by name" in Path("o/improvement.diff").read_text()


@pytest.mark.spec("evaluation:JG142", "evaluation:JG144")
@pytest.mark.deep
def test_a_judge_shares_the_budget_and_is_not_asked_twice(greeting: Any) -> None:
    """
    With two samples of each case; what it says counts where `--by` names it.
    """
    judging = """
critic = AgentDefinition("critic", model="t/m")

def said(request):
    if request.system_prompt.startswith("Greet"):
        return answer(request)
    noted("judge")
    return text('{"score": 1, "reason": "ok"}' if "!" in request.messages[0].text and "Hello " in request.messages[0].text
                else '{"score": 0, "reason": "cold"}', cost="0.003")

evaluation"""
    source = (
        Path("greeting.py")
        .read_text()
        .replace("\nevaluation", "\n" + judging, 1)
        .replace("replies=answer", "replies=said")
    )
    greeting.write("greeting.py", source.replace("checks=[contains(name)]", "checks=[judge(critic, 'Is it warm?')]"))
    made = improve(greeting, "--budget", "1", "--seed", "1", "-n", "2", "--by", "judge")
    asked = Path("asked.txt").read_text().split()

    assert made["is_better"]
    # A version that was no better gave the same answers in three cases.
    assert (54, 48, 2) == tuple([asked.count(who) for who in ("agent", "judge", "reflecting")])
    assert 54 * Decimal("0.002") + 48 * Decimal("0.003") + 2 * Decimal("0.01") == Decimal(made["spent"])


@pytest.mark.spec("evaluation:JG142")
@pytest.mark.deep
@pytest.mark.smoke
def test_a_failed_sample_is_not_repeated_for_the_next_one(greeting: Any) -> None:
    failing = """
    noted(name)
    if len(Path("asked.txt").read_text().splitlines()) == 1:
        raise ModelError("down", kind="http", status=400)
    said ="""
    source = GREETING.replace('noted("agent")', "").replace(
        "import text", "import text\nfrom stepengine.errors import ModelError"
    )
    greeting.write("greeting.py", source.replace("\n    said =", failing, 1))
    made = improve(greeting, "--budget", "1", "--seed", "1", "-n", "2", code=Exit.FAILED)
    asked = Path("asked.txt").read_text().split()

    assert "could not be measured" in made["why"]
    assert {2} == {asked.count(name) for name in asked}


@pytest.mark.spec("evaluation:JG146")
def test_the_improver_without_cases_names_the_command(folder: Any) -> None:
    params = {"parts": {"system_prompt": "x"}, "search": ["a"], "held_out": [], "budget": "1"}
    said = folder.type("run", "improver", "--params", json.dumps(params), "--no-journal", code=Exit.FAILED).stderr

    assert "nobody brought cases to run; `stepengine compare improve AGENT --eval FILE --budget USD` does" in " ".join(
        said.split()
    )


# --- blame ------------------------------------------------------------------------------------------------------------

LOOKING = '''
from stepengine import *
from stepengine.evaluation import *
from stepengine.testing import text, tool_call

@tool(annotations=ToolAnnotations(read_only=True))
def look(shelf: str) -> str:
    """Look at a shelf."""
    return "three" if shelf == "right" else "nothing"

TRIED = {}

def replies(request):
    """Look at the wrong shelf first and at the right one in later tries; whoever saw nothing says nothing."""
    prompt = request.messages[0].text
    if request.tools[0].name == "change":
        with open("shown.txt", "a") as file:
            file.write(prompt)
        return tool_call("change", {"part": "system_prompt", "value": "Look right.", "why": "w"}, cost="0.01")
    seen = [m.text for m in request.messages if m.role == "tool"]
    if seen:
        return text(f"There are {seen[0]}.", cost="0.001")
    TRIED[prompt] = TRIED.get(prompt, 0) + 1
    right = "right" in request.system_prompt or TRIED[prompt] > 1
    return tool_call("look", {"shelf": "right" if right else "wrong"}, cost="0.001")

agent = AgentDefinition("looker", model="t/m", system_prompt="Look.", tools=[look])
evaluation = Evaluation("e", [Case(f"c{n}", f"Shelf {n}", replies=replies) for n in range(10)], {"looker": "x"}, [contains("three")])
'''


@pytest.mark.spec("evaluation:JG141")
@pytest.mark.deep
def test_the_reflecting_model_sees_failed_runs_with_blamed_steps(folder: Any) -> None:
    folder.write("both.py", LOOKING)
    folder.type(*BOTH, "--budget", "1")
    shown = Path("shown.txt").read_text()

    assert "<part name='system_prompt'>\nLook.\n</part>" in shown
    assert "<part name='tools.look'>\nLook at a shelf.\n</part>" in shown
    assert 'step 1 calls look {"shelf":"wrong"}' in shown
    assert "look gave: nothing" in shown
    assert "contains: the text does not contain 'three'" in shown
    assert "step 1 is to blame: the chance to pass falls with step 1" in shown


@pytest.mark.spec("evaluation:JG141")
@pytest.mark.deep
@pytest.mark.smoke
def test_the_blamed_step_is_that_of_the_worst_sample(folder: Any) -> None:
    folder.write("both.py", LOOKING.replace("TRIED[prompt] > 1", "TRIED[prompt] != 2"))
    folder.type(*BOTH, "--budget", "1", "-n", "2", code=Exit.FAILED)

    assert "step 1 is to blame: the chance to pass falls with step 1" in Path("shown.txt").read_text()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG141")
def test_a_check_that_reads_files_blames_no_step(folder: Any) -> None:
    """
    A run that goes on from its middle has none; nothing is spent on it.
    """
    source = LOOKING.replace('[contains("three")]', "[is_there]").replace(
        "TRIED =", "def is_there(run):\n    return run.files.text('x') == 'three'\n\nTRIED ="
    )
    folder.write("both.py", source)
    folder.type(*BOTH, "--budget", "0.1", code=1)

    assert "is to blame" not in Path("shown.txt").read_text()
    assert "a run that continues from a recorded step has no files" in Path("o/improver.jsonl").read_text()
    assert '"name":"blame/' not in Path("o/bought.jsonl").read_text()


# --- parts of a file --------------------------------------------------------------------------------------------------

PARTS = '''\
from __future__ import annotations

from pydantic import BaseModel, Field
from stepengine import AgentDefinition, ModelSettings, Tool, tool

PROMPT = ("Grüße " "people "
          "politely.")  # kept

class P(BaseModel):
    limit: int = Field(default=3, ge=1)
    share: float = 0.5
    word: str = "hé"
    made: list = []

@tool
def look(name: str) -> str:
    """
    Look something up.

    Args:
        name: What.
    """
    return name

@tool(description="Count it.")
def count(name: str) -> str:
    return name

@tool
def other(name: str) -> str:
    """Belongs to nobody."""
    return name

made = Tool(name="made", description="It is made.", input_schema={"type": "object"}, run=lambda given: "x")
helper = AgentDefinition("helper", description="Helps.", system_prompt="""Help
much.""")
agent = AgentDefinition("greeter", model="t/m", system_prompt=PROMPT, instructions_prompt=f"{PROMPT}", tools=[look, count, made, "spawn_agents"],
    input_schema=P, spawnable_agents=[helper], settings=ModelSettings(temperature=0.5, max_tokens=100))
'''


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> AgentFile:
    file = tmp_path_factory.mktemp("parts") / "mine.py"
    file.write_text(PARTS, encoding="utf-8")
    return AgentFile.load(AgentLocation(file))


@pytest.mark.spec("evaluation:JG140")
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_diff_keeps_the_lines_of_the_file(tmp_path: Path, end: str) -> None:
    source = f'{GREETER}\x0c\nLATER = "a\u2028b"\n'.replace("\n", end)
    (tmp_path / "mine.py").write_bytes(source.encode())
    file = AgentFile.load(AgentLocation(tmp_path / "mine.py"))
    made = file.diff_changes({"system_prompt": "Greet\u2028all\x85of them."}).split("\n")
    kept = [line[1:] for line in made[3:] if line[:1] in (" ", "+")]

    assert [] == [line for line in made[2:-1] if line[:1] not in (" ", "+", "-", "@")]
    assert file.source_with_changes({"system_prompt": "Greet\u2028all\x85of them."}).decode().split("\n")[:-1] == kept


@pytest.mark.spec("evaluation:JG141")
def test_parts_are_the_literals_that_an_agent_is_made_of(parts: AgentFile) -> None:
    assert {
        "system_prompt": "Grüße people politely.", "settings.temperature": 0.5, "settings.max_tokens": 100, "params.limit": 3,
        "params.share": 0.5, "params.word": "hé", "helper.system_prompt": "Help\nmuch.", "helper.description": "Helps.",
        "tools.look": "Look something up.\n\nArgs:\n    name: What.", "tools.count": "Count it.", "tools.made": "It is made.",
    } == {name: part.value for name, part in parts.parts.items()}  # fmt: skip
    assert ["instructions_prompt"] == [*parts.fixed]
    assert "" == parts.diff_changes({})


TEXTS = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1, max_size=60).filter(
    str.strip
)


@pytest.mark.spec("evaluation:JG141")
@given(prompt=TEXTS, tool=TEXTS, limit=st.integers(1, 10**6), share=st.floats(allow_nan=False, allow_infinity=False))
@pytest.mark.deep
def test_a_version_equals_the_agent_of_its_file(
    prompt: str, tool: str, limit: int, share: float, tmp_path_factory: Any
) -> None:
    """
    Whatever the new values hold, quotes, line ends and backslashes included: the agent has them, and all else stays.
    """
    folder = tmp_path_factory.mktemp("parts")
    (folder / "mine.py").write_text(PARTS, encoding="utf-8")
    file = AgentFile.load(AgentLocation(folder / "mine.py"))
    changes = {
        "system_prompt": prompt,
        "helper.system_prompt": prompt,
        "tools.count": tool,
        "params.limit": limit,
        "params.share": share,
    }
    made = file.load_with_changes(changes)
    (folder / "after.py").write_bytes(file.source_with_changes(changes))
    after = AgentFile.load(AgentLocation(folder / "after.py"))

    assert (prompt, tool) == (made.system_prompt, made.tools[1].spec.description)  # type: ignore[union-attr]
    assert (limit, share, "hé") == tuple(made.input_schema.params().model_dump().values())[:3]  # type: ignore[union-attr,operator]
    assert {name: part.value for name, part in after.parts.items()} == {
        **{n: p.value for n, p in file.parts.items()},
        **changes,
    }
    assert b"# kept" in file.source_with_changes(changes)
    assert ["after.py", "mine.py"] == sorted([path.name for path in folder.iterdir() if path.suffix == ".py"])


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG141")
@settings(max_examples=10)  # each loads a file
@given(text=TEXTS)
def test_a_docstring_of_a_tool_can_say_anything(text: str, parts: AgentFile, tmp_path_factory: Any) -> None:
    import inspect

    file = tmp_path_factory.mktemp("changed") / "after.py"
    file.write_bytes(parts.source_with_changes({"tools.look": text}))
    after = AgentFile.load(AgentLocation(file))

    assert inspect.cleandoc(text) == after.parts["tools.look"].value


@pytest.mark.spec("evaluation:JG148")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"code": "x"}, "has no changeable part 'code'; changeable parts: system_prompt"),
        ({"params.limit": "x"}, "params.limit must have the type int, not str"),
        ({"params.share": float("nan")}, "params.share must be a finite number, not nan"),
        ({"system_prompt": "x" * 20_001}, "at most 20000 are allowed"),
        ({"system_prompt": " "}, "is empty"),
    ],
)
def test_a_value_that_cannot_stand_there_is_refused(parts: AgentFile, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        parts.load_with_changes(changes)


def test_a_version_that_cannot_be_loaded_says_so(parts: AgentFile) -> None:
    with pytest.raises(DefinitionError, match="max_tokens"):
        parts.load_with_changes({"settings.max_tokens": -5})


# --- the search by itself ---------------------------------------------------------------------------------------------

improver = load_module(ROOT / "agents" / "improver.py")


def version(number: int, scores: str, parents: tuple[int, ...] = (0,), **changes: str) -> Any:
    runs = {name: {"score": float(score)} for name, score in zip("abcdef", scores, strict=False)}
    return improver.Version(number, changes, parents if number else (), "", runs)


@pytest.mark.spec("evaluation:JG144")
def test_a_version_stays_while_it_is_best_at_a_case() -> None:
    pool = [version(0, "0000"), version(1, "1100"), version(2, "0011"), version(3, "1000")]

    assert {"a": {1}, "b": {1}, "c": {2}, "d": {2}} == improver.find_pareto_front(pool, "abcd")


@pytest.mark.spec("evaluation:JG144")
def test_two_versions_that_know_different_things_are_merged_once() -> None:
    pool = [version(0, "0000"), version(1, "1100", x="one", z="both"), version(2, "0011", y="two", z="other")]
    tried: set[tuple[int, int]] = set()
    made = improver.merge_two_versions(pool, "abcd", tried, Random(0))

    assert {"x": "one", "y": "two", "z": "both"} == made.changes
    assert (1, 2) == made.parents
    assert improver.merge_two_versions(pool, "abcd", tried, Random(0)) is None


@pytest.mark.spec("evaluation:JG144")
def test_a_version_and_its_descendant_are_not_merged() -> None:
    pool = [version(0, "0000"), version(1, "1100", x="one"), version(2, "0111", (1,), x="one", y="two")]

    assert improver.merge_two_versions(pool, "abcd", set(), Random(0)) is None


@pytest.mark.spec("evaluation:JG142")
async def test_a_running_call_counts_with_its_highest_cost(tmp_path: Path) -> None:
    seen, file = [], tmp_path / "book.jsonl"

    async def call() -> ModelReply:
        copy = tmp_path / "copy.jsonl"
        copy.write_bytes(file.read_bytes())
        with ReplyBook(copy, Decimal(1)) as other:
            seen.append(other.spent)
        return text("one", cost="0.2")

    with ReplyBook(file, Decimal(1)) as book:
        await book.call_within_budget("page", "key", call, max_cost=Decimal("0.5"), price=lambda usage: None)

        assert (["0.5"], Decimal("0.2")) == ([str(cost) for cost in seen], book.spent)


@pytest.mark.spec("evaluation:JG143", "evaluation:JG146")
@pytest.mark.deep
def test_a_search_ended_by_an_error_restarts_with_bought_replies(greeting: Any) -> None:
    """
    Here somebody resumed its journal by itself, without the cases.
    """
    whole = improve(greeting, "--budget", "1", "--seed", "1")
    asked, journal = Path("asked.txt").read_text(), Path("o/improver.jsonl")
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:12]))
    greeting.type("resume", "o/improver.jsonl", code=Exit.FAILED)
    made = improve(greeting, "--continue", "o")

    assert without_places(whole) == without_places(made)
    assert whole["spent"] == made["spent"]
    assert asked == Path("asked.txt").read_text()
    assert Path("o/improver.before-1.jsonl").is_file()
