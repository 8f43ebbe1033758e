"""The table of `benchmarks/README.md`: made from its figures, and those are what a run needs."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from benchmarks.peers import ENVIRONMENTS
from benchmarks.programs.__main__ import MEASURED, PAGE, PEER, cost, measured, page_with, table
from benchmarks.programs.market import ITEMS, TOTAL, WAYS, Shop, said

FIGURES = json.loads(MEASURED.read_text(encoding="utf-8"))


def test_the_page_shows_the_figures() -> None:
    text = PAGE.read_text(encoding="utf-8")

    assert page_with(text, table(FIGURES)) == text
    assert ["stepengine", "pydantic_ai"] == list(FIGURES)
    assert all(tuple(ways) == WAYS for ways in FIGURES.values())
    assert PEER in ENVIRONMENTS


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.deep
def test_a_run_needs_the_published_calls_and_bytes(way: str) -> None:
    if way == "program":
        pytest.importorskip("pydantic_monty", reason="needs the extra programs")
    kept, now = FIGURES["stepengine"][way], measured("stepengine", way, sys.executable, 1)

    assert (kept["model calls"], kept["written"]) == (now["model calls"], now["written"])
    assert now["sent"] == pytest.approx(kept["sent"], rel=0.1)


def test_a_program_needs_fewer_requests_and_tokens() -> None:
    for ways in FIGURES.values():
        assert (len(ITEMS) + 1, 2, 2) == tuple(ways[way]["model calls"] for way in WAYS)
    ours = FIGURES["stepengine"]
    assert ours["program"]["sent"] < 0.7 * ours["in one reply"]["sent"] < 0.1 * ours["one by one"]["sent"]


@pytest.mark.deep
def test_the_page_shows_code_mode_figures_of_bundled_agents() -> None:
    pytest.importorskip("pydantic_monty", reason="needs the extra programs")
    command = [sys.executable, "-m", "benchmarks.programs.bundled"]
    ran = subprocess.run(command, cwd=PAGE.parents[1], check=True, capture_output=True, text=True, timeout=60)
    needed = [
        [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) (?:requests|tokens)", line)]
        for line in ran.stdout.splitlines()
    ]
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    renaming = re.findall(
        r"needs (\d) requests and reads ([\d,]+) tokens by calls, (\d) and ([\d,]+) by a program", text
    )
    researching = re.findall(
        r"needs (\d) (requests) in both ways, and ([\d,]+) tokens by calls, ([\d,]+) by programs", text
    )
    said = [[int(one.replace(",", "")) for one in found if one != "requests"] for found in (*renaming, *researching)]

    assert [[3, 2], [3]] == [said[0][::2], said[1][:1]]
    assert [3, 2, 3, 3] == [requests for requests, _ in needed]
    assert [read for _, read in needed] == pytest.approx([*said[0][1::2], *said[1][1:]], rel=0.1)


def test_the_fake_model_adds_the_received_prices() -> None:
    results = [{"role": "tool", "content": json.dumps({"price": price})} for price in (3, 4)]

    assert "They cost 7 euros." == said("in one reply", results)["content"]
    assert f"They cost {TOTAL} euros." == said("program", [{"role": "tool", "content": str(TOTAL)}])["content"]
    assert ITEMS[2] in said("one by one", results)["tool_calls"][0]["function"]["arguments"]


def test_repeated_input_is_counted_and_costs_less() -> None:
    shop = Shop()
    first = [{"role": "user", "content": "x" * 400}]
    shop.reply("in one reply", {"messages": first})
    shop.reply("in one reply", {"messages": [*first, {"role": "tool", "content": "1"}]})

    assert (0, True) == (shop.asked[0].repeated, 100 < shop.asked[1].repeated < shop.asked[1].sent)
    assert cost(1_000, 900, 10) < cost(1_000, 0, 10)
