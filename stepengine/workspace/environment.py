"""
The environment of a command: clean variables, its private folders, and the programs on its search path.

It also prevents git from running programs that a repository's own configuration names. Every command gets the few settings whose names
are known. Filters and diff drivers have arbitrary names. So before a read-only git command the configuration is read, which runs
nothing, and each of those settings is overridden by name. Commands that change something use the repository's filters: a file
added without its filter would be stored unencrypted, or whole instead of in a large-file store. Permission to run them includes
these programs.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from stepengine.data.secret_names import is_secret_name
from stepengine.errors import DefinitionError, ToolError
from stepengine.redaction import find_environment_secrets
from stepengine.workspace.argv import Argv

if TYPE_CHECKING:
    from stepengine.workspace.remote_files import RemoteSystem

READ_SECONDS = 10.0
"""The time limit for reading the configuration."""
NAMES_BYTES = 4 * 1024 * 1024
"""The most bytes of names in a configuration; thousands of branches have far fewer."""
FOUND_COUNT = 1_000
"""Programs that a repository's configuration names are hidden one by one on a command line; a real one names a few."""
FOUND_BYTES = 65_536
"""All of them must fit on one command line, with room for the rest."""

ALWAYS: Mapping[str, str] = {"core.fsmonitor": "false", "core.hooksPath": "/dev/null", "core.pager": "cat"}
LOOKING: Mapping[str, str] = {
    # Work in a submodule is work under a configuration that was not read.
    "diff.submodule": "short",
    "status.submoduleSummary": "false",
    # A merge that is made again runs merge drivers.
    "log.diffMerges": "separate",
    "log.showSignature": "false",
    # An apparent repository may be files that a model wrote, and its configuration may name any program.
    "safe.bareRepository": "explicit",
    # `%G?` in a format checks signatures, with these programs, which are git's own defaults.
    "gpg.program": "gpg",
    "gpg.openpgp.program": "gpg",
    "gpg.x509.program": "gpgsm",
    "gpg.ssh.program": "ssh-keygen",
}
NO_FETCH = {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
"""A partial clone fetches missing objects with the programs of its remotes; the second setting is for older versions of git."""

FAMILIES = {
    ("filter", "clean"): ("clean", ""),
    ("filter", "smudge"): ("smudge", ""),
    ("filter", "process"): ("process", ""),
    ("filter", "required"): ("required", "false"),
    # For `--textconv` of a command, and for `git status -v`, which has no option against it.
    ("diff", "textconv"): ("textconv", "cat"),
    ("hook", "command"): ("enabled", "false"),
}
"""The setting that is overridden in each kind of named section, and its new value."""

NO_DRIVERS = ("--no-ext-diff", "--no-textconv")
NO_SUBMODULES = ("--ignore-submodules=dirty",)
ADDED: Mapping[str, Argv] = {
    "status": NO_SUBMODULES,
    "diff": NO_DRIVERS + NO_SUBMODULES,
    "diff-files": NO_DRIVERS + NO_SUBMODULES,
    "diff-index": NO_DRIVERS + NO_SUBMODULES,
    "diff-tree": NO_DRIVERS,
    "log": NO_DRIVERS,
    "show": NO_DRIVERS,
    "blame": ("--no-textconv",),
    "branch": (),
    "grep": (),
    "ls-files": (),
}
"""The read-only commands, each with the options to insert before its own."""
STARTING: Mapping[str, frozenset[str] | None] = {
    "--ext-diff": None,
    "--remerge-diff": None,
    "--diff-merges": frozenset(("r", "remerge")),
    "--submodule": frozenset(("diff",)),
    "--ignore-submodules": frozenset(("none", "untracked")),
}
"""The options, with their values if only some do it, that start programs of a repository or look inside of submodules."""
VALUED = frozenset(("-C", "-c", "--attr-source", "--config-env", "--git-dir", "--namespace", "--work-tree"))


@frozen
class GitQuery:
    """
    A read-only git command.

    Attributes:
        before: Git and its options before the subcommand.
        after: The subcommand and its arguments.
        question: The command to run first: it prints the names of all settings that apply, each ended by a NUL.
    """

    before: Argv
    after: Argv
    question: Argv

    def make_command(self, config_names: bytes) -> tuple[Argv, dict[str, str]]:
        """
        Return the command and its additional environment variables, which override those *config_names* of git that start programs.

        The settings in the variables are also options behind those of the command, since its own ``-c`` overrides a variable.

        Raises:
            ToolError: when more than 1,000 settings, or names of 64 KiB, would have to be overridden.
        """
        found = _named_section_overrides(config_names)
        if len(found) > FOUND_COUNT or sum([len(name) for name in found]) > FOUND_BYTES:
            msg = (
                f"{self.before[0]!r} was not executed: the repository's configuration names {len(found):,} programs that it "
                f"may run; at most {FOUND_COUNT:,}, with names of {FOUND_BYTES:,} characters together, can be kept from it"
            )
            raise ToolError(msg)
        settings = {**ALWAYS, **LOOKING, **found}
        last = [f"--config-env={name}=GIT_CONFIG_VALUE_{number}" for number, name in enumerate(settings)]
        return (*self.before, *last, *self.after), git_config_variables(settings) | NO_FETCH


def parse_git_query(argv: Argv) -> GitQuery | None:
    """
    Return *argv* as a read-only git command; ``None`` for any other command.

    Raises:
        ToolError: when an option of it would start programs of the repository.
    """
    if argv[0].rpartition("/")[2] != "git":
        return None
    at = 1
    while at < len(argv) and argv[at].startswith("-"):
        at += 2 if argv[at] in VALUED else 1
    if at >= len(argv) or argv[at] not in ADDED:
        return None
    _refuse_options_that_start_programs(argv[at + 1 :])
    question = ("git", *argv[1:at], "config", "--list", "--includes", "--name-only", "-z")
    return GitQuery(argv[:at], (argv[at], *ADDED[argv[at]], *argv[at + 1 :]), question)


def _refuse_options_that_start_programs(words: Argv) -> None:
    """Raise ``ToolError`` if an option in *words*, abbreviated or not, starts programs of a repository."""
    for number, word in enumerate(words):
        if word == "--":
            return
        name, equals, value = word.partition("=")
        value = value if equals else "".join(words[number + 1 : number + 2])
        for option, values in STARTING.items():
            if len(name) > len("--") and option.startswith(name) and (values is None or value in values):
                msg = (
                    f"'git' was not executed: its option {word!r} may start programs that the repository names. "
                    "Leave the option out"
                )
                raise ToolError(msg)


def git_config_variables(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that override *settings* over all configuration files."""
    made = {"GIT_CONFIG_COUNT": str(len(settings))}
    for number, (key, value) in enumerate(settings.items()):
        made |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return made


def _named_section_overrides(names: bytes) -> dict[str, str]:
    """Return the settings that switch off the programs in git's named sections, from a list of configuration names."""
    found: dict[str, str] = {}
    for name in os.fsdecode(names).split("\0"):
        section, _, rest = name.partition(".")
        own, dot, variable = rest.rpartition(".")
        family = FAMILIES.get((section, variable))
        if dot and family is not None:
            found[f"{section}.{own}.{family[0]}"] = family[1]
    return found


SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))
"""The program that supervises each command."""
MARKER = "STEPENGINE_CALL"
"""The variable that identifies processes that left the command's process group."""

