"""
Every example of seeds 000, 002 and 003 runs: each is a script, here or among the examples, and closes rows.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from tests.offline import ROOT, ran

pytestmark = pytest.mark.usefixtures("forks")
HERE = Path(__file__).parent


@attrs.frozen
class Example:
    """
    An example of a seed, by the heading that it stands under, and the script that it has become.
    """

    seed: str
    heading: str
    script: str


EXAMPLES = [
    Example("000", "Tool System (Rich Descriptions)", "tests/seeds/hive_first_agent.py"),
    Example("000", "Sub-Agent System (Built-in Agent Registry)", "tests/seeds/hive_subagents.py"),
    Example("000", "Basic Usage (Telegram Bot / Firebase Function)", "tests/seeds/hive_first_agent.py"),
    Example("000", "With Custom Repository (Firestore)", "tests/seeds/hive_repository.py"),
    Example("000", "With Sub-Agents", "tests/seeds/hive_subagents.py"),
    Example("000", "Ask User Questions (Interactive Mode)", "examples/bot_webhook.py"),
    Example("000", "Think/Plan Mode (Extended Reasoning)", "tests/seeds/hive_first_agent.py"),
    Example("000", "Context Management (Read Files in Portions)", "tests/seeds/hive_first_agent.py"),
    Example("000", "System Prompt Builder", "tests/seeds/hive_first_agent.py"),
    Example("002", "Session Management", "tests/seeds/dive_hooks.py"),
    Example("002", "Permission Rules", "tests/seeds/dive_hooks.py"),
    Example("002", "Context Injection", "tests/seeds/dive_hooks.py"),
    Example("002", "Compaction", "tests/seeds/dive_hooks.py"),
    Example("002", "Usage Logging", "tests/seeds/dive_hooks.py"),
    Example("002", "Task Tool (Subagents)", "tests/seeds/dive_tools.py"),
    Example("002", "AskUserQuestion Tool", "tests/seeds/dive_tools.py"),
    Example("002", "Example: Complete Agent Setup", "examples/complete_setup.py"),
    Example("003", "AgentSession", "tests/seeds/framework_session.py"),
    Example("003", "AgentContext, Tool Trait and ToolRegistry", "tests/seeds/framework_tools.py"),
    Example("003", "Permission System", "tests/seeds/framework_tools.py"),
    Example("003", "AgentHandle, AgentRuntime and ConsoleRenderer", "examples/console.py"),
    Example("003", "Programmer Usage Example", "examples/console.py"),
]
SCRIPTS = sorted({example.script for example in EXAMPLES})


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.deep
def test_a_script_of_a_seed_runs_offline(script: str, tmp_path: Path) -> None:
    assert ran(ROOT / script, tmp_path).strip()


def test_no_script_stands_here_that_is_of_no_seed() -> None:
    here = {f"tests/seeds/{path.name}" for path in HERE.glob("*.py")} - {"tests/seeds/test_seeds.py"}

    assert here == {script for script in SCRIPTS if script.startswith("tests/")}
