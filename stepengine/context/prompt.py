"""``SystemPrompt`` and ``Environment``: a system prompt from parts, in a fixed order."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import attrs
from attrs import frozen

from stepengine.data.definition import HookContext
from stepengine.data.messages import system_reminder

Section: TypeAlias = "str | Iterable[str]"
"""Text, or points for a list."""


def _to_text_pairs(value: Mapping[str, object] | Iterable[tuple[str, object]]) -> tuple[tuple[str, str], ...]:
    return tuple([(str(name), str(content)) for name, content in dict(value).items()])


@frozen(kw_only=True)
class Environment:
    """
    The environment of an agent, as an ``<env>`` block; attributes that are ``None`` have no line.

    Nothing is looked up: a prompt that depends on the machine could not be replayed on another one.

    Attributes:
        working_directory: The folder.
        platform: The operating system.
        date: ``True`` for the day (UTC) of the run's start, by its recorded time, so that a replay sends the same bytes;
            or a date or text of your own.
        custom_vars: More lines ``name: value``, in order.
    """

    working_directory: str | None = attrs.field(default=None, converter=attrs.converters.optional(str))
    platform: str | None = None
    date: dt.date | str | bool | None = True
    custom_vars: tuple[tuple[str, str], ...] = attrs.field(default=(), converter=_to_text_pairs)

    def render(self, now: dt.datetime) -> str:
        """Return the block; ``""`` if it has no line. *now* is the run's recorded time."""
        lines = [f"{name}: {' '.join(value.splitlines())}" for name, value in self._iterate_named_values(now)]
        return "\n".join(["<env>", *lines, "</env>"]) if lines else ""

    def _iterate_named_values(self, now: dt.datetime) -> Iterator[tuple[str, str]]:
        """Yield (label, value) of each line in the ``<env>`` block."""
        if self.working_directory is not None:
            yield "Working directory", self.working_directory
        if self.platform is not None:
            yield "Platform", self.platform
        if self.date is True:
            yield "Today's date", now.date().isoformat()
        elif self.date is not None and self.date is not False:
            yield "Today's date", str(self.date)
        yield from self.custom_vars


def _strip_section(value: Section) -> tuple[str, ...] | str:
    """Return a text stripped, or points as a tuple of stripped texts without empty ones."""
    return value.strip() if isinstance(value, str) else _strip_texts(value)


def _strip_texts(value: str | Iterable[str]) -> tuple[str, ...]:
    """Return one or several texts stripped, as a tuple without empty ones."""
    texts = (value,) if isinstance(value, str) else tuple(value)
    return tuple([t.strip() for t in texts if t.strip()])


@frozen
class SystemPrompt:
    """
    A system prompt from parts, for ``AgentDefinition(system_prompt=...)``.

    The parts have the order of the arguments. Empty parts are omitted, and *base* alone is unchanged. Tools have no part:
    their descriptions go to the provider's own field. The prompt is rendered once per run, so it does not change from call
    to call. For changing content use ``reminders()`` or ``inject_context()``.

    Attributes:
        base: The beginning, unchanged.
        identity: The role of the agent.
        capabilities: Its capabilities.
        constraints: The limits of its actions.
        tone: Its tone.
        tool_policy: The rules for the use of tools.
        environment: Its environment.
        reminders: Texts in ``<system-reminder>`` tags.
    """

    base: str = ""
    identity: tuple[str, ...] | str = attrs.field(default="", converter=_strip_section, kw_only=True)
    capabilities: tuple[str, ...] | str = attrs.field(default="", converter=_strip_section, kw_only=True)
    constraints: tuple[str, ...] | str = attrs.field(default="", converter=_strip_section, kw_only=True)
    tone: tuple[str, ...] | str = attrs.field(default="", converter=_strip_section, kw_only=True)
    tool_policy: tuple[str, ...] | str = attrs.field(default="", converter=_strip_section, kw_only=True)
    environment: Environment | None = attrs.field(default=None, kw_only=True)
    reminders: tuple[str, ...] = attrs.field(default=(), converter=_strip_texts, kw_only=True)

    def render(self, ctx: HookContext, /) -> str:
        """Return the prompt of a run; the engine calls this at its start."""
        return self.text(ctx.now)

    def text(self, now: dt.datetime) -> str:
        """Return the prompt for a run that started at *now*."""
        sections = {
            "Identity": self.identity,
            "Capabilities": self.capabilities,
            "Constraints": self.constraints,
            "Tone": self.tone,
            "Tool usage policy": self.tool_policy,
        }
        parts = [self.base, *[_format_section(title, content) for title, content in sections.items()]]
        parts.append("" if self.environment is None else self.environment.render(now))
        parts += [system_reminder(text) for text in self.reminders]
        return "\n\n".join([part for part in parts if part])


def _format_section(title: str, content: tuple[str, ...] | str) -> str:
    """Return a section with its title, its points as a list; ``""`` without content."""
    if not content:
        return ""
    body = content if isinstance(content, str) else "\n".join([f"- {point}" for point in content])
    return f"# {title}\n{body}"
