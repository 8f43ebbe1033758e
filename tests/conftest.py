"""
What every test runs under: no network, no provider keys, nothing left behind, one async backend, cited specification rows.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import importlib
import inspect
import ipaddress
import itertools
import os
import pkgutil
import re
import shutil
import signal
import site
import socket
import ssl
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import httpcore2
import hypothesis
import hypothesis.internal.conjecture.providers
import pytest
import typer.main
import typer.testing

from stepengine.redaction import GIVEN
from tests.forked_processes import template_process
from tests.spec_rows import known

hypothesis.settings.register_profile("fast", derandomize=True, max_examples=50, deadline=None, print_blob=True)
hypothesis.settings.register_profile(
    "explore", parent=hypothesis.settings.get_profile("fast"), derandomize=False, max_examples=2_000
)
hypothesis.settings.load_profile("fast")

# Installed, the plugin is loaded through its entry point; a checkout on PYTHONPATH names it here.
INSTALLED = any(entry.value == "stepengine.pytest_plugin" for entry in entry_points(group="pytest11"))
pytest_plugins = () if INSTALLED else ("stepengine.pytest_plugin",)

SPEC_ROWS = known()
SECONDS_PER_TEST = 60
SECONDS_PER_DEEP_TEST = 600
LEFT_OUT = frozenset({"deep", "speed", "memory"})
FAST = re.compile(r"not \(deep or speed or memory\)|not deep and not speed and not memory")
"""How the fast suite is asked for: with `addopts`, and by people."""
LEAK_GRACE_SECONDS = 10.0
HOMES = itertools.count(1)
WARNING_MODULES = ("stepengine.models._settings", "stepengine.models._reply")
"""Modules that remember, for the process, what they have warned of."""
PROVIDER_VARIABLE = re.compile(
    r"(?:ANTHROPIC|OPENAI|AWS|AZURE|GOOGLE|GEMINI|CLOUD_ML|CLOUDSDK|IDENTITY|STEPENGINE)_\w+|\w+_API_KEY|\w+_BASE_URL|\w+_AUTH_TOKEN|(?:HTTPS?|ALL)_PROXY",
    re.IGNORECASE,
)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """
    Async tests run on asyncio.
    """
    return "asyncio"


@pytest.fixture(scope="session")
def forks() -> Iterator[None]:
    """
    `tests.forked_processes` forks its processes from an interpreter that has imported the command line.
    """
    with template_process():
        yield


@pytest.fixture(scope="session")
def durable_forks() -> Iterator[None]:
    """
    Processes are forked from an interpreter that has imported DBOS and what works with it, too.
    """
    import stepengine.durable

    modules = [f"stepengine.durable.{module.name}" for module in pkgutil.iter_modules(stepengine.durable.__path__)]
    with template_process(*modules, "psycopg"):
        yield


# --- markers --------------------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    # Containers like to forbid byte code. Then each worker would rewrite every test, and each program that a test starts
    # compile the whole package.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # A shell starts what it puts into the background with SIGINT ignored; tests send it, and wait for what it does.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    ASKED[:] = required(os.environ.get(REQUIRE, ""))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(config), "failures-as-they-happen")
    block_network(config)
    read_commands_once(config)
    load_certificates_once(config)
    skip_syncs(config)
    draw_examples_by_name(config)
    if not config.pluginmanager.has_plugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): pytest-timeout is not installed, so nothing enforces it")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """
    Half as many workers again as there are cores: a third of the time tests wait, for servers, processes and clocks.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + cores // 2


def read_commands_once(config: pytest.Config) -> None:
    """
    A process reads the signatures of all commands once, and so does this one, instead of once for each `invoke`.
    """
    patch = pytest.MonkeyPatch()
    patch.setattr(typer.testing, "_get_command", functools.cache(typer.main.get_command), raising=False)
    config.add_cleanup(patch.undo)


def load_certificates_once(config: pytest.Config) -> None:
    """
    The certificates of the system are read once for each environment, which takes 0.04 s, and not for each client of a test.
    """
    make = httpcore2.default_ssl_context

    @functools.cache
    def context(trust_env: bool, *_variables: str | None) -> ssl.SSLContext:
        return make(_trust_env=trust_env)

    def default_ssl_context(*, _trust_env: bool = True) -> ssl.SSLContext:
        return context(_trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))

    patch = pytest.MonkeyPatch()
    patch.setattr(httpcore2, "default_ssl_context", default_ssl_context)
    config.add_cleanup(patch.undo)


