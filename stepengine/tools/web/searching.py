"""Back ends for ``web_search``: a SearXNG instance of one's own, and Brave Search with one's own key (requirements F15)."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import attrs

from stepengine.errors import DefinitionError, ToolError
from stepengine.redaction import GIVEN, KNOWN
from stepengine.tools.web.body import check_headers, read_body
from stepengine.tools.web.fetching import WEB_CONNECT_SECONDS, WEB_IDLE_SECONDS, WEB_SECONDS, trusted

__all__ = ("BraveSearch", "Depth", "SearchBackend", "SearchHit", "SearxngSearch")

WEB_SEARCH_RESULTS = 5
WEB_SEARCH_RESULTS_DEEP = 20

Depth: TypeAlias = Literal["standard", "deep"]
BRAVE = "https://api.search.brave.com"
SNIPPET_CHARS = 1_000
REFUSAL_CHARS = 300
SUCCESS = range(200, 300)


@attrs.frozen
class SearchHit:
    """
    One result of a search.

    Attributes:
        title: Its title.
        url: Where it is.
        snippet: What it says about the query.
    """

    title: str
    url: str
    snippet: str = ""


class SearchBackend(Protocol):
    """Searches the web; pass one to ``web_tools(search=...)``."""

    async def search(self, query: str, depth: Depth) -> Sequence[SearchHit]:
        """Return results, best first; ``"deep"`` asks for more of them. Raise ``ToolError`` when it fails."""


def _wanted(depth: Depth) -> int:
    return WEB_SEARCH_RESULTS_DEEP if depth == "deep" else WEB_SEARCH_RESULTS


def _hit(entry: Any, snippet: str) -> SearchHit | None:
    """Return one result of an answer, or ``None`` when it has no address."""
    url = entry.get("url") if isinstance(entry, Mapping) else None
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        return None
    texts = [str(entry.get(name) or "") for name in ("title", snippet)]
    title, said = (" ".join(text.split())[:SNIPPET_CHARS] for text in texts)
    return SearchHit(title, url, said)


class SearxngSearch:
    """
    Searches through a SearXNG instance, which has to have ``json`` among its ``search.formats``.

    Args:
        url: The instance, such as ``"http://localhost:8080"``; named by the caller, so it may be private.
        language: Language of the results, such as ``"en"``; the instance's default by default.
        seconds: How long one request may take; 20 by default.

    Raises:
        DefinitionError: when *url* is no http or https address, or has a query.
    """

    def __init__(self, url: str, *, language: str = "", seconds: float = WEB_SECONDS) -> None:
        self._url = _checked(url)
        self._language = language
        self._seconds = seconds

    async def search(self, query: str, depth: Depth) -> Sequence[SearchHit]:
        """Return results; ``"deep"`` reads a second page."""
        found: dict[str, SearchHit] = {}
        for page in (1, 2) if depth == "deep" else (1,):
            params = {"q": query, "format": "json", "pageno": str(page), "safesearch": "0"}
            if self._language:
                params["language"] = self._language
            answer = await _json(f"{self._url}/search", params, {}, seconds=self._seconds)
            hits = [_hit(entry, "content") for entry in _list(answer, "results")]
            before = len(found)
            for hit in hits:
                if hit is not None:
                    found.setdefault(hit.url, hit)
            if len(found) == before:
                break
        return list(found.values())[: _wanted(depth)]


class BraveSearch:
    """
    Searches through the Brave Search API.

    Args:
        key: The subscription token; sent in a header to the API and shown nowhere.
        url: The API's address.
        country: Two letters, such as ``"de"``; Brave's default by default.
        seconds: How long one request may take; 20 by default.

    Raises:
        DefinitionError: when the key is empty or no token, or *url* no http or https address.
    """

    def __init__(self, key: str, *, url: str = BRAVE, country: str = "", seconds: float = WEB_SECONDS) -> None:
        if not key or not key.isascii() or not key.isprintable() or key != key.strip():
            msg = "BraveSearch needs a subscription token: ASCII, without blanks around it"
            raise DefinitionError(msg)
        GIVEN.tell(key, "brave_api_key", os.environ)
        self._key = key
        self._url = _checked(url)
        self._country = country
        self._seconds = seconds

    def __repr__(self) -> str:
        return f"BraveSearch(url={self._url!r})"

    async def search(self, query: str, depth: Depth) -> Sequence[SearchHit]:
        """Return results; ``"deep"`` asks for 20, the most that one request gives."""
        params = {"q": query, "count": str(_wanted(depth)), "text_decorations": "false"}
        if self._country:
            params["country"] = self._country
        headers = {"X-Subscription-Token": self._key}
        answer = await _json(f"{self._url}/res/v1/web/search", params, headers, seconds=self._seconds)
        hits = [_hit(entry, "description") for entry in _list(answer.get("web"), "results")]
        return [hit for hit in hits if hit is not None][: _wanted(depth)]


def _checked(url: str) -> str:
    if not url.startswith(("http://", "https://")) or "?" in url or "#" in url:
        msg = f"{url!r} is no address of a search service; write one such as 'http://localhost:8080'"
        raise DefinitionError(msg)
    return url.rstrip("/")


def _list(answer: Any, name: str) -> Sequence[Any]:
    found = answer.get(name) if isinstance(answer, Mapping) else None
    return found if isinstance(found, list) else ()


async def _json(url: str, params: Mapping[str, str], headers: Mapping[str, str], *, seconds: float) -> dict[str, Any]:
    """
    Return the JSON object that a service answers with.

    Raises:
        ToolError: when it does not answer in time, or not with that.
    """
    import httpx2

    where = url.partition("//")[2].partition("/")[0]
    waits = httpx2.Timeout(WEB_IDLE_SECONDS, connect=WEB_CONNECT_SECONDS)
    sent = {**headers, "Accept": "application/json", "Accept-Encoding": "gzip", "User-Agent": "stepengine"}
    try:
        async with (
            asyncio.timeout(seconds),
            httpx2.AsyncClient(verify=trusted(), trust_env=False, follow_redirects=False, timeout=waits) as client,
            client.stream("GET", url, params=dict(params), headers=sent) as response,
        ):
            check_headers(response, where)
            body = await read_body(response, where)
    except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:  # a timeout is an OSError
        why = f"{type(error).__name__}: {error}" if str(error) else f"no answer within {seconds:g} s"
        raise ToolError(KNOWN.text(f"the search at {where} failed: {why}")) from None
    text = body.data.decode("utf-8", "replace")
    if response.status_code not in SUCCESS:
        msg = f"the search at {where} answered with HTTP {response.status_code}: {KNOWN.beginning(text, REFUSAL_CHARS)[:REFUSAL_CHARS]}"
        raise ToolError(msg)
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        msg = f"the search at {where} did not answer with a JSON object; a SearXNG instance needs 'json' in search.formats"
        raise ToolError(msg)
    return answer
