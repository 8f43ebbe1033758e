"""
A tool with validated input and a dependency that the model does not see.

``python examples/custom_tool.py`` needs no key: scripted replies replace the model, and the tool really runs.
"""

import sqlite3
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from stepengine import STEP_ALL, AgentDefinition, Depends, Engine, StepContext, Steps, call, tool
from stepengine.testing import ScriptedModel, text, tool_call


def stock(**counts: int) -> Iterator[sqlite3.Connection]:
    """Open a database of articles and counts; what follows the ``yield`` runs when the call that uses it has ended."""
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    connection.execute("create table stock (article, count)")
    connection.executemany("insert into stock values (?, ?)", counts.items())
    try:
        yield connection
    finally:
        connection.close()


def get_db() -> Iterator[sqlite3.Connection]:
    """Open the shop's database for one call."""
    yield from stock(apple=7, pear=0)


def get_full_db() -> Iterator[sqlite3.Connection]:
    """Open another one, for a test."""
    yield from stock(apple=99)


@tool
def stock_of(
    article: Annotated[str, Field(min_length=1)],
    db: sqlite3.Connection = Depends(get_db),
) -> int:
    """
    Say how many pieces of an article are in stock.

    Args:
        article: The article's name, in the singular.
    """
    row = db.execute("select count from stock where article = ?", (article,)).fetchone()
    if row is None:
        msg = f"there is no article {article!r}; there are apple and pear"
        raise LookupError(msg)  # becomes an error result that the model can read
    return int(row[0])


def handle_steps(ctx: StepContext) -> Steps[str]:
    apples = yield from call(stock_of, "apple")  # the handler calls it: no model, and `apples` is an int
    ctx.logger.info("looked before asking", apples=apples)
    turn = yield STEP_ALL  # now the model takes its steps
    return turn.text


clerk = AgentDefinition("clerk", model="openai/gpt-5", tools=[stock_of], handle_steps=handle_steps)


def main() -> None:
    print("what the model is told about the tool:", list(stock_of.spec.input_schema["properties"]))

    model = ScriptedModel(
        [
            tool_call("stock_of", {"article": "kiwi"}),
            tool_call("stock_of", {"article": "pear"}),
            text("We have 7 apples, and pears are sold out."),
        ]
    )
    with Engine([clerk], models=model) as engine:
        result = engine.run_sync("clerk", "What is in stock?")
        for done in result.tool_calls:
            print(f"{done.source:>8}: stock_of {done.input} -> {done.result.status}: {done.result.text}")
        print(result.output)
        assert [done.is_error for done in result.tool_calls] == [False, True, False]

        with engine.override(models=ScriptedModel(["Many."]), dependency_overrides={get_db: get_full_db}):
            tested = engine.run_sync("clerk", "What is in stock?")
        print(f"with another database: stock_of('apple') -> {tested.tool_calls[0].result.text}")
        assert tested.tool_calls[0].result.data == 99


if __name__ == "__main__":
    main()
