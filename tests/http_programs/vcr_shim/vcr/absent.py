"""
What only vcrpy has: a test that uses it is skipped.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NoReturn

import pytest

ABSENT = {
    "vcr.filters": ("brotli", "decode_response"),
    "vcr.patch": ("force_reset",),
    "vcr.persisters.filesystem": ("CassetteDecodeError", "CassetteNotFoundError", "FilesystemPersister"),
    "vcr.request": ("Request",),
    "vcr.stubs": ("VCRHTTPResponse",),
    "vcr.stubs.aiohttp_stubs": ("MockStream", "build_response"),
    "vcr.stubs.urllib3_stubs": ("VCRRequestsHTTPSConnection",),
}
"""Modules of vcrpy, and what tests import from them."""


def skip(what: str) -> NoReturn:
    pytest.skip(f"not applicable: {what}")


def make_absent(name: str) -> Any:
    """
    Return a class that skips the test which makes an object of it, or asks for one of its attributes.
    """

    class Meta(type):
        def __getattr__(cls, attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            skip(f"{name}, an internal class of vcrpy")

        def __call__(cls, *_: Any, **__: Any) -> Any:
            skip(f"{name}, an internal class or function of vcrpy")

        def __instancecheck__(cls, instance: object) -> bool:
            skip(f"{name}, an internal class of vcrpy")

    return Meta(name, (), {})


def install() -> None:
    """
    Make the absent modules importable.
    """
    for name, members in ABSENT.items():
        module = ModuleType(name)
        vars(module).update({member: make_absent(member) for member in members})
        sys.modules[name] = module
