"""
The page of a run in Chromium: it opens, finds, follows, obeys its keys, is readable by machine, and runs nothing hostile.
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from stepengine import AgentCall, AgentDefinition, Ask, Engine, Sleep, Start, ToolCall, Wait
from stepengine.data.messages import TextPart
from stepengine.debugging import render_run
from stepengine.debugging.viewer.live_page import FollowedJournal, make_page_server
from stepengine.debugging.viewer.payload import PageTexts
from stepengine.journal import FileJournal, Journal, MemoryJournal
from stepengine.journal.recorded_requests import RecordedRequests
from stepengine.journal.show import load_stored_history
from tests.evaluation.runs import engine, hostile_run, programmed, read_all, reviewed, said, tool_call

from .browser import AXE, CHROMIUM, Browser, browser, faults
from .pages import frames_at, opened

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: the command chromium on PATH"),
]
ROWS = 200
PICKED = "document.querySelector('#list [aria-selected=true]')"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as made:
        made.size(1440, 900)
        yield made


@pytest.fixture
def page(chromium: Browser, tmp_path: Path) -> Iterator[Any]:
    """
    Opens a page that is written to a file, as somebody who was sent it would.
    """

    def shown(text: str, hash: str = "") -> Browser:
        path = tmp_path / "run.html"
        path.write_text(text, encoding="utf-8")
        chromium.complaints.clear()
        chromium.open(path.as_uri() + hash)
        return chromium

    yield shown
    assert [] == chromium.complaints
    chromium.size(1440, 900)
    chromium.scheme("light")


@pytest.fixture(scope="module")
def reviewer() -> Journal:
    return reviewed()


def text_of(chromium: Browser, selector: str) -> str:
    return str(chromium.run(f"document.querySelector({json.dumps(selector)}).textContent"))


def settled(chromium: Browser) -> None:
    """
    Wait until what was asked for is drawn.
    """
    chromium.run("new Promise(go => requestAnimationFrame(() => requestAnimationFrame(go)))")


@pytest.mark.spec("evaluation:JG42", "evaluation:JG43", "evaluation:JG47", "evaluation:JG48")
def test_long_run_opens_scrolls_and_searches_with_few_rows(page: Any) -> None:
    filler = " ".join(f"word{k}" for k in range(60))

    def make(number: int) -> Any:
        needle = " quixotic" if number in (17, 2_500, 4_998) else ""
        return said(
            f"Step {number}{needle}. {filler}", tool_call("read_file", {"path": f"src/m{number}.py"}), number=number
        )

    text = render_run(read_all(5_000, make))
    chromium = page(text)
    count = "document.querySelectorAll('#list [role=option]').length"
    most = [chromium.run(count)]
    chromium.run("document.querySelector('#list').focus()")
    chromium.press("End")
    settled(chromium)
    most.append(chromium.run(count))
    last = text_of(chromium, "#head h2"), chromium.run(f"{PICKED}.getAttribute('aria-posinset')")
    chromium.run(
        "(() => { const s = document.querySelector('#search'); s.value = 'QUIXOTIC'; s.dispatchEvent(new Event('input')); })()"
    )
    chromium.wait("document.querySelector('#hits').textContent === '3 steps'")
    found = []
    for _ in range(3):
        chromium.press("n")
        settled(chromium)
        most.append(chromium.run(count))
        found.append(text_of(chromium, "#head h2"))

    chromium.size(1440, 12_000)
    time.sleep(0.2)
    settled(chromium)
    most.append(chromium.run(count))

    assert ("Step 5000", "5000") == last
    assert 0 < min(most) <= max(most) <= ROWS
    assert {"Step 17", "Step 2500", "Step 4998"} == set(found)
    assert chromium.run("document.querySelectorAll('*').length") < 1_500
    assert len(text) < 8_000_000


@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG45", "evaluation:JG48")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_hostile_text_runs_loads_and_creates_nothing_in_the_browser(page: Any, scheme: str) -> None:
    journal = hostile_run()
    text = render_run(journal, other=hostile_run())
    for shown in (render_run(journal), text):
        chromium = page(shown)
        chromium.scheme(scheme)
        title = chromium.run("document.title")
        seen = ""
        for _ in range(int(chromium.run("document.querySelector('#list [role=option]').getAttribute('aria-setsize')"))):
            for tab in "1234567":
                chromium.press(tab)
                chromium.run("document.querySelectorAll('#panel details').forEach(d => d.open = true)")
                settled(chromium)
                seen += text_of(chromium, "main")
            chromium.press("j")
        wrong = "a, iframe, object, embed, form, link, base, svg, math, img, video, audio, [style*=url], [onload], [onerror]"

        assert 0 == chromium.run(f"document.querySelectorAll({json.dumps(wrong)}).length")
        assert 2 == chromium.run("document.querySelectorAll('script').length")
        assert title == chromium.run("document.title")
        assert "owned" not in title
        assert [] == [url for url in chromium.requests if not url.startswith(("file:", "about:"))]
        assert "<script>document.title='owned'</script>" in seen
        assert "javascript:alert(1)" in seen
        assert "\\u202egnp.exe" in seen
        assert not set("\u202e\u2066\x1b\x07\x00") & set(seen)


REPORT = """\
# What I found

