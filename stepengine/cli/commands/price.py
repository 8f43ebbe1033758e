"""``stepengine compare price``: what recorded runs would have cost with other models."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated

import typer

from stepengine.cli.evaluation import clean_lines, clean_report, interrupted_or
from stepengine.cli.exits import Exit, complain
from stepengine.cli.journals import journal_at, spread
from stepengine.cli.options import Config, Files, Json, Options
from stepengine.cli.screen.render import dumps, say
from stepengine.errors import UnknownModel

if TYPE_CHECKING:
    from stepengine.evaluation.prices import Priced

__all__ = ("price",)


def price(
    files: Files,
    *,
    model: Annotated[list[str], typer.Option(help="The model; may be given several times.", metavar="PROVIDER/MODEL")],
    as_json: Json = False,
    config: Config = None,
) -> Exit:
    """
    Say what recorded runs would have cost with other models.

    As a range, from the tokens that were recorded, at the prices of today. Another tokenizer makes 0.8 to 1.35 tokens
    of one, unless the model is of the same family; its cache would have held what the recorded one did, nothing, or all
    that the request before it had; it would have thought as much, or not at all.

    Another model would also act otherwise: more or fewer steps, other tools. That is in no range; `stepengine compare impact
    --model` asks it. A folder stands for the *.jsonl files in it.

    Leaves with:
      0    all is priced
      1    there is no price for a model, or no usage in a run
      2    wrong usage; a journal cannot be read

    Examples:
      stepengine compare price journals/ --model openai/gpt-5-mini
      stepengine compare price run.jsonl --model anthropic/claude-haiku-4-5 --json
    """
    return interrupted_or(lambda: _price(files, model, Options(config=config).in_force(), as_json=as_json))


def _price(files: list[str], models: list[str], options: Options, *, as_json: bool) -> Exit:
    from stepengine.cli.bench import registry_of
    from stepengine.evaluation.prices import FORMAT, calls_of, priced
    from stepengine.models.pricing import cost_of

    registry, now = registry_of(options.settings), datetime.now(UTC)
    names: list[str] = []
    for model in models:
        try:
            names.append(str(registry.parse(model)))
        except UnknownModel:
            names.append(model)
    rows: list[tuple[str, list[Priced]]] = []
    for file in spread(files):
        calls = calls_of(journal_at(file))
        rows.append((file, [priced(calls, name, cost_of, now) for name in names]))
    if as_json:
        runs = [{"file": file, "models": [one.to_json() for one in made]} for file, made in rows]
        print(dumps(clean_report({"format": FORMAT, "runs": runs})))
    else:
        lines = [_describe_price(file, one) for file, made in rows for one in made]
        sums = [_describe_price("together", _sum(name, [made[n] for _, made in rows])) for n, name in enumerate(names)]
        say(clean_lines([*lines, *(sums if len(rows) > 1 else [])]), hang=4)
        complain("another model would also act otherwise; `stepengine compare impact --model` asks it")
    unknown = [one.model for _, made in rows for one in made if one.low is None]
    if unknown:
        complain(f"there is no price for {', '.join(dict.fromkeys(unknown))}, or no usage is recorded")
    return Exit.FAILED if unknown else Exit.COMPLETED


def _describe_price(file: str, one: Priced) -> str:
    from stepengine.evaluation.samples import shown_dollars

    if one.low is None or one.high is None:
        cost = "unknown"
    else:
        ends = [shown_dollars(end) for end in (one.low, one.high)]
        cost = " to ".join(dict.fromkeys(ends))
    was = "unknown" if one.recorded is None else shown_dollars(one.recorded)
    odd = f", {one.unknown} calls without usage" if one.unknown else ""
    return f"{file}  {one.model}: {cost} (recorded {was}{odd})"


def _sum(model: str, made: list[Priced]) -> Priced:
    from stepengine.evaluation.prices import Priced

    def total(values: list[Decimal | None]) -> Decimal | None:
        known = [value for value in values if value is not None]
        return sum(known, Decimal(0)) if len(known) == len(values) else None

    return Priced(
        model,
        total([one.low for one in made]),
        total([one.high for one in made]),
        total([one.recorded for one in made]),
        sum(one.unknown for one in made),
    )
