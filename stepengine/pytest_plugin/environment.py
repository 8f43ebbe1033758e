"""Placeholders for the credentials in the environment of a test that replays."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from stepengine.pytest_plugin.places import make_recording_path


@contextmanager
def set_placeholder_keys(item: pytest.Item, *, replays: bool) -> Iterator[None]:
    """Replace the credentials of providers in the environment inside the block, if the test *replays*."""
    with pytest.MonkeyPatch.context() as patch:
        if replays:
            from stepengine.testing.placeholders import make_replay_variables

            for name, value in make_replay_variables(os.environ, _list_recorded_hosts(item)).items():
                if value is None:
                    patch.delenv(name)
                else:
                    patch.setenv(name, value)
        yield


def _list_recorded_hosts(item: pytest.Item) -> Iterable[str]:
    """Return the hosts in the cassette of a test; none without a readable one."""
    from stepengine.errors import DataError
    from stepengine.testing.placeholders import list_hosts
    from stepengine.testing.recordings import load_interactions

    file = make_recording_path(item, "cassette")
    try:
        return list_hosts([i.request.url for i in load_interactions(file)]) if file.is_file() else ()
    except DataError:  # the fixture that reads it reports the error
        return ()
