"""Named promises of an interface, and the report of a broken one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Generic, TypeVar

Make = TypeVar("Make")


class Promises(Generic[Make]):
    """
    The promises of one interface, in the order in which they are checked.

    Args:
        call: The call of the public function that checks them, for messages: ``"check_journal(make"``, without optional arguments.
    """

    def __init__(self, call: str) -> None:
        self._call = call
        self._checks: dict[str, tuple[str, Callable[[Make], None]]] = {}

    def add(self, name: str, text: str) -> Callable[[Callable[[Make], None]], Callable[[Make], None]]:
        """Return a decorator that registers the check of a promise."""

        def register(check: Callable[[Make], None]) -> Callable[[Make], None]:
            self._checks[name] = text, check
            return check

        return register

    def check(self, make: Make, only: str = "", skip: Collection[str] = ()) -> None:
        """
        Check all promises but those in *skip*, or only *only*; fail if one is broken or cannot be checked.

        Raises:
            AssertionError: for the first broken promise, or at the end for all that could not be checked.
            ValueError: when there is no promise *only*, or none with a name in *skip*.
        """
        for name in (only, *skip):
            if name and name not in self._checks:
                msg = f"unknown promise {name!r}; valid promises: {', '.join(self._checks)}"
                raise ValueError(msg)
        unchecked: dict[str, str] = {}
        for name in [only] if only else [name for name in self._checks if name not in skip]:
            try:
                self._check_promise(name, make)
            except UncheckedPromise as error:
                unchecked[name] = str(error)
        if unchecked:
            reasons = "\n".join([f"{name!r}: {why}" for name, why in unchecked.items()])
            skipped = [name for name in self._checks if name in unchecked or name in skip]
            msg = f"unchecked promises:\n{reasons}\nTo leave them out: {self._call}, skip={skipped})"
            raise AssertionError(msg)

    def _check_promise(self, name: str, make: Make) -> None:
        """Call the check of the promise *name*; any error of it becomes an ``AssertionError`` with the broken promise."""
        text, check = self._checks[name]
        try:
            check(make)
        except UncheckedPromise:
            raise
        except Exception as error:
            why = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            msg = f"broken promise {name!r}: {text}\n{why}\nTo check only this promise: {self._call}, only={name!r})"
            raise AssertionError(msg) from error


class UncheckedPromise(Exception):
    """A promise that cannot be checked with the object from *make*."""


def require(condition: object, why: str) -> None:
    """Raise ``AssertionError`` with *why* unless *condition* is true."""
    if not condition:
        raise AssertionError(why)


def require_equal(expected: object, found: object, subject: str) -> None:
    """Raise ``AssertionError`` unless *found* equals *expected*; *subject* names the value in the message."""
    if expected != found:
        msg = f"{subject}: expected {expected!r}, found {found!r}"
        raise AssertionError(msg)


def require_error(kinds: type[BaseException], action: Callable[[], object], subject: str) -> BaseException:
    """
    Return the error of one of these *kinds* that *action* raises.

    Raises:
        AssertionError: when it raises nothing, or anything else.
    """
    try:
        action()
    except kinds as error:
        return error
    except Exception as error:
        msg = f"{subject}: expected {kinds.__name__}, but {type(error).__name__} was raised: {error}"
        raise AssertionError(msg) from error
    msg = f"{subject}: expected {kinds.__name__}, but nothing was raised"
    raise AssertionError(msg)
