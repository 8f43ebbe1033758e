"""
Authentication of requests to clouds, by a region or project and by the cloud's own credentials.

Environment variables are read like in the clouds' own SDKs, on first use. Their packages are imported then, too.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, TypeAlias
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from stepengine.errors import MissingKey, ModelError
from stepengine.models.keys import (
    KEY_HOSTS,
    Credentials,
    Secret,
    find_defined_variable,
    is_trusted_url,
    make_safe_excerpt,
    register_secret,
    require_host_label,
)

TokenSource: TypeAlias = Callable[[], str | Awaitable[str]]
"""A function without arguments that returns a token for the next request; it may be asynchronous."""

AWS_BEARER = "AWS_BEARER_TOKEN_BEDROCK"
AWS_PLATFORM_KEY = "ANTHROPIC_AWS_API_KEY"
AWS_SIGNS = (
    *("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
)
AWS_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
AWS_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
GOOGLE_CREDENTIALS = "GOOGLE_APPLICATION_CREDENTIALS"
GOOGLE_PROJECTS = ("GOOGLE_CLOUD_PROJECT", "ANTHROPIC_VERTEX_PROJECT_ID")
GOOGLE_PLATFORM_PROJECTS = ("ANTHROPIC_GOOGLE_CLOUD_PROJECT", "GOOGLE_CLOUD_PROJECT")
GOOGLE_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
ANYWHERE = "global"
AZURE_TOKEN = "AZURE_OPENAI_AD_TOKEN"  # noqa: S105 - the name of a variable
ENTRA_SIGNS = ("AZURE_CLIENT_ID", "AZURE_TENANT_ID", "IDENTITY_ENDPOINT", "AZURE_TOKEN_CREDENTIALS")
"""Variables that indicate credentials for Entra ID: a principal or workload, a managed identity, or the choice of one."""
ENTRA_SCOPE = "https://ai.azure.com/.default"
ENTRA_TOLD = "The request was sent with an Entra ID token."
SAID_CHARS = 500
"""About three lines, the message of a credentials library without its traceback."""


class CloudAuth(ABC):
    """Authenticates requests to one cloud."""

    variables: Sequence[str] = ()
    """The usual environment variables with credentials."""

    @property
    @abstractmethod
    def has_passed_credentials(self) -> bool:
        """Whether the caller passed credentials, and so chose their host."""

    @abstractmethod
    def find_account_id(self) -> Secret | None:
        """Return an id of the cloud account, for shared rate limits; ``None`` if it is unknown. No request is sent."""

    @abstractmethod
    def resolve_credentials(self, provider: str) -> Credentials:
        """
        Return the key of *provider*, or a description of the credentials that the cloud's packages will load later.

        Raises:
            MissingKey: if no argument, variable or file names credentials.
            ModelError: when a package or a setting is missing.
        """

    @abstractmethod
    def list_credential_error_types(self) -> tuple[type[Exception], ...]:
        """Return the exception classes that the cloud's packages raise for missing credentials."""


def require_trusted_host(provider: str, auth: CloudAuth, url: str, default_url: str | None) -> None:
    """
    Raise ``MissingKey`` if *url* is an untrusted host for credentials of the environment.

    The hosts in ``STEPENGINE_KEY_HOSTS`` are trusted, and so is the host of *default_url* if *url* is encrypted like *default_url*.
    Credentials that the caller passed may be sent to any host.

    Raises:
        MissingKey: for any other host, and for a URL without encryption.
    """
    if auth.has_passed_credentials or is_trusted_url(url, default_url):
        return
    host = urlsplit(url).hostname or ""
    if default_url is not None and host == urlsplit(default_url).hostname:
        msg = (
            f"the URL of {provider!r} is not encrypted, and cloud credentials from the environment are not sent in plain text. "
            "Change its http:// to https://"
        )
        raise MissingKey(msg, kind="missing_key")
    msg = (
        f"the host of {provider!r} is {host!r}, and cloud credentials from the environment are sent only to hosts of the cloud. "
        f"Pass the credentials as arguments, or trust the host with {KEY_HOSTS}={host}"
    )
    raise MissingKey(msg, kind="missing_key")


