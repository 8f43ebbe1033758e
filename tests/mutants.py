"""
Planted faults: each is put into a copy of the checkout, one at a time, and the tests that should catch it are run.

``python -m tests.mutants`` plants them all. A fault that no test notices has survived, and there is no promise that the
behaviour which it breaks holds. A mutant is a file, the exact text that stands there once, and what stands there instead;
one whose text is not found any more is an error, so that the list is mended when the code moves.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import attrs

from tests.random_mutants import FLOORS, drawn

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(
    ".git", "__pycache__", ".*_cache", ".hypothesis", ".import_linter_cache", "*.egg-info"
)
SECONDS = 300
FAILED = 1
FALLBACK = {
    "agents/": ("tests/agents",),
    "stepengine/context/": ("tests/context",),
    "stepengine/data/": ("tests/data",),
    "stepengine/engine/": ("tests/engine",),
    "stepengine/helpers/": ("tests/helpers", "tests/machine/test_handler.py"),
    "stepengine/machine/": ("tests/machine",),
    "stepengine/models/": ("tests/models",),
    "stepengine/runtime/": ("tests/runtime", "tests/engine"),
    "stepengine/workspace/": ("tests/workspace", "tests/bundled_tools"),
    "stepengine/tools/": ("tests/tools", "tests/bundled_tools"),
    "stepengine/tools/bundled/": ("tests/bundled_tools",),
}
"""The tests of a floor, for mutants that name none."""

Verdict = Literal["caught", "SURVIVED", "ERROR"]


@attrs.frozen
class Mutant:
    """
    A planted fault.

    Attributes:
        name: What goes wrong.
        file: Where, from the top of the checkout.
        old: Text that stands there exactly once.
        new: What stands there instead.
        tests: Files and folders whose tests should catch it; by default those of its floor.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()

    @property
    def suite(self) -> tuple[str, ...]:
        return self.tests or next(tests for floor, tests in FALLBACK.items() if self.file.startswith(floor))

    def problem(self, root: Path = ROOT) -> str:
        """Return why it cannot be planted under *root*; ``""`` when it can."""
        try:
            found = (root / self.file).read_text(encoding="utf-8").count(self.old)
        except OSError as error:
            return f"{self.file} cannot be read: {error}"
        if found != 1:
            return f"its text stands {found} times in {self.file}, not once: {self.old.strip()!r}"
        lacking = [test for test in self.suite if not (root / test).exists()]
        return (
            f"no such tests: {', '.join(lacking)}" if lacking else "" if self.new != self.old else "it changes nothing"
        )

    @contextmanager
    def planted(self, root: Path) -> Iterator[None]:
        """Stand in the checkout at *root*."""
        file = root / self.file
        sound = file.read_text(encoding="utf-8")
        try:
            replace(file, sound.replace(self.old, self.new))
            yield
        finally:
            replace(file, sound)


def replace(file: Path, text: str) -> None:
    """Write a source file and forget what was compiled from it: its time alone may not tell one second's two texts apart."""
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()
    file.write_text(text, encoding="utf-8")


RACES = ("tests/engine/test_races_that_are_won.py",)
YIELDS = ("tests/engine/test_waiting_yields.py",)
TOOL_CONTEXTS = ("tests/engine/test_tool_contexts.py",)
DEFERRED = ("tests/faults/test_deferred_tools.py",)
ERROR_TYPES = ("tests/models/test_error_types.py",)
TRUNCATING = ("tests/context/test_truncating.py", "tests/context/test_policy_properties.py")
HUB = ("tests/runtime/test_hub.py",)
DRIVER = ("tests/runtime/test_driver.py", "tests/runtime/test_leaves.py")
YIELDING = ("tests/engine/test_tools_that_yield.py",)
LIMITS = ("tests/runtime/test_limits.py", "tests/engine/test_spawn_limits.py", "tests/engine/test_parallel_limits.py")

