"""
The bundled sets of tools: ``file_tools``, ``search_tools``, ``shell_tools`` and ``web_tools``.

``workspace_tools`` and ``rootless_tools`` build those that a ``Workspace`` allows. An engine and the command line call them for the
tools that agents name.

A set is built with a root, which is a folder or a ``Workspace``, and a policy, and holds the posture of the reliability page. What it needs is imported
when it is built, not when stepengine is imported.
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
"""Most commands of an agent end in seconds; a model that needs more asks for it."""

CHOICES: dict[str, tuple[str | None, ...]] = {"home": ("private", "real"), "shell": (None, "bash")}
"""Options of shell tools with a few values."""

P = ParamSpec("P")

Folder: TypeAlias = "str | os.PathLike[str] | Workspace"
"""A root: a folder of this machine, or a ``Workspace``."""


@frozen(kw_only=True)
class FileTools(PathPolicy):
    """
    ``read_files``, ``list_directory`` and ``read_subtree``, and with *write* also ``write_file`` and ``str_replace``.

    With *delete* comes ``delete_file``. With *propose* come ``propose_write_file`` and ``propose_str_replace``, which show a
    change and make none.

    The root is opened now and held. No path leads out of it: not ``..``, not an absolute path, not a symbolic link, and
    not a folder that is swapped for a link while a tool runs. Files are written atomically, and not when somebody has
    changed them since the run read them, or since a person allowed the call and was shown its difference. Where the run
    has a journal, it keeps what ``stepengine.journal.undo`` needs.

    Attributes:
        write: Whether files may be written.
        delete: Whether files may be deleted, too; only with *write*.
        propose: Whether changes may be proposed; they are kept in the run's context and written nowhere.
        buffers: The files that are open in an editor, as what serves an editor lends them: what is not saved yet is read, and
            a file with such changes is written by the editor. By default files are what the disk has.
        withhold: Patterns of files that are not shown either, such as the journal of the run.
        allow_secrets: Patterns of files that are withheld by default, such as ``".env.example"``, and may be used.
        allow_protected: Patterns of files that are protected from being written, such as ``".github/workflows/"``, and
            may be written.
        trusted: Patterns of files that hold no text of third parties: what is read of them is trusted. Tools do not write them.
        refuse_hardlinks: Refuse to read a file that has more than one name.
        cross_mounts: Enter folders that are on other file systems than the root.
        allow_wide_root: Accept ``/``, the home folder, and folders that contain it.

    Raises:
        DefinitionError: when the root is no folder or too wide, or the system cannot confine the tools; for *delete*
            without *write*.
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
        prefer_python: Search in Python even where ripgrep is installed.
        withhold: Patterns of files that are not shown either, such as the journal of the run.
        allow_secrets: Patterns of files that are withheld by default, such as ``".env.example"``, and may be used.
        trusted: As for ``file_tools``, so that both take one policy. What a search finds stays untrusted, since it shows parts of many files.
        refuse_hardlinks: Refuse to read a file that has more than one name.
        cross_mounts: Enter folders that are on other file systems than the root.
        allow_wide_root: Accept ``/``, the home folder, and folders that contain it.

    Raises:
        DefinitionError: when the root is no folder or too wide, or the system cannot confine the tools.
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

    A command is an argument list, or text that every shell would only split into words; it is executed without a shell.
    With ``shell="bash"`` other text is a command line, with pipes, variables and the like: it is run by ``bash`` with its
    ordinary settings, and by ``sh`` where there is no ``bash``. A command runs in a session of its own, without
    terminal and input, in a folder below the root, and sees a clean environment with an empty home folder. When it
    ends, is stopped after its timeout, or its run is cancelled, everything that it started is killed. Background jobs
    end with their run.

    When this process itself is killed (SIGKILL, or a SIGTERM that nobody handles), the program and what it had started
    die with it on Linux.

    A git command that only looks (``status``, ``diff``, ``log``, ``show``, ``blame``, ``branch``, ``grep``, ``ls-files`` and
    the plumbing of ``diff``) runs no program that the repository's configuration or attributes name: no filter, diff
    driver, hook, monitor or pager. It fetches nothing, and does not look for changes inside of submodules. The
    configuration is read before; when that fails, the command is refused. So is an option for such programs, such as
    ``--ext-diff`` or ``--submodule=diff``. Without its filters git may call a file
    modified that is not. Every other git command, such as ``git commit``, runs without the repository's hooks, but with
    its filters, since what it stores could otherwise be unencrypted or too large: to allow it is to allow them. Of git
    that is started by a script or another program the same holds.

    **Without** *sandbox* **this is none.** A program that is allowed to run can do whatever your user can do, also outside of
    the root; nothing limits its processes, memory, files and network unless you say so with *limits*, *sandbox* or *runner*.

    With *sandbox* commands are run by bubblewrap (Linux; the program ``bwrap``): without network, with no other process in
    sight, and with nothing to read but the system's programs, those on the search path, and the root. They write below the
    root and in folders of their own only; what other programs run from the root, such as ``.git/hooks``, is read-only. What
    they do below the root, how much memory and processor they use, and what the kernel itself lets through is not
    limited by it.

    Attributes:
        shell: ``"bash"`` to run text that needs a shell; ``None``, the default, refuses it.
        env: Names of variables of this process that commands may see, such as ``["JAVA_HOME"]``. Names such as ``HOME``
            that commands get with a value of their own are refused.
        timeout: Seconds that a command may take when the model does not say; 30 by default.
        max_timeout: The most seconds that the model may ask for; 600 by default.
        sandbox: Run commands in a sandbox of the operating system; ``False`` by default.
        runner: Has commands executed elsewhere; see below.
        home: ``"private"`` for an empty home folder for each command, ``"real"`` for the user's.
        env_secrets: Accept names in *env* that look like those of secrets.
        allow_unlimited: Whether ``timeout_seconds=-1`` means no timeout instead of *max_timeout*.
        limits: Limits of the system for each command: ``processes`` (of the user, not of the command),
            ``memory_bytes``, ``file_bytes`` and ``cpu_seconds``. None by default, except that there are no core dumps.
        allow_wide_root: Accept ``/``, the home folder, and folders that contain it.
        terminals: Terminals of an editor, as what serves an editor lends them: commands that are waited for are run there, where a
            person sees them. They see the variables of these terminals, too, no *limits* hold there, and what a command leaves
            running the editor ends. Not with *sandbox* and *runner*. By default commands run in processes of this one, as those of
            ``watch`` always do.
        watch: Add ``watch``, by which a model has a command run again and again in the background, until it succeeds, fails,
            prints something else or prints a text, and is told then. It is asked about once: rules that deny bind each run of
            the command, those that ask do not. What watches is a child of the run, as those of ``child_tools``; it outlives a
            turn, ends with the run, and goes on when the run is resumed.

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
        DefinitionError: when the root is no folder or too wide, an option makes no sense, the system has no process
            groups (Windows), or no sandbox where one is asked for.
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
                # Asked before the first command: most engines, such as those of replays, run none.
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
    """Mark the tools as confined, set their folder where it is on this machine, and return them."""
    for tool in tools:
        tool.mark_confined()  # their files are opened by a ``Root``, which asks the rules about each
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
    Return ``web_search``, ``read_docs`` and ``read_url``, each only if its backend is given.

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
    from stepengine.tools.bundled.checks import make_change_hook_tool
    from stepengine.workspace.root import Root

    run, *_ = shell_tools(root, env=env, runner=runner, allow_wide_root=allow_wide_root)
    return _mark_confined_to_folder(
        root, [make_change_hook_tool(Root(root, PathPolicy(allow_wide_root=allow_wide_root)), hooks, run)]
    )


