"""
What people type finds its page: the search of the built site, in a browser, as a reader uses it.

The words come from the contents of other projects' documentation and from the titles of their issues, and were written down before any
page was made to be found by them.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.debugging.browser import CHROMIUM, Browser, browser

FIRST = 3
DOCS = Path(__file__).resolve().parents[2] / "docs"
TYPED = (
    ("install", "install", "pydantic-ai: install.md"),
    ("installation", "install", "AutoGen: Installation"),
    ("quickstart", "tutorial/index", "openai-agents: Quickstart"),
    ("jupyter", "install", "pydantic-ai 144, openai-agents 77"),
    ("event loop is already running", "install", "pydantic-ai 144, llama_deploy 162"),
    ("faq", "first-questions", "LangGraph: FAQ"),
    ("langgraph", "coming-from/langgraph", "its name"),
    ("function tools", "tools", "ADK: Function tools"),
    ("tool calling", "tools", "LangGraph: Tool calling"),
    ("structured output", "structured-output", "Strands: Structured Output"),
    ("pydantic model", "structured-output", "pydantic-ai: examples/pydantic-model.md"),
    ("dependency injection", "tools", "pydantic-ai: dependencies.md"),
    ("human in the loop", "human-in-the-loop", "LangGraph: Human-in-the-loop"),
    ("approval", "human-in-the-loop", "AutoGen: User Approval for Tool Execution"),
    ("user input", "human-in-the-loop", "LangGraph: Wait for user input"),
    ("guardrails", "hooks", "openai-agents: guardrails.md"),
    ("callbacks", "hooks", "ADK: Callbacks"),
    ("hooks", "hooks", "Strands: Hooks"),
    ("streaming", "streaming", "openai-agents: streaming.md"),
    ("stream tokens", "streaming", "LangGraph: Stream LLM tokens"),
    ("sessions", "sessions", "openai-agents: Sessions"),
    ("memory", "sessions", "ADK: Sessions & Memory"),
    ("conversation history", "sessions", "LangGraph: Manage conversation history"),
    ("persistence", "journals", "LangGraph: Persistence"),
    ("checkpoint", "journals", "n8n 33845, riskkernel 103"),
    ("durable execution", "growing", "pydantic-ai: Durable Execution"),
    ("postgres", "growing", "LangGraph: Use Postgres checkpointer for persistence"),
    ("time travel", "debugging", "LangGraph: Time travel"),
    ("context management", "context-policies", "Strands: Context Management"),
    ("compaction", "context-policies", "ADK: context/compaction.md"),
    ("summary", "context-policies", "LangGraph: Add summary of the conversation history"),
    ("prompt caching", "model-settings", "fast-agent 20, kagent 2787"),
    ("model providers", "models", "Strands: Model Providers"),
    ("ollama", "local-models", "ADK: Ollama"),
    ("custom provider", "models", "Strands: Custom Providers"),
    ("bedrock", "clouds", "Strands: Amazon Bedrock"),
    ("thinking", "model-settings", "pydantic-ai: thinking.md"),
    ("images", "multimodal", "ADK: Audio, Images, and Video"),
    ("retries", "retries", "pydantic-ai: retries.md"),
    ("fallback", "retries", "pydantic-ai: api/models/fallback.md"),
    ("usage", "cost", "openai-agents: usage.md"),
    ("token budget", "cost", "axe 19, strands 2124"),
    ("max iterations", "cost", "strands 259, CrewAI 3861"),
    ("web search", "server-tools", "ADK: Google Search"),
    ("mcp", "mcp", "Strands: Model Context Protocol (MCP)"),
    ("multi-agent", "layered-agents", "openai-agents: multi_agent.md"),
    ("handoffs", "layered-agents", "openai-agents: handoffs.md"),
    ("subagents", "layered-agents", "Strands: Delegate to subagents"),
    ("code execution", "programs", "ADK: Code Execution"),
    ("testing", "testing-your-agent", "pydantic-ai: Testing"),
    ("vcr", "record-and-replay", "vcrpy, pytest-recording"),
    ("record replay", "record-and-replay", "reeltime: Summary"),
    ("mock openai", "record-and-replay", "what people type"),
    ("test llm app in ci", "record-and-replay", "what people type"),
    ("evaluation", "evaluations", "ADK: Evaluation"),
    ("llm judge", "evaluations", "pydantic-ai: LLM Judge"),
    ("quality gate", "testing-your-agent", "SonarQube: Quality gates"),
    ("optimizer", "improving", "DSPy: Optimizers"),
    ("tracing", "observability", "openai-agents: tracing.md"),
    ("opentelemetry", "observability", "AutoGen: Open Telemetry"),
    ("fastapi", "serving", "DSPy: Deployment"),
    ("cron", "schedules", "LangGraph: Create Cron Jobs"),
    ("background", "waiting", "LangGraph: Run an Agent in the Background"),
    ("environment variables", "reference/command-line", "LangGraph: Environment Variables"),
    ("ag-ui", "web-pages", "pydantic-ai: AG-UI"),
    ("getting started", "tutorial/index", "what people type"),
    ("docker deploy", "docker", "what people type"),
    ("openai compatible base url ollama", "local-models", "what people type"),
    ("change system prompt dynamically", "system-prompt", "what people type"),
    ("resume", "journals", "what people type"),
    ("fork a run", "journals", "what people type"),
    ("context pruning", "context-policies", "what people type"),
    ("orchestration", "layered-agents", "what people type"),
    ("sandboxing", "where-tools-run", "what people type"),
    ("test agents in ci", "testing-your-agent", "what people type"),
    ("deploy with postgresql", "growing", "what people type"),
    ("docker compose", "docker", "what people type"),
    ("lm studio", "local-models", "what people type"),
    ("permission mode", "permissions", "what people type"),
    ("mock model", "testing-your-agent", "what people type"),
    ("conversation memory", "sessions", "what people type"),
)
"""What is typed, the page that it is to find, and where it was seen."""


def found(tab: Browser, site: Path, words: str) -> list[str]:
    """
    Type words into the search of the site, and return the pages of the first results, in their order.
    """
    tab.call("Page.navigate", url=f"{(site / 'search.html').as_uri()}?q={quote(words)}")
    tab.wait("document.readyState === 'complete' && document.querySelector('.search-summary')?.innerText")
    links = tab.run(
        f"[...document.querySelectorAll('ul.search li > a')].slice(0, {FIRST}).map(a => a.getAttribute('href'))"
    )
    return [link.partition("#")[0].removesuffix(".html") for link in links]


@pytest.mark.deep
@pytest.mark.spec("requirements:P13")
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: the command chromium on PATH")
def test_site_search_finds_the_expected_page_among_three_results(site: Path, tmp_path: Path) -> None:
    with browser(tmp_path) as tab:
        results = {words: found(tab, site, words) for words, _, _ in TYPED}

    assert len(results) >= 60
    assert {} == {words: results[words] for words, page, _ in TYPED if page not in results[words]}
    assert 0.9 <= sum(results[words][:1] == [page] for words, page, _ in TYPED) / len(TYPED)
    assert [] == [page for pages in results.values() for page in pages if page.startswith("spec/")]


def test_each_search_word_belongs_to_one_page() -> None:
    pages = tomllib.loads((DOCS / "search_words.toml").read_text(encoding="utf-8"))
    words = [word for typed in pages.values() for word in typed]

    assert [] == [page for page in pages if not (DOCS / f"{page}.md").exists()]
    assert [] == [word for word, count in Counter(words).items() if count > 1]
