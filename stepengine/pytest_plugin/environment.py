"""Placeholders for the credentials in the environment of a test that replays."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from stepengine.pytest_plugin.places import recording_file


@contextmanager
def set_placeholder_keys(item: pytest.Item, *, replays: bool) -> Iterator[None]:
    """Replace the credentials of providers in the environment for a while: a replay sends nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if replays:
            from stepengine.testing.placeholders import placeholder_variables

            for name, value in placeholder_variables(os.environ, _recorded_hosts(item)).items():
                if value is None:
                    patch.delenv(name)
                else:
                    patch.setenv(name, value)
        yield


def _recorded_hosts(item: pytest.Item) -> Iterable[str]:
    from stepengine.errors import DataError
    from stepengine.testing.placeholders import hosts_of
    from stepengine.testing.recordings import interactions_of

    file = recording_file(item, "cassette")
    try:
        return hosts_of([i.request.url for i in interactions_of(file)]) if file.is_file() else ()
    except DataError:  # it is told by the fixture that reads it
        return ()
