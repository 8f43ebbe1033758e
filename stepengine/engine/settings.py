"""
The settings of a user and of a project, and where each value came from.

An explicit argument wins over the environment, the environment over the project's file, the project's over the user's.
A project's file is foreign: a repository that was just cloned may give models short names and lower limits, but choose no
model, set no address that a key is sent to, no permissions and no code that runs. The command line reads them; an engine does not.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.alike import did_you_mean
from stepengine.data.checks import AMOUNT, COUNT, FLAG, FieldCheck
from stepengine.data.json import MAX_INT, JsonDict, freeze_object, thaw
from stepengine.data.limits import Limits
from stepengine.data.visible import cut_after
from stepengine.errors import DefinitionError, MissingKey
from stepengine.workspace.file_formats import read_regular_file

if TYPE_CHECKING:
    from stepengine.models import Models, Provider
    from stepengine.permissions import Policy

Source: TypeAlias = Literal["environment", "--config", "project", "user", "default"]
Trust: TypeAlias = Literal["yes", "lower", "no"]
ORDER: tuple[Source, ...] = ("default", "user", "project", "--config", "environment")
PREFIX = "STEPENGINE_"
PROJECT_FILES = ("stepengine.toml", "pyproject.toml")
FILE_BYTES = 256 * 1024
"""Settings have some kilobytes; a larger file is something else."""
LINE_DOTS = 200
"""A key of very many parts takes the parser the square of their number."""
NEAR_KEY_RATIO = 0.5
"""Dotted names share much, and one that is written without its table is still to be recognised."""
SHOWN_CHARS = 60
"""A wrong value is quoted up to about a line: enough to see the slip."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
KEYLIKE = re.compile(r"(?:key|token|secret|password)s?", re.IGNORECASE)
LOGS = ("debug", "info", "warning", "error", "off")


class SettingDefinition(NamedTuple):
    """
    One setting: its name, type, default and checks.

    Attributes:
        name: Its dotted name; ``<...>`` stands for a name that the user chooses.
        kind: The kind of value, in words.
        default: Its default; ``None`` for nothing.
        help: The effect of the setting.
        project: Whether a project's file may set it: ``yes``, ``lower`` (not above the user's own value), or ``no``.
        read: Turns a value of a file into the setting's, or raises ``ValueError``.
        parse: Turns the text of a variable into a value of a file.
    """

    name: str
    kind: str
    help: str
    read: Callable[[Any], Any]
    default: Any = None
    project: Trust = "no"
    parse: Callable[[str], Any] = str

    def matches(self, dotted_name: str) -> bool:
        """Return whether *dotted_name* fits this definition's name; ``<...>`` in it stands for any text, also with dots."""
        start, chosen, rest = self.name.partition("<")
        end = rest.partition(">")[2]
        if not chosen:
            return dotted_name == self.name
        return dotted_name.startswith(start) and dotted_name.endswith(end) and len(dotted_name) >= len(start) + len(end)


def _require_text(value: object) -> str:
    """Return a text that is not blank; raise ``ValueError`` for anything else."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value


def _require_bool(value: object) -> bool:
    """Return a bool; raise ``ValueError`` for anything else."""
    if not isinstance(value, bool):
        raise ValueError  # noqa: TRY004  (one kind of refusal)
    return value


def _parse_bool_or_keep(text: str) -> object:
    """Return the bool that a text such as ``yes`` or ``0`` means; any other text unchanged."""
    return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(
        text.strip().lower(), text
    )


def _parse_number_or_keep(text: str) -> object:
    """Return a text as an integer or float, or unchanged if it is no number."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _require_positive_integer(value: object) -> int:
    """Return an integer from 1 to ``MAX_INT``; raise ``ValueError`` for anything else."""
    if type(value) is not int or not 1 <= value <= MAX_INT:
        raise ValueError
    return value


def _require_positive_number(value: Any) -> float:
    """Return a finite number above 0; raise ``ValueError`` for anything else."""
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError
    return value  # type: ignore[no-any-return]


