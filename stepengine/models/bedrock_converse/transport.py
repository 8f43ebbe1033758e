"""
Send encoded bytes to Bedrock, signed with AWS credentials (Signature Version 4) or with a Bedrock API key.

AWS has no asynchronous SDK for Python, and its synchronous SDK encodes bodies itself. Only its credentials and its signing
are used here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from stepengine.models._cloud_auth import AwsAuth
from stepengine.models._failures import HTTP_REDIRECT
from stepengine.models.keys import Secret, register_secret

SERVICE = "bedrock"
JSON = {"content-type": "application/json", "accept": "*/*"}


class AuthenticatedClient:
    """
    Sends requests to Bedrock, signed with AWS credentials or with a Bedrock API key.

    Args:
        aws: The authentication.
        provider: The provider's name.
        base_url: The server.
        http_client: The HTTP client.
    """

    def __init__(self, aws: AwsAuth, provider: str, base_url: str, http_client: Any) -> None:
        self._aws = aws
        self._provider = provider
        self._base_url = base_url.rstrip("/")
        self._http_client = http_client
        self._finding = asyncio.Lock()
        self._found: Any = None

    async def post_streaming(self, path: str, content: bytes, headers: Mapping[str, str]) -> Any:
        """
        Send *content* with credentials to *path*; return the HTTP library's response before its body is read.

        Raises:
            httpx2.HTTPStatusError: for a reply with an error status, after its body was read.
        """
        request = self._http_client.build_request(
            "POST", self._base_url + path, content=content, headers={**JSON, **headers}
        )
        bearer = self._aws.find_api_key()
        if bearer is not None:
            request.headers["authorization"] = f"Bearer {bearer.reveal()}"
        else:
            request.headers.update(await self._make_signed_headers(request, content, headers))
        response = await self._http_client.send(request, stream=True)
        if response.status_code >= HTTP_REDIRECT:
            try:
                await response.aread()
            finally:
                await response.aclose()
            response.raise_for_status()
        return response

    async def _make_signed_headers(self, request: Any, content: bytes, headers: Mapping[str, str]) -> dict[str, str]:
        """Load the access key, and return headers with a signature of the host of *request*, of *content* and of *headers*."""
        from botocore.auth import SigV4Auth
        from botocore.awsrequest import AWSRequest

        credentials = await self._load_signing_credentials()
        told = {name: request.headers[name] for name in ("host", *JSON, *headers)}
        unsigned = AWSRequest("POST", str(request.url), headers=told, data=content)
        SigV4Auth(credentials, SERVICE, self._aws.find_region()).add_auth(unsigned)
        return dict(unsigned.headers.items())

    async def _load_signing_credentials(self) -> Any:
        """Return the access key, registered for redaction; without an explicit one, load it in a thread, which may send requests."""
        from botocore.credentials import ReadOnlyCredentials

        keys = self._aws.get_signing_keys_or_profile()
        if "secret_key" in keys:
            return ReadOnlyCredentials(keys["access_key"], keys["secret_key"], keys["session_token"])
        async with self._finding:
            frozen = await asyncio.to_thread(self._load_profile_credentials, keys["profile"])
        register_secret(self._provider, Secret(frozen.secret_key), "secret_key")
        return frozen

    def _load_profile_credentials(self, profile: str | None) -> Any:
        """Return the current access key of *profile*, renewed if necessary; raise ``NoCredentialsError`` if there is none."""
        from botocore.exceptions import NoCredentialsError
        from botocore.session import Session

        if self._found is None:
            self._found = Session(profile=profile).get_credentials()
        if self._found is None:
            raise NoCredentialsError
        return self._found.get_frozen_credentials()
