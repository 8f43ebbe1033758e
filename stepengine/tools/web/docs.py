"""``DocsSites``: documentation read from the sites that the caller names, through a fetcher (requirements F16)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Protocol

import attrs

from stepengine.errors import DefinitionError, ToolError
from stepengine.tools.search.words import words_of
from stepengine.tools.web.fetching import Fetcher, count_page
from stepengine.tools.web.pages import page_of
from stepengine.tools.web.searching import SearchBackend

__all__ = ("DocsBackend", "DocsSites", "SearchedDocs")

DOCS_PAGES = 5

LINK = re.compile(r"\[([^\[\]\n]{1,200}+)\]\(<?+([^\s)>\[]{1,2000}+)>?+[^)\[\n]{0,500}+\)(?::?+ *+([^\n]{0,300}+))?")
"""No part goes beyond the ``[`` of the next link, so that a page full of links that never end is read once."""
LINKS = 2_000
HEADING = re.compile(r"^#{1,6}+ ", re.MULTILINE)
WORD = re.compile(r"\w++")
COUNTED = 5
"""How often a word counts at most in one part of a page."""
FOUND = range(200, 300)
CHARS_PER_TOKEN = 4
SMALLEST_PART = 800
MORE = "\n[... the page goes on]\n"


class DocsBackend(Protocol):
    """Looks something up in the documentation of a library; pass one to ``web_tools(docs=...)``."""

    async def read(self, library_title: str, topic: str, max_tokens: int) -> str:
        """Return what the documentation says about *topic*, about *max_tokens* at most. Raise ``ToolError`` if nothing."""


@attrs.frozen
class _Link:
    """A page that a list of contents names."""

    title: str
    url: str
    about: str


class DocsSites:
    """
    Reads documentation sites: their ``llms.txt`` where they have one, else the links of their first page.

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
        self._sites = {_folded(title): url.rstrip("/") for title, url in sites.items()}
        self._titles = sorted(sites)

    async def read(self, library_title: str, topic: str, max_tokens: int) -> str:
        """Return what fits the topic best."""
        site = self._sites.get(_folded(library_title))
        if site is None:
            msg = f"there is no documentation of {library_title!r}; known are {', '.join(self._titles)}"
            raise ToolError(msg)
        text = await _together(self._fetcher, _best(await self._contents(site), topic), topic, max_tokens)
        if not text:
            msg = f"the documentation of {library_title!r} at {site} has no page that fits {topic!r}"
            raise ToolError(msg)
        return text

    async def _contents(self, site: str) -> list[_Link]:
        problem: ToolError | None = None
        for address in (f"{site}/llms.txt", site):
            count_page.get()()
            try:
                fetched = await self._fetcher.fetch(address)
                text = (await page_of(fetched)).text if fetched.status in FOUND else ""
            except ToolError as error:
                problem = error
                continue
            links = _links(text, fetched.url)
            if links:
                return links
        if problem is not None:
            raise problem
        msg = f"{site} has no llms.txt and no links to pages of documentation"
        raise ToolError(msg)


class SearchedDocs:
    """
    Finds documentation of any library by a search, and reads the pages that the search names.

    Args:
        search: What to search with.
        fetcher: What the pages are fetched with; pages that it refuses are left out.
    """

    def __init__(self, search: SearchBackend, fetcher: Fetcher) -> None:
        self._search = search
        self._fetcher = fetcher

    async def read(self, library_title: str, topic: str, max_tokens: int) -> str:
        """Return what the first results say."""
        hits = await self._search.search(f"{library_title} documentation {topic}", "standard")
        text = await _together(self._fetcher, [_Link(h.title, h.url, "") for h in hits], topic, max_tokens)
        if not text:
            msg = f"no documentation of {library_title!r} about {topic!r} was found"
            raise ToolError(msg)
        return text


async def _together(fetcher: Fetcher, links: Sequence[_Link], topic: str, max_tokens: int) -> str:
    """Return the pages that can be had, one after another, until the tokens are used up."""
    texts: list[str] = []
    left = max_tokens * CHARS_PER_TOKEN
    for link in links[:DOCS_PAGES]:
        head = f"# {link.title}\nSource: {link.url}\n\n"
        room = left - len(head) - len(MORE)
        if room < (SMALLEST_PART if texts else 1):
            break
        text = await _text_at(fetcher, link.url)
        if text:
            texts.append(f"{head}{_around(text, topic, room)}\n")
            left -= len(texts[-1]) + 1
    return "\n".join(texts)


async def _text_at(fetcher: Fetcher, url: str) -> str:
    """Return what a page says; nothing when it cannot be had, so that the others still count."""
    count_page.get()()
    try:
        fetched = await fetcher.fetch(url)
        return (await page_of(fetched)).text if fetched.status in FOUND else ""
    except ToolError:
        return ""


def _folded(title: str) -> str:
    return "".join(c for c in title.lower() if c.isalnum())


def _links(text: str, base: str) -> list[_Link]:
    """Return the first 2,000 links of a page in Markdown, each page once; relative ones are below *base*."""
    from urllib.parse import urldefrag, urljoin

    found: dict[str, _Link] = {}
    for match in islice(LINK.finditer(text), LINKS):
        try:
            url = urldefrag(urljoin(base, match[2]))[0]
        except ValueError:  # brackets that hold no IPv6 address
            continue
        if url.startswith(("http://", "https://")) and url.rstrip("/") != base.rstrip("/"):
            found.setdefault(url, _Link(match[1].strip(), url, (match[3] or "").strip()))
    return list(found.values())


def _best(links: Sequence[_Link], topic: str) -> list[_Link]:
    """Return the links that fit a topic at all, best first."""
    words = [Counter(words_of(f"{link.title} {link.title} {link.url} {link.about}")) for link in links]
    wanted = set(words_of(topic))
    spread = Counter(word for counted in words for word in wanted & set(counted))
    scores = [
        sum(min(counted[w], 3) * math.log(1 + len(links) / spread[w]) for w in wanted if counted[w])
        for counted in words
    ]
    ranked = sorted(range(len(links)), key=lambda n: (-scores[n], n))
    return [links[n] for n in ranked if scores[n]]


def _around(text: str, topic: str, room: int) -> str:
    """Return the part of a page that says most about a topic: whole when it fits, else from the best heading on."""
    if len(text) <= room:
        return text
    best = _best_start(text, set(words_of(topic)), room)
    return f"{text[best : best + room]}{MORE}"


def _best_start(text: str, wanted: set[str], room: int) -> int:
    """Return the heading from which on *room* characters hold most of the words; one window goes over the page once."""
    meant = {word: word for word in wanted} | {f"{word}s": word for word in wanted}
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
