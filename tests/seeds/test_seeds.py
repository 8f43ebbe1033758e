"""
Every example of seeds 000, 002 and 003 runs: each is a script, here or among the examples, and closes rows.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.offline import ROOT, ran

pytestmark = pytest.mark.usefixtures("forks")
HERE = Path(__file__).parent

SCRIPTS = {
    "tests/seeds/hive_first_agent.py": (
        "000: Tool System (Rich Descriptions)",
        "000: Basic Usage (Telegram Bot / Firebase Function)",
        "000: Think/Plan Mode (Extended Reasoning)",
        "000: Context Management (Read Files in Portions)",
        "000: System Prompt Builder",
    ),
    "tests/seeds/hive_subagents.py": ("000: Sub-Agent System (Built-in Agent Registry)", "000: With Sub-Agents"),
    "tests/seeds/hive_repository.py": ("000: With Custom Repository (Firestore)",),
    "examples/bot_webhook.py": ("000: Ask User Questions (Interactive Mode)",),
    "tests/seeds/dive_hooks.py": (
        "002: Session Management",
        "002: Permission Rules",
        "002: Context Injection",
        "002: Compaction",
        "002: Usage Logging",
    ),
    "tests/seeds/dive_tools.py": ("002: Task Tool (Subagents)", "002: AskUserQuestion Tool"),
    "examples/complete_setup.py": ("002: Example: Complete Agent Setup",),
    "tests/seeds/framework_session.py": ("003: AgentSession",),
    "tests/seeds/framework_tools.py": ("003: AgentContext, Tool Trait and ToolRegistry", "003: Permission System"),
    "examples/console.py": ("003: AgentHandle, AgentRuntime and ConsoleRenderer", "003: Programmer Usage Example"),
}
"""The scripts with the headings of the seeds that they became; `tests/examples` runs those of examples."""


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script.startswith("tests/")])
@pytest.mark.deep
def test_a_script_of_a_seed_runs_offline(script: str, tmp_path: Path) -> None:
    assert ran(ROOT / script, tmp_path).strip()


def test_every_script_here_belongs_to_a_seed_example() -> None:
    here = {f"tests/seeds/{path.name}" for path in HERE.glob("*.py")} - {"tests/seeds/test_seeds.py"}

    assert here == {script for script in SCRIPTS if script.startswith("tests/")}