def _make_choice_check(*words: str) -> Callable[[Any], str]:
    """Return a function that returns one of *words*, and raises ``ValueError`` for any other value."""

    def require_choice(value: Any) -> str:
        if value not in words:
            raise ValueError
        return str(value)

    return require_choice


def _parse_key_variable(value: object) -> str:
    """Return the variable's name in ``{ env = "NAME" }``; raise ``ValueError`` for any other value."""
    if not isinstance(value, dict) or list(value) != ["env"] or not VARIABLE.fullmatch(str(value["env"])):
        raise ValueError
    return str(value["env"])


def _parse_paths(value: object) -> tuple[str, ...]:
    """Return a list of texts that are not empty as a tuple; raise ``ValueError`` for anything else."""
    if not isinstance(value, list) or not all(isinstance(p, str) and p for p in value):
        raise ValueError
    return tuple(value)


def _parse_policy(value: object) -> JsonDict:
    """Return a table of permissions, frozen; raise ``DefinitionError`` if it is not a valid policy."""
    if not isinstance(value, dict):
        raise ValueError  # noqa: TRY004  (one kind of refusal)
    from stepengine.permissions import Policy

    Policy.from_json(value, where="permissions")
    return freeze_object(value)


LIMIT_VALUES: Mapping[FieldCheck, dict[str, Any]] = {
    COUNT: {
        "kind": "a whole number from 1",
        "project": "lower",
        "read": _require_positive_integer,
        "parse": _parse_number_or_keep,
    },
    AMOUNT: {
        "kind": "a number above 0",
        "project": "lower",
        "read": _require_positive_number,
        "parse": _parse_number_or_keep,
    },
    FLAG: {"kind": "true or false", "read": _require_bool, "parse": _parse_bool_or_keep},
}
"""The members of a setting for each kind of limit."""


def _make_limit_definitions() -> Iterator[SettingDefinition]:
    """Yield the keys of the limits that are settings."""
    for field in attrs.fields(Limits):
        if field.metadata["setting"]:
            yield SettingDefinition(
                name=f"limits.{field.name}", help=field.metadata["setting"], **LIMIT_VALUES[field.metadata["check"]]
            )


KEYS: tuple[SettingDefinition, ...] = (
    SettingDefinition(name="model", kind="text", help="The default model of runs, such as anthropic/claude-sonnet-4-5.", read=_require_text),
    SettingDefinition(name="models.<agent>", kind="text", help="The model of one agent.", read=_require_text),
    SettingDefinition(name="aliases.<name>", kind="text", help="A short name for a model.", project="yes", read=_require_text),
    *_make_limit_definitions(),
    SettingDefinition(name="display.color", kind="auto, always or never", default="auto", help="Colours on the terminal.", project="yes",
        read=_make_choice_check("auto", "always", "never")),
    SettingDefinition(name="display.plain", kind="true or false", default=False, help="Print plain lines and redraw nothing.",
        project="yes", read=_require_bool, parse=_parse_bool_or_keep),
    SettingDefinition(name="display.thinking", kind="fold, show or hide", default="fold", help="How the thinking of models is shown.",
        project="yes", read=_make_choice_check("fold", "show", "hide")),
    SettingDefinition(name="display.log", kind=f"one of {', '.join(LOGS)}", default="warning", help="The lowest level of log lines shown.",
        project="yes", read=_make_choice_check(*LOGS)),
    SettingDefinition(name="journal.record", kind="true or false", default=True, help="Record every run into the state folder.",
        project="yes", read=_require_bool, parse=_parse_bool_or_keep),
    SettingDefinition(name="journal.keep_runs", kind="a whole number from 1", default=500, help="How many ended runs to keep.",
        read=_require_positive_integer, parse=_parse_number_or_keep),
    SettingDefinition(name="journal.keep_bytes", kind="a whole number from 1", default=1024**3, help="How many bytes of ended runs to keep.",
        read=_require_positive_integer, parse=_parse_number_or_keep),
    SettingDefinition(name="base_urls.<prefix>", kind="text", help="The address of a provider's server.", read=_require_text),
    SettingDefinition(name="providers.<prefix>.key", kind='{ env = "NAME" }', help="The environment variable with a provider's key.", read=_parse_key_variable),
    SettingDefinition(name="agents", kind="a list of folders", help="Folders to search for agents, after ./agents.",
        read=_parse_paths, parse=lambda text: text.split(os.pathsep)),
    SettingDefinition(name="sandboxed", kind="a list of files, folders and packages",
        help="Agent files, folders of agent files and installed packages whose code runs only in the sandbox.",
        read=_parse_paths, parse=lambda text: text.split(os.pathsep)),
    SettingDefinition(name="permissions", kind="a table", help="The permission policy: its mode and rules, as `Policy.save` writes them.", read=_parse_policy),
)  # fmt: skip
"""Everything that can be set."""
FOREIGN = ("permissions", "mcp", "agents", "sandboxed", "hooks", "tools", "web", "memory", "base_urls", "providers")
"""What a project's file is refused by name, whether we know the key or not."""


