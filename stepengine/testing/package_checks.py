"""
``check_package``: a package of agents as its users will find it.

A wheel is read without an import. Code runs only in processes of its own, which have an empty home and none of the caller's
variables. The first of them runs ``package_probe``.
"""

from __future__ import annotations

import json
import lzma
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs

from stepengine.engine.packages import FILE, FORMAT, GROUP, Package, read_declaration
from stepengine.engine.trust import find_unapproved_access
from stepengine.errors import DefinitionError
from stepengine.journal.secret_scan import scan

SECONDS = 300
WHEEL_BYTES = 256 * 1024 * 1024
WHEEL_FILES, WHEEL_DEPTH, NAME_BYTES = 20_000, 64, 2_048
"""More than any wheel needs, and less than what fills a disk or a path."""
SHOWN_CHARS = 200
ZIP_START = b"PK\x03\x04"
ENCRYPTED = 0x1
"""The bit of a zip file by which a member is encrypted."""
TEXT_BYTES = 4 * 1024 * 1024
HOMES = re.compile(rb"(?:/home/|/Users/|[A-Za-z]:\\{1,2}Users\\{1,2})[A-Za-z0-9._-]{1,64}")
HOSTS = re.compile(r"https?://([A-Za-z0-9.-]{1,253})")
FOLDERS = {"read": "reads", "write": "writes", "network": "hosts"}
"""The scopes that a package with a tool of this category must declare."""


@attrs.define
class PackageCheck:
    """
    The findings of a check.

    Attributes:
        good: The checks that passed.
        problems: The problems that users of the package would have.
        notes: What may be meant so.
    """

    good: list[str] = attrs.field(factory=list)
    problems: list[str] = attrs.field(factory=list)
    notes: list[str] = attrs.field(factory=list)


def check_package(path: Path = Path(), *, write: bool = False, imports: bool = False) -> PackageCheck:
    """
    Check a package of agents as its users will find it: its metadata, its declaration, its files and its recorded runs.

    A project is built, and its code runs with the rights of the caller. A wheel is only read, unless its package was approved.

    Args:
        path: The folder of a project, or a wheel.
        write: Write the tools and agents that the code of a project has into ``stepengine-agents.json`` first.
        imports: Run the code of a wheel, too.

    Raises:
        DefinitionError: when it is neither a project with agents nor a wheel, or it cannot be built.
    """
    if write and path.is_file():
        msg = f"--write changes {FILE!r} in a project, but {str(path)!r} is a wheel; pass the project folder"
        raise DefinitionError(msg)
    found = PackageCheck()
    with tempfile.TemporaryDirectory(prefix="stepengine-package-") as name:
        scratch = Path(name)
        site = _unpack_or_build_wheel(path, scratch)
        if path.is_file() and not imports and not _is_package_approved(site):
            _check_without_import(site, path, found)
        else:
            _check_by_import(site, path, scratch, found, write=write)
    return found


def _check_by_import(site: Path, path: Path, scratch: Path, result: PackageCheck, *, write: bool) -> None:
    """Import the package in a process of its own, write its declaration if *write*, and add all findings to *result*."""
    told = _probe_package(site, path, scratch)
    if write:
        result.good.append(f"written: {_write_declaration(path, told)}")
        told = _probe_package(_unpack_or_build_wheel(path, scratch), path, scratch)
    result.problems += told["problems"]
    if told["agents"]:
        _check_loaded_package(scratch, path, told, result)


# --- a wheel, and a process that has nothing else -----------------------------------------------------------------------


