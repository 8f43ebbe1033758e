"""
The requests of ``web_search`` and ``read_docs``.

The back ends for searches are your own SearXNG instance, and Brave Search with your own key. Documentation is fetched from sites
that the caller names, or from the results of a search.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Literal, Protocol, TypeAlias
from urllib.parse import unquote, urldefrag, urljoin

from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.estimate import CHARS_PER_TOKEN
from stepengine.data.visible import cut_end
from stepengine.errors import DefinitionError, ToolError
from stepengine.redaction import GIVEN, KNOWN
from stepengine.tools.bundled.search.symbols import split_singular_words
from stepengine.tools.bundled.web.fetcher import (
    WEB_CONNECT_SECONDS,
    WEB_IDLE_SECONDS,
    WEB_SECONDS,
    Fetcher,
    check_header_size,
    count_page,
    get_ssl_context,
    read_body,
)
from stepengine.tools.bundled.web.pages import read_page
from stepengine.workspace.urls import normalize_service_url, remove_user_info

WEB_SEARCH_RESULTS = 5
"""A model opens one or two of them."""
WEB_SEARCH_RESULTS_DEEP = 20
"""As many as search services return for one request."""

Depth: TypeAlias = Literal["standard", "deep"]
BRAVE = "https://api.search.brave.com"
SNIPPET_CHARS = 1_000
"""A paragraph: enough to decide whether to open the page."""
REFUSAL_CHARS = 300
"""About three lines of what the service says."""
SUCCESS = range(200, 300)


@frozen
class SearchHit:
    """
    One result of a search, or a link in a table of contents.

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
        """Return results, best first; ``"deep"`` returns more of them. Raise ``ToolError`` if the search fails."""


def _get_result_count(depth: Depth) -> int:
    """Return how many results a search of this *depth* requests."""
    return WEB_SEARCH_RESULTS_DEEP if depth == "deep" else WEB_SEARCH_RESULTS


def _parse_hits(answer: object, snippet_name: str) -> list[SearchHit]:
    """Return the ``results`` in *answer* that have an http address, with the snippets in their members *snippet_name*."""
    entries = answer.get("results") if isinstance(answer, Mapping) else None
    hits = []
    for entry in entries if isinstance(entries, list) else ():
        url = entry.get("url") if isinstance(entry, Mapping) else None
        if isinstance(url, str) and url.startswith(("http://", "https://")):
            texts = [str(entry.get(name) or "") for name in ("title", snippet_name)]
            title, said = (cut_end(" ".join(text.split()), SNIPPET_CHARS) for text in texts)
            hits.append(SearchHit(title, url, said))
    return hits


class SearxngSearch:
    """
    Searches with a SearXNG instance whose ``search.formats`` must include ``json``.

    Args:
        url: The instance, such as ``"http://localhost:8080"``; named by the caller, so it may be private. No message shows
            its user name and password.
        language: Language of the results, such as ``"en"``; the instance's default by default.
        seconds: How long one request may take; 20 by default.

    Raises:
        DefinitionError: when *url* is no http or https address, or has a query.
    """

    def __init__(self, url: str, *, language: str = "", seconds: float = WEB_SECONDS) -> None:
        self._url = _normalize_url_and_register_password(url)
        self._language = language
        self._seconds = seconds

    async def search(self, query: str, depth: Depth) -> Sequence[SearchHit]:
        """Return results; ``"deep"`` reads a second page."""
        found: dict[str, SearchHit] = {}
        for page in (1, 2) if depth == "deep" else (1,):
            params = {"q": query, "format": "json", "pageno": str(page), "safesearch": "0"}
            if self._language:
                params["language"] = self._language
            answer = await _fetch_json(f"{self._url}/search", params, {}, seconds=self._seconds)
            before = len(found)
            for hit in _parse_hits(answer, "content"):
                found.setdefault(hit.url, hit)
            if len(found) == before:
                break
        return list(found.values())[: _get_result_count(depth)]


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
            msg = "BraveSearch needs a subscription token in ASCII, without spaces around it"
            raise DefinitionError(msg)
        GIVEN.add(key, "brave_api_key", os.environ)
        self._key = key
        self._url = _normalize_url_and_register_password(url)
        self._country = country
        self._seconds = seconds

    def __repr__(self) -> str:
        return f"BraveSearch(url={remove_user_info(self._url)!r})"

    async def search(self, query: str, depth: Depth) -> Sequence[SearchHit]:
        """Return results; ``"deep"`` requests 20, the maximum of one request."""
        params = {"q": query, "count": str(_get_result_count(depth)), "text_decorations": "false"}
        if self._country:
            params["country"] = self._country
        headers = {"X-Subscription-Token": self._key}
        answer = await _fetch_json(f"{self._url}/res/v1/web/search", params, headers, seconds=self._seconds)
        return _parse_hits(answer.get("web"), "description")[: _get_result_count(depth)]


