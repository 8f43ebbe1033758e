"""The processes that a test started, found by a variable of their environment."""

from __future__ import annotations

import os

RUN_VARIABLE = "TEST_RUN"


def running_with(value: str) -> list[bytes]:
    """
    Return the command lines of the other processes that have a value of ``RUN_VARIABLE``.
    """
    found = []
    wanted = f"{RUN_VARIABLE}={value}".encode()
    for number in filter(str.isdecimal, os.listdir("/proc")):  # noqa: PTH208 - plain strings: this happens after each test
        try:
            with open(f"/proc/{number}/environ", "rb") as file:  # noqa: PTH123
                is_wanted = wanted in file.read()
            if is_wanted and int(number) != os.getpid():
                with open(f"/proc/{number}/cmdline", "rb") as file:  # noqa: PTH123
                    found.append(file.read())
        except OSError:
            continue
    return found
