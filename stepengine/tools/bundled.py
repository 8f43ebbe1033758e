"""
The bundled sets of tools: ``file_tools``, ``search_tools``, ``shell_tools`` and ``web_tools``.

A set is built with a root folder and a policy, and holds the posture of the reliability page. What it needs is imported
when it is built, not when stepengine is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from stepengine.errors import DefinitionError
from stepengine.tools.changes import COMMAND_MAX_SECONDS

if TYPE_CHECKING:
    from stepengine.tools.changes import FileChangeHook
    from stepengine.tools.definition import Tool
    from stepengine.tools.shell.running import Runner
    from stepengine.tools.web.docs import DocsBackend
    from stepengine.tools.web.fetching import Fetcher
    from stepengine.tools.web.searching import SearchBackend

__all__ = ("change_hook_tools", "file_tools", "followup_tools", "search_tools", "shell_tools", "web_tools")

COMMAND_SECONDS = 30.0


def file_tools(
    root: str | os.PathLike[str],
    *,
    write: bool = False,
    delete: bool = False,
    propose: bool = False,
    withhold: Sequence[str] = (),
    allow_secrets: Sequence[str] = (),
    allow_protected: Sequence[str] = (),
    refuse_hardlinks: bool = False,
    cross_mounts: bool = False,
    allow_wide_root: bool = False,
) -> list[Tool[..., Any]]:
    """
    Return ``read_files``, ``list_directory`` and ``read_subtree``, and with *write* also ``write_file`` and ``str_replace``.

    With *delete* comes ``delete_file``. With *propose* come ``propose_write_file`` and ``propose_str_replace``, which show a
    change and make none.

    The root is opened now and held. No path leads out of it: not ``..``, not an absolute path, not a symbolic link, and
    not a folder that is swapped for a link while a tool runs. Files are written atomically, and not when somebody has
    changed them since the run read them, or since a person allowed the call and was shown its difference. Where the run
    has a journal, it keeps what ``stepengine.journal.undo`` needs.

    Args:
        root: The folder that the tools are confined to.
        write: Whether files may be written.
        delete: Whether files may be deleted, too; only with *write*.
        propose: Whether changes may be proposed; they are kept in the run's context and written nowhere.
        withhold: Patterns of files that are not shown either, such as the journal of the run.
        allow_secrets: Patterns of files that are withheld by default, such as ``".env.example"``, and may be used.
        allow_protected: Patterns of files that are protected from being written, such as ``".github/workflows/"``, and
            may be written.
        refuse_hardlinks: Refuse to read a file that has more than one name.
        cross_mounts: Enter folders that are on other file systems than the root.
        allow_wide_root: Accept ``/``, the home folder, and folders that contain it.

    Raises:
        DefinitionError: when the root is no folder or too wide, or the system cannot confine the tools; for *delete*
            without *write*.
    """
    if delete and not write:
        msg = "file_tools(delete=True) goes with write=True: what may delete files may change them"
        raise DefinitionError(msg)
    from stepengine.tools.files.proposing import proposing_tools
    from stepengine.tools.files.reading import reading_tools
    from stepengine.tools.files.root import Policy, Root
    from stepengine.tools.files.writing import writing_tools
    from stepengine.tools.search.subtree import subtree_tool

    policy = Policy(
        withhold=tuple(withhold),
        allow_secrets=tuple(allow_secrets),
        allow_protected=tuple(allow_protected),
        refuse_hardlinks=refuse_hardlinks,
        cross_mounts=cross_mounts,
        allow_wide_root=allow_wide_root,
    )
    held = Root(root, policy)
    changing = [*(writing_tools(held, delete=delete) if write else ()), *(proposing_tools(held) if propose else ())]
    return [*reading_tools(held), subtree_tool(held), *changing]


def search_tools(
    root: str | os.PathLike[str],
    *,
    withhold: Sequence[str] = (),
    allow_secrets: Sequence[str] = (),
    refuse_hardlinks: bool = False,
    cross_mounts: bool = False,
    allow_wide_root: bool = False,
    prefer_python: bool = False,
) -> list[Tool[..., Any]]:
    """
    Return ``glob``, ``code_search`` and ``find_files``, confined to *root* like ``file_tools``.

    Args:
        root: The folder that the tools are confined to.
        withhold: Patterns of files that are not shown either, such as the journal of the run.
        allow_secrets: Patterns of files that are withheld by default and may be searched.
        refuse_hardlinks: Do not search files that have more than one name.
        cross_mounts: Enter folders that are on other file systems than the root.
        allow_wide_root: Accept ``/``, the home folder, and folders that contain it.
        prefer_python: Search in Python even where ripgrep is installed.

    Raises:
        DefinitionError: when the root is no folder or too wide, or the system cannot confine the tools.
    """
    from stepengine.tools.files.root import Policy, Root
    from stepengine.tools.search.tools import searching_tools

    policy = Policy(
        withhold=tuple(withhold),
        allow_secrets=tuple(allow_secrets),
        refuse_hardlinks=refuse_hardlinks,
        cross_mounts=cross_mounts,
        allow_wide_root=allow_wide_root,
    )
    return searching_tools(Root(root, policy), prefer_python=prefer_python)


def shell_tools(
    root: str | os.PathLike[str],
    *,
    allow_shell: bool = False,
    env: Sequence[str] = (),
    timeout: float = COMMAND_SECONDS,
    max_timeout: float = COMMAND_MAX_SECONDS,
    runner: Runner | None = None,
    home: Literal["private", "real"] = "private",
    env_secrets: bool = False,
    allow_unlimited: bool = False,
    limits: Mapping[str, int] | None = None,
    allow_wide_root: bool = False,
) -> list[Tool[..., Any]]:
    """
    Return ``run_terminal_command``, ``check_job`` and ``kill_job``.

    A command is an argument list, or text that every shell would only split into words; it is executed without a shell.
    With *allow_shell* other text is a script for ``/bin/sh -eu``. A command runs in a session of its own, without
    terminal and input, in a folder below the root, and sees a clean environment with an empty home folder. When it
    ends, is stopped after its timeout, or its run is cancelled, everything that it started is killed. Background jobs
    end with their run.

    When this process itself is killed (SIGKILL, or a SIGTERM that nobody handles), the program dies with it on Linux;
    what the program had started goes on.

    A git command that only looks (``status``, ``diff``, ``log``, ``show``, ``blame``, ``branch``, ``grep``, ``ls-files`` and
    the plumbing of ``diff``) runs no program that the repository's configuration or attributes name: no filter, diff
    driver, hook, monitor or pager. It fetches nothing, and does not look for changes inside of submodules. The
    configuration is read before; when that fails, the command is refused. Without its filters git may call a file
    modified that is not. Every other git command, such as ``git commit``, runs without the repository's hooks, but with
    its filters, since what it stores could otherwise be unencrypted or too large: to allow it is to allow them. Of git
    that is started by a script or another program the same holds.

    **This is no sandbox.** A program that is allowed to run can do whatever your user can do, also outside of the root;
    nothing limits its processes, memory, files and network unless you say so with *limits* and *runner*.

    Args:
        root: The folder below which commands work.
        allow_shell: Whether text that needs a shell is run by one, instead of being refused.
        env: Names of variables of this process that commands may see, such as ``["JAVA_HOME"]``.
        timeout: Seconds that a command may take when the model does not say; 30 by default.
        max_timeout: The most seconds that the model may ask for; 600 by default.
        runner: Has commands executed elsewhere; see below.
        home: ``"private"`` for an empty home folder for each command, ``"real"`` for the user's.
        env_secrets: Accept names in *env* that look like those of secrets.
        allow_unlimited: Whether ``timeout_seconds=-1`` means no timeout instead of *max_timeout*.
        limits: Limits of the system for each command: ``processes`` (of the user, not of the command),
            ``memory_bytes``, ``file_bytes`` and ``cpu_seconds``. None by default, except that there are no core dumps.
        allow_wide_root: Accept ``/``, the home folder, and folders that contain it.

    A runner takes the ``Launch`` of a command (``argv``, ``root``, ``cwd``, ``env``) and returns the one that is executed
    instead. This one uses bubblewrap, without a network and with nothing but the system and the root in sight::

        def sandboxed(launch):
            argv = [
                "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--proc", "/proc", "--dev", "/dev",
                "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib",
                "--tmpfs", "/tmp", "--bind", launch.root, "/project", "--chdir", f"/project/{launch.cwd}",
                "--setenv", "HOME", "/tmp", "--setenv", "TMPDIR", "/tmp", "--", *launch.argv,
            ]
            return attrs.evolve(launch, argv=argv)

        tools = shell_tools("project", runner=sandboxed)

    The program in front is found on this computer, the command wherever that program looks. A script arrives on a
    descriptor, which a runner for another computer cannot pass on.

    Raises:
        DefinitionError: when the root is no folder or too wide, an option makes no sense, or the system has no process
            groups (Windows).
    """
    from stepengine.tools.shell.options import tools_for

    return tools_for(
        root,
        allow_shell=allow_shell,
        env=env,
        timeout=timeout,
        max_timeout=max_timeout,
        runner=runner,
        home=home,
        env_secrets=env_secrets,
        allow_unlimited=allow_unlimited,
        limits=limits or {},
        allow_wide_root=allow_wide_root,
    )


def web_tools(
    search: SearchBackend | None = None, docs: DocsBackend | None = None, fetch: Fetcher | None = None
) -> list[Tool[..., Any]]:
    """
    Return ``web_search``, ``read_docs`` and ``read_url``: each only when what it works with is given.

    Their category is ``"network"``, and none of them is read-only: what a model puts into an address or a query leaves the
    machine. What a page says is data of whoever wrote it.

    Args:
        search: Searches the web, such as ``SearxngSearch("http://localhost:8080")`` or ``BraveSearch(key)``.
        docs: Looks up documentation, such as ``DocsSites(fetcher, {"pydantic": "https://docs.pydantic.dev/latest"})``.
        fetch: Gets pages, such as ``SafeFetcher(allow=["docs.python.org"])`` or ``SafeFetcher(allow="public")``. The rules
            against private addresses are those of ``SafeFetcher``; another fetcher answers for itself.

    Raises:
        DefinitionError: when none of them is given.
    """
    from stepengine.tools.web.tools import reaching_tools

    made = reaching_tools(search, docs, fetch)
    if not made:
        msg = 'web_tools needs something to work with, such as search=SearxngSearch(url) or fetch=SafeFetcher(allow="public")'
        raise DefinitionError(msg)
    return made


def change_hook_tools(
    root: str | os.PathLike[str],
    hooks: Sequence[FileChangeHook],
    *,
    env: Sequence[str] = (),
    runner: Runner | None = None,
    allow_wide_root: bool = False,
) -> list[Tool[..., Any]]:
    """
    Return ``run_file_change_hooks``, which runs the checks that are configured for changed files.

    The checks are the caller's: a model says which files changed, never what is run. They run as commands of
    ``shell_tools`` do.

    Args:
        root: The folder that files and commands are below.
        hooks: The checks, such as ``FileChangeHook("types", ["mypy", "src"], pattern="**/*.py")``.
        env: Names of variables of this process that the checks may see.
        runner: Has the checks executed elsewhere; see ``shell_tools``.
        allow_wide_root: Accept ``/``, the home folder, and folders that contain it.

    Raises:
        DefinitionError: when there are no hooks, a pattern cannot be used, or the root is no folder or too wide.
    """
    from stepengine.tools.checks import checking_tool
    from stepengine.tools.files.root import Policy, Root

    run, *_ = shell_tools(root, env=env, runner=runner, allow_wide_root=allow_wide_root)
    return [checking_tool(Root(root, Policy(allow_wide_root=allow_wide_root)), hooks, run)]


def followup_tools() -> list[Tool[..., Any]]:
    """Return ``suggest_followups``, by which a model suggests to the user what could be asked next, as an event."""
    from stepengine.tools.followups import followup_tool

    return [followup_tool()]
