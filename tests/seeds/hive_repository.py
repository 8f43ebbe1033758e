"""
Seed 000, "With Custom Repository (Firestore)".

A repository of one's own with two methods and a document for each conversation; the function that a platform calls knows nothing
but the id of the chat.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from stepengine import AgentDefinition, Engine
from stepengine.models import ModelReply, ModelRequest
from stepengine.sessions import messages_from_json, messages_to_json
from stepengine.testing import ScriptedModel, text


class Documents:
    """Stands in for the database: documents by name, written and read as a whole."""

    def __init__(self) -> None:
        self.kept: dict[str, dict[str, Any]] = {}

    async def get(self, name: str) -> dict[str, Any] | None:
        """Return a document."""
        return self.kept.get(name)

    async def set(self, name: str, document: dict[str, Any]) -> None:
        """Write a document."""
        self.kept[name] = document


class Repository:
    """Conversations as documents."""

    def __init__(self, documents: Documents) -> None:
        self.documents = documents

    async def get_history(self, conversation_id: str) -> Sequence[Any]:
        """Return the messages of a conversation, none of one that is not known."""
        document = await self.documents.get(conversation_id) or {}
        return messages_from_json(document.get("messages", []))

    async def save_history(self, conversation_id: str, messages: Sequence[Any]) -> None:
        """Store the messages of a conversation."""
        await self.documents.set(conversation_id, {"messages": messages_to_json(messages)})


def reply(request: ModelRequest) -> ModelReply:
    return text(f"I have seen {len(request.messages)} messages.")


bot = AgentDefinition("bot", model="anthropic/claude-sonnet-4-5", system_prompt="You are a helpful assistant.")
documents = Documents()


async def on_message(body: dict[str, str]) -> str:
    """Answer a message; history is loaded before and saved after."""
    async with Engine([bot], models=ScriptedModel([reply]), sessions=Repository(documents)) as engine:
        result = await engine.run(bot, body["text"], session_id=body["chat"])
    assert result.session_id == body["chat"]
    assert result.session_saved
    return result.unwrap()


async def main() -> None:
    said = [await on_message({"chat": chat, "text": "Hi."}) for chat in ("7", "7", "8")]
    print(*said)
    assert said == ["I have seen 1 messages.", "I have seen 3 messages.", "I have seen 1 messages."]
    assert sorted(documents.kept) == ["7", "8"]


if __name__ == "__main__":
    asyncio.run(main())
