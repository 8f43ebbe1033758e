"""
Random agent files: handlers that loop, catch, ask, wait, start children and look at their conversation, as text.
"""

from __future__ import annotations

import random

HEAD = '''
"""A random agent."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from stepengine import (
    STEP, STEP_ALL, AgentCall, AgentDefinition, Ask, AssistantMessage, Cancel, Complete, GenerateN, Parallel, Race, Receive, Sleep,
    Start, StepContext, Steps, StepText, StepWith, Send, ToolCall, ToolMessage, UserMessage, Wait,
)
from stepengine.errors import AgentError, ChildError, LimitExceeded, ModelError, StepEngineError, ToolError


def shown(value: Any) -> Any:
    """Tell what a handler was given."""
    if isinstance(value, (list, tuple)):
        return [shown(one) for one in value]
    if hasattr(value, "is_error"):
        return [value.is_error, value.text, value.output if hasattr(value, "agent_id") else value.data]
    if hasattr(value, "message"):
        return value.message
    return value.isoformat() if isinstance(value, datetime) else value


def seen(state: Any) -> list[Any]:
    """Tell what a conversation holds."""
    history = state.message_history
    calls = [call.tool_name for one in history if isinstance(one, AssistantMessage) for call in one.tool_calls]
    results = [one.is_error for one in history if isinstance(one, ToolMessage)]
    told = [one.text for one in history if isinstance(one, UserMessage)]
    return [len(history), len(state.view), calls, results, told, state.step_index, state.steps_remaining > 0, dict(state.context)]

'''
TAIL = """

node = AgentDefinition("node", tools=["note", "broken"], output_mode="structured_output", handle_steps=node_steps)
root = AgentDefinition(
    "root", tools=["note", "broken"], spawnable_agents=[node], output_mode="structured_output", handle_steps=root_steps
)
agents = [root, node]
"""
ERRORS = (
    "ToolError",
    "ChildError",
    "ModelError",
    "(ToolError, ChildError)",
    "StepEngineError",
    "Exception",
    "ValueError",
    "AgentError",
)


