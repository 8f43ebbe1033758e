"""
The bundled sets of tools: ``file_tools``, ``search_tools``, ``shell_tools`` and ``web_tools``.

``workspace_tools`` and ``rootless_tools`` create the tools that a ``Workspace`` allows. An engine and the command line call them for
the tools that agents name.

A set is created with a root, which is a folder or a ``Workspace``, and a policy. Its modules are imported when it is created, not
when stepengine is imported.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, Literal, ParamSpec, TypeAlias

import attrs
from attrs import frozen

from stepengine.errors import DefinitionError
from stepengine.tools.bundled.changes import COMMAND_MAX_SECONDS
from stepengine.workspace.path_policy import PathPolicy
from stepengine.workspace.workspace import Workspace

if TYPE_CHECKING:
    from stepengine.tools.bundled.changes import FileChangeHook
    from stepengine.tools.bundled.memory import MemoryStore
    from stepengine.tools.bundled.shell.commands import Runner
    from stepengine.tools.bundled.web.fetcher import Fetcher
    from stepengine.tools.bundled.web.search_queries import DocsBackend, SearchBackend
    from stepengine.tools.definition import Tool
    from stepengine.workspace.buffers import Buffers
    from stepengine.workspace.terminals import Terminals

COMMAND_SECONDS = 30.0
"""Most commands of an agent end in seconds; a model can request more."""

CHOICES: dict[str, tuple[str | None, ...]] = {"home": ("private", "real"), "shell": (None, "bash")}
"""Options of shell tools with a few values."""

P = ParamSpec("P")

Folder: TypeAlias = "str | os.PathLike[str] | Workspace"
"""A root: a folder of this machine, or a ``Workspace``."""


@frozen(kw_only=True)
class FileTools(PathPolicy):
    """
    ``read_files``, ``list_directory`` and ``read_subtree``, and with *write* also ``write_file`` and ``str_replace``.

    *delete* adds ``delete_file``. *propose* adds ``propose_write_file`` and ``propose_str_replace``, which show a change without
    making it.

    The root is opened when the tools are created and stays open. No path leads out of it: neither ``..`` nor an absolute path, nor a
    symbolic link, nor a folder that is replaced by a link while a tool runs. Files are written atomically. A write fails if the file
    has changed since the run read it, or since a person approved the call by its diff. A journal of the run contains the data for
    ``stepengine.journal.undo``.

    Attributes:
        write: Whether files may be written.
        delete: Whether files may also be deleted; only with *write*.
        propose: Whether changes may be proposed; they are stored in the run's context and not written.
        buffers: The files that are open in an editor, from the code that serves the editor: unsaved content is read, and the
            editor writes files with unsaved changes. By default only files on disk are used.
        withhold: Patterns of further files that are not shown, such as the journal of the run.
        allow_secrets: Patterns of files that may be used although they are withheld by default, such as ``".env.example"``.
        allow_protected: Patterns of files that may be written although they are protected by default, such as
            ``".github/workflows/"``.
        trusted: Patterns of files without text of third parties: their content is trusted. Tools do not write them.
        refuse_hardlinks: Do not read files with more than one name.
        cross_mounts: Enter folders on other file systems than that of the root.
        allow_wide_root: Accept ``/``, the home folder, and folders that contain it.

    Raises:
        DefinitionError: If the root is not a folder or too wide, if the system cannot confine the tools, or for *delete* without
            *write*.
    """

    write: bool = False
    delete: bool = False
    propose: bool = False
    buffers: Buffers | None = None

    def make_tools(self, root: Folder) -> list[Tool]:
        """Return the tools for a root folder."""
        if self.delete and not self.write:
            msg = "file_tools(delete=True) needs write=True as well"
            raise DefinitionError(msg)
        from stepengine.tools.bundled.files.proposals import make_proposal_tools
        from stepengine.tools.bundled.files.read_tools import make_read_tools
        from stepengine.tools.bundled.files.write_tools import make_write_tools
        from stepengine.tools.bundled.search.overview import make_subtree_tool
        from stepengine.workspace.root import Root

        _check_local_options(root, buffers=self.buffers)
        held = Root(root, self)
        return [
            *make_read_tools(held, self.buffers),
            make_subtree_tool(held),
            *(make_write_tools(held, delete=self.delete, buffers=self.buffers) if self.write else ()),
            *(make_proposal_tools(held, self.buffers) if self.propose else ()),
        ]


@frozen(kw_only=True)
class SearchTools(PathPolicy):
    """
    ``glob``, ``code_search`` and ``find_files``, confined to the root like ``file_tools``.

    Attributes:
        prefer_python: Search in Python even if ripgrep is installed.
        withhold: Patterns of further files that are not shown, such as the journal of the run.
        allow_secrets: Patterns of files that may be used although they are withheld by default, such as ``".env.example"``.
        trusted: As for ``file_tools``, so that both accept the same policy. Search results stay untrusted, since they contain parts
            of many files.
        refuse_hardlinks: Do not read files with more than one name.
        cross_mounts: Enter folders on other file systems than that of the root.
        allow_wide_root: Accept ``/``, the home folder, and folders that contain it.

    Raises:
        DefinitionError: If the root is not a folder or too wide, or the system cannot confine the tools.
    """

    prefer_python: bool = False
    allow_protected: tuple[str, ...] = attrs.field(default=(), init=False)  # these tools write nothing

    def make_tools(self, root: Folder) -> list[Tool]:
        """Return the tools for a root folder."""
        from stepengine.tools.bundled.search.tools import make_search_tools
        from stepengine.workspace.root import Root

        return make_search_tools(Root(root, self), prefer_python=self.prefer_python)


@frozen(kw_only=True)
class ShellTools:
    """
    ``run_terminal_command``, ``check_job`` and ``kill_job``, and with *watch* also ``watch``.

    A command is an argument list, or text that a shell would only split into words; it is executed without a shell. With
    ``shell="bash"`` other text is a command line, for example with pipes and variables: ``bash`` runs it with its ordinary
    settings, or ``sh`` if there is no ``bash``. A command runs in a separate session, without terminal and input, in a folder below
    the root, and with a clean environment and an empty home folder. When it ends, reaches its timeout, or its run is cancelled, all
    processes that it has started are killed. Background jobs end with their run.

    If this process itself is killed (by SIGKILL, or a SIGTERM without a handler), the command and its processes are killed, too, on
    Linux.

    A read-only git command (``status``, ``diff``, ``log``, ``show``, ``blame``, ``branch``, ``grep``, ``ls-files`` and the plumbing of
    ``diff``) runs no program that the repository's configuration or attributes name: no filter, diff driver, hook, monitor or pager.
    It fetches nothing, and does not search for changes in submodules. The configuration is read before; if that fails, the command
    is rejected. Options for such programs, such as ``--ext-diff`` or ``--submodule=diff``, are also rejected. Without its filters,
    git may report an unchanged file as modified. Every other git command, such as ``git commit``, runs without the repository's
    hooks, but with its filters, since the stored data could otherwise be unencrypted or too large. To allow such a command is to
    allow its filters. A git command that a script or another program starts runs like these commands.

    **Without** *sandbox*, **this is not a sandbox.** An allowed program can do everything that your user can do, also outside of the
    root. Its processes, memory, files and network are unlimited, unless you pass *limits*, *sandbox* or *runner*.

    With *sandbox*, bubblewrap runs the commands (on Linux; the program ``bwrap``): without network, with no other process visible, and
    with read access only to the system's programs, the programs on the search path, and the root. They can write only below the root
    and in private folders; files below the root that other programs run, such as ``.git/hooks``, are read-only. The sandbox does not
    limit changes below the root, memory, processor time, and what the kernel itself permits.

    Attributes:
        shell: ``"bash"`` to run text that needs a shell; ``None``, the default, rejects such text.
        env: Names of variables of this process that commands receive, such as ``["JAVA_HOME"]``. Names such as ``HOME``, which have
            another value for commands, are rejected.
        timeout: The time limit of a command in seconds, if the model requests none; 30 by default.
        max_timeout: The largest time limit that the model may request, in seconds; 600 by default.
        sandbox: Run commands in a sandbox of the operating system; ``False`` by default.
        runner: Lets another program execute the commands; see below.
        home: ``"private"`` for an empty home folder for each command, ``"real"`` for the user's.
        env_secrets: Accept names in *env* that look like those of secrets.
        allow_unlimited: Whether ``timeout_seconds=-1`` means no time limit instead of *max_timeout*.
        limits: Limits of the system for each command: ``processes`` (of the user, not of the command),
            ``memory_bytes``, ``file_bytes`` and ``cpu_seconds``. None by default, except that core dumps are disabled.
        allow_wide_root: Accept ``/``, the home folder, and folders that contain it.
        terminals: Terminals of an editor, from the code that serves the editor. Foreground commands run there, where a person sees
            them. They also receive the variables of these terminals, *limits* do not apply, and the editor ends processes that a
            command leaves running. Not with *sandbox* and *runner*. By default commands are processes of this one; those of ``watch``
            always are.
        watch: Add ``watch``, by which a model lets a command run repeatedly in the background until it succeeds, fails, prints
            something else or prints a text; the model is then notified. A person is asked once: rules that deny apply to each run of
            the command, rules that ask do not. The watcher is a child of the run, like those of ``child_tools``; it continues after
            the turn, ends with the run, and continues when the run is resumed.

    A runner receives the ``Launch`` of a command (``argv``, ``root``, ``cwd``, ``env``) and returns the launch to execute instead.
    This example uses bubblewrap, without a network and with access only to the system and the root::

        def sandboxed(launch):
            argv = [
                "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--proc", "/proc", "--dev", "/dev",
                "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib",
                "--tmpfs", "/tmp", "--bind", launch.root, "/project", "--chdir", f"/project/{launch.cwd}",
                "--setenv", "HOME", "/tmp", "--setenv", "TMPDIR", "/tmp", "--", *launch.argv,
            ]
            return attrs.evolve(launch, argv=argv)

        tools = shell_tools("project", runner=sandboxed)

    The first program is looked up on this computer, the command where that program looks it up. A script is passed on a
    descriptor, which a runner for another computer cannot pass on.

    Raises:
        DefinitionError: If the root is not a folder or too wide, an option is invalid, the system has no process groups (Windows),
            or the requested sandbox is not available.
    """

    shell: Literal["bash"] | None = None
    env: Sequence[str] = ()
    timeout: float = COMMAND_SECONDS
    max_timeout: float = COMMAND_MAX_SECONDS
    runner: Runner | None = None
    home: Literal["private", "real"] = "private"
    env_secrets: bool = False
    allow_unlimited: bool = False
    limits: Mapping[str, int] | None = None
    allow_wide_root: bool = False
    sandbox: bool = False
    terminals: Terminals | None = None
    watch: bool = False

    def make_tools(self, root: Folder) -> list[Tool]:
        """Return the tools for a root folder."""
        self._check_option_conflicts()
        from stepengine.tools.bundled.shell.commands import Shell, encode_limits
        from stepengine.tools.bundled.shell.sandbox import make_bubblewrap_runner
        from stepengine.tools.bundled.shell.tools import make_command_tools
        from stepengine.tools.bundled.shell.watch_tool import make_watch_tool
        from stepengine.workspace.environment import CommandEnvironment, read_git_identity, validate_variable_names
        from stepengine.workspace.root import Root

        names = validate_variable_names(self.env, env_secrets=self.env_secrets)
        _check_local_options(root, terminals=self.terminals, sandbox=self.sandbox or None)
        held = Root(root, PathPolicy(allow_wide_root=self.allow_wide_root))
        folder = "/" if held.system is not None else f"/{'/'.join(held.real)}"
        shell = Shell(
            root=held,
            runs_lines=self.shell is not None,
            environment=CommandEnvironment(
                names=names,
                real_home=self.home == "real",
                root=held.real,
                system=held.system,
                # Read before the first command: most engines, such as those of replays, run none.
                identity=cache(partial(read_git_identity, folder, held.real if held.system is None else ())),
            ),
            timeout=float(self.timeout),
            max_timeout=float(self.max_timeout),
            allow_unlimited=self.allow_unlimited,
            limits=encode_limits(self.limits or {}),
            runner=make_bubblewrap_runner(held.real) if self.sandbox else self.runner,
            terminals=self.terminals,
        )
        return [*make_command_tools(shell), *([make_watch_tool(shell)] if self.watch else [])]

    def _check_option_conflicts(self) -> None:
        """Raise ``DefinitionError`` for a system without POSIX processes, invalid options, or options that contradict each other."""
        times = f"timeout={self.timeout!r} and max_timeout={self.max_timeout!r}"
        problem = ""
        if os.name != "posix" or not sys.executable:
            problem = "need a POSIX system and sys.executable; without process groups they cannot stop commands"
        elif not (0 < self.timeout <= self.max_timeout and math.isfinite(self.max_timeout)):
            problem = f"have {times}; use seconds above 0, with timeout at most max_timeout"
        elif wrong := [name for name, values in CHOICES.items() if getattr(self, name) not in values]:
            name = wrong[0]
            problem = f"have {name}={getattr(self, name)!r}; use {' or '.join(map(repr, CHOICES[name]))}"
        elif self.runner is not None and not callable(self.runner):
            problem = f"have runner={self.runner!r}; use a function that takes a Launch and returns one"
        elif self.sandbox and (self.runner is not None or self.home == "real"):
            problem = "cannot combine sandbox=True with runner= or home='real'; the sandbox is a runner and hides the home folder"
        elif self.terminals is not None and (self.sandbox or self.runner is not None or self.limits):
            problem = "cannot combine terminals= with sandbox=, runner= or limits=, which have no effect in an editor's terminals"
        if problem:
            msg = f"the shell tools {problem}"
            raise DefinitionError(msg)


def _check_local_options(root: Folder, **options: object) -> None:
    """Raise ``DefinitionError`` if a local option is set for a workspace on another system."""
    named = [f"{name}=" for name, value in options.items() if value is not None]
    if named and isinstance(root, Workspace) and root.system is not None:
        msg = (
            f"{' and '.join(named)} cannot be used in the workspace {root.name}, which is not on this machine; leave it out, or use a "
            "local folder (Workspace.bubblewrap is already a sandbox)"
        )
        raise DefinitionError(msg)


def _mark_confined_to_folder(root: Folder, tools: list[Tool]) -> list[Tool]:
    """Mark the tools as confined, set their folder if it is on this machine, and return them."""
    for tool in tools:
        tool.mark_confined()  # a ``Root`` opens their files and applies the rules to each
    if isinstance(root, Workspace) and root.system is not None:
        if root.local_folder is None:
            return tools
        root = root.local_folder
    folder = tuple([part for part in os.path.realpath(root).split("/") if part])
    for tool in tools:
        tool.folder = folder
    return tools


def _make_tools_function(
    options: Callable[P, FileTools | SearchTools | ShellTools], name: str
) -> Callable[Concatenate[Folder, P], list[Tool]]:
    """Return the public function *name*, which takes a root and the fields of *options* and returns the tools."""

    def make_tools(root: Folder, /, *args: P.args, **kwargs: P.kwargs) -> list[Tool]:
        """Return the tools of the options for a root, marked as confined."""
        return _mark_confined_to_folder(root, options(*args, **kwargs).make_tools(root))

    make_tools.__name__ = make_tools.__qualname__ = name
    make_tools.__doc__ = options.__doc__
    given = inspect.signature(options).parameters.values()
    first = inspect.Parameter("root", inspect.Parameter.POSITIONAL_ONLY)
    make_tools.__signature__ = inspect.Signature([first, *given])  # type: ignore[attr-defined]
    return make_tools


file_tools = _make_tools_function(FileTools, "file_tools")
search_tools = _make_tools_function(SearchTools, "search_tools")
shell_tools = _make_tools_function(ShellTools, "shell_tools")


def web_tools(
    search: SearchBackend | None = None, docs: DocsBackend | None = None, fetch: Fetcher | None = None
) -> list[Tool]:
    """
    Return ``web_search``, ``read_docs`` and ``read_url``, each only if its back end is passed.

    Their category is ``"network"``, and none of them is read-only: the text of an address or a query leaves the machine. The content
    of pages is untrusted data.

    Args:
        search: Searches the web, such as ``SearxngSearch("http://localhost:8080")`` or ``BraveSearch(key)``.
        docs: Looks up documentation, such as ``DocsSites(fetcher, {"pydantic": "https://docs.pydantic.dev/latest"})``.
        fetch: Fetches pages, such as ``SafeFetcher(allow=["docs.python.org"])`` or ``SafeFetcher(allow="public")``. Only
            ``SafeFetcher`` rejects private addresses; another fetcher has its own rules.

    Raises:
        DefinitionError: If no back end is passed.
    """
    from stepengine.tools.bundled.web.tools import make_web_tools

    made = make_web_tools(search, docs, fetch)
    if not made:
        msg = 'web_tools needs search=, docs= or fetch=, such as search=SearxngSearch(url) or fetch=SafeFetcher(allow="public")'
        raise DefinitionError(msg)
    for one in made:
        one.mark_confined()  # they open no file
    return made


def change_hook_tools(
    root: Folder,
    hooks: Sequence[FileChangeHook],
    *,
    env: Sequence[str] = (),
    runner: Runner | None = None,
    allow_wide_root: bool = False,
) -> list[Tool]:
    """
    Return ``run_file_change_hooks``, which runs the checks that are configured for changed files.

    The caller defines the checks: a model passes only the changed files. The checks run like commands of ``shell_tools``.

    Args:
        root: The root folder of files and commands.
        hooks: The checks, such as ``FileChangeHook("types", ["mypy", "src"], pattern="**/*.py")``.
        env: Names of variables of this process that the checks receive.
        runner: Lets another program execute the checks; see ``shell_tools``.
        allow_wide_root: Accept ``/``, the home folder, and folders that contain it.

    Raises:
        DefinitionError: If there are no hooks, a pattern is invalid, or the root is not a folder or too wide.
    """
    from stepengine.tools.bundled.checks import make_change_hook_tool
    from stepengine.workspace.root import Root

    run, *_ = shell_tools(root, env=env, runner=runner, allow_wide_root=allow_wide_root)
    return _mark_confined_to_folder(
        root, [make_change_hook_tool(Root(root, PathPolicy(allow_wide_root=allow_wide_root)), hooks, run)]
    )


def followup_tools() -> list[Tool]:
    """Return ``suggest_followups``, which suggests the user's next messages in an event."""
    from stepengine.tools.bundled.followups import make_followup_tool

    return [make_followup_tool()]


