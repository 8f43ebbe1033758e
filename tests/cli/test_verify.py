"""
``stepengine journal check --key`` and ``--sign``, as they are typed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.command import command

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
AGENT = """
from stepengine import AgentDefinition, Ask, Perform

def handle_steps(ctx):
    for number in range(5):
        yield from Perform(abs, -number)
    said = yield from Ask("Release 1.0?", options=["yes", "no"])
    return f"said {said}"

agent = AgentDefinition("asker", handle_steps=handle_steps)
"""


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """
    A key beside the folder of an agent, which is the working folder.
    """
    path = tmp_path / "keys" / "audit"
    path.parent.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("STEPENGINE_STATE_DIR", str(tmp_path / "state"))
    Path("asker.py").write_text(AGENT)
    return path


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:JR44", "reliability:JR45", "reliability:JR46", "reliability:JR48")
@pytest.mark.parametrize("journal", ["run.jsonl", "runs.db#one"])
def test_signed_run_resumes_with_its_key_and_verifies(key: Path, journal: str):
    public = f"{key}.pub"
    command("run", "./asker.py", "--journal", journal, "--sign", str(key), "-q", code=3)
    (seen,) = json.loads(command("journal", "check", journal, "--key", public, "--json").stdout)
    assert (True, []) == (seen["ok"], seen["decisions"])
    again = ["resume", journal, "--agent", "./asker.py", "--answer", "q5=yes", "-q"]
    assert "Resume it with that key" in command(*again, code=1).stderr
    assert "said yes" in command(*again, "--sign", str(key)).stdout

    shown = command("journal", "check", journal, "--key", public, "--seen", seen["signature"]["digest"]).stdout
    assert shown.startswith("ok ")
    assert "yes  to 'Release 1.0?'" in shown
    other = f"{'0' * 64}"
    assert (
        "it does not start with the records seen before"
        in command("journal", "check", journal, "--key", public, "--seen", other, code=1).stdout
    )


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:JR45")
def test_altered_and_unsigned_records_exit_with_1(key: Path):
    public = f"{key}.pub"
    command("run", "./asker.py", "--journal", "run.jsonl", "--sign", str(key), "-q", code=3)
    whole = Path("run.jsonl").read_bytes()
    Path("run.jsonl").write_bytes(whole.replace(b'"value":3}', b'"value":9}'))
    number = next(n for n, line in enumerate(whole.splitlines(), 1) if b'"value":3}' in line)
    shown = command("journal", "check", "run.jsonl", "--key", public, code=1).stdout
    assert shown.startswith("ALTERED")
    assert f"record {number} was altered" in shown
    command("journal", "repair", "run.jsonl", "--seal")
    assert f"record {number} was altered" in command("journal", "check", "run.jsonl", "--key", public, code=1).stdout

    Path("run.jsonl").write_bytes(b"".join([*whole.splitlines(keepends=True), whole.splitlines(keepends=True)[-2]]))
    shown = command("journal", "check", "run.jsonl", "--key", public, code=1).stdout
    assert shown.startswith("UNSIGNED")
    assert "follows the signature that closed the journal" in " ".join(shown.split())
    assert command("journal", "check", "run.jsonl", "--key", public, "--allow-unsigned").stdout == shown_at_length(
        public
    )


def shown_at_length(public: str) -> str:
    return str(command("journal", "check", "run.jsonl", "--key", public, code=1).stdout)


@pytest.mark.spec("reliability:JR47")
def test_invalid_keys_are_rejected_and_nothing_runs(key: Path):
    run = ["run", "./asker.py", "-q"]
    assert "--sign needs a journal to sign; name it with --journal" in command(*run, "--sign", str(key), code=2).stderr
    assert "cannot be read" in command(*run, "--journal", "run.jsonl", "--sign", "none", code=2).stderr
    assert not Path("run.jsonl").exists()
    command(*run, "--journal", "run.jsonl", "--sign", str(key), code=3)
    assert "is a private key" in command("journal", "check", "run.jsonl", "--key", str(key), code=1).stderr
    assert "there is no journal" in command("journal", "check", "none.jsonl", "--key", f"{key}.pub", code=2).stderr