def _unpack_or_build_wheel(path: Path, scratch: Path) -> Path:
    """Return a new folder with the content of the wheel at *path*, or of a project's built wheel; raise ``DefinitionError`` if that fails."""
    site = Path(tempfile.mkdtemp(prefix="site-", dir=scratch))
    wheel = path if path.is_file() else _build_wheel(path, scratch)
    try:
        with wheel.open("rb") as file:
            starts_as_zip = file.read(len(ZIP_START)) == ZIP_START
        if not starts_as_zip:
            # Programs differ in what they make of a zip file behind something else, and so in what was checked.
            msg = f"{wheel.name} is not a wheel: it does not start like a zip file; rebuild it"
            raise DefinitionError(msg)
        with zipfile.ZipFile(wheel) as opened:
            members = opened.infolist()
            if len(members) > WHEEL_FILES or sum(info.file_size for info in members) > WHEEL_BYTES:
                msg = f"{wheel.name} contains more than {WHEEL_FILES:,} files or {WHEEL_BYTES:,} bytes"
                raise DefinitionError(msg)
            seen = set[str]()
            for info in members:
                # Programs that install a wheel differ in which one of two they take, and so in what was checked.
                is_twice = info.filename.casefold() in seen
                seen.add(info.filename.casefold())
                if why := "occurs twice" if is_twice else _find_member_problem(info):
                    msg = f"{wheel.name} cannot be installed safely: its member {info.filename[:SHOWN_CHARS]!r} {why}"
                    raise DefinitionError(msg)
            opened.extractall(site)
    # What zip files may hold is open-ended, and each kind of damage has an error of its own.
    except (
        zipfile.BadZipFile,
        OSError,
        RuntimeError,
        ValueError,
        EOFError,
        RecursionError,
        zlib.error,
        lzma.LZMAError,
    ) as error:
        msg = f"{str(path)!r} is not a wheel: {error}; pass a project folder or a *.whl file"
        raise DefinitionError(msg) from None
    if len([*site.glob("*.dist-info")]) != 1:
        msg = f"{wheel.name} contains no package: a wheel needs exactly one folder *.dist-info"
        raise DefinitionError(msg)
    return site


def _find_member_problem(info: zipfile.ZipInfo) -> str:
    """Return the reason why a member of a wheel must not be unpacked; ``""`` if it may be."""
    names = info.orig_filename.removesuffix("/").split("/")
    if (
        any(name in ("", ".", "..") for name in names)
        or not info.orig_filename.isprintable()
        or "\\" in info.orig_filename
        or ":" in info.orig_filename
    ):
        return "has a name that points outside the wheel"
    if len(names) > WHEEL_DEPTH or len(info.orig_filename.encode()) > NAME_BYTES:
        return f"has a name of more than {WHEEL_DEPTH} folders or {NAME_BYTES:,} bytes"
    if info.flag_bits & ENCRYPTED:
        return "is encrypted"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "uses a compression that wheels do not allow"
    return ""


