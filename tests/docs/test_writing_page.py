"""
The page about writing agents: the rule that it gives to ruff finds what a handler must not look at.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "writing-an-agent.md").read_text(encoding="utf-8")
FOUND = {
    "import time": "import time\nNOW = time.time()",
    "from time": "from time import monotonic",
    "random": "import random\nCHANCE = random.random()",
    "from random": "from random import Random",
    "uuid": "import uuid\nNAME = uuid.uuid4()",
    "from uuid": "from uuid import uuid4",
    "environment": "import os\nHOME = os.environ['HOME']",
    "getenv": "import os\nHOME = os.getenv('HOME')",
    "now": "from datetime import UTC, datetime\nNOW = datetime.now(UTC)",
    "today": "import datetime\nDAY = datetime.date.today()",
    "secrets": "import secrets",
}


def found(folder: Path, *files: Path) -> list[str]:
    (rule,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    config = folder / "ruff.toml"
    config.write_text(rule)
    command = ["check", "--no-cache", "--output-format", "json", "--ignore-noqa", "--config", str(config)]
    said = subprocess.run(
        [sys.executable, "-m", "ruff", *command, *map(str, files)], capture_output=True, text=True, check=False
    )
    return [f"{each['filename']}: {each['message']}" for each in json.loads(said.stdout)]


@pytest.mark.spec("replay:D8")
def test_the_ruff_rule_flags_bypasses_but_not_the_context(tmp_path: Path) -> None:
    pytest.importorskip("ruff")
    for name, code in FOUND.items():
        (tmp_path / f"{name.replace(' ', '_')}.py").write_text(f"{code}\n")
    fine = "from datetime import timedelta\ndef handle_steps(ctx):\n    yield (ctx.now() + timedelta(1), ctx.random.random())\n"
    (tmp_path / "fine.py").write_text(fine)
    named = {Path(line.partition(":")[0]).stem for line in found(tmp_path, tmp_path)}

    assert {name.replace(" ", "_") for name in FOUND} == named


@pytest.mark.spec("replay:D8")
def test_bundled_agents_bypass_nothing_of_the_engine(tmp_path: Path) -> None:
    pytest.importorskip("ruff")

    assert [] == found(tmp_path, ROOT / "agents")