def recall_history_tool() -> Tool:
    """
    Return ``recall_history``, the tool that searches and reads messages that were removed from the conversation.

    The runs of an agent with this tool store removed messages in ``AgentState.left_out``, and so does a stored session. Do not use
    the tool if the model must not read removed messages.
    """
    from stepengine.tools.bundled.history_tool import make_recall_tool

    return make_recall_tool()


def skill_tools(root: str | os.PathLike[str] | None = None, *, user: bool = True) -> list[Tool]:
    """
    Return ``skill``, the tool by which a model reads a skill that ``stepengine.context.project_context`` lists.

    Args:
        root: A folder of the project; by default the engine's ``workspace``, else the working directory.
        user: Whether the user's own skills are included.
    """
    from stepengine.tools.bundled.skill_tool import make_skill_tool

    return [make_skill_tool(root, user=user)]


def memory_tools(store: MemoryStore | None = None, *, scopes: Sequence[str] = ("project", "user")) -> list[Tool]:
    """
    Return ``remember``, ``recall`` and ``forget``: notes that outlive a run. No agent has them by default.

    Args:
        store: Stores the notes; by default one Markdown file per project and one per user, outside of the repository. See
            ``FileMemory``.
        scopes: The notes that may be used: ``"project"``, ``"user"``, or both.

    Raises:
        DefinitionError: For no scope, and for an unknown scope.
    """
    from stepengine.tools.bundled.note_tools import make_memory_tools

    return make_memory_tools(store, scopes)


