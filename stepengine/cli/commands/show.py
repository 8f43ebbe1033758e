"""``stepengine show``: a recorded run, step by step, at the terminal or as a page for a browser."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer
from attrs import frozen

from stepengine.cli.exits import Exit, complain
from stepengine.cli.journals import find_journal, readable_journal
from stepengine.cli.options import Json, Last, Options, Recorded
from stepengine.cli.run_page import MAX_MB, PageOptions, make_page
from stepengine.cli.screen.render import dumps, say, wait_of
from stepengine.cli.settings import UsageProblem
from stepengine.data.codec import plain, to_json
from stepengine.data.messages import ToolResult
from stepengine.data.models import ModelReply
from stepengine.data.outcomes import Failure, Value
from stepengine.data.questions import Answer
from stepengine.data.state import ChildResult
from stepengine.errors import JournalError

if TYPE_CHECKING:
    from stepengine.data.messages import Message
    from stepengine.journal import Journal
    from stepengine.journal.compacting import Compaction
    from stepengine.journal.history import History
    from stepengine.journal.records import Intent, Result

__all__ = ("ShownEffect", "effects_of", "show")


_page_option = partial(typer.Option, rich_help_panel="Options of --html")


def show(
    file: Recorded = "",
    other: Annotated[
        str, typer.Argument(metavar="FILE2", help="With --html: another run, to show both side by side.")
    ] = "",
    *,
    last: Last = False,
    step: Annotated[str, typer.Option(help="Show one step, or one effect, whole.", metavar="N|PATH#N")] = "",
    left_out: Annotated[
        bool, typer.Option("--left-out", help="Show what each compaction took out of the conversation.")
    ] = False,
    as_json: Json = False,
    html: Annotated[bool, typer.Option("--html", help="Write the run as one page for a browser.")] = False,
    output: Annotated[
        str, _page_option("--output", "-o", help="The page; default: next to FILE, ending in .html.", metavar="PATH")
    ] = "",
    opens: Annotated[bool, _page_option("--open", help="Open the page in the browser.")] = False,
    serve: Annotated[
        bool, _page_option("--serve", help="Serve the page from this machine, and follow a running run; write no file.")
    ] = False,
    port: Annotated[int, _page_option(help="Port of --serve; 0 for any.", min=0, max=65_535)] = 0,
    force: Annotated[
        bool, _page_option("--force", help="Overwrite an existing page; show the sound part of a damaged FILE.")
    ] = False,
    agent: Annotated[
        str, _page_option(help="File or id of the agent; default: the id in FILE.", metavar="PATH|ID")
    ] = "",
    no_code: Annotated[
        bool, _page_option("--no-code", help="Run none of the agent's code: no lines, no variables.")
    ] = False,
    no_locals: Annotated[bool, _page_option("--no-locals", help="Show lines without the handler's variables.")] = False,
    max_mb: Annotated[
        float, _page_option(help="Cut long texts in a page larger than this.", metavar="N", min=0.1)
    ] = MAX_MB,
    title: Annotated[str, _page_option(help="Title of the page.", metavar="TEXT")] = "",
    strict: Annotated[bool, _page_option("--strict", help="Exit with 5 when lines and variables are missing.")] = False,
) -> Exit:
    """
    Show a run step by step, here or as a page for a browser.

    Requests, results, times and costs. Nothing is run and no agent is needed.

    With --step the whole model request of that step is shown, its reply, and the calls; --step takes the number of a step,
    or an effect such as 3.2#1. With --left-out each compaction is shown: the messages that it removed, whole, with their
    tokens, and the summary or the notes in their place. A cassette is shown as a run: its model calls in order, and other
    HTTP requests with their status.

    With --html the run becomes one HTML file that loads nothing: agents, time line, every step with request, reply, calls
    and results, usage, cost and context over time, search. Source lines and variables of the handler come from replaying
    the run with the agent's code, which performs nothing. Texts that look like secrets are left out.

    Examples:
      stepengine show --last
      stepengine show run.jsonl --step 2
      stepengine show tests/cassettes/test_it/test_answer.yaml
      stepengine show run.jsonl --json | jq .effects
      stepengine show --last --html --open
      stepengine show run.jsonl --html -o run.html --no-code
      stepengine show before.jsonl after.jsonl --html
      stepengine show --last --html --serve
    """
    page = PageOptions(
        other=other, output=output, force=force, opens=opens, agent=agent, code=not no_code, locals=not no_locals,
        max_mb=max_mb, serve=serve, port=port, title=title, strict=strict,
    )  # fmt: skip
    if html:
        if step or left_out or as_json:
            msg = "--html shows the whole run as a page; leave out --step, --left-out and --json"
            raise UsageProblem(msg)
        return make_page(Options(journal=file, last=last, agent=agent, quiet=True), page)
    if page != PageOptions():
        msg = "FILE2 and the options of a page need --html; add --html"
        raise UsageProblem(msg)
    try:
        journal = readable_journal(find_journal(Options(journal=file, last=last)).journal)
        history = journal.history()
        if left_out:
            return _show_left_out(history, step=step, as_json=as_json)
        shown = list(effects_of(history))
        chosen = _select_step(history, shown, step) if step else shown
        told = _one(history, shown, chosen) if step else _whole(history)
        if as_json:
            text = dumps({**told, "effects": [_effect(history, entry) for entry in chosen]})
        else:
            text = _render(journal, told, {entry.address for entry in chosen} if step else None)
    except JournalError as error:
        return complain(error.message, Exit.FAILED)
    if as_json:
        print(text)
    else:
        say(text, _hang)
    return Exit.COMPLETED


def _show_left_out(history: History, *, step: str, as_json: bool) -> Exit:
    """
    Print what compactions left out.

    Raises:
        UsageProblem: with a step.
        JournalError: when the journal cannot be read.
    """
    from stepengine.journal.compacting import compactions

    if step:
        msg = "--left-out shows the compactions of the whole run; leave out --step"
        raise UsageProblem(msg)
    told = {"journal": history.name, "compactions": [_compaction(found) for found in compactions(history)]}
    if as_json:
        print(dumps(told))
    else:
        from stepengine.journal.show import clean_tree

        say("\n".join(_show_compactions(clean_tree(told, whole=True))), _hang)
    return Exit.COMPLETED


@frozen
class ShownEffect:
    """
    One effect of a run.

    Attributes:
        address: Its number, with the path of its run for a child's.
        step: The model step of its run in which it happened, from 1; 0 before the first one.
        kind: The kind of effect, such as ``"model_call"``; a key of ``KINDS`` in ``data.effects``.
        what: The effect in a word or two.
        intent: Its record.
        result: The record of its outcome; ``None`` when it has none yet.
    """

    address: str
    step: int
    kind: str
    what: str
    intent: Intent
    result: Result | None


def effects_of(history: History) -> Iterator[ShownEffect]:
    """Give every effect of a run and its children, in the order in which they began."""
    from stepengine.data.effects import KINDS
    from stepengine.journal.records import ROOT, shown_address

    steps: dict[str, int] = {}
    for address, intent in history.intents.items():
        if address == ROOT:
            continue
        kind = intent.type
        steps[intent.path] = steps.get(intent.path, 0) + (kind == "model_call")
        name = history.model(intent) if kind == "model_call" else history.form(intent).get(KINDS[kind].name, "")
        what = f"{kind} {name}".rstrip()
        yield ShownEffect(shown_address(*address), steps[intent.path], kind, what, intent, history.results.get(address))


# --- as JSON ----------------------------------------------------------------------------------------------------------


def _whole(history: History) -> dict[str, object]:
    from stepengine.journal.show import ended_of, run_id_of, spending_of, status_of

    root, head = history.root, history.head
    spending = spending_of(history)
    usage, cost = spending.usage, spending.cost
    questions = [{"id": q.id, "text": q.text, "options": list(q.options)} for _, q in history.open_questions().values()]
    ended = ended_of(history)
    waits = history.waits() if status_of(history) == "suspended" else []
    return {
        "journal": history.name,
        "run": run_id_of(history),
        "agent": root["agent_id"],
        "status": status_of(history),
        "created": head.created if head is not None else None,
        "parent": plain(head.parent) if head is not None else None,
        "packages": {} if head is None else plain(head.packages),
        "prompt": root.get("prompt", ""),
        "params": plain(root.get("params")),
        "output": None if ended is None else plain(ended.output),
        "text": "" if ended is None else ended.text,
        "questions": [] if history.is_complete else questions,
        "waits_for": [wait_of(one) for one in waits],
        "milliseconds": history.last_at,
        "usage": {**attrs.asdict(usage), "total_tokens": usage.total_tokens},
        "cost": None if cost is None else str(cost),
    }


def _effect(history: History, entry: ShownEffect) -> dict[str, Any]:
    told = {
        "address": entry.address,
        "path": entry.intent.path,
        "step": entry.step,
        "kind": entry.kind,
        "what": entry.what,
        "at": None if entry.result is None else entry.result.at,
        "attempts": [] if entry.result is None else plain(list(entry.result.attempts)),
        "outcome": _outcome(history, entry),
        "came": _came(history, entry),
    }
    if entry.intent.program_line:
        told["program_line"] = entry.intent.program_line
    if entry.kind != "model_call":
        told["effect"] = plain(history.form(entry.intent))
    return told


def _outcome(history: History, entry: ShownEffect) -> dict[str, Any] | None:
    if entry.result is None:
        return None
    outcome = history.outcome(entry.result)
    if isinstance(outcome, Failure):
        return {"error": {"type": type(outcome.error).__name__, "message": plain(str(outcome.error))}}
    return {"value": plain(outcome.value)}


def _came(history: History, entry: ShownEffect) -> str:
    """Return what came of an effect, in a few words."""
    if entry.result is None:
        return "(no result yet)"
    outcome = history.outcome(entry.result)
    if isinstance(outcome, Failure):
        return f"{type(outcome.error).__name__}: {outcome.error}"
    value = outcome.value
    if isinstance(value, ModelReply):
        calls = [f"-> {call.tool_name}({_short(call.input)})" for call in value.tool_calls]
        return " ".join([part for part in (value.text, *calls) if part])
    if isinstance(value, ToolResult):
        return ("error: " if value.is_error else "") + value.text
    if isinstance(value, ChildResult):
        return f"{value.status.value}: {value.text if value.output is None else _short(value.output)}"
    if isinstance(value, tuple) and value and isinstance(value[0], Answer):
        return "; ".join([answer.text or ", ".join(answer.selected) or "(declined)" for answer in value])
    return value if isinstance(value, str) else _short(value)


def _short(value: object) -> str:
    return json.dumps(plain(value), ensure_ascii=False)


def _select_step(history: History, shown: list[ShownEffect], step: str) -> list[ShownEffect]:
    """
    Return the effects of one step of the root, or one effect.

    Raises:
        UsageProblem: when there is no such step.
    """
    if step.isdecimal():
        chosen = [e for e in shown if not e.intent.path and str(e.step) == (step.lstrip("0") or "0")]
    else:
        chosen = [e for e in shown if e.address == step]
    if not chosen:
        last = max([e.step for e in shown if not e.intent.path], default=0)
        msg = f"{history.name} has no step {step!r}; it has the steps 0 to {last}, and effects such as '#0' or '3.2#1'"
        raise UsageProblem(msg)
    return chosen


def _one(history: History, shown: list[ShownEffect], chosen: list[ShownEffect]) -> dict[str, object]:
    request = history.form(chosen[0].intent)["request"] if chosen[0].kind == "model_call" else None
    if request is not None:
        messages = [*history.messages(chosen[0].intent), *request.get("tail", ())]
        request = {**plain(request), "messages": plain(messages)}
    return {
        "journal": history.name,
        "step": chosen[0].step,
        "address": chosen[0].address,
        "so_far": _so_far(history, shown[: shown.index(chosen[0])]),
        "request": request,
    }


def _so_far(history: History, before: list[ShownEffect]) -> dict[str, object]:
    """Return what the run had done and spent before a step."""
    replies = [history.outcome(e.result) for e in before if e.kind == "model_call" and e.result is not None]
    usages = [r.value.usage for r in replies if isinstance(r, Value) and r.value.usage is not None]
    return {
        "effects": len(before),
        "model_calls": len(replies),
        "tokens": sum([usage.total_tokens for usage in usages]),
        "milliseconds": max([e.result.at for e in before if e.result is not None], default=0),
    }


def _compaction(found: Compaction) -> dict[str, Any]:
    from stepengine.journal.records import shown_address

    return {
        "address": shown_address(*found.address),
        "path": found.address[0],
        "step": found.step,
        "tokens": found.tokens,
        "tokens_instead": found.tokens_instead,
        "left_out": [_message(message) for message in found.left_out],
        "instead": [_message(message) for message in found.instead],
        "unrecorded_results": found.unrecorded,
    }


def _message(message: Message) -> dict[str, Any]:
    from stepengine.tools.bundled.recalling import message_text

    return {"role": message.role, "text": message_text(message), "message": to_json(message)}


# --- as text ----------------------------------------------------------------------------------------------------------


def _hang(line: str) -> int:
    """Return how far what is broken off a line stands behind its begin: behind an address, a dash or the name of a member."""
    first = line.lstrip(" ").partition(" ")[0]
    if first == "-":
        return 2
    return 5 if "#" in first and first[-1:].isdigit() else 0


def _render(journal: Journal, told: Mapping[str, object], addresses: Collection[str] | None) -> str:
    """Return a run, or the effects of a step of it, as the snapshots of the testing kit have it, below what they leave out."""
    from stepengine.journal.show import clean_tree, render, render_effects, run_tree

    tree = clean_tree(run_tree(journal), whole=addresses is not None)
    lines, text = (
        (_heading(told), render(tree)) if addresses is None else (_request(told), render_effects(tree, addresses))
    )
    return "\n".join([*lines, text.removesuffix("\n")])


def _show_compactions(told: Mapping[str, Any]) -> Iterator[str]:
    if not told["compactions"]:
        yield "Nothing was left out of the conversation."
    for one in told["compactions"]:
        left, instead = one["left_out"], one["instead"]
        gone = f"{_count(left)} of {one['tokens']} tokens left out"
        came = (
            f"{_count(instead)} of {one['tokens_instead']} tokens in their place"
            if instead
            else "nothing in their place"
        )
        yield f"before {one['address']}, step {one['step']}: {gone}, {came}"
        yield from _messages(left, "left out")
        if one["unrecorded_results"]:
            yield f"  {one['unrecorded_results']} results besides, of the run itself or of children, that no request ever held"
        yield from _messages(instead, "in their place")


def _count(messages: Sequence[object]) -> str:
    return f"{len(messages)} message{'' if len(messages) == 1 else 's'}"


def _messages(messages: Sequence[Mapping[str, Any]], what: str) -> Iterator[str]:
    for message in messages:
        tags = "".join([f" {tag}" for tag in message["message"].get("tags", ())])
        yield f"  {what}: {message['role']}{tags}"
        yield from [f"    {line}".rstrip() for line in message["text"].splitlines()]


def _heading(told: Mapping[str, Any]) -> Iterator[str]:
    yield f"{told['agent']}  run {told['run']} of {told['created']}, {told['milliseconds'] / 1000:.1f} s"
    if told["parent"]:
        yield f"  forked from run {told['parent']['run']} at {told['parent']['at']}"
    for wait in told["waits_for"]:
        if wait["kind"] != "question":
            yield f"  it {wait['said']}"


def _request(told: Mapping[str, Any]) -> Iterator[str]:
    so_far, request = told["so_far"], told["request"]
    counts = f"{so_far['effects']} effects, {so_far['model_calls']} model calls, {so_far['tokens']} tokens"
    yield f"before {told['address']}: {counts}, {so_far['milliseconds'] / 1000:.1f} s"
    if request is None:
        return
    yield f"sent to {request['model']}"
    if request.get("system_prompt"):
        yield from ["  system:", *[f"    {line}" for line in request["system_prompt"].splitlines()]]
    for message in request["messages"]:
        yield f"  {message.get('type', 'message')}:"
        yield from [f"    {line}" for line in _message_text(message).splitlines()]
    names = [str(spec.get("name", "")) for spec in request.get("tools", ())]
    if names:
        yield f"  tools: {', '.join(names)}"
    yield "came back"


def _message_text(message: Mapping[str, Any]) -> str:
    content = message.get("content", "")
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        text = part.get("text")
        texts.append(text if isinstance(text, str) else dumps({k: v for k, v in part.items() if v not in (None, "")}))
    return "\n".join(texts)