def make_credentials_error(provider: str, model: str, error: BaseException, repair: str) -> ModelError:
    """Return the error for missing cloud credentials, or for a failure to renew them."""
    why = make_safe_excerpt(f"{type(error).__name__}: {error}", SAID_CHARS)
    msg = f"{provider} has no usable credentials for {model!r}: {why} {repair}"
    return MissingKey(msg, kind="credentials", retryable=bool(getattr(error, "retryable", False)))


def require_at_most_one_argument(provider: str, **arguments: object) -> None:
    """
    Raise ``ModelError`` if more than one of *arguments* is not ``None``; these are alternative arguments for authentication, by name.

    Raises:
        ModelError: for two or more, because the choice would be ambiguous.
    """
    given = [f"{name}=" for name, value in arguments.items() if value is not None]
    if len(given) > 1:
        msg = f"{provider!r} was given {' and '.join(given)}; pass only one of them"
        raise ModelError(msg, kind="settings")


def require_package_installed(provider: str, package: str, extra: str) -> None:
    """Raise ``ModelError`` if *package* is not installed; the message names *extra*, which installs it."""
    parent, module = package.partition("-")[0], package.replace("-", ".")
    if find_spec(parent) is None or find_spec(module) is None:
        msg = f"{provider!r} needs the package {package!r}, which is not installed: pip install 'stepengine[{extra}]'"
        raise ModelError(msg, kind="missing_sdk")


def _is_file(path: str) -> bool:
    """Return whether *path* is a file; ``~`` is the home folder, and without a home folder the result is false."""
    try:
        return Path(path).expanduser().is_file()
    except RuntimeError:
        return False


# --- Amazon -----------------------------------------------------------------------------------------------------------