def workspace_tools(
    workspace: Workspace,
    *,
    withhold: Sequence[str] = (),
    allow_wide_root: bool = False,
    buffers: Buffers | None = None,
    terminals: Terminals | None = None,
) -> list[Tool]:
    """
    Return the bundled tools for the folder of a workspace, with those for writing and commands only if it permits them.

    Args:
        workspace: The workspace with its permissions.
        withhold: Patterns of files that are not shown.
        allow_wide_root: Accept ``/``, the home folder, and folders that contain it.
        buffers: See ``FileTools``.
        terminals: See ``ShellTools``.

    Raises:
        DefinitionError: If the root is not a folder or too wide, or the system cannot confine the tools.
        WorkspaceLost: If a remote workspace cannot be reached.
    """
    wide, write = allow_wide_root, workspace.write
    tools = [
        *file_tools(
            workspace,
            write=write,
            propose=True,
            withhold=withhold,
            trusted=workspace.trusted,
            buffers=buffers,
            allow_wide_root=wide,
        ),
        *search_tools(workspace, withhold=withhold, allow_wide_root=wide),
    ]
    if not workspace.shell:
        return tools
    shell: Literal["bash"] | None = "bash" if workspace.shell == "bash" else None
    return [*tools, *shell_tools(workspace, shell=shell, terminals=terminals, watch=True, allow_wide_root=wide)]


def rootless_tools(searxng: str | None = None) -> list[Tool]:
    """
    Return the bundled tools that every workspace has and that do not access its folder.

    These are the tools for children, waiting, follow-ups and removed messages.

    Args:
        searxng: The address of a SearXNG instance, for the tools that access the public web; ``None`` omits these tools.
    """
    from stepengine.tools.children import child_tools, sleep_tool

    tools = [*followup_tools(), *child_tools(), sleep_tool(), recall_history_tool()]
    if searxng is None:
        return tools
    from stepengine.tools.bundled.web.fetcher import SafeFetcher
    from stepengine.tools.bundled.web.search_queries import SearchedDocs, SearxngSearch

    search, fetcher = SearxngSearch(searxng), SafeFetcher(allow="public")
    return [*tools, *web_tools(search, SearchedDocs(search, fetcher), fetcher)]


def list_all_workspace_tools(root: Folder = "/") -> list[Tool]:
    """Return all tools that a workspace may offer, for their names and schemas; they are not meant to be called."""
    place = Workspace(Path(root), write=True, shell=True)  # noqa: S604 - a permission, no subprocess
    return [*workspace_tools(place, allow_wide_root=True), *rootless_tools("http://localhost")]
