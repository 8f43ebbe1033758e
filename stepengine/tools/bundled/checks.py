"""``run_file_change_hooks``: runs the checks that the caller has configured for changed files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from stepengine.data.tools import ToolAnnotations
from stepengine.errors import DefinitionError, ToolError
from stepengine.tools.bundled.changes import FileChangeHook
from stepengine.tools.bundled.files.read_tools import READ_PATHS
from stepengine.tools.context import ToolContext
from stepengine.tools.decorator import tool
from stepengine.tools.definition import Tool
from stepengine.workspace.patterns import GlobPattern
from stepengine.workspace.root import Root

RUNS = ToolAnnotations(destructive=True, open_world=True)


def _compile_hook_patterns(hooks: Sequence[FileChangeHook]) -> list[tuple[FileChangeHook, GlobPattern]]:
    """Return (hook, compiled pattern) pairs; raise ``DefinitionError`` if there are none or a pattern is invalid."""
    if not hooks:
        msg = 'change_hook_tools needs hooks, such as FileChangeHook("types", ["mypy", "src"], pattern="**/*.py")'
        raise DefinitionError(msg)
    try:
        return [(hook, GlobPattern(hook.pattern)) for hook in hooks]
    except ToolError as error:
        raise DefinitionError(error.message) from None


def make_change_hook_tool(root: Root, hooks: Sequence[FileChangeHook], run: Tool) -> Tool:
    """
    Return the tool that runs the hooks for changed files.

    Args:
        root: The root of the files.
        hooks: The checks, in the order in which they run.
        run: ``run_terminal_command`` below the same root: clean environment, limits of time and output.
    """
    checks = _compile_hook_patterns(hooks)

    @tool(category="execute", annotations=RUNS, timeout=float("inf"), destinations=())
    async def run_file_change_hooks(  # noqa: D417  (the context is no parameter of the tool)
        ctx: ToolContext,
        files: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=READ_PATHS)],
    ) -> list[dict[str, Any]]:
        """
        Run the checks that are configured for files that you have changed, such as type checks and tests.

        Usage:
            - Call it after a change is complete, with all the files that you changed.
            - Look at `exit_code`: 0 means that a check passed.

        Examples:
            {"files": ["src/app.py", "src/web/cart.ts"]}

        When not to use:
            - To run any other program, use `run_terminal_command`, if you have it.

        Notes:
            - Each check whose pattern fits one of the files gives an entry; no entry means that none is configured for them.
            - Which checks there are, and what they run, cannot be changed from here.

        Args:
            files: The files, relative to the root folder.
        """
        changed = [root.split_path(path) for path in files]
        found = [hook for hook, pattern in checks if any(pattern.match(parts) for parts in changed)]
        return [await _run_hook(ctx, hook, run) for hook in found]

    return run_file_change_hooks


async def _run_hook(ctx: ToolContext, hook: FileChangeHook, run: Tool) -> dict[str, object]:
    """Run the command of a hook by the tool *run*; return an entry with its result or error."""
    asked = {"command": list(hook.command), "process_type": "SYNC", "cwd": hook.cwd, "timeout_seconds": hook.timeout}
    result = await run.execute(asked, ctx)
    if isinstance(result.data, dict):
        return {"hook_name": hook.name, **result.data}
    return {"hook_name": hook.name, "command": " ".join(hook.command), "error": result.text}