def _normalize_url_and_register_password(url: str) -> str:
    """Return the normalized URL of a service, and register a password in it as a secret."""
    made = normalize_service_url(url)
    user_info = made.partition("//")[2].partition("/")[0].rpartition("@")[0]
    GIVEN.add(unquote(user_info.partition(":")[2]), "search_password", os.environ)
    return made


async def _fetch_json(
    url: str, params: Mapping[str, str], headers: Mapping[str, str], *, seconds: float
) -> dict[str, object]:
    """
    Request *url*, and return the JSON object in the response; raise ``ToolError`` without one within *seconds*.

    Raises:
        ToolError: If there is no response within *seconds*, or it is not a JSON object.
    """
    import httpx2

    where = remove_user_info(url).partition("//")[2].partition("/")[0]
    waits = httpx2.Timeout(WEB_IDLE_SECONDS, connect=WEB_CONNECT_SECONDS)
    sent = {**headers, "Accept": "application/json", "Accept-Encoding": "gzip", "User-Agent": "stepengine"}
    try:
        async with (
            asyncio.timeout(seconds),
            httpx2.AsyncClient(
                verify=get_ssl_context(), trust_env=False, follow_redirects=False, timeout=waits
            ) as client,
            client.stream("GET", url, params=dict(params), headers=sent) as response,
        ):
            check_header_size(response, where)
            body, _ = await read_body(response, where)
    except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:  # a timeout is an OSError
        why = f"{type(error).__name__}: {error}" if str(error) else f"no answer within {seconds:g} s"
        raise ToolError(KNOWN.text(f"the search at {where} failed: {why}")) from None
    text = body.decode("utf-8", "replace")
    if response.status_code not in SUCCESS:
        msg = f"the search at {where} answered with HTTP {response.status_code}: {KNOWN.redact_beginning(text, REFUSAL_CHARS)[:REFUSAL_CHARS]}"
        raise ToolError(msg)
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        msg = f"the search at {where} did not answer with a JSON object; a SearXNG instance needs 'json' in search.formats"
        raise ToolError(msg)
    return answer


DOCS_PAGES = 5
"""A topic is on one or two pages of a documentation; each is a request."""

LINK = re.compile(r"\[([^\[\]\n]{1,200}+)\]\(<?+([^\s)>\[]{1,2000}+)>?+[^)\[\n]{0,500}+\)(?::?+ *+([^\n]{0,300}+))?")
"""No part goes beyond the ``[`` of the next link, so that a page full of links that never end is read once."""
MAX_LINKS = 2_000
"""An index of a large documentation has some hundred."""
HEADING = re.compile(r"^#{1,6}+ ", re.MULTILINE)
WORD = re.compile(r"\w++")
COUNTED = 5
"""How often a word counts at most in one part of a page."""
SMALLEST_PART_CHARS = 800
"""A shorter part of a page says too little to be worth its heading."""
MORE = "\n[... the page goes on]\n"


class DocsBackend(Protocol):
    """Reads the documentation of libraries; pass one to ``web_tools(docs=...)``."""

    async def read(self, library_title: str, topic: str, max_tokens: int) -> str:
        """Return documentation about *topic*, at most about *max_tokens*. Raise ``ToolError`` if there is none."""


class DocsSites:
    """
    Reads documentation sites: their ``llms.txt`` if they have one, else the links of their first page.

    The pages whose titles, addresses and descriptions fit the topic best are fetched and put together, best first.

    Args:
        fetcher: What the pages are fetched with, such as ``SafeFetcher(allow=["docs.pydantic.dev"])``.
        sites: Library title to the address of its documentation; titles are compared without case and punctuation.

    Raises:
        DefinitionError: when there are no sites.
    """

    def __init__(self, fetcher: Fetcher, sites: Mapping[str, str]) -> None:
        if not sites:
            msg = 'DocsSites needs sites, such as {"pydantic": "https://docs.pydantic.dev/latest"}'
            raise DefinitionError(msg)
        self._fetcher = fetcher
        self._sites = {_normalize_title(title): url.rstrip("/") for title, url in sites.items()}
        self._titles = sorted(sites)

    async def read(self, library_title: str, topic: str, max_tokens: int) -> str:
        """Return the excerpts of a library's site that match the topic best; raise ``ToolError`` for an unknown library or topic."""
        site = self._sites.get(_normalize_title(library_title))
        if site is None:
            msg = f"there is no documentation of {library_title!r}; known are {list_names(self._titles, library_title)}"
            raise ToolError(msg)
        text = await _fetch_excerpts(
            self._fetcher, _rank_links(await self._fetch_links(site), topic), topic, max_tokens
        )
        if not text:
            msg = f"the documentation of {library_title!r} at {remove_user_info(site)} has no page that fits {topic!r}"
            raise ToolError(msg)
        return text

    async def _fetch_links(self, site: str) -> list[SearchHit]:
        """Fetch and return the links in the site's ``llms.txt``, else those on its first page; raise ``ToolError`` if there are none."""
        problem: ToolError | None = None
        for address in (f"{site}/llms.txt", site):
            count_page.get()()
            try:
                fetched = await self._fetcher.fetch(address)
                text = (await read_page(fetched)).text if fetched.status in SUCCESS else ""
            except ToolError as error:
                problem = error
                continue
            links = _parse_links(text, fetched.url)
            if links:
                return links
        if problem is not None:
            raise problem
        msg = f"{remove_user_info(site)} has no llms.txt and no links to pages of documentation"
        raise ToolError(msg)