def skip_syncs(config: pytest.Config) -> None:
    """
    Files reach the disk when the system writes them. No test cuts the power of the machine; those that pretend to note each sync.
    """
    patch = pytest.MonkeyPatch()
    for name in {"fsync", "fdatasync"} & vars(os).keys():
        patch.setattr(os, name, check_descriptor)
    config.add_cleanup(patch.undo)


def check_descriptor(descriptor: int) -> None:
    os.fstat(descriptor)  # raises for one that is closed, as a sync does


def draw_examples_by_name(config: pytest.Config) -> None:
    """
    Examples depend on nothing but the test, unless ``explore`` looks further. By itself hypothesis adds constants of the modules
    that a process happens to have imported, and parses all of them for that: ten seconds for each worker of a new clone.
    """
    if config.getoption("--hypothesis-profile", None) != "explore":
        patch = pytest.MonkeyPatch()
        patch.setattr(hypothesis.internal.conjecture.providers, "is_local_module_file", lambda path: False)
        config.add_cleanup(patch.undo)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Any:
    # Nearly all that collecting makes stays until the end: to search it for garbage again and again is a quarter of its time.
    gc.disable()
    try:
        import_in_turns(session.config)
        return (yield)
    finally:
        gc.enable()


def import_in_turns(config: pytest.Config) -> None:
    """
    Workers that collect the whole suite begin to import at different files: what one of them has rewritten, the others read.
    """
    worker: dict[str, Any] = getattr(config, "workerinput", {})
    if not worker or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    files = sorted((config.rootpath / "tests").rglob("test_*.py"))
    first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for file in (*files[first:], *files[:first]):
        # What cannot be imported is reported where it is collected.
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(file.relative_to(config.rootpath).with_suffix("").parts))


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> list[pytest.Item] | None:
    """
    Make no tests that the fast suite, or the gate's smoke tests, would make only to leave them out: thousands, in each worker. A
    test that is named is made.
    """
    if not name.startswith("test_") or not inspect.isfunction(obj):
        return None
    config = collector.config
    asked = config.option.markexpr
    if any("::" in arg for arg in config.args) or not (asked == "smoke" or FAST.fullmatch(asked)):
        return None
    markers = {marker.name for marker in (*getattr(obj, "pytestmark", ()), *collector.iter_markers())}
    is_wanted = "smoke" in markers if asked == "smoke" else markers.isdisjoint(LEFT_OUT)
    return None if is_wanted else []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    errors: list[str] = []
    enforce = config.pluginmanager.has_plugin("timeout") and not config.getoption("timeout", None)
    for item in items:
        # To ask each of twenty thousand tests for one marker after the other takes a second of each worker.
        names = {marker.name for marker in item.iter_markers()}
        errors += marker_errors(item)
        if "smoke" in names and ("deep" not in names or names & {"speed", "memory"}):
            errors.append(f"{place_of(item)}: smoke goes with deep, and neither with speed nor with memory")
        if "live" in names and "live" not in config.option.markexpr:
            item.add_marker(pytest.mark.skip(reason="calls a real provider; ask for it with -m live"))
        if "faults" in names and shutil.which("llmock") is None:
            reason = "needs the command llmock: pip install llmock into an environment of its own and put it on PATH"
            item.add_marker(pytest.mark.skip(reason=reason))
        if enforce and "timeout" not in names:
            is_fast = names.isdisjoint(("deep", "speed", "memory"))
            item.add_marker(pytest.mark.timeout(SECONDS_PER_TEST if is_fast else SECONDS_PER_DEEP_TEST))
    if errors:
        raise pytest.UsageError("\n".join(errors))