class Writer:
    """Writes a file; *rng* decides everything."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.helpers: list[str] = []
        self.count = 0
        self.may_raise = True

    def file(self) -> str:
        """Return the text of a file of two agents, whose first may spawn the second."""
        node = self.function("node_steps", "ctx: StepContext", is_root=False)
        root = self.function("root_steps", "ctx: StepContext", is_root=True)
        return HEAD + "\n\n".join([*self.helpers, node, root]) + TAIL

    def function(self, name: str, args: str, *, is_root: bool) -> str:
        lines = self.block(0, is_root=is_root)
        returned = (
            ["return {'log': log}"]
            if name.endswith("steps")
            else [self.pick(["return log", "return len(log)", "return"])]
        )
        head = ["log: list[Any] = []", "refs: list[Any] = []"]
        if not any("yield" in line for line in lines):
            lines.append("yield ToolCall('note', {'n': 0})")
        return "\n".join(
            [f"def {name}({args}) -> Steps[Any]:", *["    " + line for line in [*head, *lines, *returned]]]
        )

    def pick(self, of: list[str]) -> str:
        return self.rng.choice(of)

    def block(self, depth: int, *, is_root: bool) -> list[str]:
        lines: list[str] = []
        for _ in range(self.rng.randint(1, 4 - depth)):
            lines += self.statement(depth, is_root=is_root)
        return lines

    def below(self, depth: int, *, is_root: bool) -> list[str]:
        return ["    " + line for line in self.block(depth + 1, is_root=is_root)]

    def statement(self, depth: int, *, is_root: bool) -> list[str]:
        kinds = [self.step, self.call, self.asked, self.chance, self.said, self.looked, self.special, self.waited]
        if is_root:
            kinds += [self.child, self.started, self.started]
        if depth < 2:
            nesting = self.pick(["loop", "caught", "caught", "branch", "helper", "while"])
            if self.rng.random() < 0.4:
                return getattr(self, nesting)(depth, is_root=is_root)
        if is_root:
            kinds += [self.raced]
        return self.rng.choice(kinds)()

    # --- one thing --------------------------------------------------------------------------------------------------

    def number(self) -> int:
        self.count += 1
        return self.count

    def tool(self) -> str:
        name = self.pick(["note", "note", "note", "broken"])
        more = self.pick(["", ", include_tool_call=False"])
        given = self.pick(
            [f"'n': {self.number()}", "'n': len(log)", f"'n': {self.number()}, 'deep': [1, {{'a': None}}, 'é\\n']"]
        )
        return f"ToolCall('{name}', {{{given}}}{more})"

    def agent(self) -> str:
        params = self.pick(["", f", params={{'n': {self.number()}}}"])
        return f"AgentCall('node', 'do {self.number()}'{params})"

    def step(self) -> list[str]:
        return [
            f"turn = yield {self.pick(['STEP', 'STEP', 'STEP_ALL'])}",
            "log.append([turn.text, turn.steps_complete, seen(turn.agent_state)])",
        ]

    def call(self) -> list[str]:
        return self.rng.choice(
            [
                [f"log.append(shown((yield from {self.tool()})))"],
                [
                    f"turn = yield {self.tool()}",
                    "log.append([shown(turn.tool_results), turn.text, turn.tool_result.status])",
                ],
                [f"log += [shown(one) for one in (yield from Parallel([{self.tool()}, {self.tool()}]))]"],
                [
                    f"found = yield Parallel({self.tool()}, {self.tool()}, fail_fast={self.pick(['True', 'False'])})",
                    "log.append(shown(found.value))",
                ],
                [
                    "log += (yield from Parallel([ToolCall('note', {'n': n}) for n in range(3)], concurrency=2))[0].text, 'x'"
                ],
            ]
        )

    def asked(self) -> list[str]:
        more = self.pick(["", ", ['yes', 'no']", ", ['a', 'b'], multi_select=True", ", allow_text=True"])
        return [f"log.append(shown((yield from Ask('Q{self.number()}?'{more}))))"]

    def chance(self) -> list[str]:
        drawn = [
            "ctx.random.random()",
            "ctx.random.randint(1, 9)",
            "ctx.random.choice(['a', 'b', 'c'])",
            "ctx.random.sample(range(9), 3)",
            "ctx.now().isoformat()",
            "ctx.random.getrandbits(40)",
            "round(ctx.random.gauss(0, 1), 6)",
            "ctx.random.uniform(1, 2)",
        ]
        if self.rng.random() < 0.2:
            return ["mixed = [1, 2, 3, 4]", "ctx.random.shuffle(mixed)", "log.append(mixed)"]
        return [f"log.append({self.pick(drawn)})"]

    def said(self) -> list[str]:
        return [
            self.pick(
                [
                    f"ctx.logger.info('at {self.number()}', n=len(log))",
                    f"ctx.notify('told {self.number()}', {{'n': [1, None]}})",
                    "ctx.logger.warning('é')",
                ]
            )
        ]

    def looked(self) -> list[str]:
        return [
            self.pick(
                [
                    "log.append(seen(ctx.agent_state))",
                    "log.append([ctx.prompt, shown(ctx.params), ctx.model, ctx.is_asked])",
                    "log.append([one.role for one in ctx.prompt_messages])",
                    "log.append([isinstance(log, Sequence), isinstance({}, Mapping), sorted(['b', 'A'], key=str.lower)])",
                    "log.append(next((one for one in log if isinstance(one, str)), None))",
                    "log.append(list(map(str.strip, [' a ', 'b '])))",
                ]
            )
        ]

    def special(self) -> list[str]:
        return self.rng.choice(
            [
                ["turn = yield StepWith(tool_choice='none')", "log.append(turn.text)"],
                [f"turn = yield StepText('text {self.number()}')", "log.append([turn.text, turn.steps_complete])"],
                ["log.append(list((yield from GenerateN(2))))"],
                [f"log.append((yield from Complete('say {self.number()}')).text)"],
                self.failure(),
                ["yield ToolCall('add_message', {'role': 'user', 'content': 'more'}, include_tool_call=False)"],
                ["yield ToolCall('set_output', {'n': 1})"],
                [
                    f"yield ToolCall('set_messages', {{'messages': [UserMessage('anew {self.number()}')]}}, include_tool_call=False)",
                    "log.append(seen(ctx.agent_state))",
                ],
            ]
        )

    def failure(self) -> list[str]:
        if not self.may_raise:
            return ["log.append(len(log))"]
        return [
            self.pick(
                [f"raise ValueError('own {self.number()}')", "log.append(1 / len(log))", "log.append(1 / len(log))"]
            )
        ]

    def waited(self) -> list[str]:
        seconds = self.pick(["1", "3600", "0"])
        topic = self.pick(["Receive('t')", "Receive('t', timeout=60)"])
        return self.rng.choice(
            [
                [f"log.append(shown((yield from Sleep({seconds}))))"],
                [f"log.append(shown((yield from {topic})))"],
            ]
        )

    def raced(self) -> list[str]:
        topic = self.pick(["Receive('t')", "Receive('t', timeout=60)"])
        return self.rng.choice(
            [
                [f"log.append(shown((yield from Race({self.tool()}, Sleep(3600)))))"],
                [f"won = yield Race([{topic}, Sleep(60)])", "log.append(shown(won.value))"],
            ]
        )

    def child(self) -> list[str]:
        return self.rng.choice(
            [
                [f"log.append(shown((yield from {self.agent()})))"],
                [f"turn = yield {self.agent()}", "log.append(shown(turn.value))"],
                [f"log += shown((yield from Parallel({self.agent()}, {self.tool()})))"],
                [f"log.append(shown((yield from Race({self.agent()}, Sleep(3600)))))"],
            ]
        )

    def started(self) -> list[str]:
        how = self.pick(["cancel", "wait"])
        return self.rng.choice(
            [
                [f"refs.append((yield from Start({self.agent()}, on_return='{how}')))"],
                [f"refs += yield from Start({self.agent()}, {self.agent()}, on_return='{how}')"],
                [
                    "if refs:",
                    "    waited = yield from Wait(*refs)",
                    "    log.append([shown(waited.done), len(waited.open)])",
                ],
                [
                    "if refs:",
                    "    waited = yield from Wait(refs, need='any', timeout=60)",
                    "    log.append([shown(waited.done), len(waited.open)])",
                ],
                ["if refs:", "    log.append(shown((yield from Send(refs[-1], {'n': len(log)}, topic='t'))))"],
                ["if refs:", "    log.append(shown((yield from Cancel(refs[0], 'enough'))))"],
            ]
        )

    # --- what holds others --------------------------------------------------------------------------------------------

    def loop(self, depth: int, *, is_root: bool) -> list[str]:
        lines = [f"for step{depth} in range({self.rng.randint(1, 3)}):", *self.below(depth, is_root=is_root)]
        if self.rng.random() < 0.4:
            lines += [
                f"    if len(log) > {self.rng.randint(2, 6)}:",
                f"        {self.pick(['break', 'continue', 'break'])}",
            ]
        return [*lines, "else:", "    log.append('else')"] if self.rng.random() < 0.3 else lines

    def while_(self, depth: int, *, is_root: bool) -> list[str]:
        name = f"left{depth}"
        return [
            f"{name} = {self.rng.randint(1, 3)}",
            f"while {name}:",
            f"    {name} -= 1",
            *self.below(depth, is_root=is_root),
        ]

    def branch(self, depth: int, *, is_root: bool) -> list[str]:
        inside = self.below(depth, is_root=is_root)
        ends = ["    return {'log': log, 'early': True}"] if self.rng.random() < 0.2 else []
        return [
            f"if len(log) % 2 == {self.rng.randint(0, 1)}:",
            *inside,
            *ends,
            "else:",
            *self.below(depth, is_root=is_root),
        ]

    def caught(self, depth: int, *, is_root: bool) -> list[str]:
        kind, form, may_raise = self.pick(list(ERRORS)), self.rng.random(), self.may_raise
        again = kind not in ("Exception", "ValueError") and self.rng.random() < 0.2
        # Of what passes a `try` the sandbox tells the line of its end.
        self.may_raise = kind == "Exception" and form < 0.7
        lines = ["try:", *self.below(depth, is_root=is_root)]
        self.may_raise = False
        if form < 0.7:
            lines += [f"except {kind} as error:", "    log.append(str(error))"]
            if self.rng.random() < 0.3:
                lines += self.below(depth, is_root=is_root)
            if again:
                lines += ["    raise"]
        elif form < 0.8:
            lines += ["except GeneratorExit:", "    ctx.logger.info('left')", "    raise"]
        if form >= 0.8 or self.rng.random() < 0.3:
            lines += ["finally:", "    ctx.logger.info('finally', n=len(log))"]
        self.may_raise = may_raise
        return lines

    def helper(self, depth: int, *, is_root: bool) -> list[str]:
        name = f"help{self.number()}"
        self.helpers.append(self.function(name, "ctx: StepContext, n: int = 0", is_root=is_root))
        return [f"log.append((yield from {name}(ctx, len(log))))"]


setattr(Writer, "while", Writer.while_)


def file_of(seed: int) -> str:
    """Return the text of the random file of a seed."""
    return Writer(random.Random(seed)).file()
