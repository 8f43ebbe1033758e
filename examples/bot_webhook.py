"""
A stateless chat bot behind a webhook: a new engine answers each message, and a session store keeps the conversations.

If the model asks the user a question, the run is saved and the process may end. The user's next message is the answer, even hours
later and in another process. The run resumes at the question, and no tool runs twice.

``python examples/bot_webhook.py`` needs no key, because scripted replies replace the model. To call a real model, omit ``models=``,
set ANTHROPIC_API_KEY, and call ``on_message`` from the function that your platform calls.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from stepengine import AgentDefinition, Engine, tool
from stepengine.models import ModelReply, ModelRequest
from stepengine.sessions import FileSessions
from stepengine.testing import ScriptedModel, text, tool_call, tool_calls
from stepengine.tools.bundled import ask_user_tool

LOOKED_UP: list[str] = []


@tool
def free_tables(day: str) -> str:
    """
    Say when there are free tables.

    Args:
        day: A day of the week.
    """
    LOOKED_UP.append(day)
    return "at six and at eight"


waiter = AgentDefinition(
    "waiter",
    model="anthropic/claude-sonnet-4-5",
    tools=[free_tables, ask_user_tool()],
    system_prompt="You book tables. Ask when something is not clear.",
)


def on_message(message: Mapping[str, str], store: FileSessions) -> str:
    """Answer one message of a chat; what a serverless function would do."""
    with Engine([waiter], models=ScriptedModel([reply] * 3), sessions=store) as engine:
        result = engine.run_sync(
            waiter, message["text"], session_id=f"{message['user']}:{message['chat']}", user_id=message["user"]
        )
    if result.pending_questions:
        return result.pending_questions[0].text
    return result.text if result.error is None else "Something went wrong. Please try again."


def reply(request: ModelRequest) -> ModelReply:
    """Play the model: it answers what came last."""
    asked = {"questions": [{"question": "At six or at eight?", "options": ["six", "eight"]}]}
    match request.messages[-1]:
        case last if last.role == "tool" and last.tool_name == "ask_user":
            return text(f"Booked for {'eight' if 'eight' in last.text else 'six'}.")
        case last if last.text == "Thanks!":
            return text("You are welcome.")
        case _:
            return tool_calls(tool_call("free_tables", {"day": "Friday"}), tool_call("ask_user", asked))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for words in ("A table on Friday, please.", "eight", "Thanks!"):
            # A new store each time: nothing is left of the one before but its files.
            answer = on_message({"user": "ann", "chat": "7", "text": words}, FileSessions(folder))
            print(f"ann: {words}\nbot: {answer}")
        print("files:", *sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*.json")))
    assert LOOKED_UP == ["Friday"], "a tool ran twice"
    assert answer == "You are welcome."


if __name__ == "__main__":
    main()