def pytest_collection_finish() -> None:
    """
    What was imported so far stays: no search for garbage need go through it again, nor often through what comes later, mostly
    the providers' SDKs, 0.1 s each time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


def place_of(item: pytest.Item) -> str:
    file, line, _ = item.location
    return f"{file}:{(line or 0) + 1}: {item.name}"


def marker_errors(item: pytest.Item) -> Iterator[str]:
    for marker in item.iter_markers():
        if marker.name == "leaks_allowed" and not (marker.args or marker.kwargs.get("reason")):
            yield f"{place_of(item)}: leaks_allowed needs a reason"
        if marker.name != "spec":
            continue
        if not marker.args or marker.kwargs:
            yield f"{place_of(item)}: spec takes one or more rows, such as spec('reliability:MP06')"
        for row in marker.args:
            if not isinstance(row, str) or row not in SPEC_ROWS:
                yield f"{place_of(item)}: the specification has no row {row!r}; docs/spec has them, to be cited as 'page:ID'"


# --- what is told ---------------------------------------------------------------------------------------------------

REQUIRE = "STEPENGINE_TESTS_REQUIRE"
REQUIRED = {
    word: re.compile(rf"(?<!\w){re.escape(said)}(?!\w)", re.IGNORECASE)
    for word, said in {
        "acp-sdk": "node and `npm install --no-save acp1", "ai-sdk": "node and `npm install --no-save ai5", "axe-core": "axe-core",
        "bubblewrap": "bubblewrap", "chromium": "Chromium", "core-dump": "core-dump limit", "durable": "extra 'durable'",
        "fastmcp": "fastmcp", "git": "git", "llmock": "llmock", "mcp-npm": "node and `npm install --no-save @modelcontextprotocol/sdk",
        "mcp-conformance": "node and `npm install --no-save @modelcontextprotocol/conformance",
        "mlflow": "command mlflow", "openapi-python-client": "command openapi-python-client", "phoenix": "command phoenix", "podman": "podman", "ripgrep": "ripgrep", "tmux": "tmux",
    }.items()
}  # fmt: skip
"""What a run can ask for with STEPENGINE_TESTS_REQUIRE, and how the reason of a test that is skipped without it names it."""
ASKED: list[str] = []
"""What this run asks for: what its environment says before tests begin, which take it away."""


def required(given: str) -> list[str]:
    """
    Return what a run asks for: ``"chromium, tmux"`` are two.
    """
    words = re.split(r"[\s,]+", given.strip()) if given.strip() else []
    if unknown := sorted(set(words) - set(REQUIRED)):
        raise pytest.UsageError(f"{REQUIRE} knows {', '.join(REQUIRED)}; not {', '.join(unknown)}")
    return words


def insisted(report: Any) -> Any:
    """
    Return a report, failed where its test is skipped for want of what the run asks for.
    """
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = str(report.longrepr[2])
        for word in ASKED:
            if REQUIRED[word].search(reason):
                report.outcome = "failed"
                report.longrepr = f"{word!r} is not there, which {REQUIRE} asks for. {reason}"
                break
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Any:
    return insisted((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Any:
    return insisted((yield))


class Failures:
    """
    Says which test failed, and why in one line, when it has; the whole of it stands at the end.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\nFAILED {report.nodeid} ({report.when}): {first_line(report.longrepr)}", red=True)


def first_line(longrepr: Any) -> str:
    crash = getattr(longrepr, "reprcrash", None)
    return (str(longrepr if crash is None else crash.message).strip().splitlines() or [""])[0]


# --- what users install ---------------------------------------------------------------------------------------------


@contextmanager
def made_once(tmp_path_factory: pytest.TempPathFactory, name: str) -> Iterator[tuple[Path, bool]]:
    """
    Give a folder that all workers of a run share, and whether the first of them has yet to fill it; the others wait.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / name
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / ".complete"
        missing = not done.exists()
        if missing:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        yield folder, missing
        done.touch()


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    A folder with the sdist of the checkout and the wheel that was built from that sdist, without any download.
    """
    pytest.importorskip("build", reason="needs the extra 'dev'")
    pytest.importorskip("hatchling", reason="needs the extra 'dev'")
    with made_once(tmp_path_factory, "dist") as (folder, missing):
        if missing:
            build(folder)
    return folder


def build(folder: Path) -> None:
    checkout = str(Path(__file__).resolve().parent.parent)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), checkout],
        check=True, capture_output=True, cwd=folder, timeout=300,
    )  # fmt: skip


