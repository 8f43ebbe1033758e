"""
vcrpy's names over our cassettes, so that its own integration tests run on them.

A record mode stands for ours. A test that needs what only vcrpy has is skipped where it asks for it, with the reason. With
``VCR_SHIM_LIVE=1`` a cassette does nothing, to see what tests do without one.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import ANY
from urllib.parse import urlsplit

from stepengine.testing.recordings import CassetteFixture

from . import cassette, errors
from .absent import install, skip

install()

__all__ = ("VCR", "cassette", "default_vcr", "errors", "mode", "use_cassette")


class mode(StrEnum):  # noqa: N801 - its name in vcrpy
    ALL = "all"
    ANY = "any"
    NEW_EPISODES = "new_episodes"
    NONE = "none"
    ONCE = "once"


OURS = {"once": "once", "none": "none", "new_episodes": "new", "all": "rewrite"}
WITHOUT_EFFECT = {
    "match_on": "ours always compares everything that counts",
    "additional_matchers": "ours always compares everything that counts",
    "mode": "no option of vcrpy either",
}


class UsedCassette(contextlib.ContextDecorator):
    """
    A cassette as vcrpy's tests see it.
    """

    def __init__(self, path: Any, record_mode: str = "once", **options: Any) -> None:
        for name in options:
            if name not in WITHOUT_EFFECT:
                skip(f"the option {name} of vcrpy")
        self.path = Path(str(path))
        self.record_mode = str(record_mode)

    def __enter__(self) -> Self:
        self.ours = CassetteFixture(self.path, OURS[self.record_mode], record_errors=True, allow_unused=True)
        self._patch = self.ours.patch()
        self._patch.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.__exit__(*error)
        for exchange in [*self.ours.fresh.open_exchanges]:
            exchange.finish(read_to_end=False)
        self._save()

    def _save(self, *, force: bool = False) -> None:
        self.ours.write_recordings()

    def __call__(self, function: Any) -> Any:
        if not inspect.iscoroutinefunction(function):
            return super().__call__(function)

        async def inside(*args: Any, **kwargs: Any) -> Any:
            with UsedCassette(self.path, self.record_mode):
                return await function(*args, **kwargs)

        return inside

    @property
    def _held(self) -> list[Any]:
        """
        What vcrpy would hold: it has no errors that a program met.
        """
        recorded = [*self.ours.interactions, *self.ours.fresh.interactions]
        return [one for one in recorded if one.is_playable and "error" not in one.extras]

    def __len__(self) -> int:
        return len(self._held)

    @property
    def play_count(self) -> int:
        return len(self.ours) - len(self.ours.unused)

    @property
    def all_played(self) -> bool:
        return self.play_count == len(self)

    @property
    def requests(self) -> list[Any]:
        return [
            SimpleNamespace(
                url=one.request.url,
                uri=one.request.url,
                path=urlsplit(one.request.url).path,
                method=one.request.method,
                body=one.request.body,
                headers=Headers(one.request.headers),
            )
            for one in self._held
        ]

    @property
    def responses(self) -> list[dict[str, Any]]:
        return [
            {
                "status": {"code": one.response.status, "message": one.response.reason},
                "body": {"string": one.response.body},
                "headers": Headers(one.response.headers),
            }
            for one in self._held
        ]

    @property
    def data(self) -> list[tuple[Any, dict[str, Any]]]:
        return [*zip(self.requests, self.responses, strict=True)]


class Headers(dict[str, Any]):
    """
    The values of headers by name, whatever its case; of requests, which vcrpy keeps so, one value.
    """

    def __init__(self, pairs: Any) -> None:
        super().__init__()
        for name, value in pairs:
            self.setdefault(name.lower(), []).append(value)

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name.lower())

    def __contains__(self, name: object) -> bool:
        return super().__contains__(str(name).lower())


class NoCassette(contextlib.ContextDecorator):
    """
    A cassette that does nothing, and says what a test wants to hear.
    """

    play_count = ANY

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __len__(self) -> int:
        return 0


class UnnamedCassette:
    """
    A cassette whose name vcrpy chooses: a test with it is skipped when it runs.
    """

    def __enter__(self) -> Self:
        skip("a cassette with a name of vcrpy's choice")

    def __exit__(self, *error: object) -> None: ...

    def __call__(self, _: Any) -> Any:
        return lambda *args, **kwargs: skip("a cassette with a name of vcrpy's choice")


def use_cassette(path: Any = None, **options: Any) -> Any:
    if os.environ.get("VCR_SHIM_LIVE"):
        return NoCassette()
    if path is None or callable(path):
        return UnnamedCassette()
    return UsedCassette(path, **options)


class VCR:
    """
    Options for several cassettes.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options

    def use_cassette(self, path: Any = None, **options: Any) -> Any:
        return use_cassette(path, **{**self._options, **options})

    def __getattr__(self, name: str) -> Any:
        skip(f"VCR.{name}")


default_vcr = SimpleNamespace(ensure_suffix=lambda suffix: None)
