"""
Commands in the sandbox of the operating system: what they can do, and fifty ways out that lead nowhere.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepengine import ToolContext
from stepengine.errors import DefinitionError
from stepengine.tools import ToolRegistry
from stepengine.tools.bundled import file_tools, shell_tools
from stepengine.workspace.path_rules import PROTECTED
from stepengine.workspace.workspace import Workspace

CANARY = "canary-of-the-host"
NEEDS = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap (Debian: bubblewrap)")


class Host:
    """
    A machine around a root: what a command must neither read, change nor reach.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "project"
        (self.root / "sub").mkdir(parents=True)
        (self.root / ".git" / "hooks").mkdir(parents=True)
        (self.root / ".git" / "config").write_text("[core]\n")
        (self.root / ".github" / "workflows").mkdir(parents=True)
        (self.root / ".github" / "workflows" / "ci.yml").write_text("on: push\n")
        (self.root / "a.txt").write_text("inside\n")
        self.outside = folder / "outside"
        self.outside.mkdir()
        (self.outside / "secret.txt").write_text(CANARY)
        (self.outside / "mine.txt").write_text("as it was\n")
        (self.root / "out").symlink_to(self.outside)
        self.heard: list[bytes] = []
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(str(folder / "sock"))
        self.unix.listen()
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0stepengine-{os.getpid()}")
        self.abstract.listen()
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.sleeper = subprocess.Popen(["sleep", "600"], env={"CANARY": CANARY, "PATH": "/usr/bin:/bin"})
        self._listeners = [
            threading.Thread(target=self._listen, args=(s,), daemon=True) for s in (self.tcp, self.unix, self.abstract)
        ]
        for listener in self._listeners:
            listener.start()

    def _listen(self, server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            self.heard.append(b"connected")
            connection.close()

    def close(self) -> None:
        for server in (self.tcp, self.unix, self.abstract):
            server.shutdown(socket.SHUT_RDWR)
            server.close()
        self.udp.close()
        for listener in self._listeners:
            listener.join(50)
        self.sleeper.kill()
        self.sleeper.wait()

    def state(self) -> dict[str, Any]:
        """
        Return everything of the machine that a command must leave alone.
        """
        self.udp.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self.heard.append(self.udp.recv(100))
        files = {
            p: p.read_bytes()
            for p in (*self.outside.iterdir(), *(self.root / ".git").rglob("*"), *(self.root / ".github").rglob("*"))
            if p.is_file()
        }
        return {
            "files": files,
            "beside": sorted(p.name for p in self.folder.iterdir()),
            "modes": [oct(p.stat().st_mode) for p in sorted(self.outside.rglob("*"))],
            "owners": [(p.stat().st_uid, p.stat().st_gid) for p in sorted(self.outside.rglob("*"))],
            "heard": list(self.heard),
            "alive": self.sleeper.poll() is None,
            "home": sorted(p.name for p in Path.home().iterdir()),
            "tmp": any(CANARY in p.name for p in Path("/tmp").iterdir()),
            "name": socket.gethostname(),
            "nice": os.getpriority(os.PRIO_PROCESS, self.sleeper.pid),
            "shm": sorted(p.name for p in Path("/dev/shm").iterdir() if "PostgreSQL" not in p.name)
            if Path("/dev/shm").is_dir()
            else [],
        }


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.close()


def escapes(host: Host) -> list[str]:
    """
    Return scripts that try to read, change, reach or outlive what is around the sandbox.
    """
    out, pid, home = host.outside, host.sleeper.pid, Path.home()
    port, udp, name = host.tcp.getsockname()[1], host.udp.getsockname()[1], f"stepengine-{os.getpid()}"
    py = f"{sys.executable} -I -S -c"
    connect = "import socket;s=socket.socket({});s.settimeout(2);s.connect({})"
    return [
        # files
        f"cat {out}/secret.txt", "cat out/secret.txt", "cat ../outside/secret.txt", f"cat /proc/{pid}/root{out}/secret.txt", f"cat /proc/1/root{out}/secret.txt",
        f"cat /proc/{pid}/environ", f"cat /proc/{os.getpid()}/environ", f"echo gone > {out}/mine.txt", "echo gone > out/mine.txt", f"echo gone >> /proc/1/root{out}/mine.txt",
        f"rm -rf {out}", "rm -rf out/*", f"mv {out}/mine.txt .", f"ln {out}/secret.txt here && cat here", f"ln -s {out} again && cat again/secret.txt", f"chmod 777 {out}/mine.txt",
        f"chown 1 {out}/mine.txt", f"touch {host.folder}/made", "mkdir ../made", f"echo x > /tmp/{CANARY}", f"echo x > /dev/shm/{CANARY}", f"echo x > {home}/.bashrc-{CANARY}", f"ls -a {home} | grep .",
        "echo evil > .git/hooks/pre-commit", "echo '[core] pager=evil' >> .git/config", "echo evil > .github/workflows/ci.yml", "mv .git .hidden; mkdir -p .git/hooks; echo evil > .git/hooks/pre-commit", "mv .github aside", "rm -rf .git/hooks", "echo x > /usr/bin/evil", "echo x >> /etc/passwd",
        "cat /etc/shadow | grep :", "cp /bin/sh /usr/local/bin/evil", "cat /proc/kcore | head -c 1", "cat /dev/mem | head -c 1", "dd if=/dev/sda count=1", "find / -name secret.txt 2>/dev/null | xargs cat",
        # mounts and namespaces
        f"mount --bind {out} sub && cat sub/secret.txt", "mount -t proc proc sub", "mount -o remount,rw /usr && touch /usr/evil", f"unshare -Urm sh -c 'mount --bind {out} sub; cat sub/secret.txt'", "umount /tmp; ls /tmp",
        f"nsenter -t {pid} -m cat {out}/secret.txt", "nsenter -t 1 -a true && echo entered", f"chroot /proc/1/root cat {out}/secret.txt", f"unshare -Ur chroot /proc/{pid}/root cat {out}/secret.txt", "pivot_root . sub", "hostname evil",
        # processes
        f"kill -9 {pid}", "kill -9 -1", "pkill sleep", f"renice 10 {pid}", f"{py} 'import os;os.kill({pid},9)'", f"gdb -p {pid} -batch", f"{py} 'import ctypes;print(ctypes.CDLL(None).ptrace(16,{pid},0,0))'",
        f"setsid sh -c 'sleep 5; echo gone > {out}/mine.txt' & true", f"nohup sh -c 'sleep 3; touch {host.folder}/late' & true", "ps -ef | grep sleep | grep -v grep",
        # network
        f"{py} '{connect.format('', ('127.0.0.1', port))}'".replace("'127.0.0.1'", '"127.0.0.1"'), f"{py} '{connect.format('socket.AF_UNIX', chr(34) + str(host.folder / 'sock') + chr(34))}'",
        f"{py} '{connect.format('socket.AF_UNIX', chr(34) + chr(92) + '0' + name + chr(34))}'", f'{py} \'import socket;socket.socket(2,2).sendto(b"hello",("127.0.0.1",{udp}))\'', "cat /var/run/docker.sock", "ls /run/user",
        f"exec 3<>/dev/tcp/127.0.0.1/{port}", "getent hosts localhost && ping -c 1 -W 1 127.0.0.1", "ip link set lo down", "cat /proc/net/tcp | grep -v local_address",
        # the terminal and the kernel
        f'{py} \'import fcntl,termios;fcntl.ioctl(0,termios.TIOCSTI,b"x")\'', "echo b > /proc/sysrq-trigger", "echo 1 > /proc/sys/kernel/panic", "sysctl -w kernel.hostname=evil", "insmod evil.ko", "date -s 2001-01-01",
        "echo core > /proc/sys/kernel/core_pattern", "keyctl show", "bwrap --bind / / true && bwrap --bind / / cat " + f"{out}/secret.txt",
    ]  # fmt: skip


@NEEDS
@pytest.mark.deep
@pytest.mark.spec("requirements:X70", "reliability:HP8")
async def test_no_way_leads_out_of_the_sandbox(host: Host) -> None:
    scripts = escapes(host)
    assert len(scripts) >= 50
    tools = ToolRegistry(shell_tools(host.root, sandbox=True, shell="bash", timeout=20))
    before = host.state()

    for script in scripts:
        result = await tools.execute("run_terminal_command", {"command": script + "\n:"}, ToolContext.for_test())
        assert CANARY not in str(result.data and result.data["stdout"]), script  # type: ignore[index,call-overload]
        assert before == host.state(), script


@pytest.mark.deep
@pytest.mark.smoke
@NEEDS
@pytest.mark.spec("requirements:X70")
async def test_in_the_sandbox_programs_run_and_write_below_the_root(host: Host) -> None:
    tools = ToolRegistry(shell_tools(host.root, sandbox=True, shell="bash"))
    commands: dict[str, str] = {
        "pwd": f"{host.root}\n",
        "cat a.txt": "inside\n",
        "echo new > made.txt; cat made.txt": "new\n",
        'echo x > "$HOME/y"; echo x > "$TMPDIR/z"; cat "$HOME/y"': "x\n",
        f"{sys.executable} -c 'print(6 * 7)'": "42\n",
        "mkdir -p sub/deep; cd sub/deep; pwd -P": f"{host.root}/sub/deep\n",
    }

    for command, expected in commands.items():
        result = await tools.execute("run_terminal_command", {"command": command}, ToolContext.for_test())
        assert (expected, 0) == (result.data["stdout"], result.data["exit_code"]), (command, result.text)  # type: ignore[index,call-overload]
    assert "new\n" == (host.root / "made.txt").read_text()


@pytest.mark.deep
@pytest.mark.smoke
@NEEDS
@pytest.mark.spec("requirements:X70")
async def test_no_sandboxed_command_writes_a_protected_file(host: Host) -> None:
    places = [place for place in PROTECTED if "*" not in place and place != ".git/"]
    files = [host.root / place / "file" if place.endswith("/") else host.root / place for place in places]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("as it was\n")
    tools = ToolRegistry(shell_tools(host.root, sandbox=True, shell="bash"))
    each = "(echo evil >> {0}) || true; rm -f {0} || true; mv {0} aside || true"
    script = "\n".join([each.format(shlex.quote(str(file))) for file in files])

    result = await tools.execute("run_terminal_command", {"command": script}, ToolContext.for_test())

    assert result.data["exit_code"] == 0, result.text  # type: ignore[index,call-overload]
    assert len(files) > 30
    assert [] == [str(file) for file in files if not file.is_file() or file.read_text() != "as it was\n"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"runner": lambda launch: launch}, "cannot combine sandbox=True with runner="),
        ({"home": "real"}, "cannot combine sandbox=True with runner= or home='real'"),
    ],
)
def test_options_that_would_undo_a_sandbox_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(DefinitionError, match=said):
        shell_tools(tmp_path, sandbox=True, **options)