The *parser* is **slow**:

| file | ms |
|---|---|
| a.py | 12 |

2 * 3 * 4 = 24, snake_case_name, \\*as is\\*, **open
"""


def shape(node: str) -> str:
    """
    An expression that tells the elements of a node that are of Markdown, each with its text.
    """
    return f"[...{node}.querySelectorAll('em,strong,code,li,pre,.title')].map(n => [n.tagName.toLowerCase(), n.textContent])"


@pytest.mark.spec("evaluation:JG45", "evaluation:JG46", "evaluation:JG47")
def test_model_markdown_is_formatted_and_m_toggles_the_source(page: Any) -> None:
    journal = read_all(2, lambda number: said(REPORT, tool_call("read_file", {"path": "a.py"})))
    chromium = page(render_run(journal), "#step=1&tab=reply")
    settled(chromium)
    seen = chromium.run(shape("document.querySelector('#panel .md')"))

    assert [["p", "What I found"], ["em", "parser"], ["strong", "slow"]] == seen[:3]
    assert [["pre", "| file | ms |\n|---|---|\n| a.py | 12 |"]] == seen[3:]
    assert text_of(chromium, "#panel .md").endswith("2 * 3 * 4 = 24, snake_case_name, *as is*, **open")

    chromium.press("m")
    settled(chromium)
    assert REPORT == text_of(chromium, "#panel pre.prose")
    chromium.press("m")
    settled(chromium)
    assert seen == chromium.run(shape("document.querySelector('#panel .md')"))


@pytest.mark.spec("evaluation:JG45")
def test_page_markdown_matches_markdown_it_and_loses_no_word(page: Any) -> None:
    """
    The other one is markdown-it; what the page leaves alone, links and the like, is switched off there.
    """
    from markdown_it import MarkdownIt

    other = MarkdownIt("commonmark", {"breaks": True}).disable(
        [
            "link",
            "image",
            "autolink",
            "html_inline",
            "html_block",
            "blockquote",
            "hr",
            "lheading",
            "reference",
            "code",
            "entity",
        ]
    )
    texts = [written(random.Random(seed)) for seed in range(120)]
    replies = iter(texts)
    journal = read_all(
        len(texts) + 1, lambda number: said(next(replies), tool_call("read_file", {"path": "a"}), number=number)
    )
    chromium = page(render_run(journal), "#step=1&tab=reply")
    for text in texts:
        settled(chromium)
        node = "(document.querySelector('#panel .md') || document.querySelector('#panel pre.prose'))"
        ours = chromium.run(shape(node))
        words = re.findall(r"\w", str(chromium.run(f"{node}.textContent")))
        chromium.press("j")

        theirs = chromium.run(
            f"(() => {{ const d = new DOMParser().parseFromString({json.dumps(other.render(text))}, 'text/html');"
            "d.querySelectorAll('pre').forEach(p => { p.textContent = p.textContent; });"
            "d.querySelectorAll('h2').forEach(h => {"
            " const p = d.createElement('p'); p.className = 'title'; p.append(...h.childNodes); h.replaceWith(p); });"
            f"return {shape('d.body')}; }})()"
        )
        # Where lines end differs: what matters is what is in what.
        assert [[tag, "".join(inner.split())] for tag, inner in theirs] == [
            [tag, "".join(inner.split())] for tag, inner in ours
        ], text
        assert "".join(re.findall(r"\w", re.sub(r"(?m)^ *\d+\.|^```\w+", "", text))) == "".join(words), text


def written(chance: random.Random) -> str:
    """
    Return what a model may write: paragraphs, lists in lists, code, emphasis in emphasis, and signs that mean nothing.
    """

    def words() -> str:
        pieces = []
        for _ in range(chance.randint(1, 5)):
            word = chance.choice(["step", "file", "Größe", "x", "v2"])
            kind = chance.randint(0, 9)
            pieces.append(
                [
                    f"*{word}*",
                    f"**{word} {word}**",
                    f"`{word} *x*`",
                    f"**{word} *in* it**",
                    f"{word} * 2",
                    f"a_{word}_b",
                ][kind]
                if kind < 6
                else word
            )
        return " ".join(pieces)

    blocks = []
    for _ in range(chance.randint(1, 5)):
        kind = chance.randint(0, 3)
        if kind == 0:
            blocks.append("\n".join([words() for _ in range(chance.randint(1, 3))]))
        elif kind == 1:
            sign, inner = chance.choice([("-", "  "), ("*", "  "), ("1.", "   ")])
            lines = []
            for _ in range(chance.randint(1, 4)):
                lines.append(f"{sign} {words()}")
                lines += [f"{inner}- {words()}" for _ in range(chance.choice([0, 0, 2]))]
            blocks.append("\n".join(lines))
        elif kind == 2:
            blocks.append("```python\n" + "\n".join([f"  {words()}" for _ in range(2)]) + "\n```")
        else:
            blocks.append(f"## {words()}")
        blocks.append("")
        if kind == 1:
            blocks.append("and then\n")
    return "\n".join(blocks)


@pytest.mark.spec("evaluation:JG45")
@pytest.mark.parametrize("sign", ["*", "`` ` ", "  - ", "|"])
def test_pathological_markdown_does_not_hang_the_page(page: Any, sign: str) -> None:
    text = sign * (19_000 // len(sign))
    shuffled = list(text)
    random.Random(1).shuffle(shuffled)
    replies = iter([text, "".join(shuffled)])
    journal = read_all(3, lambda number: said(next(replies), tool_call("read_file", {"path": "a"}), number=number))
    chromium = page(render_run(journal), "#step=1&tab=reply")

    for step in ("1", "2"):
        chromium.run(f"location.hash = '#step={step}&tab=reply'")
        settled(chromium)
        slowest = chromium.run(
            "(() => { const from = performance.now(); document.querySelector('#tabs [aria-selected=true]').click();"
            " return performance.now() - from; })()"
        )
        deepest = chromium.run(
            "(() => { const deep = n => n.children.length ? 1 + Math.max(...[...n.children].map(deep)) : 0; return deep(document.querySelector('#panel')); })()"
        )
        assert slowest < 20_000
        assert deepest < 40


@pytest.mark.spec("evaluation:JG46", "evaluation:JG111")
def test_page_offers_resume_for_suspended_and_fork_for_ended_runs(page: Any) -> None:
    chromium = page(render_run(reviewed(answered=False)))
    begun = text_of(chromium, "#head .command")
    chromium.run("[...document.querySelectorAll('#list .row')].findLast(n => n.querySelector('.call.ask')).click()")
    settled(chromium)

    assert begun.startswith("stepengine fork 'the journal in memory' --at '#")
    assert "stepengine resume 'the journal in memory'" == text_of(chromium, "#head .command")


@pytest.mark.spec("evaluation:JG47", "evaluation:JG46")
def test_keys_navigate_search_and_copy_but_type_in_search(page: Any, reviewer: Journal) -> None:
    chromium = page(render_run(reviewer))

    def press(*keys: str) -> str:
        chromium.press(*keys)
        settled(chromium)
        return text_of(chromium, "#head h2")

    assert "Before the first step" == text_of(chromium, "#head h2")
    assert "Step 1" == press("j")
    assert "Before the first step" == press("k", "k")
    press("j", "4")
    assert ("true", "#step=1&tab=calls") == (
        chromium.run("document.querySelector('#tab-calls').getAttribute('aria-selected')"), chromium.run("location.hash"),
    )  # fmt: skip
    assert "stepengine fork" in text_of(chromium, "#head .command")
    press("e")
    assert "error" in text_of(chromium, "#head")
    press("/", "j", "k", "1")
    assert "jk1" == chromium.run("document.querySelector('#search').value")
    chromium.press("Escape")
    assert ("", "list") == (
        chromium.run("document.querySelector('#search').value"),
        chromium.run("document.activeElement.id"),
    )
    press("t")
    assert "dark" == chromium.run("document.documentElement.dataset.theme")
    press("t", "t", "?")
    assert chromium.run("document.querySelector('#help').open")
    assert "next error" in text_of(chromium, "#help")
    chromium.press("Escape")
    chromium.wait("!document.querySelector('#help').open")
    press("J")
    assert "reviewer" in text_of(chromium, "#tree [aria-selected=true]")
    press("J")
    assert {"helper"} == set(chromium.run("[...document.querySelectorAll('#list .row .word')].map(n => n.textContent)"))
    press("y")
    chromium.wait("document.querySelector('#fork').textContent === 'Copied'")


@pytest.mark.spec("evaluation:JG46")
def test_link_to_step_and_tab_opens_there(page: Any, reviewer: Journal) -> None:
    chromium = page(render_run(reviewer), "#step=2&tab=request")

    assert "Step 2" == text_of(chromium, "#head h2")
    assert "new since the last step" in text_of(chromium, "#panel")
    blocks = chromium.run(
        "[...document.querySelectorAll('#panel .block')].map(n => [n.classList.contains('new'), n.textContent])"
    )
    assert all(is_new == ("new" in cap[:30]) for is_new, cap in blocks)
    assert [False] == [is_new for is_new, cap in blocks if "Review src." in cap]


@pytest.mark.spec("evaluation:JG40", "evaluation:JG42")
def test_page_script_assembles_each_request_as_recorded(page: Any, reviewer: Journal) -> None:
    history = load_stored_history(reviewer)
    requests = {
        f"{i.path}#{i.seq}": [
            "".join([part.text for part in m.content if isinstance(part, TextPart)][:1])
            for m in RecordedRequests(history).get_request(i).all_messages
        ]
        for i in history.intents.values()
        if i.type == "model_call"
    }
    chromium = page(render_run(reviewer))
    assert len(requests) > 3
    for address, texts in requests.items():
        chromium.run(f"location.hash = '#step={quote(address, safe='')}&tab=request'")
        chromium.wait(f"document.querySelector('#head .mono').textContent === '{address}'")
        assert str(len(texts)) == text_of(chromium, "#tab-request .count")
        shown = text_of(chromium, "#panel")
        for text in texts:
            first = PageTexts().clean(text).strip().split("\n")[0][:60]
            assert first in shown


@pytest.mark.spec("evaluation:JG40", "evaluation:JG46")
def test_each_tab_shows_its_part_of_the_step(page: Any, reviewer: Journal) -> None:
    chromium = page(render_run(reviewer), "#step=1")
    seen = {}
    for key, name in zip("1234567", ("request", "reply", "thinking", "calls", "diff", "handler", "raw"), strict=True):
        chromium.press(key)
        chromium.run("document.querySelectorAll('#panel details').forEach(d => d.open = true)")
        settled(chromium)
        seen[name] = text_of(chromium, "#panel")

    assert "You review.\nBe terse." in seen["request"]
    assert "read_file" in seen["request"]
    assert "Review src." in seen["request"]
    assert "I begin." in seen["reply"]
    assert "cache tokens" in seen["reply"].replace("from ", "")
    assert "Small steps." in seen["thinking"]
    assert "picture" in seen["calls"]
    assert "Where the arguments come from: 1 untrusteduntrusted path" in seen["calls"]
    assert "image/png, 48 bytes" in seen["calls"]
    assert "first step" in seen["diff"]
    assert "--agent" in seen["handler"]
    assert '"n": 1' in seen["raw"]
    assert "Small steps." in seen["raw"]
    chromium.press("4")
    chromium.run(
        "[...document.querySelectorAll('#panel button')].find(b => b.textContent === 'Show the picture').click()"
    )
    assert chromium.run("document.querySelector('#panel img').src").startswith("data:image/png;base64,")


@pytest.mark.spec("evaluation:JG49")
def test_two_runs_show_equal_steps_folded_and_first_difference_open(page: Any, reviewer: Journal) -> None:
    chromium = page(render_run(reviewer, other=reviewed(last="Another end.")))
    settled(chromium)
    rows = chromium.run("[...document.querySelectorAll('#list .row .what')].map(n => n.textContent)")

    assert any("equal steps" in row for row in rows)
    assert "~" in chromium.run(f"{PICKED}.textContent")
    assert ["A", "B"] == chromium.run("[...document.querySelectorAll('#fields th')].slice(1).map(n => n.textContent)")
    assert "Another end." in text_of(chromium, "#fields")
    chromium.press("2")
    assert "Done." in text_of(chromium, "#panel")
    chromium.run("[...document.querySelectorAll('.sides button')][1].click()")
    settled(chromium)
    assert "Another end." in text_of(chromium, "#panel")
    chromium.run("document.querySelector('.row.fold').click()")
    settled(chromium)
    assert not any(
        "equal steps" in row
        for row in chromium.run("[...document.querySelectorAll('#list .row .what')].map(n => n.textContent)")
    )


@pytest.mark.spec("evaluation:JG50", "evaluation:JG48")
def test_served_page_shows_records_written_meanwhile(chromium: Browser, tmp_path: Path) -> None:
    lines = list(reviewed().lines())
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(lines[:8]))
    server, address = make_page_server(FollowedJournal(FileJournal(path), "run.jsonl"))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        chromium.complaints.clear()
        chromium.open(address)
        before = text_of(chromium, "#status"), text_of(chromium, "#facts")
        # Somebody reads the first step, in the middle of what is shown of it.
        chromium.press("1")
        chromium.run("document.querySelector('#panel').replaceChildren(document.createTextNode('where they read'))")
        path.write_bytes(b"".join(lines))
        chromium.wait("document.querySelector('#status').textContent === 'completed'")
        steps = chromium.run("[...document.querySelectorAll('#list .row')].at(-1).textContent")
        read = text_of(chromium, "#panel")
    finally:
        chromium.call("Page.navigate", url="about:blank")
        server.shutdown()
        thread.join()
        server.server_close()

    assert "interrupted" == before[0]
    assert "Done." in steps
    assert "where they read" == read
    assert [] == [c for c in chromium.complaints if "favicon" not in c]


@pytest.mark.spec("evaluation:JG48")
@pytest.mark.parametrize(("width", "height"), [(360, 225), (1440, 900)])
def test_no_width_scrolls_sideways(page: Any, width: int, height: int, reviewer: Journal) -> None:
    """
    A window of 1,440 at 400 % is one of 360.
    """
    chromium = page(render_run(reviewer, agent=engine([])))
    chromium.size(width, height)
    for tab in "1234567":
        chromium.press(tab)
        settled(chromium)
        assert chromium.run("document.documentElement.scrollWidth") <= width
    assert 0 < chromium.run("document.querySelectorAll('#list .row').length") <= ROWS


@pytest.mark.skipif(
    AXE is None, reason="needs axe-core: npm install --no-save axe-core, or AXE_CORE=path/to/axe.min.js"
)
@pytest.mark.spec("evaluation:JG48")
@pytest.mark.parametrize(("scheme", "width"), [("light", 1440), ("dark", 420)])
def test_axe_finds_no_accessibility_violation(page: Any, scheme: str, width: int, reviewer: Journal) -> None:
    assert AXE is not None
    chromium: Browser = page(render_run(reviewer, agent=engine([])), "#step=2&tab=request")
    chromium.scheme(scheme)
    chromium.size(width, 900)
    violations: dict[str, list[Any]] = {}

    def judged(name: str) -> None:
        settled(chromium)
        violations[name] = faults(chromium)

    for tab in "1234567":
        chromium.press(tab)
        chromium.run("document.querySelectorAll('details').forEach(d => d.open = true)")
        judged(f"tab {tab}")
    chromium.run(
        "(() => { const s = document.querySelector('#search'); s.value = 'read'; s.dispatchEvent(new Event('input')); })()"
    )
    judged("search")
    chromium.press("e")
    judged("error")
    chromium.press("?")
    judged("help")
    page(render_run(reviewer, other=reviewed(last="Another end.")))
    judged("compare")
    page(render_run(waiting()), "#step=1&tab=calls")
    judged("program")

    assert {} == {name: found for name, found in violations.items() if found}


PROGRAM = """\
import asyncio
items = [*["tea"] * 9, "gold", "milk"]
prices = await asyncio.gather(*[price(item) for item in items])
# <script>window.hacked = 1</script>
if await ask("Buy <b>tea</b>?", ["yes", "no"]) == "yes":
    print("\x1b[2J")
