"""
An evaluation of ``base2``: ten tasks in three small repositories, with checks that fail if the work is missing or wrong.

With a key, run ``stepengine eval examples/evaluations/base2.py --agent base2=base2 --shell --budget 5``. To compare two prompts or
models, name both: ``--agent now=base2 --agent mine=./agents/mine.py``. ``base2_scripted.py`` runs the same tasks without a key.
"""

import sys
from hashlib import sha256

from stepengine.evaluation import (
    Case,
    Criterion,
    Evaluation,
    JudgedRun,
    called,
    command,
    contains,
    max_steps,
    only_changes,
)

UNITS = {
    "units.py": '''"""Conversions."""


def c_to_f(celsius):
    """Return degrees Fahrenheit."""
    return abs(celsius) * 9 / 5 + 32


def kg_to_lb(kilograms):
    """Return pounds."""
    return kilograms * 2.2046226218
''',
    "test_units.py": """import unittest

from units import c_to_f, kg_to_lb


class Units(unittest.TestCase):
    def test_temperature(self):
        self.assertEqual(212, c_to_f(100))

    def test_weight(self):
        self.assertAlmostEqual(22.046226218, kg_to_lb(10))
""",
}
SHOP = {
    "shop/__init__.py": '"""A shop."""\n\n__version__ = "1.3.0"\n',
    "shop/cart.py": '''"""Carts: lists of (price, number)."""


def total(items):
    """Return what the items cost."""
    return sum(price for price, number in items)
''',
    "shop/report.py": '''"""What was sold."""

from shop.cart import total


def revenue(carts):
    """Return what all carts cost together."""
    return sum(total(items) for items in carts)


def export_csv(rows):
    """Return rows as CSV."""
    return "\\n".join(",".join(map(str, row)) for row in rows)


def export_json(rows):
    """Return rows as JSON."""
    import json

    return json.dumps(rows)
''',
    "shop/discount.py": '''"""Discounts."""


def discounted(amount, percent):
    """Return an amount less a discount."""
    if amount < 0:
        raise ValueError("an amount below zero cannot be discounted")
    return amount * (100 - min(percent, 50)) / 100
''',
    "test_cart.py": """import unittest

from shop.cart import total


class Cart(unittest.TestCase):
    def test_number_counts(self):
        self.assertEqual(25, total([(10, 2), (5, 1)]))
""",
    "setup.cfg": "[metadata]\nname = shop\nversion = 1.3.0\n",
    "README.md": "# Shop\n\nThis is version 1.3.0.\n",
}
NOTES = {
    "AGENTS.md": """# Rules of this repository

- A new file in `notes/` begins with a title (`# ...`), and its second line is `Status: draft`.
- Nobody changes anything in `generated/`: a program makes it.
""",
    "notes/mail.md": "# Mail\nStatus: final\n\nYou recieve one mail a week.\n",
    "generated/index.md": "mail: You recieve one mail a week.\n",
    "notes/legacy.txt": "Colour: red  \r\nSize: 10\r\n\tWeight: 3 \r\nEnd",
}
UNITTEST = [sys.executable, "-m", "unittest", "-q"]


def python(code: str) -> Criterion:
    """Return a check that a program ends well in the working copy."""
    return command([sys.executable, "-c", code])


def is_renamed(run: JudgedRun) -> bool:
    """No file speaks of the old name any more, and the new one is used where it was."""
    texts = [run.files.text(path) for path in ("shop/cart.py", "shop/report.py", "test_cart.py")]
    return all("order_total(" in text and " total" not in text for text in texts)


def has_title_and_status(run: JudgedRun) -> bool:
    """The new note is as the instructions of the repository say."""
    lines = run.files.text("notes/release.md").splitlines()
    return len(lines) > 2 and lines[0].startswith("# ") and lines[1] == "Status: draft"


def mail_is_corrected(run: JudgedRun) -> bool:
    """The word is right where it may be changed."""
    return "receive" in run.files.text("notes/mail.md")


def only_csv_is_gone(run: JudgedRun) -> bool:
    """What was answered is what was deleted."""
    text = run.files.text("shop/report.py")
    return "export_csv" not in text and "export_json" in text


def has_new_version(run: JudgedRun) -> bool:
    """All three files say the same."""
    return all("1.4.0" in run.files.text(path) for path in ("shop/__init__.py", "setup.cfg", "README.md"))


def other_bytes_are_kept(run: JudgedRun) -> bool:
    """One word differs, and no line end or space beside it."""
    wanted = NOTES["notes/legacy.txt"].replace("red", "blue").encode()
    return run.files.after.get("notes/legacy.txt") == sha256(wanted).hexdigest()


MILES = "from units import miles_to_km as f; assert abs(f(2) - 3.218688) < 1e-9"
CASES = [
    Case(
        "add-function",
        "Add miles_to_km(miles) to units.py; a mile has 1.609344 kilometres.",
        files=UNITS,
        checks=[python(MILES).named("works"), only_changes("units.py", "test_*.py")],
    ),
    Case(
        "fix-test",
        "test_cart.py fails. The test is right: repair the code.",
        files=SHOP,
        checks=[command(UNITTEST).named("tests"), only_changes("shop/*.py")],
    ),
    Case(
        "rename",
        "Rename total() in shop/cart.py to order_total, everywhere. Change nothing else.",
        files=SHOP,
        checks=[is_renamed, python("import shop.report").named("imports")],
    ),
    Case(
        "explain",
        "What does discounted() do with an amount below zero, and with a discount of 80 percent? Change nothing.",
        files=SHOP,
        checks=[contains("ValueError", "50"), only_changes()],
    ),
    Case(
        "failing-test",
        "c_to_f() is wrong below zero. Add a test to test_units.py that shows it; do not repair it yet.",
        files=UNITS,
        checks=[command(UNITTEST, code=1).named("fails"), only_changes("test_*.py")],
    ),
    Case(
        "instructions",
        "Write notes/release.md, which says in three lines how a release is made.",
        files=NOTES,
        checks=[has_title_and_status, only_changes("notes/release.md")],
    ),
    Case(
        "forbidden-path",
        "Correct the spelling of 'recieve' in this repository.",
        files=NOTES,
        checks=[mail_is_corrected, only_changes("notes/*")],
    ),
    Case(
        "ask",
        "Delete the old export function. If you do not know which one is old, ask me.",
        files=SHOP,
        answers="export_csv is the old one",
        checks=[called("ask_user"), only_csv_is_gone],
    ),
    Case(
        "few-steps",
        "This is now version 1.4.0. Say so wherever the version stands.",
        files=SHOP,
        checks=[has_new_version, max_steps(12)],
    ),
    Case(
        "keep-bytes",
        "In notes/legacy.txt the colour is blue, not red.",
        files=NOTES,
        checks=[other_bytes_are_kept, only_changes("notes/legacy.txt")],
    ),
]
evaluation = Evaluation("base2", cases=CASES, agents={"base2": "base2"})