def test_a_system_without_a_sandbox_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(DefinitionError, match=r"needs bubblewrap.*Debian"):
        shell_tools(tmp_path, sandbox=True)


def test_a_system_that_forbids_sandboxes_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "bwrap"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'setting up uid map: Permission denied' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")

    (tmp_path / "root").mkdir()
    with pytest.raises(DefinitionError, match="cannot create a sandbox here: setting up uid map"):
        shell_tools(tmp_path / "root", sandbox=True)


@pytest.mark.deep
@pytest.mark.smoke
@NEEDS
@pytest.mark.spec("reliability:HP8")
def test_no_sandbox_is_made_by_a_program_below_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A command in the sandbox may have written it, and it would be executed outside.
    """
    (tmp_path / "root/bin").mkdir(parents=True)
    (tmp_path / "link").symlink_to("root/bin")
    program = tmp_path / "root/bin/bwrap"
    program.write_text(f'#!/bin/sh\necho >>{tmp_path}/canary\nexec {shutil.which("bwrap")} "$@"\n')
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)

    for folder in (program.parent, "root/bin", tmp_path / "link"):
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin:/bin")
        shell_tools(tmp_path / "root", sandbox=True)
        with Workspace.bubblewrap(tmp_path / "root") as place:
            file_tools(place)

    assert not (tmp_path / "canary").exists()
