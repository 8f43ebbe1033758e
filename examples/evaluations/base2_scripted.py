"""
The tasks of ``base2.py`` without a key: scripted agents solve them, fail them or do nothing, which tests the checks themselves.

``stepengine eval examples/evaluations/base2_scripted.py --shell --gate "right.pass >= 1" --gate "wrong.pass <= 0"``
"""

import runpy
from collections.abc import Callable
from pathlib import Path

import attrs

from stepengine import load_agent
from stepengine.evaluation import Evaluation
from stepengine.models import ModelReply, ModelRequest
from stepengine.testing import text, tool_call, tool_calls

suite = runpy.run_path(str(Path(__file__).with_name("base2.py")))


def change(path: str, *pairs: tuple[str, str]) -> ModelReply:
    """Return a reply that replaces texts in a file."""
    replacements = [{"old_string": old, "new_string": new} for old, new in pairs]
    return tool_call("str_replace", {"path": path, "replacements": replacements})


def write(path: str, content: str) -> ModelReply:
    """Return a reply that writes a file."""
    return tool_call("write_file", {"path": path, "content": content})


LOOK = tool_call("spawn_agents", {"agents": [{"agent_type": "basher", "params": {"command": ["ls"]}}]})
READ = tool_call("read_files", {"paths": ["README.md"]})
MILES = (
    "    return kilograms * 2.2046226218\n",
    "    return kilograms * 2.2046226218\n\n\ndef miles_to_km(miles):\n    return miles * {}\n",
)
RENAMED = ("total(", "order_total(")
CSV = suite["SHOP"]["shop/report.py"]
CSV_ALONE = CSV[CSV.index("def export_csv") : CSV.index("def export_json")]
BELOW = (
    "    def test_weight",
    "    def test_below_zero(self):\n        self.assertEqual(14, c_to_f(-10))\n\n    def test_weight",
)
WHICH = tool_call(
    "ask_user", {"questions": [{"question": "Which export is old?", "options": [{"label": "CSV"}, {"label": "JSON"}]}]}
)
VERSION = ("1.3.0", "1.4.0")
OLD_SUM = ("sum(price for price, number in items)", "sum(price * number for price, number in items)")

RIGHT = {
    "add-function": [change("units.py", (MILES[0], MILES[1].format("1.609344"))), LOOK],
    "fix-test": [change("shop/cart.py", OLD_SUM), LOOK],
    "rename": [
        change("shop/cart.py", RENAMED),
        change("shop/report.py", ("import total", "import order_total"), ("sum(total(", "sum(order_total(")),
        change("test_cart.py", ("import total", "import order_total"), (" total(", " order_total(")),
        LOOK,
    ],
    "explain": [text("It raises ValueError for an amount below zero, and takes 50 percent off at most.")],
    "failing-test": [change("test_units.py", BELOW), LOOK],
    "instructions": [write("notes/release.md", "# Releases\nStatus: draft\n\nTag, build, publish.\n"), LOOK],
    "forbidden-path": [change("notes/mail.md", ("recieve", "receive")), LOOK],
    "ask": [WHICH, change("shop/report.py", (CSV_ALONE, "")), LOOK],
    "few-steps": [
        tool_calls(*[change(path, VERSION) for path in ("shop/__init__.py", "setup.cfg", "README.md")]),
        LOOK,
    ],
    "keep-bytes": [change("notes/legacy.txt", ("red", "blue")), LOOK],
}
WRONG = {
    "add-function": [change("units.py", (MILES[0], MILES[1].format("1.6"))), write("notes.txt", "done"), LOOK],
    "fix-test": [change("test_cart.py", ("assertEqual(25", "assertEqual(15")), LOOK, text("The test was wrong.")],
    "rename": [change("shop/cart.py", RENAMED), LOOK],
    "explain": [change("shop/discount.py", ("raise", "return 0\n        raise")), LOOK, text("It gives 0.")],
    "failing-test": [change("units.py", ("abs(celsius)", "celsius")), change("test_units.py", BELOW), LOOK],
    "instructions": [write("notes/release.md", "How to release\n"), write("RELEASING.md", "See notes.\n"), LOOK],
    "forbidden-path": [change("generated/index.md", ("recieve", "receive")), LOOK],
    "ask": [change("shop/report.py", (CSV[CSV.index("def export_json") :], "")), LOOK],
    "few-steps": [*[READ] * 12, change("README.md", VERSION), LOOK],
    "keep-bytes": [
        write("notes/legacy.txt", "Colour: blue\nSize: 10\nWeight: 3\nEnd\n"),
        write("notes/todo.txt", "check it"),
        LOOK,
    ],
}
PLAYED = {"scripted/right": RIGHT, "scripted/wrong": WRONG, "scripted/untouched": {}}


def played(case: str) -> Callable[[ModelRequest], ModelReply]:
    """Return what plays a case: the next reply of the side whose model is asked."""

    def reply(request: ModelRequest) -> ModelReply:
        said = sum(message.role == "assistant" for message in request.messages)
        script = PLAYED[request.model].get(case, [])
        return script[said] if said < len(script) else text("Done.")

    return reply


base2 = load_agent("base2")
evaluation = Evaluation(
    "base2-scripted",
    cases=[attrs.evolve(case, replies=played(case.id)) for case in suite["CASES"]],
    agents={name.partition("/")[2]: attrs.evolve(base2, model=name) for name in PLAYED},
)
