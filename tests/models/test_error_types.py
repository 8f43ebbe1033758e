"""What the types that providers give their errors count as, where no HTTP status says it: inside a reply that began well."""

from __future__ import annotations

import pytest

from stepengine.models._failures import STATUS_OF_TYPE, error_from_body
from tests.models.wires import made

STATUSES = {
    "DEADLINE_EXCEEDED": (504, True),
    "INTERNAL": (500, True),
    "INVALID_ARGUMENT": (400, False),
    "NOT_FOUND": (404, False),
    "PERMISSION_DENIED": (403, False),
    "RESOURCE_EXHAUSTED": (429, True),
    "UNAUTHENTICATED": (401, False),
    "UNAVAILABLE": (503, True),
    "accessDeniedException": (403, False),
    "api_error": (500, True),
    "authentication_error": (401, False),
    "billing_error": (402, False),
    "insufficient_quota": (429, False),
    "internalServerException": (500, True),
    "internal_server_error": (500, True),
    "invalid_request_error": (400, False),
    "modelStreamErrorException": (500, True),
    "modelTimeoutException": (408, True),
    "not_found_error": (404, False),
    "overloaded_error": (529, True),
    "permission_error": (403, False),
    "rate_limit_error": (429, True),
    "rate_limit_exceeded": (429, True),
    "request_too_large": (413, False),
    "server_error": (500, True),
    "serviceUnavailableException": (503, True),
    "service_unavailable": (503, True),
    "slow_down": (503, True),
    "throttlingException": (429, True),
    "timeout_error": (504, True),
    "validationException": (400, False),
    "vector_store_timeout": (504, True),
    "bio_policy": (400, False),
    "data_residency_mismatch": (400, False),
    "empty_image_file": (400, False),
    "failed_to_download_image": (400, False),
    "image_content_policy_violation": (400, False),
    "image_file_not_found": (400, False),
    "image_file_too_large": (400, False),
    "image_parse_error": (400, False),
    "image_too_large": (400, False),
    "image_too_small": (400, False),
    "misalignment_policy_violation": (400, False),
    "unsupported_image_media_type": (400, False),
    "invalid_image": (400, False),
    "never_heard_of_it": (None, True),
}


@pytest.mark.spec("reliability:MP22", "reliability:MP06")
@pytest.mark.parametrize("field", ["type", "code", "status"])
def test_an_error_inside_a_reply_counts_as_its_type_says(field):
    for word, row in STATUSES.items():
        error = error_from_body({"error": {field: word, "message": "No such luck."}}, None, {}, made("anthropic"))

        assert row == (error.status, error.retryable), word


def test_every_known_error_type_is_in_the_table():
    assert set(STATUS_OF_TYPE) <= set(STATUSES)