def followup_tools() -> list[Tool]:
    """Return ``suggest_followups``, which suggests the user's next messages in an event."""
    from stepengine.tools.bundled.followups import followup_tool

    return [followup_tool()]


def recall_history_tool() -> Tool:
    """
    Return ``recall_history``, the tool that searches and reads messages that were removed from the conversation.

    Its agent's runs keep what is left out: ``AgentState.left_out`` holds it, and so does a stored session. Whoever may not read
    what was once said gives an agent no such tool.
    """
    from stepengine.tools.bundled.history_tool import make_recall_tool

    return make_recall_tool()


def skill_tools(root: str | os.PathLike[str] | None = None, *, user: bool = True) -> list[Tool]:
    """
    Return ``skill``, the tool by which a model reads a skill that ``stepengine.context.project_context`` lists.

    Args:
        root: A folder of the project; by default the engine's ``workspace``, else the working directory.
        user: Whether the user's own skills are among them.
    """
    from stepengine.tools.bundled.skill_tool import skill_tool

    return [skill_tool(root, user=user)]


def memory_tools(store: MemoryStore | None = None, *, scopes: Sequence[str] = ("project", "user")) -> list[Tool]:
    """
    Return ``remember``, ``recall`` and ``forget``: notes that outlive a run. No agent has them by default.

    Args:
        store: Keeps the notes; by default one file of Markdown per project and one per user, outside of the repository. See
            ``FileMemory``.
        scopes: Which notes may be used: ``"project"``, ``"user"``, or both.

    Raises:
        DefinitionError: for no scope, and for an unknown one.
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
        workspace: Where they work, and what they may do there.
        withhold: Patterns of files that are not shown.
        allow_wide_root: Accept ``/``, the home folder, and folders that contain it.
        buffers: See ``FileTools``.
        terminals: See ``ShellTools``.

    Raises:
        DefinitionError: when the root is no folder or too wide, or the system cannot confine the tools.
        WorkspaceLost: when the place cannot be reached.
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

    These are for children, times, follow-ups and what was left out of the conversation.

    Args:
        searxng: The address of a SearXNG instance, for the tools that reach the public web; ``None`` for none of these.
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
    """Return all tools that a workspace may offer, as a source of names and schemas; they are never called."""
    place = Workspace(Path(root), write=True, shell=True)  # noqa: S604 - a permission, no subprocess
    return [*workspace_tools(place, allow_wide_root=True), *rootless_tools("http://localhost")]
