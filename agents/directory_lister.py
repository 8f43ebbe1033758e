"""
``directory-lister``: lists several folders at once. It never calls a model.

``stepengine run directory-lister --params '{"directories": [{"path": "."}]}'``
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from stepengine import AgentDefinition, Parallel, StepContext, Steps, ToolCall


class Directory(BaseModel):
    """One folder."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(min_length=1, description="The folder, from the root.")


class Directories(BaseModel):
    """The folders to list."""

    model_config = ConfigDict(extra="forbid")

    directories: list[Directory] = Field(min_length=1, max_length=100, description="The folders, in order.")


class Listings(BaseModel):
    """What the folders hold, in the order asked for."""

    results: list[dict[str, Any]]


def handle_steps(ctx: StepContext[Directories]) -> Steps[Listings]:
    """List all folders at once, and return the listings; a folder that cannot be listed has its error in its place."""
    found = yield from Parallel([ToolCall("list_directory", {"path": f.path}) for f in ctx.params.directories])
    listed: list[Any] = [{"error": one.text} if one.is_error else one.data for one in found]
    paths = [folder.path for folder in ctx.params.directories]
    return Listings(results=[{**entry, "path": path} for path, entry in zip(paths, listed, strict=True)])


agent = AgentDefinition(
    "directory-lister",
    description="Lists the files and folders of several directories at once; needs no model.",
    tools=["list_directory"],
    input_schema=Directories,
    output_schema=Listings,
    handle_steps=handle_steps,
)