SECRET_CHARS = 6
"""The length from which on a value is a secret; replacing shorter ones would garble logs."""

QUIET = {
    "TERM": "dumb",
    "NO_COLOR": "1",
    "CI": "1",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "EDITOR": "true",
    "VISUAL": "true",
    "GIT_EDITOR": "true",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
}
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"

FIXED = {
    "PATH": "it has the folders of PATH outside of the root",
    "HOME": 'it is an empty folder; home="real" sets it to your home folder',
    "TMPDIR": "it is a folder of the command",
    "USER": "stepengine always sets it",
    "LOGNAME": "stepengine always sets it",
    MARKER: "stepengine always sets it",
}
"""The variables that every command gets with a value of ours, each with the reason."""
GIT_SETTINGS = ("GIT_CONFIG_COUNT", "GIT_CONFIG_KEY_", "GIT_CONFIG_VALUE_")
IDENTITY = {"user.name": "NAME", "user.email": "EMAIL"}
IDENTITY_SECONDS = 2.0
"""The time limit for reading the name and address; a slower configuration provides none."""


def _is_private_variable(name: str) -> bool:
    """Return True for a variable that commands do not get by default: secrets and settings of this package."""
    return is_secret_name(name, "variable") or name.upper().startswith("STEPENGINE_")


