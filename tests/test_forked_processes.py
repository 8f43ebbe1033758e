"""
The processes that tests fork are like those that `subprocess` starts.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked_processes

pytestmark = pytest.mark.usefixtures("forks")
ABOUT = """
import json, os, sys, warnings
print(json.dumps([
    __name__, sys.argv[1:], os.getcwd(), dict(os.environ), sys.stdin.read(), sys.dont_write_bytecode,
    [one for one in sys.path if "shop" in one], bool(sys.modules.get("helper")), sorted(os.listdir("/proc/self/fd")),
]))
print("said", file=sys.stderr)
"""


def about(way: Any, folder: Path, *command: str) -> Any:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder / "shop"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = way.run(
        [sys.executable, *command, "a", "--b"], cwd=folder, env=environment, input="typed", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (0, "said\n") == (done.returncode, done.stderr)
    told = json.loads(done.stdout)
    told[3] = {name: value for name, value in told[3].items() if name in environment}
    return told


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["-c", "-m", "file"])
def test_a_forked_program_sees_the_same_as_a_new_interpreter(tmp_path: Path, kind: str) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "helper.py").touch()
    (tmp_path / "shop" / "sitecustomize.py").write_text("import helper\n")
    (tmp_path / "program.py").write_text(ABOUT)
    command = {"-c": ["-c", ABOUT], "-m": ["-m", "program"], "file": ["program.py"]}[kind]

    assert about(subprocess, tmp_path, *command) == about(forked_processes, tmp_path, *command)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.parametrize("ending", ["pass", "sys.exit('no')", "raise ValueError('no')", "os.kill(os.getpid(), 9)"])
def test_a_program_ends_as_in_a_new_interpreter(ending: str) -> None:
    command = [sys.executable, "-c", f"import atexit, os, sys; atexit.register(print, 'left'); {ending}"]
    made, expected = (
        way.run(command, capture_output=True, text=True, check=False) for way in (forked_processes, subprocess)
    )

    assert (expected.returncode, expected.stdout) == (made.returncode, made.stdout)
    assert expected.stderr.splitlines()[-1:] == made.stderr.splitlines()[-1:]


def test_a_forked_process_takes_signals_and_wait_timeouts() -> None:
    command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
    with forked_processes.Process(command, stdout=subprocess.PIPE, text=True) as process:
        assert "up\n" == process.stdout.readline()
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(signal.SIGTERM)
        assert -signal.SIGTERM == process.wait(50)


@pytest.mark.deep
@pytest.mark.smoke
def test_forked_program_has_the_file_limit_of_the_caller() -> None:
    command = [sys.executable, "-c", "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        done = forked_processes.run(command, capture_output=True, text=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert f"{soft - 1}\n" == done.stdout
