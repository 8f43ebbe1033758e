"""
Seed 003, "AgentSession": history, metadata and lineage of a conversation, in the files that the seed describes.
"""

import json
import tempfile
from pathlib import Path

import attrs

from stepengine import AgentDefinition, Engine, UserMessage
from stepengine.sessions import FileSessions
from stepengine.testing import ScriptedModel, text, tool_call
from stepengine.tools.bundled import spawn_tools

KEYS = [
    "session_id", "agent_type", "parent_session_id", "parent_tool_use_id", "child_session_ids", "model", "provider",
    "created_at", "updated_at", "metadata",
]  # fmt: skip

scout = AgentDefinition("scout", description="Looks around.")
coder = AgentDefinition("coder", model="anthropic/claude-sonnet-4-5", tools=spawn_tools(), spawnable_agents=[scout])
SPAWN = tool_call("spawn_agents", {"agents": [{"agent_type": "scout", "prompt": "Look."}]})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = FileSessions(Path(folder, "sessions"))
        model = ScriptedModel([SPAWN, text("All quiet."), text("Done.")])
        with Engine([coder], models=model, sessions=store, child_sessions=True) as engine:
            engine.run_sync(coder, "Go.", session_id="abc123", metadata={"custom_key": "custom_value"})

        place = store.folder("abc123")
        described = json.loads((place / "metadata.json").read_text())
        lines = [json.loads(line) for line in (place / "history.jsonl").read_text().splitlines()]
        print(place.name, described["agent_type"], len(lines))
        assert [key for key in described if key in KEYS] == KEYS
        assert ("abc123", "coder", None, None) == tuple(described[key] for key in KEYS[:4])
        assert (described["provider"], described["metadata"]) == ("anthropic", {"custom_key": "custom_value"})
        assert described["created_at"].endswith("Z")
        assert len(lines) == len(store.load("abc123").messages)

        (child,) = described["child_session_ids"]
        info = store.load(child).info
        assert (info.parent_session_id, info.agent_id) == ("abc123", "scout")
        assert info.parent_tool_call_id

        store.set_metadata("abc123", "stars", 5)
        assert FileSessions(Path(folder, "sessions")).get_metadata("abc123")["stars"] == 5
        assert {known.session_id for known in store.list()} == {"abc123", child}

        session = store.load("abc123")  # a value: what happens to the store does not change it
        longer = store.save(attrs.evolve(session, messages=session.messages.append(UserMessage("More."))))
        assert len(longer.messages) == len(session.messages) + 1


if __name__ == "__main__":
    main()