class SettingOrigin(NamedTuple):
    """
    The source of a setting's value.

    Attributes:
        source: The kind of place.
        place: The file with its line, or the variable; ``""`` for a default.
    """

    source: Source
    place: str = ""

    def __str__(self) -> str:
        return self.place or self.source


class _GivenValue(NamedTuple):
    """The raw value of a setting in a file or variable."""

    name: str
    value: Any
    origin: SettingOrigin


@frozen(kw_only=True)
class Settings:
    """
    All effective values and their sources. Create one with ``Settings.load``.

    Attributes:
        values: Values by dotted name; a key that is not set is not in it.
        origins: Where they came from.
        notes: Sentences about what a project's file asked for and may not set.
    """

    values: Mapping[str, Any] = attrs.field(factory=dict)
    origins: Mapping[str, SettingOrigin] = attrs.field(factory=dict)
    notes: tuple[str, ...] = ()

    def get(self, name: str) -> Any:
        """Return the value of a setting, else its default; ``None`` without one. Raise for an unknown name."""
        return self.values.get(name, get_setting_definition(name).default)

    def origin(self, name: str) -> SettingOrigin:
        """Return the source of the value of a setting."""
        return self.origins.get(name, SettingOrigin("default"))

    def table(self, name: str) -> dict[str, Any]:
        """Return the members of a table whose names the user chose, such as ``aliases``."""
        start = f"{name}."
        return {key.removeprefix(start): value for key, value in self.values.items() if key.startswith(start)}

    @property
    def names(self) -> list[str]:
        """The names of all settings, with those that the user chose."""
        found: list[str] = []
        for key in KEYS:
            found += sorted(n for n in self.values if key.matches(n)) if "<" in key.name else [key.name]
        return found

    @property
    def limits(self) -> Limits:
        """The limits that are set."""
        return Limits(**self.table("limits"))

    @property
    def policy(self) -> Policy | None:
        """The permissions that are set; ``None`` for none."""
        table = self.get("permissions")
        if table is None:
            return None
        from stepengine.permissions import Policy

        return Policy.from_json(thaw(table), where=str(self.origin("permissions")))

    def make_models(self) -> Models:
        """Return the known providers with the addresses, key variables and aliases that are set."""
        from stepengine.models import Models

        models = Models.standard(aliases=self.table("aliases"))
        addresses = self.table("base_urls")
        variables = {name.removesuffix(".key"): variable for name, variable in self.table("providers").items()}
        for prefix in {**addresses, **variables}:
            models.register(prefix, partial(_make_provider, prefix, addresses.get(prefix), variables.get(prefix)))
        return models

    @property
    def agent_folders(self) -> tuple[Path, ...]:
        """The folders with agents. A relative one in a settings file is relative to the folder of that file."""
        # One of the environment stays relative: it leads into whatever folder somebody stands in, and is trusted like that.
        base = self._base_folder("agents")
        return tuple([base / os.path.expanduser(folder) for folder in self.get("agents") or ()])  # noqa: PTH111  (never raises)

    @property
    def sandboxed(self) -> frozenset[str]:
        """Names of packages, and real paths of files and folders, as ``stepengine.engine.trust`` compares them."""
        base, given = self._base_folder("sandboxed"), self.get("sandboxed") or ()
        return frozenset([*given, *[os.path.realpath(base / os.path.expanduser(name)) for name in given]])  # noqa: PTH111  (never raises)

    def _base_folder(self, key: str) -> Path:
        """Return the folder to which relative paths of a key are relative."""
        origin = self.origin(key)
        is_file = origin.source in ("user", "--config")
        return Path(origin.place.rpartition(":")[0]).parent.absolute() if is_file else Path()

    @classmethod
    def load(cls, cwd: Path, environ: Mapping[str, str] = os.environ, *, config: Path | None = None) -> Settings:
        """
        Return the settings from the files of user and project, *config* and the environment; later sources have precedence.

        Args:
            cwd: The working folder; the project's file is looked for there and above, up to the top of its repository.
            environ: Variables.
            config: A file that the user named, which may set everything.

        Raises:
            DefinitionError: for a file that cannot be read, an unknown key and a value of the wrong kind, with file and line.
        """
        given: list[_GivenValue] = []
        user = _find_user_settings_file(environ)
        if user is not None and user.is_file():
            given += _load_settings_file(user, "user")
        project = _find_project_file(cwd)
        if project is not None and not (config is not None and config.exists() and project.samefile(config)):
            given += _load_settings_file(project, "project")
        if config is not None:
            given += _load_settings_file(config, "--config")
        given += _load_environment_settings(environ)
        return _merge_values(given)