MUTANTS = (
    # --- what a tool is told, and what it reports -------------------------------------------------------------------
    Mutant(
        "a tree is suspended although one of its races has been won",
        "stepengine/runtime/standstill.py",
        "if self._tree.performers.brake.is_given_up(item):",
        "if False:",
        RACES,
    ),
    Mutant(
        "a run in a race that stands still keeps its tree from it",
        "stepengine/runtime/standstill.py",
        "if type(effect) in RUNS and not is_start and child_path(item.path, effect.seq) in self._tree.runs.by_path:\n            return True",
        "if type(effect) in RUNS and not is_start:\n            return child_path(item.path, effect.seq) in self._tree.runs.by_path",
        RACES,
    ),
    Mutant(
        "a run that starts a child seems to wait for it",
        "stepengine/runtime/standstill.py",
        "is_start = isinstance(effect, Spawn) and effect.is_background",
        "is_start = False",
        YIELDS,
    ),
    Mutant(
        "a tree is suspended while members of a race are about to begin",
        "stepengine/runtime/driver.py",
        "self._beginning = items[:1]  # while",
        "self._beginning = []  # while",
        YIELDS,
    ),
    Mutant(
        "a replay counts a child that was stopped before it began",
        "stepengine/journal/replayer.py",
        "return type(item.effect) in RUNS and self._past.intent(address) is None and self.halts(item)",
        "return False",
        YIELDS,
    ),
    Mutant(
        "children are told in the order in which they were started",
        "stepengine/runtime/background.py",
        "sorted([(outcome.at, path) for outcome, path in found if outcome is not None])",
        "sorted([(0, path) for outcome, path in found if outcome is not None])",
        YIELDS,
    ),
    Mutant(
        "a child that nobody waited for is left at work by its parent",
        "stepengine/machine/calls.py",
        "for kind, paths in run.children.background.unfinished_children():",
        "for kind, paths in ():",
        YIELDS,
    ),
    Mutant(
        "who lost a race is done again after a crash",
        "stepengine/journal/record_ends.py",
        "return any(known and not was_given_up(past.history.outcome(known)) for known in others)",
        "return False",
        YIELDS,
    ),
    Mutant(
        "nobody is given up when a race was won",
        "stepengine/runtime/driver.py",
        "self._run.tree.performers.brake.give_up(left)",
        "self._run.tree.performers.brake.give_up([])",
        RACES,
    ),
    Mutant(
        "a body is not told which call spawned its run",
        "stepengine/runtime/innermost.py",
        "parent_tool_call_id=tree.runs.spawned_by.get(item.path),",
        "parent_tool_call_id=None,",
        TOOL_CONTEXTS,
    ),
    Mutant(
        "a body is not told the runs above its own",
        "stepengine/runtime/innermost.py",
        'ancestor_run_ids=cast("Any", state.ancestor_run_ids),',
        "ancestor_run_ids=(),",
        TOOL_CONTEXTS,
    ),
    Mutant(
        "a body is not told what its agent is for",
        "stepengine/runtime/innermost.py",
        "agent_description=agent.description,",
        'agent_description="",',
        TOOL_CONTEXTS,
    ),
    Mutant(
        "a body is told the agent's id as its name",
        "stepengine/runtime/innermost.py",
        "agent_name=agent.display_name,",
        "agent_name=agent.id,",
        TOOL_CONTEXTS,
    ),
    Mutant(
        "every step is the first for a body",
        "stepengine/runtime/innermost.py",
        "step_index=effect.step_index,",
        "step_index=0,",
        TOOL_CONTEXTS,
    ),
    Mutant(
        "a body's signal is nobody's",
        "stepengine/runtime/innermost.py",
        "cancelled=tree.runs.signal,",
        'cancelled=__import__("threading").Event(),',
        TOOL_CONTEXTS,
    ),
    Mutant(
        "a root's body has a parent's session",
        "stepengine/runtime/innermost.py",
        "parent_session_id=info.session_id if item.path else None,",
        "parent_session_id=info.session_id,",
        TOOL_CONTEXTS,
    ),
    Mutant(
        "side effects are dropped",
        "stepengine/data/messages.py",
        "            side_effects=self.side_effects,\n",
        "",
        TOOL_CONTEXTS,
    ),
    Mutant(
        "credits are dropped",
        "stepengine/data/messages.py",
        "            credits_used=self.credits_used,\n",
        "",
        TOOL_CONTEXTS,
    ),
    Mutant(
        "credits of children are not added",
        "stepengine/machine/spent.py",
        "        others = self._children = self._children + child.spending\n",
        "        others = self._children = self._children + attrs.evolve(child.spending, credits_used=0)\n",
        TOOL_CONTEXTS,
    ),
    # --- tools that yield -------------------------------------------------------------------------------------------
    Mutant(
        "a body may ask for a step",
        "stepengine/machine/handler.py",
        "(YIELDS if run.plan.body is None else OF_TOOLS).get(type(asked))",
        "YIELDS.get(type(asked))",
        YIELDING,
    ),
    Mutant(
        "a body may touch a conversation",
        "stepengine/machine/handler.py",
        "if body is not None and _touches_conversation(binding):",
        "if False:",
        YIELDING,
    ),
    Mutant(
        "changes of a body are lost",
        "stepengine/machine/state.py",
        "                self.apply(change, by)\n                if self.body is None",
        "                if self.body is None",
        YIELDING,
    ),
    Mutant(
        "what a body spent is not its caller's",
        "stepengine/machine/state.py",
        "        self.spent.count_body(end)\n",
        "",
        YIELDING,
    ),
    Mutant(
        "children of a body are not listed",
        "stepengine/machine/spent.py",
        "        self._add_children(body.children)\n",
        "",
        YIELDING,
    ),
    Mutant(
        "children of a model's body count as a handler's",
        "stepengine/machine/calls.py",
        "            self._by if body is None or not body.by_model else body.tool_call_id,\n",
        "            self._by,\n",
        YIELDING,
    ),
    Mutant(
        "a body without a result is in doubt",
        "stepengine/journal/record_player.py",
        "        starts = type(item.effect) in STARTS\n",
        "        starts = type(item.effect) is Spawn\n",
        (*YIELDING, "tests/engine/test_trees_of_tools.py"),
    ),
    Mutant(
        "another result of a body goes unnoticed",
        "stepengine/journal/replayer.py",
        "            same = isinstance(outcome, Value) and past.is_same_outcome(recorded, outcome)\n",
        "            same = type(outcome) is Value\n",
        YIELDING,
    ),
    Mutant(
        "a body is no level",
        "stepengine/runtime/limits.py",
        "            elif isinstance(effect, CallBody):\n                self._check_body_depth(item, effect)\n",
        "",
        YIELDING,
    ),
    Mutant(
        "the time that people take counts as work of a body",
        "stepengine/machine/run.py",
        "worked += 0 if _is_waiting(effect) else run.effects.now - began",
        "worked += run.effects.now - began",
        YIELDING,
    ),
    Mutant(
        "all bodies of a run share their chance",
        "stepengine/engine/run_plans.py",
        'random=partial(Random, f"{self.seed}:{path}"),\n            model=parent.model',
        'random=partial(Random, f"{self.seed}"),\n            model=parent.model',
        YIELDING,
    ),
    Mutant(
        "a rule holds whoever asks for the call",
        "stepengine/permissions/policy.py",
        "                and request.source != rule.source\n",
        "                and request.source is None\n",
        YIELDING,
    ),
    Mutant(
        "a body runs agents that nobody gave it",
        "stepengine/engine/run_plans.py",
        "return bool(effect.tool_call_id) and (parent.body is None or effect.tool_call_id != parent.body.tool_call_id)",
        "return bool(effect.tool_call_id)",
        YIELDING,
    ),
    Mutant(
        "a name in uses= that means nothing is passed over",
        "stepengine/engine/catalog.py",
        '    if key is None:\n        msg = (\n            f"the tool {by!r} of agent',
        '    if key is None:\n        return wanted\n        msg = (\n            f"the tool {by!r} of agent',
        YIELDING,
    ),
    # --- logs -------------------------------------------------------------------------------------------------------
    Mutant(
        "the logger of the engine is never called",
        "stepengine/runtime/hub.py",
        "            write(self._logger, event.level, event.message, context, data)\n",
        "            pass\n",
        (*HUB, *TOOL_CONTEXTS),
    ),
    Mutant(
        "a body's lines are shown and not logged",
        "stepengine/runtime/innermost.py",
        "        self._tree.hub.log.write(event, data or None, step=self._effect.step_index)\n",
        "",
        TOOL_CONTEXTS,
    ),
    Mutant(
        "what a body raised is not logged",
        "stepengine/tools/execution.py",
        "    log(message, traceback=trace)\n",
        "",
        TOOL_CONTEXTS,
    ),
    Mutant(
        "lines of a handler are not logged",
        "stepengine/runtime/hub.py",
        "            self.log.write(event, event.data, step=event.step)  # type: ignore[arg-type,attr-defined]\n",
        "            pass\n",
        HUB,
    ),
    # --- context ----------------------------------------------------------------------------------------------------
    Mutant(
        "truncate drops one exchange more at the bound",
        "stepengine/context/truncation.py",
        "            if total <= (room if",
        "            if total < (room if",
        TRUNCATING,
    ),
    Mutant(
        "truncate drops the newest exchange to free room",
        "stepengine/context/truncation.py",
        "index == len(groups) - 1 else target",
        "index == len(groups) else target",
        TRUNCATING,
    ),
    Mutant(
        "truncate counts a note for every exchange",
        "stepengine/context/truncation.py",
        "(0 if index - 1 in dropped else _gap_note_tokens())",
        "_gap_note_tokens()",
        TRUNCATING,
    ),
    Mutant(
        "truncate starts at the second exchange",
        "stepengine/context/truncation.py",
        "            if group.start not in kept:",
        "            if group.start not in kept and index > 0:",
        TRUNCATING,
    ),
    # --- models -----------------------------------------------------------------------------------------------------
    Mutant(
        "a refused permission counts as a bad request",
        "stepengine/models/_failures.py",
        '    "permission_error": 403,',
        '    "permission_error": 400,',
        ERROR_TYPES,
    ),
    Mutant(
        "a deadline counts as not found",
        "stepengine/models/_failures.py",
        '    "DEADLINE_EXCEEDED": 504,',
        '    "DEADLINE_EXCEEDED": 404,',
        ERROR_TYPES,
    ),
    Mutant(
        "encoded parts are lost when they are joined",
        "stepengine/models/_wire.py",
        '    return b",".join([encode_json(value) for value in values if value is not None])',
        "    return None",
        ("tests/models/test_encoding.py", "tests/models/test_responses_and_gemini.py"),
    ),
    Mutant(
        "a sound goes to Responses as a file",
        "stepengine/models/openai/encode.py",
        '    if kind not in {"pdf", "text", "office"}:',
        '    if kind == "nothing":',
        ("tests/faults/test_media.py",),
    ),
    Mutant(
        "a file that another provider holds is sent",
        "stepengine/models/_wire.py",
        "    if part.file_id is not None and HOLDERS",
        "    if part.file_id is None and HOLDERS",
        ("tests/faults/test_media.py",),
    ),
    Mutant(
        "an image that another model made is lost",
        "stepengine/models/anthropic/encode.py",
        "        self.defer_to_user_turn(turn.after)\n",
        "",
        ("tests/faults/test_media.py",),
    ),
    Mutant(
        "an uploaded file is deleted nowhere",
        "stepengine/models/files.py",
        "        await self._provider(at or part.provider).delete_file(str(part.file_id))",
        "        self._provider(at or part.provider)",
        ("tests/faults/test_media.py",),
    ),
    Mutant(
        "tools that a model searches for are sent as all others",
        "stepengine/models/_wire.py",
        '{**self._encode(tool), "defer_loading": True}',
        "self._encode(tool)",
        DEFERRED,
    ),
    Mutant(
        "a search refers to tools that are there no more",
        "stepengine/models/anthropic/encode.py",
        "    if flags.hidden.issuperset(find_loaded_tools(data)):",
        "    if flags.hidden:",
        DEFERRED,
    ),
    Mutant(
        "a search goes to a model that has none",
        "stepengine/models/openai/encode.py",
        "is_over = flags.hidden is not None and not flags.hidden and is_tool_search(part.data)",
        "is_over = False",
        DEFERRED,
    ),
    Mutant(
        "what ours found is not defined for who searches by itself",
        "stepengine/models/openai/encode.py",
        "                after = loading.add_definitions(after, turn.refers)\n",
        "                pass\n",
        DEFERRED,
    ),
    Mutant(
        "a call of a found tool goes back without its namespace",
        "stepengine/models/openai/encode.py",
        '        item["namespace"] = data["namespace"]\n',
        "        pass\n",
        DEFERRED,
    ),
    Mutant(
        "what was found last stands in front",
        "stepengine/models/_hidden_tools.py",
        "    return (*known, *fresh) if fresh else known",
        "    return (*fresh, *known) if fresh else known",
        DEFERRED,
    ),
    Mutant(
        "tools that another provider's model found are unknown to the next one",
        "stepengine/models/_hidden_tools.py",
        "                named.append(part.tool_name)\n",
        "                pass\n",
        DEFERRED,
    ),
    Mutant(
        "a provider that refused its own search is asked for it again",
        "stepengine/models/_http.py",
        "            self._unsearching.add(model)\n",
        "",
        DEFERRED,
    ),
    Mutant(
        "a search finds tools that are shown",
        "stepengine/machine/tool_search.py",
        "    hidden = [spec for spec in offered.values() if spec.defer_loading]",
        "    hidden = [*offered.values()]",
        ("tests/machine/test_finding.py",),
    ),
    Mutant(
        "a paused reply loses what it had said",
        "stepengine/machine/step.py",
        "content=(*paused.content, *more.content)",
        "content=more.content",
        ("tests/machine/test_replies.py",),
    ),
    Mutant(
        "a reply that a handler or a hook sees is made durable later",
        "stepengine/journal/recorder.py",
        "is_unseen = is_alone and not plan.hooks and not self._is_traced",
        "is_unseen = True",
        ("tests/journal/test_files.py",),
    ),
    Mutant(
        "an effect begins before the reply that it follows from is durable",
        "stepengine/journal/recorder.py",
        "if not (self._pending.owed or (lasts and fresh and self._writer.waits)):",
        "if not (lasts and fresh and self._writer.waits):",
        ("tests/journal/test_files.py",),
    ),
    Mutant(
        "nobody learns of a key that is told while a run is written",
        "stepengine/redaction.py",
        "        over.holds = False\n",
        "",
        ("tests/redaction/test_redaction.py", "tests/journal/test_redaction.py"),
    ),
    Mutant(
        "people are asked what is not durable yet",
        "stepengine/journal/encoding.py",
        "return kind is AskPerson or (kind not in RUNS",
        "return kind is not AskPerson and (kind not in RUNS",
        ("tests/journal/test_suspension.py",),
    ),
    Mutant(
        "what a call wrote is left out of its result",
        "stepengine/journal/recorder.py",
        '{"attempts": [*attempts], "writes": writes}',
        '{"attempts": [*attempts]}',
        ("tests/journal/test_undo.py",),
    ),
    Mutant(
        "deltas that wait are never joined",
        "stepengine/runtime/hub.py",
        "        self.queue[-1] = one\n        self._has_joined = True\n        return True\n",
        "        return False\n",
        HUB,
    ),
    Mutant(
        "a setting that a wire has no word for is left out silently",
        "stepengine/models/_http.py",
        "return add_dropped(self._finished(reply, request), self._list_left_out(request))",
        "return self._finished(reply, request)",
        ("tests/faults/test_what_authors_say.py",),
    ),
    Mutant(
        "what was cited goes back with an id that is not taken back",
        "stepengine/models/anthropic/encode.py",
        'if name != "file_id"',
        "if name",
        ("tests/faults/test_what_authors_say.py",),
    ),
    Mutant(
        "the nearest model names are not looked up",
        "stepengine/models/pricing.py",
        "    return tuple([n for n in get_close_matches(name, known, n=4) if n != name][:3])",
        '    return __import__("time").sleep(0.01) or ()',
        ("tests/models/test_pricing.py",),
    ),
    Mutant(
        "the system is not asked for the addresses of a name",
        "stepengine/tools/bundled/web/fetcher.py",
        "    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)\n",
        "    found = await asyncio.sleep(0.01, [])\n",
        ("tests/bundled_tools/test_web_fetching.py",),
    ),
    # --- agents -----------------------------------------------------------------------------------------------------
    Mutant(
        "base2 has no handler",
        "agents/base2.py",
        "        handle_steps=handle_steps,\n        hooks=",
        "        hooks=",
        ("tests/agents/test_orchestrators.py",),
    ),
    # --- what a tool is ---------------------------------------------------------------------------------------------
    Mutant(
        "a built-in tool stands in the place of the author's of its name",
        "stepengine/engine/catalog.py",
        "{**BUILT_IN, **self._tools}",
        "{**self._tools, **BUILT_IN}",
        ("tests/tools/test_built_in.py",),
    ),
    Mutant(
        "a recorded tool that is gone is replayed as the built-in one of its name",
        "stepengine/journal/recorded_machines.py",
        " or isinstance(tools[name].runs, Control)",
        "",
        ("tests/journal/test_format.py",),
    ),
    Mutant(
        "an input of a built-in tool is not mended",
        "stepengine/tools/control.py",
        "    mend = make_repairer(spec.input_schema, ALIASES)\n",
        "    mend = None\n",
        ("tests/tools/test_built_in.py",),
    ),
    # --- the kernel: data -------------------------------------------------------------------------------------------
    Mutant(
        "an older version of a transcript appends into the newer one's slot",
        "stepengine/data/transcript.py",
        "        if slot == self._length:\n            return True\n",
        "        return True\n",
        ("tests/data/test_transcript.py",),
    ),
    Mutant(
        "a call id may be used twice",
        "stepengine/data/transcript.py",
        "    if call_id in fresh or known.get(call_id, length) < length:",
        "    if call_id in fresh:",
        ("tests/data/test_transcript.py",),
    ),
    Mutant(
        "a replaced result is remembered as it was",
        "stepengine/data/transcript.py",
        "            first = min(first, index)\n",
        "            first = index + 1\n",
        ("tests/data/test_transcript.py",),
    ),
    Mutant(
        "a fork knows the calls of newer versions",
        "stepengine/data/transcript.py",
        "            if index < length:\n                calls[call_id] = index\n                break\n",
        "            calls[call_id] = index\n            break\n",
        ("tests/data/test_transcript.py",),
    ),
    Mutant(
        "a part of a cost that is unknown counts as nothing",
        "stepengine/data/usage.py",
        "    return None if a is None or b is None else a + b",
        "    return (a or Decimal(0)) + (b or Decimal(0))",
        ("tests/data/test_usage_and_settings.py",),
    ),
    Mutant(
        "an image weighs nothing",
        "stepengine/data/estimate.py",
        "            tokens += MEDIA_TOKENS\n",
        "            pass\n",
        ("tests/data/test_estimate.py",),
    ),
    # --- the kernel: machine ----------------------------------------------------------------------------------------
    Mutant(
        "an unknown call lets the turn end",
        "stepengine/machine/step.py",
        "        if call.is_fault:\n            return False\n",
        "",
        ("tests/machine/test_batches.py", "tests/machine/test_replies.py"),
    ),
    Mutant(
        "a step does not use up the budget",
        "stepengine/machine/budget.py",
        "        self.steps_left -= 1\n",
        "        pass\n",
        ("tests/machine/test_budgets.py",),
    ),
    Mutant(
        "calls of a reply that was cut off are carried out",
        "stepengine/machine/step.py",
        "            call.skip(CUT_OFF)\n",
        "            pass\n",
        ("tests/machine/test_replies.py",),
    ),
    Mutant(
        "allow is stronger than deny",
        "stepengine/machine/hooks.py",
        '("allow", "ask", "deny").index',
        '("deny", "ask", "allow").index',
        ("tests/machine/test_permission.py",),
    ),
    Mutant(
        "a check that fails lets the call through",
        "stepengine/machine/hooks.py",
        '            said = Decision.deny(f"The check of this call failed, so it was not run: {error}")\n',
        "            said = None\n",
        ("tests/machine/test_hooks.py", "tests/machine/test_permission.py"),
    ),
    Mutant(
        "a call after the one that ended the turn is carried out",
        "stepengine/machine/batch.py",
        '        return f"{call.asked.tool_name} ended the turn"\n',
        '        return ""\n',
        ("tests/machine/test_batches.py",),
    ),
    Mutant(
        "a call without result has none when the run is stopped",
        "stepengine/machine/batch.py",
        "        if call.result is None:\n            call.close(stop)\n",
        "        pass\n",
        ("tests/machine/test_stops.py",),
    ),
    Mutant(
        "tools that must not run side by side do",
        "stepengine/machine/batch.py",
        "tool.spec.parallel_safe and not tool.spec.ends_turn and ",
        "not tool.spec.ends_turn and ",
        ("tests/machine/test_batches.py",),
    ),
    Mutant(
        "a handler that swallows its limit goes on",
        "stepengine/machine/handler.py",
        "MAX_LIMIT_THROWS = 2\n",
        "MAX_LIMIT_THROWS = 3\n",
        ("tests/machine/test_budgets.py", "tests/machine/test_author.py"),
    ),
    Mutant(
        "an action is free",
        "stepengine/machine/budget.py",
        "        self._actions += count\n",
        "",
        ("tests/machine/test_author.py",),
    ),
    Mutant(
        "the run's clock stands still",
        "stepengine/machine/effect_channel.py",
        "        self.now = max(self.now, outcome.at)\n        # Messages",
        "        # Messages",
        ("tests/machine/test_calls.py", "tests/machine/test_handler.py"),
    ),
    Mutant(
        "the handler is not closed",
        "stepengine/machine/handler.py",
        "        run.side_events.report_close_problems(author.close())\n",
        "        run.side_events.report_close_problems(())\n",
        ("tests/machine/test_closing.py",),
    ),
    Mutant(
        "a child is shown what the reply says after its call",
        "stepengine/machine/history.py",
        "            if isinstance(part, ToolCallPart) and part.tool_call_id == call_id:\n                break\n",
        "",
        ("tests/engine/test_spawn_inheritance.py", "tests/machine/test_expanding.py"),
    ),
    # --- the kernel: helpers ----------------------------------------------------------------------------------------
    Mutant(
        "retry tries once more than it was told",
        "stepengine/helpers/calls.py",
        "    tries = max(times, 1)\n",
        "    tries = max(times, 1) + 1\n",
    ),
    Mutant(
        "best_of shows its judge failures, too",
        "stepengine/helpers/agents.py",
        "    outputs = [child.output for child in children if not child.is_error]",
        "    outputs = [child.output for child in children]",
    ),
    Mutant(
        "best_of takes an index that is one too large",
        "stepengine/helpers/agents.py",
        "not 0 <= index < len(outputs):",
        "not 0 <= index <= len(outputs):",
    ),
    # --- the kernel: runtime ----------------------------------------------------------------------------------------
    Mutant(
        "outcomes of a Gather come in the order of their ends",
        "stepengine/runtime/driver.py",
        "        self.outcomes[index] = outcome = await _perform_member(self._run, item)\n",
        "        outcome = await _perform_member(self._run, item)\n"
        "        self.outcomes[self.outcomes.index(None)] = outcome\n",
        DRIVER,
    ),
    Mutant(
        "a machine is left open",
        "stepengine/runtime/driver.py",
        "        machine.close()\n",
        "        pass\n",
        DRIVER,
    ),
    Mutant(
        "a provider's wait is not obeyed",
        "stepengine/runtime/retry.py",
        "        return min(asked + jitter, max(policy.obey, jitter))",
        "        return min(jitter, max(policy.obey, jitter))",
        ("tests/runtime/test_calls.py", "tests/runtime/test_retries.py"),
    ),
    Mutant(
        "further attempts are without number",
        "stepengine/runtime/retry.py",
        "        self._left -= 1\n",
        "",
        ("tests/runtime/test_calls.py", "tests/runtime/test_retries.py"),
    ),
    Mutant(
        "a spent reservation is kept",
        "stepengine/runtime/limits.py",
        "            ledger.call_tokens += tokens\n",
        "            ledger.call_tokens += abs(tokens)\n",
        LIMITS,
    ),
    Mutant(
        "a child may stand one level deeper",
        "stepengine/runtime/limits.py",
        "    if most is None or depth <= most:\n",
        "    if most is None or depth <= most + 1:\n",
        LIMITS,
    ),
    Mutant(
        "children do not count above their parent",
        "stepengine/runtime/limits.py",
        "                ledger.asked += count\n            ledger = ledger.parent\n",
        "                ledger.asked += count\n            ledger = None\n",
        LIMITS,
    ),
    Mutant(
        "a run whose time is over is told that its steps are",
        "stepengine/runtime/clock.py",
        'LimitExceeded(msg, kind="seconds", limit=seconds)',
        'LimitExceeded(msg, kind="steps", limit=seconds)',
        (*LIMITS, *DRIVER),
    ),
    # --- the kernel: engine -----------------------------------------------------------------------------------------
    Mutant(
        "a child takes the engine's model before its spawner's",
        "stepengine/engine/run_plans.py",
        "model = self._chosen_model(agent) or parent.model or self._checked_model(self._default_model)",
        "model = self._chosen_model(agent) or self._checked_model(self._default_model) or parent.model",
        ("tests/engine/test_engine.py", "tests/engine/test_spawn.py"),
    ),
    Mutant(
        "a child may spawn what its parent may not",
        "stepengine/engine/run_plans.py",
        "            raise spawn_not_allowed_error(parent.definition.id, effect.agent_id, agents, hint)\n        spawner: Agent",
        "            return self._catalog.find(given or effect.agent_id)\n        spawner: Agent",
        ("tests/engine/test_engine.py", "tests/engine/test_spawn.py"),
    ),
    Mutant(
        "runs of one path share their chance",
        "stepengine/engine/run_plans.py",
        'random=partial(Random, f"{self.seed}:{path}") if',
        'random=partial(Random, f"{path}") if',
        ("tests/engine/test_handlers.py",),
    ),
    Mutant(
        "a spent budget is passed by on the short way",
        "stepengine/runtime/performer_stack.py",
        " or self._ledgers.get_ledger(path).bounded:\n",
        ":\n",
        ("tests/runtime/test_limits.py", "tests/engine/test_spawn_limits.py"),
    ),
    Mutant(
        "a recorder is passed by on the short way",
        "stepengine/runtime/performer_stack.py",
        "        if wrapping is None or not self._middlewares:\n",
        "        if True:\n",
        ("tests/journal/test_records.py",),
    ),
    Mutant(
        "a run of a group that fails at once is passed by on the short way",
        "stepengine/runtime/performer_stack.py",
        "        if wrapping is not None and wrapping.brake.can_stop(path):\n            return None\n",
        "",
        ("tests/engine/test_spawn_fail_fast.py",),
    ),
    Mutant(
        "a flat object may hold what is not JSON",
        "stepengine/data/json.py",
        "        if not ((kind is str and item.isascii()) or (kind is int and MIN_NUMBER <= item <= MAX_NUMBER)):\n            return False\n",
        "",
        ("tests/data/test_json_values.py",),
    ),
    Mutant(
        "a history is taken for masked after its first look",
        "stepengine/context/masks.py",
        "        return MaskableCounts(left.long + self._is_long(message), left.named + (message.tool_name in self.tools))\n",
        "        return left\n",
        ("tests/context/test_masking.py",),
    ),
    # --- bodies of providers that were once read wrongly ------------------------------------------------------------
    Mutant(
        "pieces of a call of Gemini are calls of their own",
        "stepengine/models/google/decode.py",
        '        if call.get("willContinue") is True:\n',
        "        if False:\n",
        ("tests/models/test_streamed_arguments.py",),
    ),
    Mutant(
        "the pieces of a text of an argument take each other's place",
        "stepengine/models/google/calls.py",
        "before.pieces += value.pieces",
        "before.pieces = value.pieces",
        ("tests/models/test_streamed_arguments.py",),
    ),
    Mutant(
        "a call of a custom tool is a function's",
        "stepengine/models/openai_chat/decode.py",
        '    if any(_is_custom(entry) for entry in objects_at(message, "tool_calls")):\n',
        "    if False:\n",
        ("tests/models/test_whole_calls.py",),
    ),
    Mutant(
        "a call in the form before tool_calls is none",
        "stepengine/models/openai_chat/calls.py",
        '    return call if isinstance(call, Mapping) and (call.get("name") or call.get("arguments")) else None',
        "    return None",
        ("tests/models/test_whole_calls.py",),
    ),
    Mutant(
        "what stands beside a streamed function is lost",
        "stepengine/models/openai_chat/calls.py",
        "            slot.more.update(find_newer_members(entry, MEMBERS))\n",
        "",
        ("tests/models/test_whole_calls.py",),
    ),
    Mutant(
        "what a call of Anthropic's held beside its arguments stays at home",
        "stepengine/models/anthropic/encode.py",
        "    newer = {name: value for name, value in more.items() if (name, value) != DIRECT}\n",
        "    newer = {}\n",
        ("tests/models/test_members_of_the_sdks.py",),
    ),
    Mutant(
        "what a message of Anthropic's holds that is newer is lost",
        "stepengine/models/anthropic/decode.py",
        '            **({"more": newer} if newer else {}),\n',
        "",
        ("tests/models/test_members_of_the_sdks.py",),
    ),
    Mutant(
        "what a call of Responses held beside its arguments stays at home",
        "stepengine/models/openai/encode.py",
        '        item = {**data.get("more", {}), **item}\n',
        "",
        ("tests/models/test_members_of_the_sdks.py",),
    ),
    Mutant(
        "what a message of Responses held stays at home",
        "stepengine/models/openai/encode.py",
        '**own.get("more_of_item", {}), ',
        "",
        ("tests/models/test_members_of_the_sdks.py",),
    ),
    Mutant(
        "a second choice of a stream is dropped in silence",
        "stepengine/models/openai_chat/decode.py",
        '                self._record_unread(f"choices[{index}]")\n',
        "",
        ("tests/models/test_events_of_streams.py",),
    ),
    Mutant(
        "an unknown event of Responses is dropped in silence",
        "stepengine/models/openai/decode.py",
        "        if kind not in READ:\n            self._record_unread(kind)\n",
        "        if kind not in READ:\n",
        ("tests/models/test_events_of_streams.py",),
    ),
    Mutant(
        "an unknown event of Anthropic is dropped in silence",
        "stepengine/models/anthropic/stream.py",
        '        elif kind != "ping":\n            self._record_unread(kind)\n',
        "",
        ("tests/models/test_events_of_streams.py",),
    ),
    Mutant(
        "a delta of Chat is read and nothing else of it kept",
        "stepengine/models/openai_chat/decode.py",
        "        self._store_newer_members(delta)\n",
        "",
        ("tests/models/test_events_of_streams.py",),
    ),
    Mutant(
        "what of a reply was not read is told to nobody",
        "stepengine/machine/side_events.py",
        "            if text not in self.warnings:\n                self.warn(text)\n                if run",
        "            if False:\n                self.warn(text)\n                if run",
        ("tests/machine/test_batches.py",),
    ),
    Mutant(
        "what tools of OpenAI used is neither read nor kept",
        "stepengine/models/openai/decode.py",
        '    *("tool_usage", "input_transformations", "prompt_cache_diagnostics"),\n)\n# Listed, and not just ignored: what is in no list is told of as new, and these would be told at every reply.\nECHOES = (\n',
        '    *("input_transformations", "prompt_cache_diagnostics"),\n)\nECHOES = (\n    "tool_usage",\n',
        ("tests/models/test_members_of_the_sdks.py",),
    ),
    Mutant(
        "the bill of xAI is not read",
        "stepengine/models/_reply.py",
        "        return Decimal(ticks) / TICKS_PER_DOLLAR if type(ticks) is int and 0 <= ticks <= MAX_TICKS else None\n",
        "        return None\n",
        ("tests/models/test_pricing.py",),
    ),
    Mutant(
        "searches of X cost nothing",
        "stepengine/models/_price_book.py",
        '    "x_search_calls": Decimal("0.005"),',
        '    "x_search_calls": Decimal("0"),',
        ("tests/models/test_pricing.py",),
    ),
    Mutant(
        "the total of a bill in parts is not read",
        "stepengine/models/_reply.py",
        '    paid = parse_dollars(cost.get("total_cost") if isinstance(cost, Mapping) else cost)\n',
        "    paid = parse_dollars(cost)\n",
        ("tests/models/test_pricing.py",),
    ),
    Mutant(
        "what the user's own key is charged is left out of a bill",
        "stepengine/models/_reply.py",
        '    if raw.get("is_byok") is not True:\n        return paid\n',
        "    if True:\n        return paid\n",
        ("tests/models/test_pricing.py",),
    ),
    Mutant(
        "the bill in a header is not read",
        "stepengine/models/_http.py",
        "        return attrs.evolve(reply, cost=stated) if stated else reply\n",
        "        return reply\n",
        ("tests/models/test_pricing.py",),
    ),
    Mutant(
        "the bill beside a message is not read in streams",
        "stepengine/models/openai_chat/decode.py",
        'NOT_IN_PIECES = ("provider_metadata", *REASONING)',
        "NOT_IN_PIECES = REASONING",
        ("tests/models/test_events_of_streams.py",),
    ),
    Mutant(
        "images that were made beside a reply cost nothing",
        "stepengine/models/_price_book.py",
        "        images = self._image_cost(model, data, at) or Decimal(0)\n",
        "        images = Decimal(0)\n",
        ("tests/models/test_pricing.py",),
    ),
    Mutant(
        "searches are counted by what a reply shows",
        "stepengine/models/_unpriced.py",
        "    if told is not None:\n        return told\n",
        "",
        ("tests/models/test_pricing.py",),
    ),
    Mutant(
        "a dearer tier without a price costs as the ordinary one",
        "stepengine/models/_price_book.py",
        "        elif tier in DEARER:\n            unpriced.append(tier)\n",
        "        elif tier in DEARER:\n            pass\n",
        ("tests/models/test_pricing.py",),
    ),
    Mutant(
        "flex is a tier that nobody knows",
        "stepengine/models/_price_book.py",
        '        elif tier in {"flex", "batch"} and',
        '        elif tier in {"batch"} and',
        ("tests/models/test_pricing.py",),
    ),
    Mutant(
        "the kind of traffic of Vertex AI is not read",
        "stepengine/models/_unpriced.py",
        "        tier = TRAFFIC.get(traffic, traffic)\n",
        '        tier = ""\n',
        ("tests/models/test_pricing.py",),
    ),
    Mutant(
        "what Gemini states of the whole alone is nothing",
        "stepengine/models/google/decode.py",
        '    if raw.get("promptTokenCount") is None:\n',
        "    if False:\n",
        ("tests/models/test_pricing.py",),
    ),
    Mutant(
        "a cache beside the prompt is clamped",
        "stepengine/models/_reply.py",
        "        whole, unsure = whole + cached if beside else whole, unsure or not beside\n",
        "        pass\n",
        ("tests/models/test_pricing.py",),
    ),
    Mutant(
        "a model that stood in is counted twice",
        "stepengine/models/_iterations.py",
        '        if entry.get("type") not in {"message", STOOD_IN}\n',
        '        if entry.get("type") != "message"\n',
        ("tests/models/test_pricing.py",),
    ),
    Mutant(
        "a model that stood in is not named",
        "stepengine/models/anthropic/decode.py",
        '    return next((name for name in [*reversed(named), *reversed(served)] if name), text_at(message, "model"))',
        '    return text_at(message, "model")',
        ("tests/models/test_pricing.py",),
    ),
    Mutant(
        "models that stand in are not asked for",
        "stepengine/models/anthropic/request.py",
        '{"fallbacks": _encode_fallbacks(names)}',
        "{}",
        ("tests/models/test_settings.py",),
    ),
    Mutant(
        "a key that Google refuses is a bad request",
        "stepengine/models/_failures.py",
        "|api key not valid|",
        "|",
        ("tests/models/test_wrong_keys.py",),
    ),
    Mutant(
        "a key that xAI refuses is a bad request",
        "stepengine/models/_failures.py",
        'r"incorrect api key|',
        'r"',
        ("tests/models/test_wrong_keys.py",),
    ),
    Mutant(
        "a fallback stops at a refused key",
        "stepengine/models/routing.py",
        'DEFAULT = ("unavailable", "rate_limit", "no_credit", "auth")',
        'DEFAULT = ("unavailable", "rate_limit", "no_credit")',
        ("tests/models/test_wrong_keys.py",),
    ),
    Mutant(
        "the word of Perplexity for a long prompt is unknown",
        "stepengine/models/_failures.py",
        '"context_length_exceeded", "too_many_prompt_tokens", ',
        '"context_length_exceeded", ',
        ("tests/models/test_wrong_keys.py",),
    ),
    Mutant(
        "an answer as an object is not a reply",
        "stepengine/models/openai_chat/decode.py",
        '    if isinstance(message.get("content"), Mapping) and _wants_json(call):\n',
        "    if False:\n",
        ("tests/models/test_streams.py",),
    ),
    Mutant(
        "a gap in the numbers of items is an error",
        "stepengine/models/openai/decode.py",
        "        if index <= newest:",
        "        if index != newest + 1:",
        ("tests/models/test_streams.py",),
    ),
    Mutant(
        "a signature that comes alone is an item of its own",
        "stepengine/models/openai_chat/decode.py",
        '        is_end = bool(detail.get("signature")) and not any(map(detail.get, (*TEXTS, "data")))\n',
        "        is_end = False\n",
        ("tests/models/test_streams.py",),
    ),
    Mutant(
        "a search of X waits for its client",
        "stepengine/models/openai/decode.py",
        'X_SEARCH = ("xai", "custom_tool_call")',
        'X_SEARCH = ("", "")',
        ("tests/models/test_pricing.py",),
    ),
    Mutant(
        "sources beside the choices are lost",
        "stepengine/models/openai_chat/decode.py",
        "*_decode_sources(data, message))",
        ")",
        ("tests/models/test_presets.py",),
    ),
    Mutant(
        "no model of Gemini's is asked for its most",
        "stepengine/models/_thinking_levels.py",
        'MORE_THAN_HIGH = re.compile(r"gemini-4-hydrogen")',
        'MORE_THAN_HIGH = re.compile(r"nothing")',
        ("tests/models/test_thinking_words.py",),
    ),
    Mutant(
        "a long reply of Gemini's is gone on with without its token",
        "stepengine/models/google/request.py",
        "        members[GOES_ON_WITH] = encode_json(token)\n",
        "",
        ("tests/models/test_responses_and_gemini.py",),
    ),
    Mutant(
        "searches of images cost nothing",
        "stepengine/models/_unpriced.py",
        '    found += ["imageSearchQueries"] if',
        "    found += [] if",
        ("tests/models/test_pricing.py",),
    ),
    Mutant(
        "a steered response is refused",
        "stepengine/models/openai/decode.py",
        '    "steered": StopReason.END_TURN,',
        '    "steered": StopReason.REFUSAL,',
        ("tests/models/test_responses_and_gemini.py",),
    ),
)


