"""
Placeholders for credentials: those that are set, and those that the recorded providers need.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepengine.testing.placeholders import list_hosts, make_replay_variables

pytestmark = pytest.mark.spec("replay:Y11")


@pytest.mark.parametrize(
    ("environ", "urls", "expected"),
    [
        ({}, (), {"ANTHROPIC_API_KEY": "replay", "GEMINI_API_KEY": "replay", "OPENAI_API_KEY": "replay"}),
        ({}, ("https://api.groq.com/openai/v1/chat/completions",), {"GROQ_API_KEY": "replay"}),
        (
            {"OPENAI_API_KEY": "sk-live", "OPENAI_BASE_URL": "https://a.test", "MY_API_KEY": "own"},
            ("https://api.anthropic.com/v1/messages",),
            {"OPENAI_API_KEY": "replay", "ANTHROPIC_API_KEY": "replay"},
        ),
        (
            {"AWS_SESSION_TOKEN": "t", "AWS_PROFILE": "p", "AWS_REGION": "r"},
            ("https://bedrock-runtime.us-east-1.amazonaws.com/model/m/converse",),
            {
                "AWS_ACCESS_KEY_ID": "replay",
                "AWS_SECRET_ACCESS_KEY": "replay",
                "AWS_SESSION_TOKEN": None,
                "AWS_PROFILE": None,
            },
        ),
        (
            {"AWS_BEARER_TOKEN_BEDROCK": "t"},
            ("https://bedrock-runtime.us-east-1.amazonaws.com/model/m/converse",),
            {"AWS_BEARER_TOKEN_BEDROCK": "replay"},
        ),
        (
            {"GOOGLE_API_KEY": "g"},
            ("https://generativelanguage.googleapis.com/v1beta/m",),
            {"GOOGLE_API_KEY": "replay"},
        ),
    ],
)
def test_credentials_are_replaced_and_addresses_stay(environ, urls, expected):
    assert expected == make_replay_variables(environ, list_hosts(urls))


def test_google_gets_placeholder_credentials():
    changes = make_replay_variables({}, list_hosts(["https://us-central1-aiplatform.googleapis.com/v1/projects/p"]))
    assert ["GOOGLE_APPLICATION_CREDENTIALS"] == list(changes)
    tree = json.loads(Path(changes["GOOGLE_APPLICATION_CREDENTIALS"] or "").read_text())
    assert ("authorized_user", "replay") == (tree["type"], tree["refresh_token"])
