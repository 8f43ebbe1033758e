"""
What a person says in an editor: blocks of a prompt, and what is shown of them again.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import acp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.adapters.acp import prompts
from stepengine.data.messages import DocumentPart, ImagePart
from stepengine.data.state import AgentState
from stepengine.errors import InputError


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


PNG = st.binary(max_size=20).map(lambda rest: b"\x89PNG\r\n\x1a\n" + rest)
"""Other bytes may be those of a sound, and an image with these is one."""


@pytest.mark.deep
@pytest.mark.smoke
@given(st.lists(PNG, max_size=4), st.text(max_size=20))
@pytest.mark.spec("interfaces:IF47", "interfaces:IF49")
def test_prompt_images_and_files_reach_the_model_and_are_replayed(
    tmp_path_factory: Any, images: list[bytes], text: str
) -> None:
    blob = acp.embedded_blob_resource("file:///a/b.pdf", encoded(b"%PDF"), mime_type="application/pdf")
    blocks = [
        acp.text_block(text),
        *[acp.image_block(encoded(one), "image/png") for one in images],
        acp.resource_block(blob),
    ]
    said = prompts.parse_prompt(blocks)
    document = DocumentPart(data=b"%PDF", mime_type="application/pdf", name="b.pdf")
    assert (text, (*[ImagePart(data=one) for one in images], document)) == (said.text, said.media)

    state = prompts.with_media_message(None, said.media)
    assert state is not None
    again = prompts.with_media_message(state, said.media)
    assert again is not None
    assert [said.media] * 2 == [message.content for message in again.message_history] == [m.content for m in again.view]
    assert prompts.with_media_message(state, ()) is state
    assert isinstance(state, AgentState)

    file = tmp_path_factory.mktemp("kept") / "0001.media.json"
    file.write_text(prompts.media_to_json(said.media))
    shown = [update.content for update in prompts.make_prompt_updates(text, file)]
    assert [text, *[encoded(one) for one in images], "(b.pdf)"] == [
        getattr(one, "text", None) if one.type == "text" else one.data for one in shown
    ]


@pytest.mark.parametrize(
    "block",
    [
        acp.audio_block("AAAA", "audio/wav"),
        acp.image_block("no base64!", "image/png"),
        acp.image_block("A", "image/png"),
    ],
)
def test_unsupported_or_invalid_prompt_blocks_are_refused(block: Any) -> None:
    with pytest.raises(InputError):
        prompts.parse_prompt([block])


def test_oversized_prompt_media_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_MEDIA", 10)
    with pytest.raises(InputError, match="more than 10 bytes"):
        prompts.parse_prompt([acp.image_block(encoded(b"x" * 6), "image/png")] * 2)


@pytest.mark.parametrize("text", ["", "[", "{}", "[1]", '[{"data": "x"}]', "[" * 100_000])
def test_unreadable_saved_images_are_not_shown(tmp_path: Path, text: str) -> None:
    file = tmp_path / "0001.media.json"
    file.write_text(text)
    assert (
        1
        == len(prompts.make_prompt_updates("hello", file))
        == len(prompts.make_prompt_updates("hello", tmp_path / "none"))
    )


def test_only_existing_skills_are_expanded_in_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    skill = tmp_path / ".agents" / "skills" / "tidy"
    skill.mkdir(parents=True)
    (skill / "SKILL.md").write_text("---\nname: tidy\ndescription: Tidy up\n---\nSort the imports.\n")

    assert ["tidy"] == [command.name for command in prompts.list_skill_commands(tmp_path)]
    told = prompts.expand_skill_command("/tidy  a.py", tmp_path)
    assert told.startswith("# Skill tidy")
    assert "Sort the imports." in told
    assert told.endswith("\n\na.py")
    assert told == prompts.expand_skill_command("/tidy\na.py", tmp_path)
    for other in ("/etc/passwd is what?", "tidy a.py", "//tidy", "/"):
        assert other == prompts.expand_skill_command(other, tmp_path)