def _merge_values(setting_values: Sequence[_GivenValue]) -> Settings:
    """Return the settings from all values by precedence; values that a project may not set become notes."""
    values: dict[str, Any] = {}
    origins: dict[str, SettingOrigin] = {}
    notes: list[str] = []
    for one in sorted(setting_values, key=lambda g: ORDER.index(g.origin.source)):
        if one.origin.source == "project" and one.name.split(".")[0] in FOREIGN:
            file = one.origin.place.rpartition(":")[0]
            notes.append(
                f"{one.origin}: {one.name} may not be set by a project; pass --config {shlex.quote(file)} if you trust it"
            )
            continue
        key = get_setting_definition(one.name, one.origin)
        value = _parse_setting_value(key, one)
        if one.origin.source == "project" and key.project == "no":
            notes.append(
                f"{one.origin}: {one.name} may not be set by a project; set it in your own file or environment"
            )
        elif one.origin.source == "project" and key.project == "lower" and values.get(one.name, value) < value:
            notes.append(
                f"{one.origin}: {one.name} = {value} is above your own limit {values[one.name]}, which applies"
            )
        else:
            values[one.name], origins[one.name] = value, one.origin
    return Settings(values=values, origins=origins, notes=tuple(notes))


def get_setting_definition(name: str, origin: SettingOrigin | None = None) -> SettingDefinition:
    """
    Return the definition of the setting with this dotted name; the message of the error names *origin*.

    Raises:
        DefinitionError: when there is no such setting.
    """
    for key in KEYS:
        if key.matches(name):
            return key
    hint = did_you_mean(
        name,
        [key.name for key in KEYS],
        min_similarity=NEAR_KEY_RATIO,
        otherwise="; `stepengine config show` lists all settings",
    )
    msg = f"{f'{origin}: ' if origin else ''}there is no setting {name!r}{hint}"
    raise DefinitionError(msg)


def _parse_setting_value(key: SettingDefinition, given_value: _GivenValue) -> object:
    """Return a setting's value; raise ``DefinitionError`` with its origin if it is invalid, without secrets."""
    try:
        return key.read(given_value.value)
    except DefinitionError as error:
        msg = f"{given_value.origin}: {error.message}"
        raise DefinitionError(msg) from None
    except ValueError:
        secret = key.name.endswith(".key") or any(KEYLIKE.fullmatch(part) for part in given_value.name.split("."))
        shown = "a hidden text" if secret else _shorten_repr(given_value.value)
        why = " Put keys into environment variables, never into a file." if secret else ""
        msg = f"{given_value.origin}: {given_value.name} is {shown}; expected {key.kind}.{why}"
        raise DefinitionError(msg) from None


