"""
One agent with file tools that reads and changes a file.

``python examples/simple_task.py`` needs no key: three scripted replies replace the model, and the files are real. To call a real
model, omit ``models=`` and set ANTHROPIC_API_KEY.
"""

import tempfile
from pathlib import Path

from stepengine import AgentDefinition, Engine, Workspace
from stepengine.testing import ScriptedModel, text, tool_call

fixer = AgentDefinition(
    "fixer",
    model="anthropic/claude-sonnet-4-5",
    tools=["read_files", "str_replace"],
    system_prompt="You correct spelling in the files that you are told of, and change nothing else.",
)

REPLIES = [
    tool_call("read_files", {"paths": ["letter.txt"]}),
    tool_call(
        "str_replace",
        {"path": "letter.txt", "replacements": [{"old_string": "recieved", "new_string": "received"}]},
    ),
    text("I corrected one word."),
]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        letter = Path(folder, "letter.txt")
        letter.write_text("We have recieved your parcel.\n")
        # The workspace gives the agent the tools that it names: in this folder, and as far as the workspace allows.
        workspace = Workspace(folder, write=True)
        with Engine([fixer], workspace=workspace, models=ScriptedModel(REPLIES)) as engine:
            result = engine.run_sync(fixer, "Correct letter.txt.")
        print(f"{result.status}: {result.output}")
        print(f"the file: {letter.read_text().strip()}")
        assert "received" in letter.read_text()


if __name__ == "__main__":
    main()