class AwsAuth(CloudAuth):
    """
    Authenticates requests to Amazon Bedrock with a Bedrock API key, or with a signature by AWS credentials.

    Args:
        provider: The provider's name.
        region: The region; by default from the environment or the profile.
        profile: A profile of AWS's configuration files.
        access_key: The id of an access key.
        secret_key: The access key itself.
        session_token: The token of a temporary access key.
        api_key: A Bedrock API key.

    Raises:
        ModelError: for an incomplete access key, or one together with a Bedrock API key.
    """

    variables = (AWS_BEARER, "AWS_ACCESS_KEY_ID", "AWS_PROFILE")
    key_variable: ClassVar[str] = AWS_BEARER
    key_name: ClassVar[str] = "a Bedrock API key"
    made_by: ClassVar[str] = "BedrockProvider"

    def __init__(
        self,
        provider: str,
        *,
        region: str | None,
        profile: str | None,
        access_key: str | None,
        secret_key: str | Secret | None,
        session_token: str | Secret | None,
        api_key: str | Secret | None,
    ) -> None:
        if (access_key is None) != (secret_key is None):
            msg = f"{provider!r} was given half of an access key; pass both access_key= and secret_key="
            raise ModelError(msg, kind="settings")
        if access_key is None and session_token is not None:
            msg = f"{provider!r} was given session_token= without an access key; pass access_key= and secret_key=, too"
            raise ModelError(msg, kind="settings")
        require_at_most_one_argument(provider, api_key=api_key, access_key=access_key)
        self._provider = provider
        self._region = region
        self._profile = profile
        self._access_key = access_key
        self._secret_key = _make_registered_secret(provider, secret_key, "secret_key")
        self._session_token = _make_registered_secret(provider, session_token, "session_token")
        self._api_key = _make_registered_secret(provider, api_key, "api_key")

    @property
    def has_passed_credentials(self) -> bool:
        """Whether the caller passed a key or a profile."""
        return any(one is not None for one in (self._api_key, self._access_key, self._profile))

    def resolve_credentials(self, provider: str) -> Credentials:
        """Return the API key, or a description of the credentials that AWS's packages load with the first request."""
        bearer = self.find_api_key()
        # A machine at Amazon has credentials without a sign of them, so a region is accepted as one.
        is_named = (
            self.has_passed_credentials
            or self._region is not None
            or find_defined_variable((self.key_variable, *AWS_SIGNS, *AWS_REGIONS))
        )
        if not (is_named or any(_is_file(os.environ.get(variable) or usual) for variable, usual in AWS_FILES.items())):
            msg = (
                f"there are no AWS credentials for {provider!r}: set AWS_REGION and {self.key_variable}, or AWS_ACCESS_KEY_ID "
                f"and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or pass {self.made_by}(region=..., profile=...)"
            )
            raise MissingKey(msg, kind="missing_key")
        if bearer is None:
            require_package_installed(provider, "boto3", "bedrock")
        if self.find_region() is None:
            msg = (
                f"{provider!r} has no region: set AWS_REGION, such as AWS_REGION=us-east-1, name one in the profile, or pass "
                f"{self.made_by}(region=...)"
            )
            raise ModelError(msg, kind="missing_region")
        named = self.key_name if bearer is not None else self._describe_credentials()
        return Credentials(bearer, "AWS", told=f"Requests went to {self.find_region()} with {named}.")

    def _describe_credentials(self) -> str:
        """Return a phrase that names the source of the credentials for signatures."""
        if self._access_key is not None:
            return "the access key passed as access_key="
        if self._profile is not None:
            return f"the profile {self._profile!r}"
        found = find_defined_variable((self.key_variable, *AWS_SIGNS))
        return f"credentials from {found}" if found else "the credentials that boto3 found"

    def find_account_id(self) -> Secret | None:
        """Return the API key, else the id of the access key, else the name of the profile; ``None`` without them."""
        bearer, keys = self.find_api_key(), self.get_signing_keys_or_profile()
        named = keys.get("access_key") or keys.get("profile") or os.environ.get("AWS_PROFILE", "").strip()
        return bearer if bearer is not None or not named else Secret(named)

    def find_api_key(self) -> Secret | None:
        """Return the API key of the argument or the environment, registered for redaction; ``None`` if requests must be signed."""
        if self._api_key is not None or self._access_key is not None or self._profile is not None:
            return self._api_key
        return _make_registered_secret("bedrock", os.environ.get(self.key_variable, "").strip() or None, "api_key")

    def find_region(self) -> str | None:
        """
        Return the region of the argument, the environment or the profile; ``None`` if it is unknown.

        Raises:
            ModelError: when it cannot be a part of a host name.
        """
        region, source = self._region, "region="
        if not region and (variable := find_defined_variable(AWS_REGIONS)) is not None:
            region, source = os.environ[variable].strip(), variable
        if not region:
            region, source = _read_profile_region(self._profile), "the profile"
        return None if region is None else require_host_label(self._provider, region, "region", source)

    def get_signing_keys_or_profile(self) -> dict[str, str | None]:
        """
        Return the access key of the arguments or the environment, else ``{"profile": ...}``, where ``None`` is the default profile.

        A key of the environment is registered for redaction. It is passed explicitly, because AWS's packages cache keys forever.
        """
        access_key, secret, token = self._access_key, self._secret_key, self._session_token
        if access_key is None and self._profile is None and find_defined_variable(("AWS_ACCESS_KEY_ID",)):
            access_key = os.environ["AWS_ACCESS_KEY_ID"].strip()
            secret = _make_registered_secret(
                "aws", os.environ.get("AWS_SECRET_ACCESS_KEY", "").strip() or None, "secret_key"
            )
            token = _make_registered_secret(
                "aws", os.environ.get("AWS_SESSION_TOKEN", "").strip() or None, "session_token"
            )
        if secret is None:
            return {"profile": self._profile}
        shown = None if token is None else token.reveal()
        return {"access_key": access_key, "secret_key": secret.reveal(), "session_token": shown}

    def list_credential_error_types(self) -> tuple[type[Exception], ...]:
        """Return the exception classes for missing credentials of boto3, once it is loaded, and of the SDK's signing."""
        found = sys.modules.get("botocore.exceptions")
        return (RuntimeError,) if found is None else (RuntimeError, found.BotoCoreError)


class AwsPlatformAuth(AwsAuth):
    """Authenticates requests to Claude on AWS with an API key of that platform, or with a signature by AWS credentials."""

    variables = (AWS_PLATFORM_KEY, "AWS_ACCESS_KEY_ID", "AWS_PROFILE")
    key_variable = AWS_PLATFORM_KEY
    key_name = "an API key of Claude on AWS"
    made_by = "AnthropicAwsProvider"


_regions: dict[tuple[str | None, ...], str] = {}
"""A cache of the regions of profiles, because botocore needs 7 ms to read its files, and every run needs them."""


