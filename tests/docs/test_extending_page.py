"""
`docs/extending.md` is so: each of its blocks runs, and it names the types of what has to be implemented.
"""

from __future__ import annotations

import builtins
import collections.abc
import datetime as dt
import importlib
import inspect
import pathlib
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepengine import Interactor
from stepengine.journal import Journal, LineJournal, Writer
from stepengine.models import Provider
from stepengine.sandbox import ProgramSession, Sandbox
from stepengine.sessions import (
    CacheStore,
    DeletingStore,
    DocumentSessions,
    SessionStore,
    StateStore,
    TurnStore,
    VersionedStore,
)
from stepengine.tools import ToolSource
from tests.test_surface import MODULES

from .pages import blocks_of, execute, page

INTERFACES = (
    *(Provider, Journal, LineJournal, Writer, DocumentSessions, SessionStore, StateStore, DeletingStore, CacheStore),
    *(VersionedStore, TurnStore, ToolSource, Interactor, Sandbox, ProgramSession),
)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.leaks_allowed("the workers of programs belong to the process, and wait for its next program")
def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks_of(page("extending.md")):
        execute(block, "extending.md", names)
    assert names


def types_to_implement(interface: type) -> Iterator[str]:
    """
    Give the names of our types in the signatures of the methods that a subclass, or an object with a protocol, must have.
    """
    required = getattr(interface, "__abstractmethods__", None) or [n for n in vars(interface) if not n.startswith("_")]
    for name in sorted(required):
        member = inspect.getattr_static(interface, name)
        for text in getattr(getattr(member, "fget", member), "__annotations__", {}).values():
            for found in re.findall(r"\b[A-Z]\w+", str(text)):
                if not any(hasattr(module, found) for module in (builtins, typing, collections.abc, dt, pathlib)):
                    yield found


@pytest.mark.spec("ecosystem:EC232")
@pytest.mark.parametrize("interface", INTERFACES, ids=lambda interface: interface.__name__)
def test_types_of_an_interface_are_public_and_on_the_page(interface: type) -> None:
    public = {name for module in MODULES for name in importlib.import_module(module).__all__}
    known = set(re.findall(r"\w+", page("extending.md")))
    needed = set(types_to_implement(interface)) - {"MaybeAwaitable"}  # a value, or an awaitable of it

    assert set() == needed - public
    assert set() == (needed | {interface.__name__}) - known
