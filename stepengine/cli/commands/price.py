"""``stepengine compare price``: the estimated cost of recorded runs with other models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from stepengine.cli.evaluation import join_and_redact_lines, redact_report, run_reporting_errors
from stepengine.cli.exits import Exit, print_error
from stepengine.cli.journals import expand_to_journals, open_journal
from stepengine.cli.options import Config, Files, Json, Options
from stepengine.cli.screen.render import print_visible, to_ascii_json
from stepengine.errors import UnknownModel

if TYPE_CHECKING:
    from stepengine.evaluation.prices import RunPrice


def price(
    files: Files,
    *,
    model: Annotated[list[str], typer.Option(help="The model; may be repeated.", metavar="PROVIDER/MODEL")],
    as_json: Json = False,
    config: Config = None,
) -> Exit:
    """
    Estimate what recorded runs would cost with other models.

    Prints a range, from the recorded tokens at current prices. It assumes 0.8 to 1.35 tokens per recorded token,
    unless the model is of the same family; a cache that held what the recorded one did, nothing, or the whole
    previous request; and as much thinking as recorded, or none.

    Another model would also act differently, with other steps and tools. The range does not include that;
    `stepengine compare impact --model` runs it. A folder means the *.jsonl files in it.

    Exit codes:
      0    everything has a price
      1    a model has no price, or a run has no usage
      2    wrong usage; a journal cannot be read

    Examples:
      stepengine compare price journals/ --model openai/gpt-5-mini
      stepengine compare price run.jsonl --model anthropic/claude-haiku-4-5 --json
    """
    return run_reporting_errors(
        lambda: _print_prices(files, model, Options(config=config).with_settings(), as_json=as_json)
    )


def _print_prices(files: list[str], models: list[str], options: Options, *, as_json: bool) -> Exit:
    """Print the estimated cost of each run with each model, and the sums; return the exit code."""
    from stepengine.evaluation import price as price_run
    from stepengine.evaluation.prices import FORMAT

    registry = options.settings.make_models()
    names: list[str] = []
    for model in models:
        try:
            names.append(str(registry.parse(model)))
        except UnknownModel:
            names.append(model)
    rows = [(file, price_run(open_journal(file), *names)) for file in expand_to_journals(files)]
    if as_json:
        runs = [{"file": file, "models": [one.to_json() for one in made]} for file, made in rows]
        print(to_ascii_json(redact_report({"format": FORMAT, "runs": runs})))
    else:
        lines = [_describe_price(file, one) for file, made in rows for one in made]
        sums = [
            _describe_price("together", _sum_prices(name, [made[n] for _, made in rows]))
            for n, name in enumerate(names)
        ]
        print_visible(join_and_redact_lines([*lines, *(sums if len(rows) > 1 else [])]), hanging_indent=4)
        print_error("another model would also act differently; to call it, run `stepengine compare impact --model`")
    unknown = [one.model for _, made in rows for one in made if one.low is None]
    if unknown:
        print_error(f"there is no price for {', '.join(dict.fromkeys(unknown))}, or no usage is recorded")
    return Exit.FAILED if unknown else Exit.COMPLETED


def _describe_price(file: str, run_price: RunPrice) -> str:
    """Return a line with the estimated and the recorded cost of a run."""
    from stepengine.evaluation.samples import format_dollars

    if run_price.low is None or run_price.high is None:
        cost = "unknown"
    else:
        ends = [format_dollars(end) for end in (run_price.low, run_price.high)]
        cost = " to ".join(dict.fromkeys(ends))
    was = "unknown" if run_price.recorded is None else format_dollars(run_price.recorded)
    odd = f", {run_price.unknown} calls without usage" if run_price.unknown else ""
    return f"{file}  {run_price.model}: {cost} (recorded {was}{odd})"


def _sum_prices(model: str, prices: list[RunPrice]) -> RunPrice:
    """Return the sum of the estimates of a model for several runs."""
    from stepengine.evaluation.prices import RunPrice
    from stepengine.evaluation.samples import sum_costs

    return RunPrice(
        model,
        sum_costs([one.low for one in prices]),
        sum_costs([one.high for one in prices]),
        sum_costs([one.recorded for one in prices]),
        sum(one.unknown for one in prices),
    )