def _read_profile_region(profile: str | None) -> str | None:
    """Return the region in a profile of AWS's files, cached; ``None`` without a region or without botocore."""
    key = (profile, *[os.environ.get(name) for name in ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", *AWS_FILES, "HOME")])
    if key not in _regions and find_spec("botocore") is not None:
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session

        try:
            region = Session(profile=profile).get_config_variable("region")
        except BotoCoreError:
            return None
        if region:
            _regions[key] = region
    return _regions.get(key)


def _make_registered_secret(provider: str, value: str | Secret | None, member: str) -> Secret | None:
    """Return a value as a ``Secret``, registered for redaction; ``None`` for ``None``."""
    found = Secret(value.strip()) if isinstance(value, str) else value
    register_secret(provider, found, member)
    return found


# --- Google -----------------------------------------------------------------------------------------------------------


class GoogleAuth(CloudAuth):
    """
    Authenticates requests to Vertex AI with Google's short-lived tokens, in a project and a location.

    Args:
        provider: The provider's name.
        project: The project; by default from the environment, else that of the credentials.
        location: The location, such as ``"us-east5"``; by default from the environment, else ``"global"``.
        credentials: Credentials of ``google-auth``, or a token; by default ``google-auth`` looks for them.
    """

    variables = (GOOGLE_CREDENTIALS, *GOOGLE_PROJECTS)
    projects: ClassVar[Sequence[str]] = GOOGLE_PROJECTS
    made_by: ClassVar[str] = "VertexProvider"

    def __init__(self, provider: str, *, project: str | None, location: str | None, credentials: object) -> None:
        self._provider = provider
        self._project = project
        self._location = location
        self._credentials = credentials
        self._has_passed_credentials = credentials is not None
        self._finding: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
        if isinstance(credentials, str | Secret):
            self._credentials = _make_registered_secret(provider, credentials, "access_token")

    @property
    def has_passed_credentials(self) -> bool:
        """Whether the caller passed credentials."""
        return self._has_passed_credentials

    def resolve_credentials(self, provider: str) -> Credentials:
        """Return a description of the credentials, which are loaded later; raise ``MissingKey`` if no setting or file names any."""
        folder = os.environ.get("CLOUDSDK_CONFIG") or "~/.config/gcloud"
        saved = f"{folder}/application_default_credentials.json"
        found = find_defined_variable(self.variables)
        if not (self.has_passed_credentials or self._project or found or _is_file(saved)):
            msg = (
                f"there are no Google Cloud credentials for {provider!r}: set GOOGLE_CLOUD_PROJECT, and {GOOGLE_CREDENTIALS} or "
                f"run `gcloud auth application-default login`, or pass {self.made_by}(project=..., credentials=...)"
            )
            raise MissingKey(msg, kind="missing_key")
        if self.has_passed_credentials and self.project is None:
            raise self._make_missing_project_error()
        require_package_installed(provider, "google-auth", "vertex")
        source = (
            "the credentials passed as credentials="
            if self.has_passed_credentials
            else "the credentials that google-auth found"
        )
        return Credentials(None, "Google", told=f"Requests went to the project {self.project!r} with {source}.")

    @property
    def project(self) -> str | None:
        """The project of the argument, the environment or the credentials; ``None`` if it is unknown."""
        variable = find_defined_variable(self.projects)
        own = getattr(self._credentials, "project_id", None)
        return self._project or (os.environ[variable].strip() if variable else None) or (str(own) if own else None)

    def find_account_id(self) -> Secret | None:
        """Return the project, because limits apply per project."""
        return None if self.project is None else Secret(self.project)

    def resolve_location(self, *variables: str) -> str:
        """
        Return the location of the argument, else of the first set one of *variables*, else ``"global"``.

        Raises:
            ModelError: when it cannot be a part of a host name.
        """
        variable = find_defined_variable(variables)
        location = self._location or (os.environ[variable].strip() if variable else ANYWHERE)
        return require_host_label(
            self._provider, location, "location", "location=" if self._location else str(variable)
        )

    @property
    def credentials(self) -> Any:
        """The credentials; ``None`` before they are loaded."""
        if isinstance(self._credentials, Secret):
            from google.oauth2.credentials import Credentials as Token

            self._credentials = Token(self._credentials.reveal())  # type: ignore[no-untyped-call]
        return self._credentials

    async def load_credentials_if_missing(self, model: str) -> None:
        """
        Load the credentials if the caller passed none, which may send requests; raise an error without credentials or project.

        Raises:
            MissingKey: when there are none.
            ModelError: when the project is unknown.
        """
        lock = self._finding.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        async with lock:
            if self._credentials is None:
                self.resolve_credentials(self._provider)
                await self._load_default_credentials(model)
        if self.project is None:
            raise self._make_missing_project_error()

    async def _load_default_credentials(self, model: str) -> None:
        """Load default credentials with ``google-auth`` and store them and their project; raise ``MissingKey`` if there are none."""
        import google.auth

        failure: BaseException
        try:
            credentials, project = await asyncio.to_thread(google.auth.default, scopes=[GOOGLE_SCOPE])
        except self.list_credential_error_types() as error:
            failure = make_credentials_error(self._provider, model, error, f"Look at {GOOGLE_CREDENTIALS}.")
        else:
            self._credentials = credentials
            self._project = self.project or project
            return
        raise failure

    def _make_missing_project_error(self) -> ModelError:
        msg = f"{self._provider!r} has no project: set GOOGLE_CLOUD_PROJECT, or pass {self.made_by}(project=...)"
        return ModelError(msg, kind="missing_project")

    def list_credential_error_types(self) -> tuple[type[Exception], ...]:
        """Return the exception classes of ``google-auth``."""
        from google.auth.exceptions import GoogleAuthError

        return (GoogleAuthError,)


class GooglePlatformAuth(GoogleAuth):
    """Authenticates requests to Anthropic's own platform on Google Cloud."""

    variables = (GOOGLE_CREDENTIALS, *GOOGLE_PLATFORM_PROJECTS)
    projects = GOOGLE_PLATFORM_PROJECTS
    made_by = "AnthropicGoogleProvider"


# --- Microsoft --------------------------------------------------------------------------------------------------------


def make_entra_token_source(provider: str, explicit: TokenSource | None, scope: str) -> TokenSource | None:
    """
    Return a source of Entra ID tokens: *explicit*, else one that the environment configures; ``None`` if neither exists.

    Each token is registered for redaction, and errors of the source are raised as ``ModelError``.

    Raises:
        ModelError: when the environment configures credentials and the package ``azure-identity`` is missing.
    """
    source = explicit
    if source is None and (token := os.environ.get(AZURE_TOKEN, "").strip()):
        source = lambda: token  # noqa: E731 - a function of one value
    if source is None and find_defined_variable(ENTRA_SIGNS):
        require_package_installed(provider, "azure-identity", "azure")
        source = _make_azure_token_source(scope)
    return None if source is None else _make_registering_token_source(provider, source)


def _make_azure_token_source(scope: str) -> TokenSource:
    """Return a source of tokens of ``azure-identity``, which is loaded with the first token."""
    made: list[Callable[[], str]] = []

    async def fetch_token() -> str:
        """Return a token of ``azure-identity``; the first call loads the package."""
        if not made:
            from azure.identity import DefaultAzureCredential, get_bearer_token_provider

            made.append(get_bearer_token_provider(DefaultAzureCredential(), scope))
        return await asyncio.to_thread(made[0])

    return fetch_token


def _make_registering_token_source(provider: str, source: TokenSource) -> TokenSource:
    """Return *source* with each token registered for redaction, and each failure raised as ``ModelError``."""

    async def fetch_and_register_token() -> str:
        """Return a token of *source*, registered for redaction; raise ``ModelError`` if that fails."""
        failure: BaseException
        try:
            value = source()
            found: object = await value if inspect.isawaitable(value) else value
            if isinstance(found, str) and found:
                register_secret(provider, Secret(found), "access_token")
                return found
            failure = TypeError(f"the token source returned a {type(found).__name__}, not a non-empty str")
        except Exception as error:  # noqa: BLE001 - whatever a source of the user's does
            failure = error
        raise make_credentials_error(
            provider,
            f"{provider}/...",
            failure,
            f"Check the token source, and the environment variables {', '.join(ENTRA_SIGNS)}.",
        ) from None

    return fetch_and_register_token
