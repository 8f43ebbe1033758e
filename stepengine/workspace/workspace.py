"""
``Workspace``: the location in which the agents of an engine work, and the bundled tools that they may use there.

The location is a folder of this machine, in a container, or on another machine.

Each kind of location is an argument list that connects to the standard input and output of a Python there. The program in that
Python is the same for all of them, see ``stepengine.workspace.remote_files``.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import shlex
import shutil
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import attrs
from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.checks import FLAG, TEXT, allow_none, make_validator, with_keyword_hints
from stepengine.data.visible import cut_end
from stepengine.errors import DefinitionError, WorkspaceLost
from stepengine.workspace.open_files import is_open_database
from stepengine.workspace.paths import to_path, to_patterns

if TYPE_CHECKING:
    from stepengine.workspace.containers import Container
    from stepengine.workspace.remote_files import RemoteSystem

START_SECONDS = 60.0
"""A log-in over a slow network needs seconds; a host without an answer must not block a run."""
IMAGE_SECONDS = 600.0
"""The time limit for the start of a container: its image may have to be downloaded."""
ALWAYS = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ")
"""The environment variables for the program that connects: no keys."""
CONTAINERS = (
    "DOCKER_HOST",
    "DOCKER_CONTEXT",
    "DOCKER_CONFIG",
    "DOCKER_CERT_PATH",
    "DOCKER_TLS_VERIFY",
    "CONTAINER_HOST",
    "XDG_RUNTIME_DIR",
)
ENTERING = (
    "-I", "-S", "-c",
    "import os, sys; os.makedirs(sys.argv[1], exist_ok=True); os.chdir(sys.argv[1]); os.execv(sys.executable, [sys.executable, *sys.argv[2:]])",
)  # fmt: skip
"""Creates the folder and becomes the Python that works in it: Docker would create it, and Podman fails without it."""
WAITING = ("-I", "-S", "-c", "import time\nwhile True: time.sleep(86_400)")
"""The program of a container that is kept: other programs are started in it."""
LIMITS: Mapping[str, str] = {
    "processes": "RLIMIT_NPROC",
    "memory_bytes": "RLIMIT_AS",
    "file_bytes": "RLIMIT_FSIZE",
    "cpu_seconds": "RLIMIT_CPU",
}
SSH_OPTIONS = (
    "BatchMode=yes", "ForwardAgent=no", "ForwardX11=no", "ClearAllForwardings=yes", "PermitLocalCommand=no", "SendEnv=-*",
    "ControlMaster=no", "ControlPath=none", "ServerAliveInterval=15", "ServerAliveCountMax=4",
)  # fmt: skip
"""No password is asked for, nothing of ours is forwarded, and a peer that is silent for a minute is gone."""
FORMS = "docker:IMAGE, podman:IMAGE, container:NAME:/FOLDER, ssh:HOST:/FOLDER, bubblewrap:FOLDER, kubernetes:POD:/FOLDER or over:COMMAND"


def _check_web(workspace: object, field: attrs.Attribute[Any], web: Any) -> None:
    """Raise ``DefinitionError`` unless *web* is ``None`` or the address of a search service."""
    make_validator(allow_none(TEXT))(workspace, field, web)
    if web is not None:
        # Imported here alone: every usable import loads this module, and hardly a workspace has web=.
        from stepengine.workspace.urls import normalize_service_url

        normalize_service_url(web)


def _format_web_setting(web: str | None) -> str:
    """Return the repr of *web* without its user name and password."""
    from stepengine.workspace.urls import remove_user_info

    return repr(web and remove_user_info(web))


def _check_shell(_workspace: object, _field: attrs.Attribute[Any], shell: object) -> None:
    """Raise ``DefinitionError`` unless *shell* is a bool or ``"bash"``."""
    if not isinstance(shell, bool) and shell != "bash":
        msg = (
            f'Workspace(shell=...) must be True for single programs, "bash" for command lines, or False, not {shell!r}'
        )
        raise DefinitionError(msg)


def _root_to_path(root: str | os.PathLike[str]) -> Path:
    """Return the root of a workspace as a ``Path``; raise ``DefinitionError`` for any other value than a text or path."""
    return to_path(root, "Workspace(root)")


@with_keyword_hints
@frozen
class Workspace:
    """
    Where the agent works, and which bundled tools it may use there.

    In ``Engine(workspace=...)`` an agent gets each bundled tool that it names, such as ``"read_files"``. Tools that only read and search
    are always allowed. *write*, *shell* and *web* allow the others.

    ``Workspace("project")`` is a folder of this machine. ``docker``, ``podman``, ``ssh``, ``bubblewrap`` and ``kubernetes`` return a
    workspace in another location, and ``from_command`` one behind any command with standard input and output. ``file_tools``,
    ``search_tools``, ``shell_tools``, ``change_hook_tools``, ``stepengine.journal.undo`` and ``Engine`` accept all of them. ``snapshot``
    copies the content. Processes start at the first use; ``close``, or the end of a ``with`` block, ends them. The other location needs
    only Python 3.8 or newer and a POSIX system.

    Attributes:
        root: The root folder; in another location, its path there.
        cwd: The working directory; the root itself by default.
        system: The other location; ``None`` for this machine.
        write: Whether agents may change files: ``write_file``, ``str_replace``.
        shell: Whether agents may run programs: ``run_terminal_command``, ``check_job``, ``kill_job``, ``watch``. ``True`` is for
            single programs with their arguments, ``"bash"`` also for command lines with pipes, variables and the like. It is no sandbox.
        web: The address of a SearXNG instance, such as ``"http://localhost:8080"``, for ``web_search``, ``read_docs`` and ``read_url``,
            which reach the public web. ``None`` for no web.
        trusted: Patterns of files without text of third parties, such as ``"docs/**"``; see ``Policy.guard_injection``. Tools do not
            write them.

    Raises:
        DefinitionError: when an option has an invalid value.
    """

    root: Path = attrs.field(converter=_root_to_path)
    cwd: Path = attrs.field(default=attrs.Factory(lambda self: self.root, takes_self=True), converter=Path)
    system: RemoteSystem | None = attrs.field(
        default=None, kw_only=True, repr=lambda system: getattr(system, "name", "None")
    )
    write: bool = attrs.field(default=False, kw_only=True, validator=make_validator(FLAG))
    shell: bool | Literal["bash"] = attrs.field(default=False, kw_only=True, validator=_check_shell)
    web: str | None = attrs.field(default=None, kw_only=True, validator=_check_web, repr=_format_web_setting)
    trusted: tuple[str, ...] = attrs.field(default=(), kw_only=True, converter=to_patterns)

    def __fspath__(self) -> str:
        if self.system is None:
            return os.fspath(self.root)
        msg = f"the workspace {self.name} is not a folder on this machine"
        raise DefinitionError(msg)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """The name of the workspace in messages and records, without keys, options and passwords."""
        return os.fspath(self.root) if self.system is None else f"{self.system.name}"

    @property
    def local_folder(self) -> Path | None:
        """The local folder of the root; for a container or sandbox the folder mounted there; ``None`` if there is none."""
        if self.system is None:
            return self.root
        found = self.system.find_local_folder(os.fspath(self.root))
        return Path(found) if found else None

    def with_access(
        self, *, write: bool = False, shell: bool | Literal["bash"] = False, web: str | None = None
    ) -> Workspace:
        """
        Return the same workspace with other permissions.

        Raises:
            DefinitionError: when an option has an invalid value.
        """
        return attrs.evolve(self, write=write, shell=shell, web=web)

    def close(self) -> None:
        """End the processes and the connection of the workspace; a local folder needs no close."""
        if self.system is not None:
            self.system.close()

    def snapshot(self, to: str | os.PathLike[str]) -> Workspace:
        """
        Copy the current content to *to*, and return a workspace of the copy, for example to fork a run there.

        The new workspace has the same permissions, working directory and *trusted* patterns.

        A folder of this machine, in a sandbox or not, is copied; its links stay as they are. A container from ``keep=`` or ``container=``
        is saved as an image, without its mounts; the new container has the same mounts. The call blocks until that is done, so an
        event loop calls it in a thread.

        Args:
            to: A folder that does not exist yet; for a container the name of an image, such as ``"shop:before"``.

        Raises:
            DefinitionError: for a workspace without snapshots, and a folder that exists.
            WorkspaceLost: when the copy or the image cannot be created.
        """
        made = self._make_snapshot(to)
        cwd = made.root / self.cwd.relative_to(self.root) if self.cwd.is_relative_to(self.root) else made.root
        return attrs.evolve(self, root=made.root, cwd=cwd, system=made.system)

    def _make_snapshot(self, to: str | os.PathLike[str]) -> Workspace:
        """Save the folder as a copy, or the container as an image, and return a workspace of the copy or image."""
        place = None if self.system is None else self.system.place
        kept, again = (None, None) if place is None else (place.kept, place.again)
        here = self.local_folder
        # A copy of a container has the same mounts, so it would change the original files.
        is_mounted = self.system is not None and self.system.list_mounted_folders(
            os.fspath(self.root), include_below=False
        )
        if kept is not None and again is not None and not is_mounted:
            kept.commit(_require_operand(os.fspath(to), kept.program))
            made: Workspace = again(os.fspath(to))
            return made
        if here is not None and (place is None or (kept is None and again is not None)):
            copied = _copy_folder(here, Path(to))
            return Workspace(copied) if again is None else again(os.fspath(copied))
        msg = (
            f"the workspace {self.name} cannot make snapshots; use a folder on this machine, bubblewrap, or a container with keep= or "
            "container= and a root outside of mounts"
        )
        raise DefinitionError(msg)

    def discard(self) -> None:
        """
        End the processes of the workspace, and delete its container if that was created with ``keep=``.

        Raises:
            WorkspaceLost: when the container cannot be removed.
        """
        self.close()
        if self.system is not None and self.system.place.kept is not None:
            self.system.place.kept.remove()

    # --- locations ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_command(
        cls,
        argv: Sequence[str],
        root: str | os.PathLike[str] = ".",
        *,
        python: str = "python3",
        name: str = "",
        env: Sequence[str] = (),
        limits: Mapping[str, int] | None = None,
        start_seconds: float = START_SECONDS,
    ) -> Workspace:
        """
        Return a workspace at the other end of a command's standard input and output.

        Args:
            argv: The command, such as ``["docker", "exec", "-i", "box"]``; the words that start Python there are appended.
            root: The remote folder, relative to the folder in which Python starts; ``~`` is the home folder.
            python: The remote Python.
            name: The name in messages and journals; by default the command, which must then contain no secrets.
            env: Names of variables of this process that the command sees in addition to ``PATH``, ``HOME``, ``USER``, ``LANG`` and ``TZ``.
            limits: System limits for Python and all commands there, as in ``shell_tools``.
            start_seconds: The time limit of a start.

        Raises:
            DefinitionError: when *argv* is not a command, and for invalid limits.
        """
        words = _require_command_words(argv)
        return cls._create_remote(
            root,
            name=name or f"over:{shlex.join(words)}",
            argv=lambda options: (*words, python, *options),
            env=env,
            limits=limits,
            start=start_seconds,
        )

    @classmethod
    def docker(
        cls,
        image: str = "",
        root: str | os.PathLike[str] = "/workspace",
        *,
        container: str = "",
        keep: str = "",
        mounts: Mapping[str | os.PathLike[str], str] | None = None,
        network: str = "none",
        memory: str = "4g",
        cpus: float = 2.0,
        processes: int = 1024,
        user: str = "",
        options: Sequence[str] = (),
        python: str = "python3",
        program: str = "docker",
        start_seconds: float = IMAGE_SECONDS,
    ) -> Workspace:
        """
        Return a workspace in a new container of *image*, or in the running *container*.

        A new container starts at the first use. It is deleted when its connection ends, unless ``keep=`` is set.

        Args:
            image: The image, such as ``"python:3.13"``; it must contain Python.
            root: The folder in the container; a missing one is created.
            container: A running container, in place of an image. The options from *keep* to *options* do not apply to it.
            keep: The name of a container that is kept with its content until ``discard()``. The next workspace with the same name, image
                and options uses the container again, also in another process.
            mounts: Folders of this machine, with their paths in the container; both sides can write to them.
            network: ``"none"``, or the name of a Docker network.
            memory: The memory limit.
            cpus: The number of processors.
            processes: The maximum number of processes.
            user: The user in the container, such as ``"1000:1000"``; by default the user of the image.
            options: More options of ``docker run``.
            python: The Python in the container.
            program: The program; ``podman`` accepts the same arguments.
            start_seconds: The time limit of a start, with the download of the image.

        Raises:
            DefinitionError: for both or neither of *image* and *container*, and for a name that Docker would read as an option.
        """
        from stepengine.workspace.containers import (
            Container,
        )  # imported only for containers, so that most imports stay light

        if bool(image) == bool(container):
            msg = f'Workspace.{program} needs either an image or container="..."'
            raise DefinitionError(msg)
        shown = {there: os.path.realpath(here) for here, there in (mounts or {}).items()}
        named, seen = (
            _require_operand(image or container, program),
            _make_connection_variables(CONTAINERS, shown.values()),
        )
        inside = (python, *ENTERING, _require_absolute_path(root))
        limits = (
            f"--network={network}", "--security-opt=no-new-privileges", f"--memory={memory}", f"--memory-swap={memory}",
            f"--cpus={cpus:g}", f"--pids-limit={processes}", *([f"--user={user}"] if user else []),
            *[f"--mount={_make_mount_option(here, there)}" for here, there in (mounts or {}).items()], *options, named,
        )  # fmt: skip
        once = ""
        if container:
            words: tuple[str, ...] = (program, "exec", "-i", "-w", _require_absolute_path(root), named, python)
            kept = Container(program, named, seen)
        elif keep:
            words = (program, "exec", "-i", _require_operand(keep, program), *inside)
            kept = Container(program, keep, seen, ("--init", *limits, python, *WAITING), start_seconds)
        else:
            words = (program, "run", "--rm", "-i", "--init", *limits, *inside)
            kept = None
            once = "its container ended with the connection, and its files outside of mounts are lost; create the workspace again"

        def docker_with_image(image: str) -> Workspace:
            """Return a workspace with the same options in a container of *image*."""
            return cls.docker(
                image, root, mounts=mounts, network=network, memory=memory, cpus=cpus, processes=processes, user=user, options=options,
                python=python, program=program, start_seconds=start_seconds,
            )  # fmt: skip

        return cls._create_remote(
            root,
            name=f"{program}:{keep or named}",
            argv=lambda options: (*words, *options),
            env=CONTAINERS,
            start=start_seconds,
            once=once,
            shown=shown,
            kept=kept,
            again=None if kept is None else docker_with_image,
        )

    @classmethod
    def podman(cls, image: str = "", root: str | os.PathLike[str] = "/workspace", **options: Any) -> Workspace:
        """Return a workspace in a container of Podman; the options are those of ``docker``."""
        return cls.docker(image, root, program="podman", **options)

    @classmethod
    def ssh(
        cls,
        host: str,
        folder: str | os.PathLike[str],
        *,
        options: Sequence[str] = (),
        python: str = "python3",
        limits: Mapping[str, int] | None = None,
        start_seconds: float = START_SECONDS,
    ) -> Workspace:
        """
        Return a workspace in a folder on another machine, reached by OpenSSH.

        This is not a sandbox: commands have all rights of the remote user. Nothing is forwarded, and no password is requested. The keys
        are those of ``ssh`` and its agent, and stay on this machine.

        Args:
            host: The host: a name in the configuration of ``ssh``, or ``user@host``.
            folder: The remote folder; ``~`` is the home folder.
            options: More options of ``ssh``, such as ``["-p", "2222"]``.
            python: The remote Python.
            limits: System limits for all remote processes, as in ``shell_tools``.
            start_seconds: The time limit of the log-in.

        Raises:
            DefinitionError: for a host that ``ssh`` would read as an option, and for invalid limits.
        """
        named = _require_operand(host, "ssh")
        given = [word for option in SSH_OPTIONS for word in ("-o", option)]
        return cls._create_remote(
            folder,
            name=f"ssh:{named}",
            argv=lambda words: ("ssh", "-T", *options, *given, "--", named, f"exec {shlex.join([python, *words])}"),
            env=("SSH_AUTH_SOCK", "XDG_RUNTIME_DIR"),
            limits=limits,
            start=start_seconds,
        )

    @classmethod
    def bubblewrap(
        cls,
        root: str | os.PathLike[str],
        *,
        network: bool = False,
        limits: Mapping[str, int] | None = None,
        tmp_bytes: int = 1 << 30,
        start_seconds: float = START_SECONDS,
    ) -> Workspace:
        """
        Return a workspace in a local folder, in a bubblewrap sandbox that otherwise contains only programs of the system and of ``PATH``.

        These programs are read-only. Of this process's variables, commands see only ``PATH``; ``HOME`` is ``/tmp``.

        Args:
            root: The folder; writes change it permanently.
            network: Whether the sandbox has a network.
            limits: System limits for all processes in the sandbox, as in ``shell_tools``; ``processes`` counts all processes of the user,
                and does not apply to root.
            tmp_bytes: The size limit of ``/tmp`` in bytes of memory, and of each of the two file systems in memory.
            start_seconds: The time limit of the start.

        Raises:
            DefinitionError: when *root* is not a folder, or is ``/``.
        """
        from stepengine.workspace.bubblewrap import PROGRAM, sandbox_options, sandbox_python, sandbox_search_path

        real = os.path.realpath(root)
        if real == "/":
            msg = "Workspace.bubblewrap needs a folder other than /, because commands may write to all files in it"
            raise DefinitionError(msg)
        if not Path(real).is_dir():
            why = "it is not a folder" if Path(real).exists() else "it does not exist"
            msg = f"the root {os.fspath(root)!r} of Workspace.bubblewrap cannot be opened as a folder: {why}"
            raise DefinitionError(msg)
        path = os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin")
        shown = list(sandbox_options(path, network=network))
        at = shown.index("--tmpfs", shown.index("--dev"))
        shown[at:at] = ["--size", str(tmp_bytes)]
        variables = {"PATH": sandbox_search_path(path), "HOME": "/tmp", "LANG": "C.UTF-8"}  # noqa: S108  (inside of the sandbox)
        made = ["--clearenv", *[word for name in variables for word in ("--setenv", name, variables[name])]]
        words = (PROGRAM, *shown, "--bind", real, real, *made, "--chdir", real, "--")
        return cls._create_remote(
            real,
            name=f"bubblewrap:{real}",
            argv=lambda options: (*words, sandbox_python(), *options),
            limits=limits,
            start=start_seconds,
            shown={real: real},
            again=lambda folder: cls.bubblewrap(
                folder, network=network, limits=limits, tmp_bytes=tmp_bytes, start_seconds=start_seconds
            ),
        )

    @classmethod
    def kubernetes(
        cls,
        pod: str,
        root: str | os.PathLike[str] = "/workspace",
        *,
        container: str = "",
        namespace: str = "",
        context: str = "",
        python: str = "python3",
        start_seconds: float = START_SECONDS,
    ) -> Workspace:
        """
        Return a workspace in a folder of a running pod, reached by ``kubectl exec``.

        Args:
            pod: The pod; its own definition limits its resources and network.
            root: The folder in the pod.
            container: The container of the pod; the first one by default.
            namespace: The namespace of the pod; by default that of the context.
            context: The context of ``kubectl``; the current one by default.
            python: The Python in the pod.
            start_seconds: The time limit of the start.

        Raises:
            DefinitionError: for a name that ``kubectl`` would read as an option.
        """
        chosen = {"--context": context, "--namespace": namespace, "--container": container}
        given = [f"{option}={_require_operand(value, 'kubectl')}" for option, value in chosen.items() if value]
        words = ("kubectl", "exec", "-i", *given, _require_operand(pod, "kubectl"), "--")
        return cls._create_remote(
            root,
            name=f"kubernetes:{pod}",
            argv=lambda options: (*words, python, *options),
            env=("KUBECONFIG",),
            start=start_seconds,
        )

    @classmethod
    def parse(cls, text: str, folder: str | os.PathLike[str] = ".") -> Workspace:
        """
        Return the workspace that a text describes, as on the command line.

        Args:
            text: ``docker:IMAGE`` or ``podman:IMAGE``, where *folder* is mounted at ``/workspace``; ``container:NAME:/FOLDER``,
                ``ssh:HOST:/FOLDER``, ``bubblewrap:FOLDER``, ``kubernetes:POD:/FOLDER``; ``over:COMMAND``, which starts in *folder*.
            folder: The folder of this machine.

        Raises:
            DefinitionError: when the text describes no workspace.
        """
        kind, _, rest = text.partition(":")
        name, _, path = rest.rpartition(":")
        if kind in {"docker", "podman"} and rest:
            return cls.docker(rest, mounts={folder: "/workspace"}, program=kind)
        if kind == "bubblewrap" and rest:
            return cls.bubblewrap(Path(folder, rest))
        if kind == "over" and rest:
            return cls.from_command(_split_command(rest), folder)
        if kind in {"container", "ssh", "kubernetes"} and name and path:
            made = {"container": lambda: cls.docker("", path, container=name), "ssh": lambda: cls.ssh(name, path)}
            return made.get(kind, lambda: cls.kubernetes(name, path))()
        msg = f"{text!r} is not a workspace; use {FORMS}"
        raise DefinitionError(msg)

    @classmethod
    def _create_remote(
        cls,
        root: str | os.PathLike[str],
        *,
        name: str,
        argv: Any,
        env: Sequence[str] = (),
        limits: Mapping[str, int] | None = None,
        start: float,
        once: str = "",
        shown: Mapping[str, str] | None = None,
        kept: Container | None = None,
        again: Callable[[str], Workspace] | None = None,
    ) -> Workspace:
        """Return a workspace on another system. The first use starts the command that *argv* returns."""
        from stepengine.workspace.remote_files import RemotePlace, RemoteSystem

        place = RemotePlace(
            name=name, argv=argv, env=_make_connection_variables(env, (shown or {}).values()), limits=limits_by_rlimit_name(limits or {}), start=start,
            once=once, shown=shown or {}, kept=kept, again=again,
        )  # fmt: skip
        return cls(Path(root), system=RemoteSystem(place))


def _copy_folder(folder: Path, to: Path) -> Path:
    """Copy a folder to a new one, and return its path; if that fails, the incomplete copy is removed."""
    real, target = folder.resolve(), to.absolute()
    if target.resolve().is_relative_to(real):
        msg = f"{str(target)!r} is inside the folder to copy; use a path outside of it"
        raise DefinitionError(msg)
    try:
        target.mkdir(parents=True)
    except FileExistsError:
        msg = f"{str(target)!r} already exists; use a new folder for the snapshot"
        raise DefinitionError(msg) from None
    except OSError as error:
        msg = f"{str(target)!r} cannot be created: {error.strerror}"
        raise WorkspaceLost(msg) from None
    try:
        shutil.copytree(real, target, symlinks=True, dirs_exist_ok=True, ignore=_find_uncopyable_names)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(target, ignore_errors=True)
        msg = f"{str(real)!r} could not be copied: {error}"
        raise WorkspaceLost(cut_end(msg, 2_000)) from None
    return target


def _find_uncopyable_names(folder: str, names: list[str]) -> list[str]:
    """Return the entries that cannot be copied: pipes, sockets, devices, and databases that this process uses."""
    found = []
    for name in names:
        with contextlib.suppress(OSError):
            status = os.lstat(Path(folder, name))
            mode = status.st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)) or is_open_database(status):
                found.append(name)
    return found


def _make_connection_variables(names: Sequence[str], shared: Collection[str]) -> dict[str, str]:
    """
    Return the environment variables for the program that makes a connection.

    Its ``PATH`` has no folders below the *shared* ones: commands in a sandbox or container could write a program there, and it would be
    executed outside.
    """
    made = {one: os.environ[one] for one in (*ALWAYS, *names) if one in os.environ}
    if shared and "PATH" in made:
        from stepengine.workspace.environment import filter_search_path

        made["PATH"] = filter_search_path(made["PATH"], [[part for part in one.split("/") if part] for one in shared])
    return made


def _require_command_words(argv: Any) -> tuple[str, ...]:
    """Return a command as a tuple of words; raise ``DefinitionError`` for anything else."""
    if isinstance(argv, str) or not argv or not all(isinstance(word, str) and "\0" not in word for word in argv):
        msg = f"Workspace.from_command needs a list of words, such as ['docker', 'exec', '-i', 'box'], not {argv!r}"
        raise DefinitionError(msg)
    return tuple(argv)


def _split_command(text: str) -> list[str]:
    """Return the words of a command line; raise ``DefinitionError`` if its quotes are not closed."""
    try:
        return shlex.split(text)
    except ValueError as error:
        msg = f"the command {text!r} cannot be parsed: {error}"
        raise DefinitionError(msg) from None


def _require_operand(text: str, program: str) -> str:
    """Return *text* if a program reads it as one operand; raise ``DefinitionError`` if it looks like an option or has blanks."""
    if not text or text.startswith("-") or not text.isprintable() or any(c.isspace() for c in text):
        msg = f"{text!r} cannot be passed to {program}; use a name without blanks that does not start with '-'"
        raise DefinitionError(msg)
    return text


def _require_absolute_path(path: str | os.PathLike[str]) -> str:
    """Return a path as text; raise ``DefinitionError`` if it is not absolute."""
    text = os.fspath(path)
    if not text.startswith("/") or not text.isprintable():
        msg = f"{text!r} must be the absolute path of a folder in the workspace, such as '/workspace'"
        raise DefinitionError(msg)
    return text


def _make_mount_option(local_path: str | os.PathLike[str], mount_path: str) -> str:
    """Return the option that mounts a local folder at *mount_path*; raise ``DefinitionError`` for a path that Docker rejects."""
    real = os.path.realpath(local_path)
    if any(c in path for path in (real, mount_path) for c in ',"\n'):
        msg = f"{real!r} and {mount_path!r} cannot be mounted: Docker allows no commas, quotes and line ends in paths"
        raise DefinitionError(msg)
    return f"type=bind,source={real},target={_require_absolute_path(mount_path)}"


def limits_by_rlimit_name(limits: Mapping[str, int]) -> dict[str, int]:
    """
    Return limits by the names of the module ``resource``; raise ``DefinitionError`` for an unknown limit or an invalid value.

    Raises:
        DefinitionError: for an unknown limit, and for a value that is not a positive whole number.
    """
    for name, value in limits.items():
        if name not in LIMITS or type(value) is not int or value <= 0:
            msg = f"limits has {name!r}: {value!r}; valid limits: {list_names(LIMITS, name)}, each a positive whole number"
            raise DefinitionError(msg)
    return {LIMITS[name]: value for name, value in limits.items()}


WORKSPACE: contextvars.ContextVar[Workspace | None] = contextvars.ContextVar("stepengine_workspace", default=None)
"""The engine's workspace, for the function of a ``Perform``, which receives no context."""
