"""
Prompts of an editor: text, links, files and images, and the skills with which a prompt may start as commands.

What must not be here: sessions, and how a turn is run.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.media_types import UNKNOWN, resolve_media_type
from stepengine.data.messages import DocumentPart, ImagePart, UserMessage
from stepengine.data.state import AgentState
from stepengine.data.visible import visible
from stepengine.errors import InputError, ToolError
from stepengine.workspace.skills import get_skill_catalog, read_skill_instructions

if TYPE_CHECKING:
    from acp import schema

MAX_RESOURCE = 32_768
"""Characters of a text that an editor puts into a prompt as context."""
MAX_MEDIA = 20 * 1_048_576
"""Bytes of the images and documents of a prompt."""
MAX_COMMANDS = 100
ABOUT_CHARS = 200

Media: TypeAlias = ImagePart | DocumentPart


@frozen
class EditorPrompt:
    """
    One prompt.

    Attributes:
        text: Its text, with the names of links and with embedded texts.
        media: Its images and documents.
    """

    text: str
    media: tuple[Media, ...] = ()


def parse_prompt(blocks: Iterable[Any]) -> EditorPrompt:
    """
    Return the prompt in the content blocks of an editor. A link becomes its name and address; nothing is fetched.

    Raises:
        InputError: For a block of an unsupported type, and for invalid base64.
    """
    texts, media = list[str](), list[Media]()
    for block in blocks:
        resource: Any = getattr(block, "resource", None)
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "resource_link":
            texts.append(f"[{block.name}]({block.uri})")
        elif block.type == "resource" and getattr(resource, "text", None) is not None:
            texts.append(_format_embedded_resource(resource))
        elif block.type == "image":
            media.append(ImagePart(data=_decode_base64(block.data), mime_type=block.mime_type))
        elif block.type == "resource" and getattr(resource, "blob", None) is not None:
            media.append(_media_from_resource(resource))
        else:
            msg = f"a prompt of this agent may contain text, links, embedded files and images, but not {block.type!r}"
            raise InputError(msg)
    if sum(len(part.data or b"") for part in media) > MAX_MEDIA:
        msg = f"the images and files of a prompt have more than {MAX_MEDIA:,} bytes; send fewer of them"
        raise InputError(msg)
    return EditorPrompt("\n\n".join(texts), tuple(media))


def _format_embedded_resource(resource: Any) -> str:
    """Return an embedded text as a ``<resource>`` element with its address; a long text is cut with a note."""
    text = resource.text
    cut = f"\n... ({len(text) - MAX_RESOURCE} characters more)" if len(text) > MAX_RESOURCE else ""
    return f'<resource uri="{resource.uri}">\n{text[:MAX_RESOURCE]}{cut}\n</resource>'


def _media_from_resource(resource: Any) -> Media:
    """Return an embedded file as an image or a document, with its detected media type."""
    data = _decode_base64(resource.blob)
    kind = resolve_media_type(resource.mime_type or UNKNOWN, data)
    if kind.startswith("image/"):
        return ImagePart(data=data, mime_type=kind)
    return DocumentPart(data=data, mime_type=kind, name=str(resource.uri).rpartition("/")[2])


def _decode_base64(text: str) -> bytes:
    """Decode base64; raise ``InputError`` if it is invalid."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        msg = "an image or a file in the prompt is not valid base64"
        raise InputError(msg) from None


def with_media_message(state: AgentState | None, media: Sequence[Media]) -> AgentState | None:
    """Return the state with images and documents added as a user message before the next prompt."""
    if not media:
        return state
    shown = UserMessage(list(media))
    if state is None:
        return AgentState.from_messages([shown])
    return attrs.evolve(state, message_history=state.message_history.append(shown), view=state.view.append(shown))


# --- kept beside a turn, to be shown again ----------------------------------------------------------------------------


def media_to_json(media: Sequence[Media]) -> str:
    """Return images and documents as JSON for the file of a turn."""
    return json.dumps(
        [
            {
                "data": base64.b64encode(part.data or b"").decode(),
                "type": part.mime_type,
                "name": getattr(part, "name", ""),
            }
            for part in media
        ]
    )


def make_prompt_updates(text: str, media_file: Path) -> list[object]:
    """Return the updates that show the stored prompt of a turn again."""
    import acp

    return [
        acp.update_user_message_text(text),
        *[acp.update_user_message(block) for block in _load_media_blocks(media_file)],
    ]


def _load_media_blocks(file: Path) -> list[Any]:
    """Return a turn's stored images as blocks and other files by name; none if the file is missing, too large or invalid."""
    import acp

    try:
        if not file.is_file() or file.stat().st_size > 2 * MAX_MEDIA:
            return []
        kept: list[Any] = json.loads(file.read_text(encoding="utf-8"))
        images = [one for one in kept if str(one["type"]).startswith("image/")]
        others = [one for one in kept if one not in images]
        blocks: list[Any] = [acp.image_block(str(one["data"]), str(one["type"])) for one in images]
        return blocks + [acp.text_block(f"({visible(str(one['name']), strict=True) or one['type']})") for one in others]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


# --- commands -----------------------------------------------------------------------------------------------------


def list_skill_commands(folder: Path) -> list[schema.AvailableCommand]:
    """Return the skills of a project and of the user as commands with which a prompt may start."""
    from acp import schema

    found = list(get_skill_catalog(folder, user=True).skills.values())[:MAX_COMMANDS]
    return [
        schema.AvailableCommand(
            name=skill.name,
            description=visible(skill.description, strict=True)[:ABOUT_CHARS],
            input=schema.AvailableCommandInput(root=schema.UnstructuredCommandInput(hint="what to do with it")),
        )
        for skill in found
    ]


def expand_skill_command(text: str, folder: Path) -> str:
    """Return a prompt with its ``/NAME`` replaced by the instructions of the skill; other prompts unchanged."""
    if not text.startswith("/"):
        return text
    name, *words = text.removeprefix("/").split(maxsplit=1) or [""]
    skill = get_skill_catalog(folder, user=True).skills.get(name)
    if skill is None:
        return text
    try:
        return "\n\n".join([read_skill_instructions(skill), *words]).rstrip()
    except ToolError as error:
        raise InputError(error.message) from None