def _shorten_repr(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # a number of more digits than Python writes
        return "a very long number"
    return cut_after(text, SHOWN_CHARS)


# --- providers ------------------------------------------------------------------------------------------------------

ENDPOINTS: dict[str, Literal["runtime", "mantle", "converse"]] = {
    "bedrock": "runtime",
    "bedrock_mantle": "mantle",
    "bedrock_converse": "converse",
}


def _make_provider(prefix: str, address: str | None, variable: str | None) -> Provider:
    """Return the provider of a prefix with its base URL and key variable. Unknown prefixes speak Chat Completions."""
    from stepengine.models import (
        AnthropicProvider,
        FoundryProvider,
        GoogleInteractionsProvider,
        GoogleProvider,
        OpenAIChatProvider,
        OpenAIProvider,
    )
    from stepengine.models.presets import PRESETS

    if prefix in (*ENDPOINTS, "vertex", "anthropic_aws", "anthropic_google"):
        return _make_cloud_provider(prefix, address, variable)
    given: dict[str, Any] = {"base_url": address, "key_env": variable}
    if prefix == "anthropic":
        return AnthropicProvider(**given)
    if prefix in ("google", "google_interactions"):
        return (GoogleProvider if prefix == "google" else GoogleInteractionsProvider)(**given)
    if prefix == "foundry":
        return FoundryProvider(**given)
    if prefix in PRESETS and PRESETS[prefix].adapter == "openai":
        return OpenAIProvider(name=prefix, **given)
    return OpenAIChatProvider(prefix, **given)


def _make_cloud_provider(prefix: str, base_url: str | None, key_variable: str | None) -> Provider:
    """Return a cloud provider with a base URL and the credentials from an environment variable; raise ``MissingKey`` if it is unset."""
    from stepengine.models import AnthropicAwsProvider, AnthropicGoogleProvider, BedrockProvider, VertexProvider

    key = os.environ.get(key_variable, "").strip() or None if key_variable is not None else None
    if key_variable is not None and key is None:
        msg = f"there is no key for {prefix!r}: set {key_variable}, or remove the model from the settings"
        raise MissingKey(msg, kind="missing_key")
    if prefix == "vertex":
        return VertexProvider(base_url=base_url, credentials=key)
    if prefix == "anthropic_google":
        return AnthropicGoogleProvider(base_url=base_url, credentials=key)
    if prefix == "anthropic_aws":
        return AnthropicAwsProvider(key, base_url)
    return BedrockProvider(key, base_url, name=prefix, endpoint=ENDPOINTS[prefix])


# --- files and variables --------------------------------------------------------------------------------------------


def _find_user_settings_file(environ: Mapping[str, str]) -> Path | None:
    """Return the path of the user's settings, which may not exist; ``None`` without a home folder."""
    folder = environ.get("XDG_CONFIG_HOME", "")
    if folder.startswith("/"):
        return Path(folder, "stepengine", "config.toml")
    home = environ.get("HOME", "")
    return Path(home, ".config", "stepengine", "config.toml") if home.startswith("/") else None


def _find_project_file(cwd: Path) -> Path | None:
    """Return the project's settings file, in the working folder or above, within the repository; raise if a folder has two."""
    folder = cwd.absolute()
    for place in (folder, *folder.parents):
        found = [place / name for name in PROJECT_FILES if _has_stepengine_settings(place / name)]
        if len(found) > 1:
            msg = f"{place} has both a stepengine.toml and a [tool.stepengine] in pyproject.toml; keep one of them"
            raise DefinitionError(msg)
        if found:
            return found[0]
        if (place / ".git").exists():
            return None
    return None


def _has_stepengine_settings(path: Path) -> bool:
    """Return whether a file exists and is a settings file; a ``pyproject.toml`` needs a ``tool.stepengine`` table."""
    if not path.is_file():
        return False
    return path.name != "pyproject.toml" or "[tool.stepengine" in _read_settings_file(path, strict=False)


def _read_settings_file(path: Path, *, strict: bool = True) -> str:
    """Return a file's text; raise ``DefinitionError`` if it cannot be read, or, with *strict*, is too long or not UTF-8."""
    try:
        content = read_regular_file(path, FILE_BYTES)
        if len(content) > FILE_BYTES and strict:
            msg = f"{path} has more than {FILE_BYTES:,} bytes"
            raise DefinitionError(msg)
        return content.decode("utf-8", "strict" if strict else "replace")
    except OSError as error:
        msg = f"{path} cannot be read: {error.strerror}"
        raise DefinitionError(msg) from None
    except UnicodeDecodeError:
        msg = f"{path} is not UTF-8"
        raise DefinitionError(msg) from None


def _load_settings_file(path: Path, source: Source) -> list[_GivenValue]:
    """Return the settings in a TOML file, with the line of each."""
    text = _read_settings_file(path)
    if dotted := [number for number, line in enumerate(text.split("\n"), start=1) if line.count(".") > LINE_DOTS]:
        msg = f"{path}:{dotted[0]} has more than {LINE_DOTS} dots in one line; break the line"
        raise DefinitionError(msg)
    import tomllib

    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also for numbers that are too long to be read
        msg = f"{path} is not valid TOML: {error}"
        raise DefinitionError(msg) from None
    if path.name == "pyproject.toml":
        for name in ("tool", "stepengine"):
            data = data.get(name, {})
            if not isinstance(data, dict):
                msg = f"{path}: {name} is not a table; write [tool.stepengine] with one setting per line"
                raise DefinitionError(msg)
    lines = _make_line_finder(text)
    return [
        _GivenValue(name, value, SettingOrigin(source, f"{path}:{lines(name)}"))
        for name, value in _flatten_tables(data)
    ]


def _flatten_tables(data: Mapping[str, object], start: str = "") -> Iterator[tuple[str, object]]:
    """Yield each setting of a file by its dotted name; the value of a key may be a table."""
    for member, value in data.items():
        name = f"{start}{member}"
        if isinstance(value, dict) and not any(key.matches(name) for key in KEYS) and value:
            yield from _flatten_tables(value, f"{name}.")
        else:
            yield name, value


def _make_line_finder(text: str) -> Callable[[str], int]:
    """Return a function from a dotted name to its line; for an unknown name, the line of its table or the first."""
    found: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        bare = line.strip()
        if bare.startswith("["):
            table = _strip_quotes_and_spaces(bare.strip("[]")).removeprefix("tool.stepengine").removeprefix(".")
            found.setdefault(table, number)
        elif "=" in bare and not bare.startswith("#"):
            name = _strip_quotes_and_spaces(bare.partition("=")[0])
            found.setdefault(f"{table}.{name}" if table else name, number)

    def find_line(name: str) -> int:
        while name and name not in found:
            name = name.rpartition(".")[0]
        return found.get(name, 1)

    return find_line


def _strip_quotes_and_spaces(text: str) -> str:
    """Return a key of a TOML file without quotes and spaces."""
    return text.replace('"', "").replace("'", "").replace(" ", "")


def _load_environment_settings(environ: Mapping[str, str]) -> list[_GivenValue]:
    """Return the settings in variables: ``STEPENGINE_LIMITS__MAX_STEPS`` is ``limits.max_steps``."""
    found: list[_GivenValue] = []
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or not environ[variable].strip():
            continue
        name = variable.removeprefix(PREFIX).lower().replace("__", ".")
        if name.startswith("models."):
            name = name.replace("_", "-")
        known = next((key for key in KEYS if key.matches(name)), None)
        if known is None and "." not in name:
            continue
        value = environ[variable] if known is None else known.parse(environ[variable])
        found.append(_GivenValue(name, value, SettingOrigin("environment", variable)))
    return found
