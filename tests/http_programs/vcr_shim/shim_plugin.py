"""
A plugin of pytest for vcrpy's integration tests: it names those that do not apply to our cassettes, each with the reason.

Other tests are skipped by the module ``vcr`` here, where they ask for an option or a class that only vcrpy has.
"""

from __future__ import annotations

import os
import re

import pytest
import pytest_httpbin.certs

ONLY_LIVE = bool(os.environ.get("VCR_SHIM_LIVE"))

LIVE = "fails without a cassette, too, and a cassette changes nothing"
NOT_APPLICABLE = {
    r"test_niquests\.py": "niquests has connections of its own, which a recording names",
    r"test_tornado\.py": "tornado has connections of its own or libcurl's, which a recording names",
    r"test_simple_fetching|test_flickr_should_respond|test_amazon_doctype": "needs the internet",
    r"test_stubs\.py|test_disksaver\.py|test_register_\w+\.py": "internal classes of vcrpy",
    r"test_aiohttp\.py::test_post(\[|_file)|test_requests\.py::test_post_file": "vcrpy's form of a request's body, and its log",
    r"test_aiohttp\.py::test_cookies": "values of cookies are taken out of the file",
    r"test_nested_cassettes": "a second cassette of one process is refused: a request could belong to either",
    r"httpx_old_format": "an old form of vcrpy's files",
    r"test_multiple\.py|test_matchers\.py": "a choice of what is compared: ours always compares everything that counts",
    r"completed_stream_once\[httpx2?-True": "a reply is complete, also if its connection does not close well",
    r"cancelled_async_stream\[httpx2?-False": "what was read of a reply is kept, and a replay breaks off where it did",
    r"test_all_record_mode_replaces": "rewrite records everything again, as vcrpy does with drop_unused_requests",
    r"test_httpx_stream_cleanup\.py::.*(failed_\w+_stream|cancelled_async_stream)\[httpx2?-True\]": LIVE,
    r"test_urllib3\.py::test_url": LIVE,
    r"test_streaming_request_body\.py": LIVE,
    r"test_release_conn_restores_pool_capacity\[True": LIVE,
    r"test_flickr_multipart_upload": LIVE,
}


def pytest_configure() -> None:
    """
    Let requests trust the server of the tests.
    """
    os.environ["REQUESTS_CA_BUNDLE"] = pytest_httpbin.certs.where()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """
    Skip what does not apply; with ``VCR_SHIM_LIVE=1`` run only what is said to fail without a cassette, and fail where it passes.
    """
    reasons = [
        next((why for name, why in NOT_APPLICABLE.items() if re.search(name, item.nodeid)), "") for item in items
    ]
    for item, reason in zip(items, reasons, strict=True):
        if reason:
            mark = pytest.mark.xfail(strict=True) if ONLY_LIVE else pytest.mark.skip(reason=f"not applicable: {reason}")
            item.add_marker(mark)
    if ONLY_LIVE:
        items[:] = [item for item, reason in zip(items, reasons, strict=True) if reason == LIVE]