"""


def waiting(code: str = PROGRAM) -> Journal:
    calls: list[Any] = [ToolCall("price", {"item": item}) for item in [*["tea"] * 9, "gold", "milk"]]
    return programmed(code, (calls, [3] * 11), ([Ask("Buy <b>tea</b>?", options=["yes", "no"])], [5]))


def lines_shown(chromium: Browser) -> list[str]:
    rows: list[str] = chromium.run(
        "[...document.querySelectorAll('#panel .source div')].map(d => d.innerText.replace(/\\s+/g, ' ').trim())"
    )
    return rows


@pytest.mark.spec("programs:PG38")
def test_program_shows_calls_below_lines_and_marks_the_waiting_line(page: Any) -> None:
    """
    Of many calls of one line the first ones stand there, those that failed, and a button for the others.
    """
    chromium = page(render_run(waiting()), "#step=1&tab=calls")
    settled(chromium)
    calls = [f"1#{n} price tea → 30" for n in range(9)]

    assert lines_shown(chromium) == [
        "1 import asyncio",
        '2 items = [*["tea"] * 9, "gold", "milk"]',
        "3 prices = await asyncio.gather(*[price(item) for item in items])",
        *calls[:5],
        "1#9 price gold → error ValueError: nobody sells gold",
        "5 more calls",
        "4 # <script>window.hacked = 1</script>",
        '5 if await ask("Buy <b>tea</b>?", ["yes", "no"]) == "yes":',
        "1#11 ask Buy <b>tea</b>? yes no → no result yet",
        '6 print("\\x1b[2J")',
    ]
    assert chromium.run("[...document.querySelectorAll('#panel [aria-current]')].map(d => d.innerText.trim()[0])") == [
        "5"
    ]
    assert chromium.run("document.querySelector('#panel .source').getAttribute('aria-label')") == "Program, at line 5"
    assert not chromium.run("window.hacked || document.querySelector('#panel b, #panel script')")
    chromium.run("document.querySelector('#panel .link.more').click()")
    assert [line for line in lines_shown(chromium) if line.startswith("1#")][6:11] == [
        *calls[5:],
        "1#10 price milk → 40",
    ]


@pytest.mark.spec("programs:PG38")
def test_call_of_a_program_links_to_its_step_and_line(page: Any) -> None:
    """
    There the program stands where a handler would.
    """
    chromium = page(render_run(waiting()), "#step=1&tab=calls")
    chromium.run("document.querySelectorAll('#panel .link')[1].click()")
    settled(chromium)
    head = text_of(chromium, "#head")
    cap = text_of(chromium, "#panel .cap")
    chromium.press("6")
    settled(chromium)

    assert "In the program of #1" in head
    assert "line 3 of its program" in cap
    assert text_of(chromium, "#panel h3") == "Program of #1line 3"
    assert text_of(chromium, "#panel [aria-current]").startswith("3prices = await")


@pytest.mark.spec("evaluation:JG48")
def test_rows_and_charts_have_accessible_names_and_a_table(page: Any, reviewer: Journal) -> None:
    chromium = page(render_run(reviewer))
    chromium.press("j")
    settled(chromium)

    assert chromium.run(f"document.querySelector('#list').getAttribute('aria-activedescendant') === {PICKED}.id")
    assert ["2", str(len(opened(render_run(reviewer))["steps"]))] == [
        chromium.run(f"{PICKED}.getAttribute('{name}')") for name in ("aria-posinset", "aria-setsize")
    ]
    assert "steps in" in chromium.run("document.querySelector('#lane').getAttribute('aria-label')")
    chromium.run("document.querySelector('#twin').open = true")
    chromium.wait("document.querySelectorAll('#table tbody tr').length > 3")
    assert "$0.0010" in text_of(chromium, "#table")
    assert "33 %" in text_of(chromium, "#table")
    chromium.run(
        "(() => { const s = document.querySelector('#search'); s.value = 'ticket'; s.dispatchEvent(new Event('input')); })()"
    )
    chromium.wait("/hits? for ticket/.test(document.querySelector('#said').textContent)")
    sizes = chromium.run(
        "[...document.querySelectorAll('button, #list .row, #tree li, summary')].filter(n => n.offsetParent).map(n => n.getBoundingClientRect().height)"
    )
    assert min(sizes) >= 24


@pytest.mark.spec("evaluation:JG41", "evaluation:JG46")
def test_handler_tab_shows_line_variables_and_changes_between_steps(page: Any, reviewer: Journal) -> None:
    text = render_run(reviewer, agent=engine([]))
    data = opened(text)
    number = next(n for n, row in enumerate(data["steps"]) if row["kind"] == "model" and row["n"] == 2)
    frame = frames_at(data, number)[0]
    chromium = page(text, "#step=2&tab=handler")
    here = text_of(chromium, "#panel [aria-current=true]")
    shown = dict(
        zip(
            *[
                chromium.run(f"[...document.querySelectorAll('#panel .members > {tag}')].map(n => n.textContent)")
                for tag in ("dt", "dd")
            ],
            strict=True,
        )
    )
    chromium.press("5")
    settled(chromium)
    changed = text_of(chromium, "#panel")

    assert f"{frame['line']}        yield STEP" == here
    assert frame["values"] == shown
    assert "findings = []" in changed
    assert "+ findings = [" in changed
    assert "count_messagespre_step" in changed
    assert "+ 4 added" in changed


PAINTED = """(() => {
    const canvas = document.querySelector('#lane'), {width, height} = canvas, scale = width / canvas.clientWidth;
    const drawn = canvas.getContext('2d').getImageData(0, 0, width, height).data;
    const there = (part, lane) => drawn[4 * (Math.round((lane * 20 + 13) * scale) * width + Math.round(part * width)) + 3] > 0;
    return [0.25, 0.9].map(part => [0, 1, 2, 3].map(lane => there(part, lane)));
})()"""


def beside_each_other() -> Journal:
    """
    Two children in the background at the same time, one of which fails, and then a third.
    """

    def child(ctx: Any) -> Any:
        yield from Sleep(0.2)
        if ctx.params["fails"]:
            msg = "no page"
            raise ValueError(msg)
        return "done"

    def lead(ctx: Any) -> Any:
        kids = [AgentCall("kid", prompt, params={"fails": prompt == "two"}) for prompt in ("one", "two", "three")]
        yield from Wait(*(yield from Start(*kids[:2])))
        yield from kids[2]

    kid = AgentDefinition("kid", handle_steps=child)
    journal = MemoryJournal()
    Engine([AgentDefinition("lead", handle_steps=lead, spawnable_agents=[kid])]).run_sync("lead", "go", journal=journal)
    return journal


@pytest.mark.spec("waiting:WT3")
def test_concurrent_children_are_drawn_in_parallel_lanes(page: Any) -> None:
    journal = beside_each_other()
    chromium = page(render_run(journal))

    assert ["leadgo", "kidone", "kidtwo", "kidthree"] == chromium.run(
        "[...document.querySelectorAll('#names li')].map(li => li.textContent)"
    )
    assert [["", "", "bad", ""]] == [
        chromium.run("[...document.querySelectorAll('#names li')].map(li => li.className.replace('here', '').trim())")
    ]
    assert [[True, True, True, False], [True, False, False, True]] == chromium.run(PAINTED)
    chromium.run(
        "(() => { const c = document.querySelector('#lane'), b = c.getBoundingClientRect();"
        " c.dispatchEvent(new MouseEvent('click', {clientX: b.left + b.width / 4, clientY: b.top + 50})); })()"
    )
    settled(chromium)
    assert "kidtwo" == text_of(chromium, "#names .here")
    assert chromium.run(f"{PICKED}.textContent").startswith("1#")

    chromium.run("document.querySelector('#agent-3').click()")
    settled(chromium)
    assert "kidthree" == text_of(chromium, "#names")
    chromium.run("document.querySelector('#twin').open = true")
    chromium.wait("document.querySelectorAll('#table table').length == 2")
    assert "failed" in text_of(chromium, "#table")
    assert chromium.run(
        "document.querySelector('#context').offsetParent === null"
    )  # no model was asked, so nothing is charted
