"""
The tables of the reference are made from the tables of the package.
"""

from __future__ import annotations

from .test_site import script

MAKER = script("make_reference_tables")


def test_the_page_of_errors_has_them_all() -> None:
    assert MAKER.error_page() == MAKER.ERRORS_PAGE.read_text(encoding="utf-8"), "python docs/make_reference_tables.py"


def test_the_page_about_limits_has_them_all() -> None:
    assert MAKER.limits() == MAKER.LIMITS_PAGE.read_text(encoding="utf-8"), "python docs/make_reference_tables.py"


def test_the_page_of_events_has_them_all() -> None:
    assert MAKER.events() == MAKER.EVENTS_PAGE.read_text(encoding="utf-8"), "python docs/make_reference_tables.py"