def _build_wheel(project: Path, scratch: Path) -> Path:
    """Build *project* with pip, and return the wheel; raise ``DefinitionError`` if that fails."""
    try:
        told = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
    except OSError:
        msg = f"there is no pyproject.toml in {str(project)!r}; pass a project folder or a wheel; `stepengine init NAME --package` creates one"
        raise DefinitionError(msg) from None
    except (ValueError, RecursionError) as error:
        msg = f"{project / 'pyproject.toml'} cannot be read: {error}"
        raise DefinitionError(msg) from None
    if find_spec("pip") is None:
        msg = "building needs pip, which is not installed here; install it, or pass a wheel instead of the folder"
        raise DefinitionError(msg)
    system = told.get("build-system", {})
    if not isinstance(system, dict):
        msg = f"{project / 'pyproject.toml'} has {system!r} as build-system; use a table `[build-system]`"
        raise DefinitionError(msg)
    backend = str(system.get("build-backend", "setuptools.build_meta"))
    alone = ["--no-build-isolation"] if find_spec(backend.partition(".")[0]) is not None else []
    target = Path(tempfile.mkdtemp(prefix="wheel-", dir=scratch))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        *alone,
        "-w",
        str(target),
        str(project.resolve()),
    ]
    try:
        done = subprocess.run(  # noqa: S603
            command, check=False, capture_output=True, encoding="utf-8", errors="replace", cwd=scratch, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        msg = f"building {str(project)!r} took more than {SECONDS} seconds"
        raise DefinitionError(msg) from None
    wheels = [*target.glob("*.whl")]
    if done.returncode or len(wheels) != 1:
        msg = f"{str(project)!r} cannot be built: {done.stderr.strip()[-2000:] or 'the build did not produce exactly one wheel'}"
        raise DefinitionError(msg)
    return wheels[0]


def _run_python_isolated(arguments: Sequence[str], site: Path, scratch: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with the content of *site* installed, in an empty home, without the variables of this process."""
    home = scratch / "home"
    (home / "empty").mkdir(parents=True, exist_ok=True)
    own = str(Path(__file__).resolve().parents[2])
    variables = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(home),
        "PYTHONPATH": f"{site}:{own}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    variables |= {"PYTHONSAFEPATH": "1", "STEPENGINE_STATE_DIR": str(home / "state")}
    command = [sys.executable, *arguments]
    return subprocess.run(  # noqa: S603
        command, check=False, capture_output=True, encoding="utf-8", errors="replace", cwd=home / "empty", env=variables,
        timeout=SECONDS,
    )  # fmt: skip


def _probe_package(site: Path, path: Path, scratch: Path) -> dict[str, Any]:
    """Return the agents and the problems that an isolated process finds when it imports the package in *site*."""
    project = "" if path.is_file() else str(path.resolve())
    try:
        out = scratch / f"{site.name}.json"
        done = _run_python_isolated(
            ["-m", "stepengine.testing.package_probe", str(site), project, str(out)], site, scratch
        )
    except subprocess.TimeoutExpired:
        return {"problems": [f"importing it took more than {SECONDS} seconds"], "agents": {}, "site": site}
    try:
        told: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        last = (done.stderr.strip() or "no error output").rpartition("\n")[2][:500]
        return {
            "problems": [f"importing it ended the process with exit code {done.returncode}: {last}"],
            "agents": {},
            "site": site,
        }
    return {**told, "site": site}


# --- a wheel that is only read ------------------------------------------------------------------------------------------


def _read_agent_package(site: Path) -> Package:
    """
    Return the package of an unpacked wheel from its metadata, without an import; raise ``DefinitionError`` if it names no agents.

    Raises:
        DefinitionError: when its metadata names no agents, or cannot be read.
    """
    try:
        (dist,) = metadata.distributions(path=[str(site)])
        name, version = str(dist.metadata["Name"]), str(dist.metadata["Version"])
        entries = [*dist.entry_points.select(group=GROUP)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        msg = f"its metadata cannot be read: {error}"
        raise DefinitionError(msg) from None
    if len(entries) != 1:
        msg = f"it has {len(entries)} entries in the group {GROUP!r}; it needs exactly one, named like its publisher"
        raise DefinitionError(msg)
    module = entries[0].module.split(".")
    if not all(part.isidentifier() for part in module):
        msg = f"its entry in {GROUP!r} names {entries[0].module[:SHOWN_CHARS]!r}, which is not a module"
        raise DefinitionError(msg)
    folder = _find_declaration_folder(site, module)
    if folder is None:
        msg = f"there is no {FILE} in {entries[0].module!r}"
        raise DefinitionError(msg)
    declared = read_declaration(folder / FILE)
    return Package(
        name=name, version=version, publisher=entries[0].name, value=entries[0].value, folder=folder, **declared
    )


def _find_declaration_folder(site: Path, module: Sequence[str]) -> Path | None:
    """Return the folder of a module, or of its package, that has the declaration; ``None`` if neither has."""
    places = (site.joinpath(*module), site.joinpath(*module[:-1]))
    return next((place for place in places if (place / FILE).is_file()), None)


def _is_package_approved(site: Path) -> bool:
    """Return whether a person approved the requests of the package when it was installed."""
    try:
        return find_unapproved_access(_read_agent_package(site).access_request) == ()
    except DefinitionError:
        return False


def _check_without_import(site: Path, path: Path, result: PackageCheck) -> None:
    """Check a wheel by its files alone, and add the findings to *result*."""
    try:
        package = _read_agent_package(site)
    except DefinitionError as error:
        result.problems.append(error.message)
    else:
        said = {name: getattr(package, name) for name in ("reads", "writes", "hosts")}
        agents = {agent_id: {"tools": agent.tools} for agent_id, agent in package.agents.items()}
        result.problems += _find_missing_scopes(said, agents)
        result.notes += _find_undeclared_hosts(package.folder, package.hosts)
    result.problems += _find_leaked_secrets_and_paths(site, path)
    result.notes.append("its code was not run, so its behaviour is unknown; --import runs it with your rights")
    if not result.problems:
        result.good.append("its metadata and its declaration can be read; no keys, no machine-specific paths")


# --- what is looked at ------------------------------------------------------------------------------------------------


def _write_declaration(project: Path, probed: Mapping[str, Any]) -> str:
    """Write the declaration of the package from its code, and return the file. Declared folders and hosts stay."""
    if not probed["agents"]:
        msg = f"{FILE} was not written: {'; '.join(probed['problems'])}"
        raise DefinitionError(msg)
    inside = Path(*str(probed["module"]).split("."))
    places = [top / folder for folder in (inside, inside.parent) for top in (project / "src", project)]
    folder = next((place for place in places if place.is_dir() and (probed["site"] / inside).parent.is_dir()), project)
    file = folder / FILE
    before: dict[str, Any] = {}
    if file.is_file():
        try:
            before = {**json.loads(file.read_bytes())}
        except (ValueError, TypeError, RecursionError) as error:
            # Folders and hosts are known to its author alone: written over they would be lost.
            msg = f"{file.relative_to(project)} cannot be read and is unchanged: {error}; repair or remove it first"
            raise DefinitionError(msg) from None
    kept = {name: before.get(name, []) for name in ("reads", "writes", "hosts")}
    file.write_text(
        json.dumps({"format": FORMAT, "agents": probed["agents"], **kept}, indent=2) + "\n", encoding="utf-8"
    )
    return str(file.relative_to(project))


def _check_loaded_package(scratch: Path, path: Path, probed: Mapping[str, Any], result: PackageCheck) -> None:
    """Check the declaration, keys, paths, hosts and recorded runs of a package whose agents can be loaded."""
    site: Path = probed["site"]
    folder = _find_declaration_folder(site, probed["module"].split("."))
    if folder is None:
        result.problems.append(f"there is no {FILE} in {probed['module']!r}; --write creates it")
        return
    try:
        said = read_declaration(folder / FILE)
    except DefinitionError as error:
        result.problems.append(error.message)
        return
    package = Package(name="", version="", publisher=probed["publisher"], value=probed["module"], folder=folder, **said)
    result.problems += _find_declaration_differences(package.agents, probed["agents"])
    result.problems += _find_missing_scopes(said, probed["agents"])
    result.problems += _find_leaked_secrets_and_paths(site, path)
    result.notes += _find_undeclared_hosts(folder, said["hosts"])
    if not result.problems:
        result.good.append(
            f"loads without the folder of its author: {', '.join(f'{package.publisher}/{one}' for one in package.agents)}"
        )
        result.good.append(f"{FILE} matches the code; no keys, no machine-specific paths")
        _replay_recorded_runs(package, scratch, site, result)


def _find_declaration_differences(
    declared_agents: Mapping[str, Any], agents_in_code: Mapping[str, Any]
) -> Iterator[str]:
    for agent_id in sorted({*declared_agents, *agents_in_code}):
        if agent_id not in agents_in_code or agent_id not in declared_agents:
            where = "declared but not in the code" if agent_id in declared_agents else "not declared"
            yield f"the agent {agent_id!r} is {where}; --write corrects it"
            continue
        tools, declared = agents_in_code[agent_id]["tools"], declared_agents[agent_id].tools
        for name in sorted({*tools, *declared}):
            if tools.get(name) != declared.get(name):
                now = f"of the category {tools[name]!r}" if name in tools else "missing in the code"
                yield f"the tool {name!r} of {agent_id!r} is {now}, but declared as {declared.get(name, 'nothing')!r}; --write corrects it"
        if {*agents_in_code[agent_id]["spawns"]} != {*declared_agents[agent_id].spawns}:
            yield f"{agent_id!r} may spawn {agents_in_code[agent_id]['spawns']}, but declared are {[*declared_agents[agent_id].spawns]}; --write corrects it"


def _find_missing_scopes(declaration: Mapping[str, Any], agents: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for each category of tools without declared folders or hosts."""
    kinds = {(kind, name) for agent in agents.values() for name, kind in agent["tools"].items()}
    for kind, member in FOLDERS.items():
        having = sorted([name for of, name in kinds if of == kind])
        if having and not declaration[member]:
            example = '["api.example.com"]' if member == "hosts" else '["."] for its working folder'
            yield (
                f"{', '.join(having)} {'is' if len(having) == 1 else 'are'} of the category {kind!r}, "
                f"and {member!r} is empty; declare them, such as {example}"
            )


def _find_leaked_secrets_and_paths(site: Path, path: Path) -> Iterator[str]:
    """Yield keys, and paths of the machine that built the package."""
    for secret in scan([site]):
        yield str(attrs.evolve(secret, path=str(Path(secret.path).relative_to(site))))
    found = [HOMES.pattern]
    # The folder of a wheel, such as /tmp, says nothing about the machine that built it.
    if path.is_dir() and path.resolve().name:
        found.append(rb"(?<![\w.-])" + re.escape(str(path.resolve()).encode()) + rb"(?![\w-]|\.\w)")
    machine_path = re.compile(b"|".join(found))
    for file in sorted(site.rglob("*")):
        content = file.read_bytes() if file.is_file() and file.stat().st_size <= TEXT_BYTES else b""
        for number, line in enumerate(content.split(b"\n") if b"\0" not in content else (), start=1):
            leak = machine_path.search(line)
            if leak is not None:
                yield f"{file.relative_to(site)}:{number} contains a machine-specific path: {leak[0].decode('utf-8', 'replace')}"


def _find_undeclared_hosts(folder: Path, hosts: Sequence[str]) -> Iterator[str]:
    """Yield the hosts that the code names but the declaration does not."""
    for file in sorted(folder.rglob("*.py")):
        text = file.read_bytes()[:TEXT_BYTES].decode("utf-8", "replace")
        for host in dict.fromkeys([found.rstrip(".") for found in HOSTS.findall(text)]):
            if host not in hosts:
                yield f"{file.relative_to(folder)} names the host {host}, which is not among 'hosts'"


def _replay_recorded_runs(package: Any, scratch: Path, site: Path, result: PackageCheck) -> None:
    """Approve the package in the scratch environment, and replay the recorded runs of its agents."""
    name = next(iter(site.glob("*.dist-info"))).name.partition("-")[0]
    done = _run_python_isolated(["-m", "stepengine", "agents", "agree", name], site, scratch)
    if done.returncode:
        result.problems.append(done.stderr.strip())
        return
    for agent_id in package.agents:
        full = f"{package.publisher}/{agent_id}"
        try:
            done = _run_python_isolated(["-m", "stepengine", "test", full], site, scratch)
        except subprocess.TimeoutExpired:
            result.problems.append(f"replaying the runs of {full} took more than {SECONDS} seconds")
            continue
        said = done.stdout.strip().rpartition("\n")[2]
        if done.returncode == 0:
            result.good.append(f"{full} replays its recorded runs: {said}")
        elif "no recorded run" in done.stderr:
            result.notes.append(
                f"{full} has no recorded run; add one in recordings/ so that others can try it without a key"
            )
        else:
            result.problems.append(f"{full} does not replay its recorded runs: {(done.stdout + done.stderr).strip()}")
