"""What a command sees: a clean environment, its private folders, and the programs on its search path (HP2, SH06, SH16)."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import attrs

from stepengine.errors import DefinitionError
from stepengine.redaction import is_secret_variable
from stepengine.tools.shell.git import ALWAYS, as_variables

__all__ = ("MARKER", "Environment", "Private", "check_names", "find_program", "without_secrets")

MARKER = "STEPENGINE_CALL"
"""The variable by which processes are found that left the command's process group (SH03)."""

SECRET_CHARS = 6
"""How short a value is too short to be a secret; replacing shorter ones would garble what is logged."""

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


def _is_private(name: str) -> bool:
    """Return whether commands do not see a variable by default: secrets, and what steers this package."""
    return is_secret_variable(name) or name.upper().startswith("STEPENGINE_")


def check_names(names: Sequence[str], *, env_secrets: bool) -> tuple[str, ...]:
    """
    Return the names of variables that commands may see.

    Raises:
        DefinitionError: for one string, for what is no name, and for the name of a secret without *env_secrets*.
    """
    if isinstance(names, str):
        msg = f"env={names!r} is one string; give a list of names, such as env=[{names!r}]"
        raise DefinitionError(msg)
    for name in names:
        if not name or "=" in name or "\0" in name:
            msg = f"env names the variable {name!r}; a name such as 'JAVA_HOME' would be fine"
            raise DefinitionError(msg)
        if _is_private(name) and not env_secrets:
            msg = (
                f"env names {name!r}, which looks like a secret; whatever a command prints is shown to the model. "
                "Pass env_secrets=True to mean it"
            )
            raise DefinitionError(msg)
    return tuple(names)


def without_secrets(text: str) -> str:
    """Return *text* with the values of our own variables that look like secrets replaced by their names (rule HP7)."""
    for name, value in os.environ.items():
        if len(value) >= SECRET_CHARS and value in text and _is_private(name):
            text = text.replace(value, f"[{name}]")
    return text


@attrs.frozen
class Private:
    """
    The private folders of one command: ``home``, which is empty, and ``tmp``.

    Attributes:
        folder: The folder that holds them; only its owner may enter.
    """

    folder: Path = attrs.field(factory=lambda: Path(tempfile.mkdtemp(prefix="stepengine-")))

    @property
    def home(self) -> Path:
        """The home folder."""
        return self.folder / "home"

    @property
    def tmp(self) -> Path:
        """The folder for temporary files."""
        return self.folder / "tmp"

    def make(self) -> None:
        """Make the folders."""
        self.home.mkdir(mode=0o700)
        self.tmp.mkdir(mode=0o700)

    def remove(self) -> None:
        """Remove the folders and all that is in them."""
        shutil.rmtree(self.folder, ignore_errors=True)


@attrs.frozen(kw_only=True)
class Environment:
    """
    The rules for what commands see.

    Attributes:
        names: Variables of this process that they may see.
        real_home: Whether they see the real home folder.
        root: The components of the root's real path; no program below it is found by name.
    """

    names: tuple[str, ...]
    real_home: bool
    root: tuple[str, ...]

    def search_path(self) -> str:
        """Return the search path: the absolute folders of ours that are outside of the root."""
        folders = os.environ.get("PATH", DEFAULT_PATH).split(os.pathsep)
        kept = [f for f in folders if f.startswith("/") and not below(f, self.root)]
        return os.pathsep.join(dict.fromkeys(kept)) or DEFAULT_PATH

    def variables(self, private: Private) -> dict[str, str]:
        """Return the variables of one command, with a marker of its own."""
        named = {name: os.environ[name] for name in ("TZ", *self.names) if name in os.environ}
        user = user_name()
        made = QUIET | named | as_variables(ALWAYS)
        made |= {"PATH": self.search_path(), "USER": user, "LOGNAME": user, "TMPDIR": str(private.tmp)}
        made["HOME"] = os.path.expanduser("~") if self.real_home else str(private.home)  # noqa: PTH111  (never raises)
        made[MARKER] = secrets.token_hex(16)
        return made


def user_name() -> str:
    """Return the user's name, or number when it has none."""
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def below(path: str, root: Sequence[str]) -> bool:
    """Return whether a path, as written or with links followed, is the root or below it."""
    if not root:  # the root is /: whoever accepts that means every program
        return False
    for form in (os.path.normpath(path), os.path.realpath(path)):
        if tuple([p for p in form.split("/") if p][: len(root)]) == tuple(root):
            return True
    return False


def find_program(name: str, search_path: str, root: Sequence[str]) -> str | None:
    """
    Return the absolute path of the program that *name* stands for on the search path; ``None`` when there is none.

    A program below the root is not found by its name. A name with a ``/`` is a path and returned as it is.
    """
    if "/" in name:
        return name
    for folder in search_path.split(os.pathsep):
        found = shutil.which(name, path=folder)
        if found is not None and not below(found, root):
            return found
    return None