def validate_variable_names(names: Sequence[str], *, env_secrets: bool) -> tuple[str, ...]:
    """
    Return *names*, the variables that commands may see, as a tuple after validation.

    Raises:
        DefinitionError: for a single string, an invalid name, a variable that every command gets with a fixed value, and the
            name of a secret without *env_secrets*.
    """
    if isinstance(names, str):
        msg = f"env={names!r} is one string; pass a list of names, such as env=[{names!r}]"
        raise DefinitionError(msg)
    for name in names:
        reason = FIXED.get(name) or (
            "stepengine sets it so that git runs no other programs" if name.startswith(GIT_SETTINGS) else ""
        )
        if reason:
            msg = f"env contains {name!r}, which commands cannot inherit: {reason}. Remove it from env"
            raise DefinitionError(msg)
        if not name or "=" in name or "\0" in name:
            msg = f"env contains {name!r}, which is not a variable name; use a name such as 'JAVA_HOME'"
            raise DefinitionError(msg)
        if _is_private_variable(name) and not env_secrets:
            msg = (
                f"env contains {name!r}, which looks like a secret; the model sees all output of commands. "
                "To allow it, pass env_secrets=True"
            )
            raise DefinitionError(msg)
    return tuple(names)


def read_git_identity(folder: str, root: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """
    Run ``git config``, and return the variables with the user's name and email for git. No other git settings are read.

    Variables of this process have precedence over the configuration.

    Args:
        folder: The working folder of git: the configuration of a repository there has precedence over the user's own.
        root: The components of the root's real path; no git below it is executed.
    """
    own = {name: value for name, value in os.environ.items() if name not in {"GIT_DIR", "GIT_WORK_TREE"}}
    program = find_program("git", own.get("PATH", DEFAULT_PATH), root)
    said = b""
    if program is not None:
        try:
            said = subprocess.run(  # noqa: S603  (reading the configuration runs nothing)
                [program, "config", "--includes", "-z", "--get-regexp", r"^user\.(name|email)$"],
                cwd=folder,
                env=own,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=IDENTITY_SECONDS,
                check=False,
            ).stdout
        except (OSError, subprocess.SubprocessError):
            said = b""
    entries = [entry.partition("\n") for entry in os.fsdecode(said).split("\0")]
    known = {key: value.strip() for key, _, value in entries}
    made = {
        f"GIT_{who}_{what}": own.get(f"GIT_{who}_{what}") or known.get(key, "")
        for who in ("AUTHOR", "COMMITTER")
        for key, what in IDENTITY.items()
    }
    return tuple([(name, value) for name, value in made.items() if value])


def replace_environment_secrets(text: str) -> str:
    """Return *text* with the secrets of our own environment replaced by the names of their variables, the longest first."""
    private = {v: n for n, v in os.environ.items() if len(v) >= SECRET_CHARS and _is_private_variable(n)}
    known = {**find_environment_secrets(os.environ), **private}
    for value in sorted(known, key=len, reverse=True):
        text = text.replace(value, f"[{known[value]}]")
    return text


@frozen
class PrivateFolders:
    """
    The private folders of one command: ``home``, which is empty, and ``tmp``.

    Attributes:
        folder: The folder that holds them; only its owner may enter.
        system: Its system; ``None`` for this machine.
    """

    folder: Path = attrs.field(factory=lambda: Path(tempfile.mkdtemp(prefix="stepengine-")))
    system: RemoteSystem | None = None

    @classmethod
    def create(cls, system: RemoteSystem | None) -> PrivateFolders:
        """Create the private folder on a remote system, or for ``None`` on this machine, still without its subfolders."""
        return cls() if system is None else cls(Path(system.create_private_folder()), system)

    @property
    def home(self) -> Path:
        """The home folder."""
        return self.folder / "home"

    @property
    def tmp(self) -> Path:
        """The folder for temporary files."""
        return self.folder / "tmp"

    def create_subfolders(self) -> None:
        """Create the home folder and the folder for temporary files in the private folder."""
        if self.system is not None:
            self.system.create_private_subfolders([str(self.home), str(self.tmp)])
            return
        self.home.mkdir(mode=0o700)
        self.tmp.mkdir(mode=0o700)

    async def remove_without_blocking(self) -> None:
        """Remove the folders with their content; on a remote system in a thread, so that the event loop is not blocked."""
        if self.system is None:
            self.remove()
        else:
            await asyncio.to_thread(self.remove)

    def remove(self) -> None:
        """Remove the folders with their content."""
        if self.system is not None:
            self.system.remove_private_folder(str(self.folder))
            return
        shutil.rmtree(self.folder, ignore_errors=True)


@frozen(kw_only=True)
class CommandEnvironment:
    """
    The rules for the environment variables of commands.

    Attributes:
        names: The visible variables of this process, or of the remote system.
        identity: Returns the variables with the name and email for git commits, each with its value.
        real_home: Whether they see the real home folder.
        root: The components of the root's real path; no program below it is found by name.
        system: The system of the commands; ``None`` for this machine.
    """

    names: tuple[str, ...]
    real_home: bool
    root: tuple[str, ...]
    system: RemoteSystem | None = None
    identity: Callable[[], tuple[tuple[str, str], ...]] = tuple

    def get_search_path(self) -> str:
        """Return the search path for commands: the absolute folders of ``PATH`` outside of the root, or a default if there are none."""
        given, _, _ = self._fetch_variables()
        path = given.get("PATH", DEFAULT_PATH)
        if self.system is None:
            return filter_search_path(path, [self.root])
        kept = self.system.list_paths_outside_root(_absolute_search_folders(path), self.root)
        return os.pathsep.join(kept) or DEFAULT_PATH

    def find_program(self, name: str, search_path: str) -> str | None:
        """
        Return the path of a program on the system of the commands; ``None`` if it is not found outside of the root.

        A name with a ``/`` is returned unchanged.
        """
        if self.system is None or "/" in name:
            return find_program(name, search_path, self.root)
        return self.system.find_program_outside(name, search_path.split(os.pathsep), self.root)

    def _fetch_variables(self) -> tuple[Mapping[str, str], str, str]:
        """Return the environment variables, the user's name and the home folder; of a remote system only variables for commands."""
        if self.system is not None:
            return self.system.fetch_variables(("PATH", "TZ", *self.names))
        return os.environ, get_user_name(), os.path.expanduser("~")  # noqa: PTH111  (never raises)

    def make_variables(self, private: PrivateFolders) -> dict[str, str]:
        """Return the environment variables of one command, with a new random marker."""
        given, user, home = self._fetch_variables()
        named = {name: given[name] for name in ("TZ", *self.names) if name in given}
        made = {**QUIET, **dict(self.identity()), **named, **git_config_variables(ALWAYS)}
        made |= {"PATH": self.get_search_path(), "USER": user, "LOGNAME": user, "TMPDIR": str(private.tmp)}
        made["HOME"] = home if self.real_home else str(private.home)
        made[MARKER] = secrets.token_hex(16)
        return made


def get_user_name() -> str:
    """Return the user's name; the user id if there is none."""
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def is_within_root(path: str, root: Sequence[str]) -> bool:
    """Return True if a path, as written or with links followed, is the root or below it; always False for the root ``/``."""
    if not root:  # the root is /: its approval includes every program
        return False
    for form in (os.path.normpath(path), os.path.realpath(path)):
        if tuple([p for p in form.split("/") if p][: len(root)]) == tuple(root):
            return True
    return False


def _absolute_search_folders(search_path: str) -> list[str]:
    return list(dict.fromkeys([folder for folder in search_path.split(os.pathsep) if folder.startswith("/")]))


def filter_search_path(search_path: str, roots: Collection[Sequence[str]]) -> str:
    """Return the absolute folders of a search path outside of all *roots*; a default path if there are none."""
    kept = [f for f in _absolute_search_folders(search_path) if not any(is_within_root(f, root) for root in roots)]
    return os.pathsep.join(kept) or DEFAULT_PATH


def find_program(name: str, search_path: str, root: Sequence[str]) -> str | None:
    """
    Return the absolute path of a program on the search path; ``None`` if it is not found outside of the root.

    Relative folders on the search path are ignored. A name with a ``/`` is a path and returned unchanged.
    """
    if "/" in name:
        return name
    for folder in search_path.split(os.pathsep):
        # The program starts in another working folder, where a relative path names another file.
        found = shutil.which(name, path=folder) if folder.startswith("/") else None
        if found is not None and not is_within_root(found, root):
            return found
    return None
