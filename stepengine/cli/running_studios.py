"""
The running studios of this user on this machine, so that ``stepengine studio --link`` can print new login links.

Each studio has a file in the user's state folder, which only its owner can read. It holds the address and a token of the operator.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stepengine.cli.settings import UsageProblem
from stepengine.data.alike import list_names
from stepengine.journal.recorded_runs import get_runs_folder
from stepengine.workspace.atomic import replace_path

STUDIOS = "studios"
SECONDS = 5.0


@contextlib.contextmanager
def announce_studio(folder: Path, url: str, host: str, token: str) -> Iterator[None]:
    """
    Announce a running studio of *folder* during the block, in a file that only its owner can read; ignore errors.

    *url* is its address on this machine, *host* the name and port at which browsers open it.
    """
    runs = get_runs_folder()
    if runs is None:
        yield
        return
    told = {"url": url, "host": host, "token": token, "folder": str(folder.resolve()), "pid": os.getpid()}
    file = runs.parent / STUDIOS / f"{secrets.token_hex(8)}.json"
    with contextlib.suppress(OSError):
        file.parent.mkdir(0o700, parents=True, exist_ok=True)
        replace_path(file, json.dumps(told).encode(), mode=0o600)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def request_login_links(folder: Path) -> list[str]:
    """
    Return a new login link of each running studio of *folder*; files of studios that were killed are removed.

    Raises:
        UsageProblem: when no studio of that folder is running.
    """
    links: list[str] = []
    others: list[str] = []
    for file, told in _read_announcements():
        link = _request_login_link(told, file)
        if link is None:
            continue
        if Path(told["folder"]) == folder.resolve():
            links.append(link)
        else:
            others.append(str(told["folder"]))
    if not links:
        known = f" Running: {list_names(sorted(set(others)))}; name one as FOLDER." if others else ""
        msg = f"no studio of {str(folder.resolve())!r} is running.{known} `stepengine studio` starts one"
        raise UsageProblem(msg)
    return links


def _read_announcements() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield each readable announcement file of a studio with its content."""
    runs = get_runs_folder()
    for file in [] if runs is None else sorted((runs.parent / STUDIOS).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            told = json.loads(file.read_text(encoding="utf-8"))
            if all(isinstance(told[name], str) for name in ("url", "token", "folder", "host")):
                yield file, told


def _request_login_link(studio: dict[str, Any], file: Path) -> str | None:
    """Request a new login link; ``None`` if the studio does not answer. The file of a dead studio is removed."""
    import httpx2

    # The Host header is the name that the studio accepts, which may differ from its address.
    headers = {"authorization": f"Bearer {studio['token']}", "host": studio["host"]}
    try:
        with httpx2.Client(timeout=SECONDS, trust_env=False, follow_redirects=False) as client:
            answer = client.post(f"{studio['url']}/login/links", headers=headers)
        return f"http://{studio['host']}{answer.json()['link']}" if answer.is_success else None
    except httpx2.ConnectError:
        file.unlink(missing_ok=True)
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, KeyError, TypeError):
        pass
    return None
