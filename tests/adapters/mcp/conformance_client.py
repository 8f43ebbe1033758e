"""
A client for the conformance suite of MCP: an agent whose tools come from the server of a scenario, and whose model calls one.

`conformance_client.py URL`; the scenario and what it gives to its client are in the environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
from mcp.client.auth import AuthorizationCodeResult, OAuthClientProvider
from mcp.client.auth.extensions.client_credentials import (
    ClientCredentialsOAuthProvider,
    PrivateKeyJWTOAuthProvider,
    SignedJWTParameters,
)
from mcp.client.auth.extensions.identity_assertion import IdentityAssertionOAuthProvider
from mcp.shared.auth import OAuthClientInformationFull, OAuthClientMetadata, OAuthToken

from stepengine import AgentDefinition, Engine, RunStatus
from stepengine.adapters.mcp import mcp_tools
from stepengine.testing import ScriptedModel, tool_call

SCENARIO = os.environ.get("MCP_CONFORMANCE_SCENARIO", "")
CONTEXT: dict[str, Any] = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}"))
CALLBACK = "http://localhost:3030/callback"
INPUTS: dict[str, dict[str, Any]] = {"srv__add_numbers": {"a": 5, "b": 3}}


class Storage:
    """
    Tokens of one process.
    """

    def __init__(self, client: OAuthClientInformationFull | None) -> None:
        self.client, self.tokens = client, None

    async def get_tokens(self) -> OAuthToken | None:
        return self.tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.tokens = tokens  # type: ignore[assignment]

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self.client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self.client = client_info


class Browser:
    """
    Somebody who signs in at once: the address of the page leads straight back.
    """

    def __init__(self) -> None:
        self.back = ""

    async def open(self, url: str) -> None:
        async with httpx2.AsyncClient() as client:
            self.back = (await client.get(url)).headers["location"]

    async def result(self) -> AuthorizationCodeResult:
        said = {name: values[0] for name, values in parse_qs(urlsplit(self.back).query).items()}
        return AuthorizationCodeResult(code=said["code"], state=said.get("state"), iss=said.get("iss"))


def make_auth(url: str) -> Any:
    """
    Return what signs the requests of a scenario; ``None`` for one without.
    """
    if not SCENARIO.startswith("auth/"):
        return None
    if SCENARIO == "auth/client-credentials-basic":
        return ClientCredentialsOAuthProvider(url, Storage(None), CONTEXT["client_id"], CONTEXT["client_secret"])
    if SCENARIO == "auth/client-credentials-jwt":
        name = CONTEXT["client_id"]
        key, kind = CONTEXT["private_key_pem"], CONTEXT["signing_algorithm"]
        signed = SignedJWTParameters(issuer=name, subject=name, signing_key=key, signing_algorithm=kind)
        return PrivateKeyJWTOAuthProvider(url, Storage(None), name, signed.create_assertion_provider())
    known = None
    if "client_secret" in CONTEXT:
        known = OAuthClientInformationFull(
            client_id=CONTEXT["client_id"], client_secret=CONTEXT["client_secret"], redirect_uris=[CALLBACK],
            token_endpoint_auth_method="client_secret_basic",
        )  # fmt: skip
    browser = Browser()
    kinds = ["authorization_code", "refresh_token"]
    about = OAuthClientMetadata(client_name="stepengine", redirect_uris=[CALLBACK], grant_types=kinds)
    page = "https://conformance-test.local/client-metadata.json"
    return OAuthClientProvider(url, about, Storage(known), browser.open, browser.result, client_metadata_url=page)


async def make_identity_auth(url: str) -> Any:
    """
    Return what signs requests with a token of another company: its identity is exchanged for an assertion.
    """
    base = f"{urlsplit(url).scheme}://{urlsplit(url).netloc}"
    async with httpx2.AsyncClient() as client:
        about = (await client.get(f"{base}/.well-known/oauth-protected-resource/mcp")).json()

    async def assertion(audience: str, resource: str) -> str:
        asked = {
            "grant_type": "urn:ietf:params:oauth:grant-type:token-exchange",
            "requested_token_type": "urn:ietf:params:oauth:token-type:id-jag",
            "subject_token": CONTEXT["idp_id_token"],
            "subject_token_type": "urn:ietf:params:oauth:token-type:id_token",
            "audience": audience, "resource": resource, "client_id": CONTEXT["idp_client_id"],
        }  # fmt: skip
        async with httpx2.AsyncClient() as client:
            return str((await client.post(CONTEXT["idp_token_endpoint"], data=asked)).json()["access_token"])

    return IdentityAssertionOAuthProvider(
        url, Storage(None), CONTEXT["client_id"], CONTEXT["client_secret"], about["authorization_servers"][0], assertion,
        token_endpoint_auth_method="client_secret_basic",
    )  # fmt: skip


class Person:
    """
    Somebody who takes the default of each field.
    """

    def ask(self, question: Any) -> str:
        return "default"


def call_tool(request: Any) -> Any:
    """
    Play a model that calls the tool of the server.
    """
    name = request.tools[0].name
    return tool_call(name, INPUTS.get(name, {}))


async def main(url: str) -> int:
    auth = await make_identity_auth(url) if "idp_id_token" in CONTEXT else make_auth(url)
    source = mcp_tools(url, name="srv", auth=auth, timeout=20, start_timeout=20)
    agent = AgentDefinition("worker", model="test/model", tools=[source])
    model = ScriptedModel(["done"] if SCENARIO == "initialize" else [call_tool, "done"])
    async with Engine([agent], models=model, interactor=Person()) as engine:
        result = await engine.run("worker", "Go.")
    print(result.status, result.error or "", *[(one.result.status, one.result.text) for one in result.tool_calls])
    return 0 if result.status is RunStatus.COMPLETED else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1])))