class SearchedDocs:
    """
    Finds the documentation of any library by a web search, and reads the pages found.

    Args:
        search: What to search with.
        fetcher: What the pages are fetched with; pages that it refuses are left out.
    """

    def __init__(self, search: SearchBackend, fetcher: Fetcher) -> None:
        self._search = search
        self._fetcher = fetcher

    async def read(self, library_title: str, topic: str, max_tokens: int) -> str:
        """Return excerpts of the first results of a web search; raise ``ToolError`` if there is no text."""
        hits = await self._search.search(f"{library_title} documentation {topic}", "standard")
        text = await _fetch_excerpts(self._fetcher, hits, topic, max_tokens)
        if not text:
            msg = f"no documentation of {library_title!r} about {topic!r} was found"
            raise ToolError(msg)
        return text


async def _fetch_excerpts(fetcher: Fetcher, links: Sequence[SearchHit], topic: str, max_tokens: int) -> str:
    """Fetch the first five pages, and return excerpts of them about *topic*, at most *max_tokens* tokens; ``""`` without any."""
    texts: list[str] = []
    left = max_tokens * CHARS_PER_TOKEN
    for link in links[:DOCS_PAGES]:
        head = f"# {link.title}\nSource: {link.url}\n\n"
        room = left - len(head) - len(MORE)
        if room < (SMALLEST_PART_CHARS if texts else 1):
            break
        text = await _count_and_fetch_text(fetcher, link.url)
        if text:
            texts.append(f"{head}{_cut_excerpt(text, topic, room)}\n")
            left -= len(texts[-1]) + 1
    return "\n".join(texts)


async def _count_and_fetch_text(fetcher: Fetcher, url: str) -> str:
    """Count a fetch, and return the page's text; ``""`` if it cannot be fetched. Raise ``ToolError`` above the limit of the run."""
    count_page.get()()
    try:
        fetched = await fetcher.fetch(url)
        return (await read_page(fetched)).text if fetched.status in SUCCESS else ""
    except ToolError:
        return ""


def _normalize_title(title: str) -> str:
    """Return a library's title in lower case, with letters and digits only."""
    return "".join(c for c in title.lower() if c.isalnum())


def _parse_links(text: str, base: str) -> list[SearchHit]:
    """Return the first 2,000 links of a page in Markdown, each page once; relative ones are below *base*."""
    found: dict[str, SearchHit] = {}
    for match in islice(LINK.finditer(text), MAX_LINKS):
        try:
            url = urldefrag(urljoin(base, match[2]))[0]
        except ValueError:  # brackets that hold no IPv6 address
            continue
        if url.startswith(("http://", "https://")) and url.rstrip("/") != base.rstrip("/"):
            found.setdefault(url, SearchHit(match[1].strip(), url, (match[3] or "").strip()))
    return list(found.values())


def _rank_links(links: Sequence[SearchHit], topic: str) -> list[SearchHit]:
    """Return the links that match a topic, best first."""
    words = [Counter(split_singular_words(f"{link.title} {link.title} {link.url} {link.snippet}")) for link in links]
    wanted = set(split_singular_words(topic))
    spread = Counter(word for counted in words for word in wanted & set(counted))
    scores = [
        sum(min(counted[w], 3) * math.log(1 + len(links) / spread[w]) for w in wanted if counted[w])
        for counted in words
    ]
    ranked = sorted(range(len(links)), key=lambda n: (-scores[n], n))
    return [links[n] for n in ranked if scores[n]]


def _cut_excerpt(text: str, topic: str, room: int) -> str:
    """Return the part of a page that matches a topic best: all of it if it is short, else *room* characters from the best heading."""
    if len(text) <= room:
        return text
    best = _find_best_excerpt_start(text, set(split_singular_words(topic)), room)
    return f"{text[best : best + room]}{MORE}"


def _find_best_excerpt_start(text: str, words: set[str], room: int) -> int:
    """Return the offset of the heading, or 0, from which *room* characters contain most of the wanted words."""
    meant = {word: word for word in words} | {f"{word}s": word for word in words}
    places = [(m.start(), m.end(), word) for m in WORD.finditer(text) if (word := meant.get(m[0].lower()))]
    counted: Counter[str] = Counter()
    best = best_score = score = first = after = 0
    for start in [0, *[m.start() for m in HEADING.finditer(text)]]:
        while after < len(places) and places[after][1] <= start + room:
            counted[places[after][2]] += 1
            score += counted[places[after][2]] <= COUNTED
            after += 1
        while first < after and places[first][0] < start:
            score -= counted[places[first][2]] <= COUNTED
            counted[places[first][2]] -= 1
            first += 1
        if score > best_score:
            best, best_score = start, score
    return best
