"""``stepengine agents check`` and ``agree``: what somebody who installs a package of agents meets, and what is agreed to of one."""

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
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from stepengine.cli.exits import Exit
from stepengine.cli.screen.render import dumps, say, visible
from stepengine.cli.settings import UsageProblem
from stepengine.cli.trusting import grouped_wishes, refuse_inside
from stepengine.data.alike import list_names
from stepengine.errors import DefinitionError

if TYPE_CHECKING:
    from stepengine.engine.packages import Package

__all__ = ("agree", "check")

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
"""What a package with a tool of that category has to name."""


@attrs.define
class PackageCheck:
    """
    What was found.

    Attributes:
        good: What is as it should be.
        problems: What somebody who installs it would stumble over.
        notes: What may be meant so.
    """

    good: list[str] = attrs.field(factory=list)
    problems: list[str] = attrs.field(factory=list)
    notes: list[str] = attrs.field(factory=list)


def check(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="The folder of the project, or a wheel; by default this folder.")
    ] = Path(),
    *,
    write: Annotated[
        bool,
        typer.Option("--write", help="Write the tools and agents that its code has into stepengine-agents.json first."),
    ] = False,
    imports: Annotated[
        bool, typer.Option("--import", help="Run the code of a wheel, too; that agrees to what it declares.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> Exit:
    """
    Check what somebody who installs a package of agents meets.

    A wheel (*.whl) is only read: its metadata, its stepengine-agents.json, its files. Nothing of it runs, unless you
    agreed to that package before or give --import. The folder of a project is yours: it is built, and its code is run.

    Code that is run starts in an empty folder and home, without your variables. That finds what only your machine has. It is no
    sandbox: the code has your rights. Its agents are loaded and given to an engine, its recorded runs (*.jsonl below recordings/)
    are repeated, and its code is compared with stepengine-agents.json. Files are searched for keys and for paths of a machine.

    stepengine-agents.json lies in the package, and is what a person is shown before anything of it is imported: tools with
    their categories, which --write takes from the code, and the folders (reads, writes) and hosts, which only you know.

    Building needs the build backend of the project; where it is not installed, pip fetches it.

    Leaves with:
      0    nothing to stumble over
      1    there is something
      2    no project with agents, or it cannot be built

    Examples:
      stepengine agents check
      stepengine agents check --write
      stepengine agents check dist/mine-0.1.0-py3-none-any.whl
      stepengine agents check dist/mine-0.1.0-py3-none-any.whl --import
    """
    if write and path.is_file():
        msg = f"--write changes {_file()!r} in a project; {str(path)!r} is a wheel"
        raise UsageProblem(msg)
    found = PackageCheck()
    with tempfile.TemporaryDirectory(prefix="stepengine-package-") as name:
        scratch = Path(name)
        site = _unpack_wheel(path, scratch)
        if path.is_file() and not imports and not _is_agreed(site):
            _check_unrun(site, path, found)
        else:
            _check_by_running(site, path, scratch, found, write=write)
    if as_json:
        print(dumps(attrs.asdict(found)))
    else:
        lines = [("ok", found.good), ("note", found.notes), ("PROBLEM", found.problems)]
        say("\n".join([f"{mark:<8}{visible(line)}" for mark, several in lines for line in several]), hang=8)
    return Exit.FAILED if found.problems else Exit.COMPLETED


def _check_by_running(site: Path, path: Path, scratch: Path, found: PackageCheck, *, write: bool) -> None:
    told = _probe(site, path, scratch)
    if write:
        found.good.append(f"written: {_write_wishes(path, told)}")
        told = _probe(_unpack_wheel(path, scratch), path, scratch)
    found.problems += told["problems"]
    if told["agents"]:
        _check_as_user(scratch, path, told, found)


def agree(
    name: Annotated[str, typer.Argument(metavar="PACKAGE", help="The package, as pip names it.")],
    *,
    forget: Annotated[bool, typer.Option("--forget", help="Agree no longer.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> Exit:
    """
    Agree to what the agents of an installed package want.

    What that is, the package says itself: tools, folders, hosts, agents of others. It is shown, and agreed to for this
    version and later ones that want no more; one that wants more is asked about again. It is not a limit: agents are programs,
    and may do whatever you may. Nothing of the package is loaded for this.

    `run` and `chat` ask at a terminal; this is for everywhere else.

    Examples:
      stepengine agents agree acme-agents
      stepengine agents agree acme-agents --forget
    """
    from stepengine.engine import packages, trust

    refuse_inside("stepengine agents agree")
    if forget:
        was = trust.withdraw(name)
        print(dumps({"forgotten": was}) if as_json else "forgotten" if was else "it was not agreed to")
        return Exit.COMPLETED
    found = packages.find_installed()
    plain = _plain(name)
    package = next((one for one in found.packages if _plain(one.name) == plain), None)
    if package is None:
        problem = next((said for (_, theirs), said in found.problems.items() if _plain(theirs) == plain), None)
        there = list_names([one.name for one in found.packages], name)
        msg = problem or f"there is no package {name!r} with agents; installed are: {there}"
        raise UsageProblem(msg)
    trust.agree(package.wishes)
    if as_json:
        print(dumps(attrs.asdict(package.wishes)))
        return Exit.COMPLETED
    print(f"agreed, for {visible(str(package.wishes), strict=True)}:")
    lines = grouped_wishes(package.wishes.asks) or ["  it wants no tool, folder or host"]
    print(visible("\n".join(lines)))
    return Exit.COMPLETED


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _file() -> str:
    from stepengine.engine.packages import FILE

    return FILE


# --- a wheel, and a process that has nothing else -----------------------------------------------------------------------


def _unpack_wheel(path: Path, scratch: Path) -> Path:
    """Return a folder with the content of the wheel at *path*, or of the one that is built of the project there."""
    site = Path(tempfile.mkdtemp(prefix="site-", dir=scratch))
    wheel = path if path.is_file() else _build_wheel(path, scratch)
    try:
        with wheel.open("rb") as file:
            starts_as_zip = file.read(len(ZIP_START)) == ZIP_START
        if not starts_as_zip:
            # Programs differ in what they make of a zip file behind something else, and so in what was checked.
            msg = f"{wheel.name} is not a wheel: it does not start like a zip file; build it again"
            raise UsageProblem(msg)
        with zipfile.ZipFile(wheel) as opened:
            members = opened.infolist()
            if len(members) > WHEEL_FILES or sum(info.file_size for info in members) > WHEEL_BYTES:
                msg = f"{wheel.name} holds more than {WHEEL_FILES:,} files or {WHEEL_BYTES:,} bytes"
                raise UsageProblem(msg)
            seen = set[str]()
            for info in members:
                # Programs that install a wheel differ in which one of two they take, and so in what was checked.
                is_twice = info.filename.casefold() in seen
                seen.add(info.filename.casefold())
                if why := "is in it twice" if is_twice else _refuse_member(info):
                    msg = f"{wheel.name} is not installed safely: its member {info.filename[:SHOWN_CHARS]!r} {why}"
                    raise UsageProblem(msg)
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
        msg = f"{str(path)!r} is not a wheel: {error}; the folder of a project, or a *.whl, would be fine"
        raise UsageProblem(msg) from None
    if len([*site.glob("*.dist-info")]) != 1:
        msg = f"{wheel.name} holds no package: a wheel has one folder *.dist-info"
        raise UsageProblem(msg)
    return site


def _refuse_member(info: zipfile.ZipInfo) -> str:
    """Return why a member of a wheel is not unpacked; ``""`` when it may be."""
    names = info.orig_filename.removesuffix("/").split("/")
    if (
        any(name in ("", ".", "..") for name in names)
        or not info.orig_filename.isprintable()
        or "\\" in info.orig_filename
        or ":" in info.orig_filename
    ):
        return "has a name that leads elsewhere"
    if len(names) > WHEEL_DEPTH or len(info.orig_filename.encode()) > NAME_BYTES:
        return f"has a name of more than {WHEEL_DEPTH} folders or {NAME_BYTES:,} bytes"
    if info.flag_bits & ENCRYPTED:
        return "is encrypted"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "is compressed in a way that wheels are not"
    return ""


def _build_wheel(project: Path, scratch: Path) -> Path:
    try:
        told = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
    except OSError:
        msg = f"there is no pyproject.toml in {str(project)!r}; the folder of a project, or a wheel, would be fine: `stepengine init NAME --package` makes one"
        raise UsageProblem(msg) from None
    except (ValueError, RecursionError) as error:
        msg = f"{project / 'pyproject.toml'} cannot be read: {error}"
        raise UsageProblem(msg) from None
    if find_spec("pip") is None:
        msg = "building needs pip, which this environment has not; give the wheel itself in place of the folder"
        raise UsageProblem(msg)
    system = told.get("build-system", {})
    if not isinstance(system, dict):
        msg = f"{project / 'pyproject.toml'} has {system!r} as build-system; a table `[build-system]` would be fine"
        raise UsageProblem(msg)
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
        raise UsageProblem(msg) from None
    wheels = [*target.glob("*.whl")]
    if done.returncode or len(wheels) != 1:
        msg = f"{str(project)!r} cannot be built: {done.stderr.strip()[-2000:] or 'no wheel came of it'}"
        raise UsageProblem(msg)
    return wheels[0]


def _alone(arguments: Sequence[str], site: Path, scratch: Path) -> subprocess.CompletedProcess[str]:
    """Run Python where the content of *site* is installed, in an empty home and folder, without any variable of here."""
    home = scratch / "home"
    (home / "empty").mkdir(parents=True, exist_ok=True)
    own = str(Path(__file__).resolve().parents[3])
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


def _probe(site: Path, path: Path, scratch: Path) -> dict[str, Any]:
    project = "" if path.is_file() else str(path.resolve())
    try:
        out = scratch / f"{site.name}.json"
        done = _alone(["-m", "stepengine.cli.probing", str(site), project, str(out)], site, scratch)
    except subprocess.TimeoutExpired:
        return {"problems": [f"importing it took more than {SECONDS} seconds"], "agents": {}, "site": site}
    try:
        told: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        last = (done.stderr.strip() or "it said nothing").rpartition("\n")[2][:500]
        return {
            "problems": [f"importing it ended the process with {done.returncode}: {last}"],
            "agents": {},
            "site": site,
        }
    return {**told, "site": site}


# --- a wheel that is only read ------------------------------------------------------------------------------------------


def _read_package(site: Path) -> Package:
    """
    Return the package of an unpacked wheel by its metadata; nothing of it is imported.

    Raises:
        DefinitionError: when its metadata names no agents, or cannot be read.
    """
    from importlib import metadata

    from stepengine.engine.packages import FILE, GROUP, Package, read_declaration

    try:
        (dist,) = metadata.distributions(path=[str(site)])
        name, version = str(dist.metadata["Name"]), str(dist.metadata["Version"])
        entries = [*dist.entry_points.select(group=GROUP)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        msg = f"its metadata cannot be read: {error}"
        raise DefinitionError(msg) from None
    if len(entries) != 1:
        msg = f"it has {len(entries)} entries in the group {GROUP!r}; one, called like its publisher, would be fine"
        raise DefinitionError(msg)
    module = entries[0].module.split(".")
    if not all(part.isidentifier() for part in module):
        msg = f"its entry in {GROUP!r} names {entries[0].module[:SHOWN_CHARS]!r}, which is no module"
        raise DefinitionError(msg)
    folders = [site.joinpath(*module), site.joinpath(*module[:-1])]
    folder = next((place for place in folders if (place / FILE).is_file()), None)
    if folder is None:
        msg = f"no {FILE} lies in {entries[0].module!r}"
        raise DefinitionError(msg)
    declared = read_declaration(folder / FILE)
    return Package(
        name=name, version=version, publisher=entries[0].name, value=entries[0].value, folder=folder, **declared
    )


def _is_agreed(site: Path) -> bool:
    """Return whether a person agreed to what the package in the wheel wants, when it was installed."""
    from stepengine.engine.trust import not_agreed

    try:
        return not_agreed(_read_package(site).wishes) == ()
    except DefinitionError:
        return False


def _check_unrun(site: Path, path: Path, found: PackageCheck) -> None:
    """Check a wheel by its files alone."""
    try:
        package = _read_package(site)
    except DefinitionError as error:
        found.problems.append(error.message)
    else:
        said = {name: getattr(package, name) for name in ("reads", "writes", "hosts")}
        agents = {agent_id: {"tools": agent.tools} for agent_id, agent in package.agents.items()}
        found.problems += _find_unnamed(said, agents)
        found.notes += _hosts(package.folder, package.hosts)
    found.problems += _traces(site, path)
    found.notes.append("its code was not run, so nothing is known of what it does; --import runs it with your rights")
    if not found.problems:
        found.good.append("its metadata and its declaration can be read; no keys, no paths of a machine")


# --- what is looked at ------------------------------------------------------------------------------------------------


def _write_wishes(project: Path, told: Mapping[str, Any]) -> str:
    """Write what the code has into the file of the project, and return where; folders and hosts stay as they are."""
    from stepengine.engine.packages import FILE, FORMAT

    if not told["agents"]:
        msg = f"{FILE} was not written: {'; '.join(told['problems'])}"
        raise UsageProblem(msg)
    inside = Path(*str(told["module"]).split("."))
    places = [top / folder for folder in (inside, inside.parent) for top in (project / "src", project)]
    folder = next((place for place in places if place.is_dir() and (told["site"] / inside).parent.is_dir()), project)
    file = folder / FILE
    before: dict[str, Any] = {}
    if file.is_file():
        try:
            before = {**json.loads(file.read_bytes())}
        except (ValueError, TypeError, RecursionError) as error:
            # Folders and hosts are known to its author alone: written over they would be lost.
            msg = f"{file.relative_to(project)} cannot be read, and is left as it is: {error}; mend or remove it first"
            raise UsageProblem(msg) from None
    kept = {name: before.get(name, []) for name in ("reads", "writes", "hosts")}
    file.write_text(json.dumps({"format": FORMAT, "agents": told["agents"], **kept}, indent=2) + "\n", encoding="utf-8")
    return str(file.relative_to(project))


def _check_as_user(scratch: Path, path: Path, told: Mapping[str, Any], found: PackageCheck) -> None:
    """Look at everything that somebody would meet who installs it; its agents can be loaded."""
    from stepengine.engine.packages import FILE, Package, read_declaration

    site: Path = told["site"]
    places = [site.joinpath(*told["module"].split(".")), site.joinpath(*told["module"].split(".")[:-1])]
    folder = next((place for place in places if (place / FILE).is_file()), None)
    if folder is None:
        found.problems.append(f"no {FILE} lies in {told['module']!r}; --write makes it")
        return
    try:
        said = read_declaration(folder / FILE)
    except DefinitionError as error:
        found.problems.append(error.message)
        return
    package = Package(name="", version="", publisher=told["publisher"], value=told["module"], folder=folder, **said)
    found.problems += _beyond(package.agents, told["agents"])
    found.problems += _find_unnamed(said, told["agents"])
    found.problems += _traces(site, path)
    found.notes += _hosts(folder, said["hosts"])
    if not found.problems:
        found.good.append(
            f"loads without its author's folder: {', '.join(f'{package.publisher}/{one}' for one in package.agents)}"
        )
        found.good.append(f"{FILE} says what its code has; no keys, no paths of a machine")
        _repeat_runs(package, scratch, site, found)


def _beyond(said: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[str]:
    """Give where code and declaration differ, each way: what is asked for and not used is asked in vain."""
    for agent_id in sorted({*said, *there}):
        if agent_id not in there or agent_id not in said:
            where = "declared, and its code has none" if agent_id in said else "not declared"
            yield f"the agent {agent_id!r} is {where}; --write puts that right"
            continue
        tools, declared = there[agent_id]["tools"], said[agent_id].tools
        for name in sorted({*tools, *declared}):
            if tools.get(name) != declared.get(name):
                now = f"of the category {tools[name]!r}" if name in tools else "not there"
                yield f"the tool {name!r} of {agent_id!r} is {now}, and declared as {declared.get(name, 'nothing')!r}; --write puts that right"
        if {*there[agent_id]["spawns"]} != {*said[agent_id].spawns}:
            yield f"{agent_id!r} may spawn {there[agent_id]['spawns']}, and declared is {[*said[agent_id].spawns]}; --write puts that right"


def _find_unnamed(said: Mapping[str, Any], agents: Mapping[str, Any]) -> Iterator[str]:
    kinds = {(kind, name) for agent in agents.values() for name, kind in agent["tools"].items()}
    for kind, member in FOLDERS.items():
        having = sorted([name for of, name in kinds if of == kind])
        if having and not said[member]:
            yield (
                f"{', '.join(having)} {'is' if len(having) == 1 else 'are'} of the category {kind!r}, "
                f"and {member!r} is empty; say what, such as {_like(member)}"
            )


def _like(member: str) -> str:
    return '["api.example.com"]' if member == "hosts" else '["."] for the folder that it works in'


def _traces(site: Path, path: Path) -> Iterator[str]:
    """Give keys, and paths of the machine that it was made on."""
    from stepengine.journal.scanning import scan

    for leak in scan([site]):
        yield str(attrs.evolve(leak, path=str(Path(leak.path).relative_to(site))))
    own = str((path.parent if path.is_file() else path).resolve()).encode()
    for file in sorted(site.rglob("*")):
        content = file.read_bytes() if file.is_file() and file.stat().st_size <= TEXT_BYTES else b""
        for number, line in enumerate(content.split(b"\n") if b"\0" not in content else (), start=1):
            home = HOMES.search(line)
            if home is not None or (own in line and len(own) > 1):
                shown = home[0] if home is not None else own
                yield f"{file.relative_to(site)}:{number} holds a path of a machine: {shown.decode('utf-8', 'replace')}"


def _hosts(folder: Path, hosts: Sequence[str]) -> Iterator[str]:
    """Give hosts that the code names, and that are not declared."""
    for file in sorted(folder.rglob("*.py")):
        text = file.read_bytes()[:TEXT_BYTES].decode("utf-8", "replace")
        for host in dict.fromkeys([found.rstrip(".") for found in HOSTS.findall(text)]):
            if host not in hosts:
                yield f"{file.relative_to(folder)} names the host {host}, which is not among 'hosts'"


def _repeat_runs(package: Any, scratch: Path, site: Path, found: PackageCheck) -> None:
    """Repeat the recorded runs that come with it, by the names of its agents, as whoever installed it does."""
    name = next(iter(site.glob("*.dist-info"))).name.partition("-")[0]
    done = _alone(["-m", "stepengine", "agents", "agree", name], site, scratch)
    if done.returncode:
        found.problems.append(done.stderr.strip())
        return
    for agent_id in package.agents:
        full = f"{package.publisher}/{agent_id}"
        try:
            done = _alone(["-m", "stepengine", "test", full], site, scratch)
        except subprocess.TimeoutExpired:
            found.problems.append(f"repeating the runs of {full} took more than {SECONDS} seconds")
            continue
        said = done.stdout.strip().rpartition("\n")[2]
        if done.returncode == 0:
            found.good.append(f"{full} repeats its recorded runs: {said}")
        elif "no recorded run" in done.stderr:
            found.notes.append(
                f"{full} comes with no recorded run; one below recordings/ lets others try it without a key"
            )
        else:
            found.problems.append(f"{full} does not repeat its recorded runs: {(done.stdout + done.stderr).strip()}")
