"""Upload files to providers, so that requests name them by id and do not contain their bytes."""

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
"""The most bytes of a file, the smallest limit of the services; a file is read whole."""

MEMBERS = ("file_id", "provider", "mime_type", "name")


class UploadedFile(TypedDict):
    """
    A file at a provider, as a JSON object, which is equal after a ``Perform`` is recorded and replayed.

    Attributes:
        provider: The name of the provider; no other can use the file.
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
    Return a message part for an uploaded file.

    Raises:
        DataError: for a value that is not a result of ``upload``.
    """
    given: object = file
    words = [given.get(name, "") for name in MEMBERS] if isinstance(given, Mapping) else [""]
    if not all(isinstance(word, str) for word in words) or not words[0]:
        msg = f"{file!r:.100} is not an uploaded file; pass the result of engine.files.upload(...)"
        raise DataError(msg)
    file_id, provider, kind, name = map(str, words)
    if kind.startswith("image/"):
        return ImagePart(mime_type=kind, file_id=file_id, provider=provider)
    return DocumentPart(mime_type=kind, name=name, file_id=file_id, provider=provider)


class Files:
    """
    Uploads files to providers and deletes them there: ``await engine.files.upload(...)``.

    In a handler use ``yield from Perform(engine.files.upload, "report.pdf", to="anthropic")``, so that a replayed or resumed
    run does not upload again.

    Args:
        models: Returns the registry of the providers.
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
        Upload a file to a provider and return its description; ``file_part(...)`` converts that to a message part.

        Args:
            file: Its bytes, or the path of a file of at most 512 MB.
            to: The provider, such as ``"anthropic"``, ``"openai"`` or ``"google"``, or a model string of it.
            mime_type: The MIME type; by default from the extension of the name.
            name: The name of the file; by default that of the path.
            expires_in: Seconds until the provider deletes the file: at Anthropic 3,600 to 7,776,000, at OpenAI 3,600 to 2,592,000.
                By default it never expires, except that Google deletes every file after 48 hours.

        Raises:
            InputError: for a file that cannot be read, is too large, or has an unknown type.
            ModelError: when the provider stores no files, or the upload fails.
        """
        if isinstance(file, bytes):
            data = file
        else:
            name = name or Path(file).name
            data = await asyncio.to_thread(_read_file_within_limit, file)
        kind = resolve_media_type(mime_type or mimetypes.guess_type(name, strict=False)[0] or "", data)
        if not kind:
            msg = f"the type of the file {name!r} is unknown; pass mime_type=, such as 'application/pdf'"
            raise InputError(msg)
        provider = self._get_provider(to)
        file_id = await provider.upload(data, mime_type=kind, name=name, expires_in=expires_in)
        return UploadedFile(provider=provider.name, file_id=file_id, mime_type=kind, name=name)

    async def delete(self, file: Mapping[str, object], *, at: str = "") -> None:
        """
        Delete an uploaded file at its provider.

        Args:
            file: The result of ``upload``.
            at: The prefix of the provider, if it is registered under another name than its own.

        Raises:
            DataError: for a value that is not a result of ``upload``.
            ModelError: when the deletion fails, such as for an unknown file.
        """
        part = file_part(file)
        await self._get_provider(at or part.provider).delete_file(str(part.file_id))

    def _get_provider(self, provider_or_model: str) -> Provider:
        """Return the registered provider for a provider's name, or for a model string."""
        return self._models().provider_for(
            provider_or_model if "/" in provider_or_model else f"{provider_or_model}/files"
        )


def _read_file_within_limit(file: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a file; raise ``InputError`` if it cannot be read or exceeds the upload limit."""
    try:
        data = read_regular_file(file, MOST)
    except (OSError, ValueError) as error:
        msg = f"the file {os.fspath(file)!r} cannot be read: {error}"
        raise InputError(msg) from None
    if len(data) > MOST:
        msg = f"the file {os.fspath(file)!r} has more than {MOST:,} bytes, the upload limit"
        raise InputError(msg)
    return data