@pytest.fixture(scope="session")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    A fresh environment that holds the wheel; its dependencies are lent by this one, so that nothing is downloaded.
    """
    with made_once(tmp_path_factory, "installed") as (folder, missing):
        if missing:
            install(dist, folder)
    return folder / "venv"


def install(dist: Path, folder: Path) -> None:
    environment = folder / "venv"
    venv.create(environment, with_pip=False)
    (file,) = dist.glob("*.whl")
    arguments = ["install", "--quiet", "--no-deps", "--no-index", str(file)]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), *arguments],
        check=True, capture_output=True, cwd=folder, timeout=300,
    )  # fmt: skip
    (own,) = environment.glob("lib/python3*/site-packages")
    (own / "lent.pth").write_text("\n".join(site.getsitepackages()) + "\n")


# --- the outside world ----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """
    Run a test by itself: without network and keys, in a home of its own, and with nothing left behind. One fixture, because
    each of ten thousand tests pays for every one that there is more than for what it does.
    """
    with own_surroundings(request.node, tmp_path_factory.getbasetemp()), no_leaks(request.node):
        yield


class NetworkBlockedError(RuntimeError):
    """
    A test tried to leave the machine. Not an OSError, so that no retry takes it for a bad connection.
    """


class Network:
    """
    Whether the test that runs may leave the machine, as only live ones may.
    """

    open = False


@contextmanager
def own_surroundings(node: Any, base: Path) -> Iterator[None]:
    """
    Take away keys, base URLs and proxies, and keep runs and settings of the command line in a folder of the test, also those
    of its child processes. What a process warns of once is warned of once in each test. A live test keeps its keys, and has the network.
    """
    Network.open = bool(node.get_closest_marker("live"))
    home = f"{base}/home-{next(HOMES)}"
    with pytest.MonkeyPatch.context() as patch:
        for name in () if Network.open else filter(is_of_a_provider, list(os.environ)):
            patch.delenv(name)
        patch.setenv("STEPENGINE_STATE_DIR", f"{home}/state")
        patch.setenv("XDG_CONFIG_HOME", f"{home}/config")
        patch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
        try:
            yield
        finally:
            GIVEN.clear()
            for name in WARNING_MODULES:
                if name in sys.modules:
                    sys.modules[name]._warned.clear()


@functools.cache
def is_of_a_provider(name: str) -> bool:
    return PROVIDER_VARIABLE.fullmatch(name) is not None


def block_network(config: pytest.Config) -> None:
    """
    Block the network except loopback and Unix sockets, for as long as pytest runs.
    """
    patch = pytest.MonkeyPatch()
    for name in ("connect", "connect_ex", "sendto"):
        patch.setattr(socket.socket, name, guarded(getattr(socket.socket, name)))
    patch.setattr(socket, "getaddrinfo", guarded_lookup(socket.getaddrinfo))
    config.add_cleanup(patch.undo)


def guarded(method: Any) -> Any:
    def call(self: socket.socket, *args: Any) -> Any:
        address = args[-1]
        inside = self.family not in {socket.AF_INET, socket.AF_INET6} or is_loopback(address[0])
        if not (inside or Network.open):
            raise NetworkBlockedError(
                f"tests may not reach {address!r}; only loopback is open. A real call belongs under the marker 'live'."
            )
        return method(self, *args)

    return call


def guarded_lookup(lookup: Any) -> Any:
    def call(host: Any, *args: Any, **kwargs: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name and not (Network.open or is_literal(name) or is_loopback(name)):
            raise NetworkBlockedError(f"tests may not look up {name!r}; only localhost has an address here")
        return lookup(host, *args, **kwargs)

    return call


def is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    if not is_literal(host):
        return host == "localhost"
    address = ipaddress.ip_address(host)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


# --- leaks ----------------------------------------------------------------------------------------------------------


def held() -> frozenset[str]:
    """
    Return `kind: name` of each thread, child process and open descriptor of this process.
    """
    return frozenset((*threads(), *children(), *descriptors()))


def threads() -> Iterator[str]:
    for thread in threading.enumerate():
        # The watchdog is the process's and ends by itself when nothing runs, which nobody has to wait for after each test.
        if not thread.name.startswith(("pytest", "stepengine-watchdog")):
            yield f"thread: {thread.name} ({thread.ident})"


def children() -> Iterator[str]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # mostly there is none, and to ask for that is cheap
        return
    for task in listed("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children", "rb") as file:  # noqa: PTH123
                pids = file.read().decode().split()
        except OSError:  # the thread has ended meanwhile
            continue
        yield from (f"child process: {pid}" for pid in pids)


def descriptors() -> Iterator[str]:
    for name in listed("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
        except OSError:  # the descriptor of the listing itself
            continue
        yield f"descriptor: {name} -> {target}"


def listed(folder: str) -> list[str]:
    """
    Return the names in a folder of Linux; none elsewhere. Plain strings, because this happens before and after every test.
    """
    try:
        return os.listdir(folder)  # noqa: PTH208
    except FileNotFoundError:
        return []


@contextmanager
def no_leaks(node: Any) -> Iterator[None]:
    """
    Fail a test that leaves threads, child processes or descriptors behind, after a short grace for what is about to end.
    """
    before = held()
    yield
    if node.get_closest_marker("leaks_allowed"):
        return
    deadline = time.monotonic() + LEAK_GRACE_SECONDS
    generations = iter((0, 1))  # what a test made is young; to look through everything takes a hundred times as long
    while leaked := held() - before:
        if time.monotonic() > deadline:
            pytest.fail("the test left behind:\n  " + "\n  ".join(sorted(leaked)), pytrace=False)
        gc.collect(next(generations, 2))
        time.sleep(0.005)
