"""Files that providers hold, so that many requests name them and none carries them."""

from __future__ import annotations

import asyncio
import mimetypes
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypedDict

from stepengine.data.media_types import resolve_media_type
from stepengine.data.messages import DocumentPart, ImagePart
from stepengine.errors import DataError, InputError
from stepengine.models.base import Provider
from stepengine.models.registry import Models
from stepengine.workspace.file_formats import read_regular_file

MOST = 512 * 1024 * 1024
"""Bytes of a file, which is read whole: what the strictest of the services takes."""

MEMBERS = ("file_id", "provider", "mime_type", "name")


class UploadedFile(TypedDict):
    """
    A file that a provider holds, as JSON, so that it is the same in a program and as the result of a ``Perform``.

    Attributes:
        provider: The name of the provider that holds it; no other finds it.
        file_id: Its id there.
        mime_type: Its type.
        name: Its name; ``""`` for none.
    """

    provider: str
    file_id: str
    mime_type: str
    name: str


def file_part(file: Mapping[str, object]) -> ImagePart | DocumentPart:
    """
    Return the part that names an uploaded file in a message.

    Raises:
        DataError: for what ``upload`` did not return.
    """
    given: object = file
    words = [given.get(name, "") for name in MEMBERS] if isinstance(given, Mapping) else [""]
    if not all(isinstance(word, str) for word in words) or not words[0]:
        msg = (
            f"an uploaded file is what engine.files.upload(...) returned, with provider and file_id, not {file!r:.100}"
        )
        raise DataError(msg)
    file_id, provider, kind, name = map(str, words)
    if kind.startswith("image/"):
        return ImagePart(mime_type=kind, file_id=file_id, provider=provider)
    return DocumentPart(mime_type=kind, name=name, file_id=file_id, provider=provider)


class Files:
    """
    Uploads files to providers and deletes them there: ``await engine.files.upload(...)``.

    Inside a handler that is ``yield from Perform(engine.files.upload, "report.pdf", to="anthropic")``, so that a run which
    is replayed or resumed does not upload again.

    Args:
        models: Gives the registry that knows the providers.
    """

    def __init__(self, models: Callable[[], Models]) -> None:
        self._models = models

    async def upload(
        self,
        file: bytes | str | os.PathLike[str],
        *,
        to: str,
        mime_type: str = "",
        name: str = "",
        expires_in: int | None = None,
    ) -> UploadedFile:
        """
        Give a provider a file to hold; ``file_part(...)`` makes a part of what comes back.

        Args:
            file: Its bytes, or the path of a file of at most 512 MB.
            to: The provider, such as ``"anthropic"``, ``"openai"`` or ``"google"``, or a model string of it.
            mime_type: Its type; by default by the ending of its name.
            name: Its name; by default that of the path.
            expires_in: Seconds until the provider deletes it: at Anthropic 3,600 to 7,776,000, at OpenAI 3,600 to 2,592,000;
                by default it stays until it is deleted. Google deletes every file after 48 hours.

        Raises:
            InputError: for a file that cannot be read, is too large, or whose type is not known.
            ModelError: when the provider holds no files, or the upload fails.
        """
        if isinstance(file, bytes):
            data = file
        else:
            name = name or Path(file).name
            data = await asyncio.to_thread(_read_file, file)
        kind = resolve_media_type(mime_type or mimetypes.guess_type(name, strict=False)[0] or "", data)
        if not kind:
            msg = (
                f"the type of the file {name!r} is not known by its ending; give mime_type=, such as 'application/pdf'"
            )
            raise InputError(msg)
        provider = self._provider(to)
        file_id = await provider.upload(data, mime_type=kind, name=name, expires_in=expires_in)
        return UploadedFile(provider=provider.name, file_id=file_id, mime_type=kind, name=name)

    async def delete(self, file: Mapping[str, object], *, at: str = "") -> None:
        """
        Delete an uploaded file at its provider.

        Args:
            file: What ``upload`` returned.
            at: The prefix of the provider, where it is registered under another one than its own name.

        Raises:
            DataError: for what ``upload`` did not return.
            ModelError: when that fails, such as for a file that is not there.
        """
        part = file_part(file)
        await self._provider(at or part.provider).delete_file(str(part.file_id))

    def _provider(self, to: str) -> Provider:
        return self._models().provider_for(to if "/" in to else f"{to}/files")


def _read_file(file: str | os.PathLike[str]) -> bytes:
    try:
        data = read_regular_file(file, MOST)
    except (OSError, ValueError) as error:
        msg = f"the file {os.fspath(file)!r} cannot be read: {error}"
        raise InputError(msg) from None
    if len(data) > MOST:
        msg = f"the file {os.fspath(file)!r} has more than {MOST:,} bytes, the most that can be uploaded"
        raise InputError(msg)
    return data