# --- running them ---------------------------------------------------------------------------------------------------


@attrs.frozen
class Outcome:
    """How the tests took a mutant; *said* is what pytest had to say of it."""

    mutant: Mutant
    verdict: Verdict
    said: str
    seconds: float


def suite_run(root: Path, suite: Sequence[str], seconds: float = SECONDS) -> tuple[int | None, str]:
    """Run tests in the checkout at *root*; return pytest's status, ``None`` when it took too long, and what it says."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", "0", "--no-header", *suite]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHON_COLORS": "0"}
    # A session of its own, so that nothing that a hanging test started outlives it.
    with subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, f"no end after {seconds:g} s"
    lines = said.decode(errors="replace").strip().splitlines()
    first = next((line for line in lines if line.startswith(("FAILED ", "ERROR "))), lines[-1] if lines else "")
    return process.returncode, first


def tried(mutant: Mutant, root: Path) -> Outcome:
    """Plant one mutant in the checkout at *root* and run its tests."""
    began = time.monotonic()
    problem = mutant.problem(root)
    if problem:
        return Outcome(mutant, "ERROR", problem, 0)
    with mutant.planted(root):
        status, said = suite_run(root, mutant.suite)
    verdict: Verdict = "caught" if status == FAILED else "SURVIVED" if status == 0 else "ERROR"
    return Outcome(mutant, verdict, said, time.monotonic() - began)


def copies(folder: Path, count: int) -> Iterator[Path]:
    """Give copies of the checkout that import their own code."""
    look = "import stepengine; print(stepengine.__file__)"
    for number in range(count):
        root = folder / f"copy{number}"
        shutil.copytree(ROOT, root, ignore=LEFT_OUT, symlinks=True)
        seen = subprocess.run(
            [sys.executable, "-c", look],
            cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        if Path(seen.strip()).parent.parent != root:
            msg = f"a process in {root} imports {seen.strip()}, so that no mutant there would be seen"
            raise RuntimeError(msg)
        yield root


def sound(mutants: Sequence[Mutant], roots: Sequence[Path]) -> bool:
    """Return whether the tests of all mutants pass without any of them, and say so."""
    suites = sorted({test for mutant in mutants for test in mutant.suite})
    parts = [suites[number :: len(roots)] for number in range(len(roots))]
    print(f"the tests of {len(mutants)} mutants, in {len(suites)} files and folders, without any of them:", flush=True)
    with ThreadPoolExecutor(len(roots)) as pool:
        ran = [(root, part, 10 * SECONDS) for root, part in zip(roots, parts, strict=True) if part]
        results = list(pool.map(lambda given: suite_run(*given), ran))
    for _, said in results:
        print(f"    {said}", flush=True)
    return all(status == 0 for status, _ in results)


def run(mutants: Sequence[Mutant], jobs: int) -> list[Outcome]:
    """Try all mutants, *jobs* at a time, and say of each how it went."""
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        roots = list(copies(Path(folder), jobs))
        if not sound(mutants, roots):
            return [Outcome(mutant, "ERROR", "its tests fail without it", 0) for mutant in mutants]
        free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for root in roots:
            free.put(root)

        def one(mutant: Mutant) -> Outcome:
            root = free.get()
            try:
                return tried(mutant, root)
            finally:
                free.put(root)

        with ThreadPoolExecutor(jobs) as pool:
            for done in as_completed([pool.submit(one, mutant) for mutant in mutants]):
                outcome = done.result()
                outcomes.append(outcome)
                print(
                    f"{len(outcomes):3}/{len(mutants)} {outcome.verdict:8} {outcome.seconds:5.1f} s  {outcome.mutant.name}",
                    flush=True,
                )
                if outcome.verdict != "caught":
                    print(f"{'':24}{outcome.mutant.file}: {outcome.said}", flush=True)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.strip().partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only mutants whose name or file contains one of these")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="say what there is and whether it can be planted")
    parser.add_argument("--random", type=int, metavar="N", help="draw N faults from the syntax tree instead")
    parser.add_argument("--seed", type=int, default=0, help="what they are drawn with (default: %(default)s)")
    parser.add_argument(
        "--floor", action="append", help="draw from this floor only, such as machine; may be given again"
    )
    parser.add_argument("--results", type=Path, help="append the outcomes of drawn faults, and skip what was caught")
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help="after which a drawn fault counts as caught (default: %(default)s)",
    )
    asked = parser.parse_args()
    if asked.random:
        faults = drawn(asked.random, asked.seed, tuple(asked.floor or FLOORS))
        if asked.list:
            print("\n".join([f"{fault.name} (line {fault.line})" for fault in faults]))
            return 0
        from tests.random_runs import run_random  # needs coverage, which planting needs not

        results = asked.results and asked.results.resolve()
        return run_random(faults, seed=asked.seed, jobs=max(1, asked.jobs), results=results, seconds=asked.seconds)
    mutants = [m for m in MUTANTS if not asked.words or any(w in m.name or w in m.file for w in asked.words)]
    if asked.list:
        problems = [mutant.problem() for mutant in mutants]
        for mutant, problem in zip(mutants, problems, strict=True):
            print(f"{mutant.file}: {mutant.name}{f'  ERROR: {problem}' if problem else ''}")
        return any(problems)
    outcomes = run(mutants, max(1, asked.jobs))
    count = {verdict: sum(o.verdict == verdict for o in outcomes) for verdict in ("caught", "SURVIVED", "ERROR")}
    print(f"{count['caught']} of {len(outcomes)} caught, {count['SURVIVED']} survived, {count['ERROR']} errors")
    return int(count["caught"] != len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
