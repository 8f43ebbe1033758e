"""
Flight booking, after Pydantic AI's example: a search with a union type as output, a validator, and questions to the customer.

``python examples/from_others/pydantic_ai_flight_booking.py`` uses scripted replies. To call a real model, omit ``models=``.

There the caller loops over runs and passes the history on. Here the loops are two handlers and the questions are ``Ask``, so one
journal holds the whole booking and it can be resumed at each question. The tool that runs an agent yields, and names that agent in
``uses=``.
"""

from __future__ import annotations

import datetime as dt
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, RootModel

from stepengine import (
    STEP_ALL,
    AgentCall,
    AgentDefinition,
    Ask,
    Engine,
    Limits,
    Perform,
    RunResult,
    StepContext,
    Steps,
    ToolCall,
    tool,
)
from stepengine.journal import JournalLike
from stepengine.testing import ScriptedModel, tool_call

MODEL = "openai/gpt-5"
PAGE = "Flights on 10 May: HAM-OSL DY1 120 euros; HAM-OSL SK7 90 euros; HAM-ARN SK9 70 euros."


class Flight(BaseModel):
    """A flight."""

    number: str
    price: int
    origin: Annotated[str, Field(description="Three-letter airport code.")]
    destination: Annotated[str, Field(description="Three-letter airport code.")]
    date: dt.date


class NoFlight(BaseModel):
    """No flight fits."""


class Seat(BaseModel):
    """A seat."""

    row: Annotated[int, Field(ge=1, le=30)]
    letter: Literal["A", "B", "C", "D", "E", "F"]


class Unclear(BaseModel):
    """The answer names no seat."""


class Flights(RootModel[list[Flight]]):
    """All flights of a page."""


class Found(RootModel[Flight | NoFlight]):
    """The result of a search."""


class Choice(RootModel[Seat | Unclear]):
    """The result of reading an answer."""


class Wish(BaseModel):
    """What the customer asked for."""

    origin: str
    destination: str
    date: dt.date


class Booking(BaseModel):
    """A booked flight."""

    flight: Flight
    seat: Seat


def fetch_page() -> str:
    """Return the page of a booking site."""
    return PAGE


extractor = AgentDefinition(
    "extractor",
    model=MODEL,
    description="Extracts flights from text.",
    system_prompt="Extract all flights.",
    output_schema=Flights,
)
seater = AgentDefinition(
    "seater",
    model=MODEL,
    description="Reads a wish for a seat.",
    system_prompt="Extract the seat. A and F are at the window; rows 1, 14 and 20 have more leg room.",
    output_schema=Choice,
)


@tool(uses=[extractor])
def extract_flights() -> Steps[list[Flight]]:
    """Get the details of all flights."""
    page = yield from Perform(fetch_page)
    flights = yield from AgentCall(extractor, page)
    return flights.root


def find_problems(flight: Flight, wish: Wish) -> list[str]:
    """Return how a flight differs from the wish."""
    return [
        f"The {name} is {getattr(flight, name)}, not {getattr(wish, name)}."
        for name in Wish.model_fields
        if getattr(flight, name) != getattr(wish, name)
    ]


def search(ctx: StepContext[Wish]) -> Steps[Found]:
    """Search until a flight fits and the customer takes it, or there is none."""
    retries = 4
    while True:
        turn = yield STEP_ALL
        found = turn.output.root if turn.output is not None else NoFlight()
        if isinstance(found, NoFlight):
            return Found(found)
        problems = find_problems(found, ctx.params)
        if not problems:
            answer = yield from Ask(
                f"Buy {found.number} for {found.price} euros?", options=["buy", "search"], key=found.number
            )
            if answer == "buy":
                return Found(found)
            problems = [f"The customer does not want {found.number}. Suggest another flight."]
        elif (retries := retries - 1) < 0:
            msg = f"no flight that fits: {problems}"
            raise ValueError(msg)
        yield ToolCall("add_message", {"role": "user", "content": "\n".join(problems)}, include_tool_call=False)


searcher = AgentDefinition(
    "searcher",
    model=MODEL,
    description="Finds the cheapest flight.",
    tools=[extract_flights],
    system_prompt="Find the cheapest flight on the given date.",
    input_schema=Wish,
    output_schema=Found,
    handle_steps=search,
)


def handle_steps(ctx: StepContext[Wish]) -> Steps[Booking | None]:
    """Find a flight, then a seat."""
    found = yield from AgentCall(searcher, ctx.prompt, params=ctx.params)
    if isinstance(found.root, NoFlight):
        return None
    attempt, question = 1, "Which seat would you like?"
    while True:
        answer = yield from Ask(question, key=f"seat-{attempt}")
        choice = yield from AgentCall(seater, answer)
        if isinstance(choice.root, Seat):
            return Booking(flight=found.root, seat=choice.root)
        attempt, question = attempt + 1, "That is no seat. Which seat would you like?"


agent = AgentDefinition("booking", input_schema=Wish, spawnable_agents=[searcher, seater], handle_steps=handle_steps)


def make_model() -> ScriptedModel:
    """Return the replies of all agents, in order."""
    cheap, dear, other = (
        {"number": number, "price": price, "origin": "HAM", "destination": to, "date": "2026-05-10"}
        for number, price, to in (("SK7", 90, "OSL"), ("DY1", 120, "OSL"), ("SK9", 70, "ARN"))
    )

    def output(value: Any) -> Any:
        return tool_call("set_output", {"data": value})

    return ScriptedModel(
        [
            tool_call("extract_flights", {}),
            output([dear, cheap, other]),
            output(other),  # the wrong destination: the validator refuses it
            output(cheap),  # "search"
            output(dear),  # "buy"
            output({}),  # no seat
            output({"row": 14, "letter": "A"}),
        ]
    )


ANSWERS = {"SK7": "search", "DY1": "buy", "seat-1": "the best one", "seat-2": "window, more leg room"}


def run(engine: Engine, journal: JournalLike) -> RunResult[Any]:
    """Book, and answer each question in turn: every time the run is suspended and resumed from its journal."""
    wish = Wish(origin="HAM", destination="OSL", date=dt.date(2026, 5, 10))
    result = engine.run_sync(agent, "A flight to Oslo.", params=wish, journal=journal, limits=Limits(max_steps=15))
    while result.pending_questions:
        (question,) = result.pending_questions
        answer = ANSWERS[question.id.rpartition(":")[2]]
        print(f"{question.text} {answer}")
        result = engine.resume_sync(journal, answers={question.id: answer})
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, Engine([agent], models=make_model()) as engine:
        print(run(engine, Path(folder, "booking.jsonl")).unwrap())
