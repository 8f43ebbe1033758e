"""
``Policy``: rules and a mode, what they say about a call and why, and their form as a file.

A matching deny wins, whatever its scope and priority. Otherwise scopes are asked in the order user, session, agent,
global, within a scope higher priorities first, then in order of addition; the first rule that matches decides. When none
does, the mode decides.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from pathlib import Path as FilePath
from typing import Any, Literal, TypeAlias, get_args

import attrs
from attrs import frozen

from stepengine.data.alike import find_nearest, list_names
from stepengine.data.definition import HookContext
from stepengine.data.json import JsonDict, canonical, freeze_object, thaw
from stepengine.data.messages import ToolCallPart
from stepengine.data.origins import ASKED as ASKED_ABOUT_DATA
from stepengine.data.origins import ORIGIN_HOOK, find_origins, untrusted_reasons
from stepengine.data.questions import Decision
from stepengine.data.tools import ToolLike, ToolSpec, find_values
from stepengine.errors import DefinitionError
from stepengine.permissions.commands import CONFINED, READ_ONLY, CommandForm, confine_command, find_doubt
from stepengine.permissions.rules import (
    FOLLOWING,
    ORDER,
    AfterUntrusted,
    Call,
    Category,
    Command,
    Domain,
    Effect,
    Every,
    Matcher,
    Path,
    Regex,
    Request,
    Rule,
    Scope,
    ToolNamed,
    Untrusted,
    Values,
    When,
    names_instruction_file,
    normalize_for_deny,
)
from stepengine.workspace.atomic import replace_path
from stepengine.workspace.command_guard import CommandGuard
from stepengine.workspace.file_formats import read_regular_file
from stepengine.workspace.guard import CallGuard, FileGuard

Mode: TypeAlias = Literal["default", "plan", "accept_edits", "dont_ask", "bypass"]
"""What holds where no rule of a ``Policy`` matches; the policy says what each means."""

Hook: TypeAlias = Callable[[HookContext, ToolCallPart], Decision]

MODES: tuple[Mode, ...] = get_args(Mode)
FORMAT_VERSION = 1
"""Rules of another version could be misread as permissions, so they are refused."""
KEPT_DECISIONS = 256
"""A run asks the same few questions again and again; the table takes some kilobytes."""
MAX_FILE_BYTES = 1024 * 1024
"""Ten thousand rules have less; the file is read at each start, and may belong to a project that is not trusted."""
PLAN = "Denied: in plan mode only tools that change nothing may be used; describe what you would do instead."
DOUBT = "May it run? The rule {!r} may mean it: {}."
ASKED = "Denied: this needs a person's approval, and the mode is not to ask."
UNTRUSTED = "Denied: an argument of this call is not from the user."
POSSIBLE_PATH = "a text of the call may name {!r}, which the rule {!r} denies"
MAX_SHOWN_CHARS = 200
"""Of a path in a question; a person reads no longer one."""
UNASKED = "leads to a file about which a person has to be asked first; name the file itself"
CALL_KEYS = ("is", "input", "agent", "paths", "hosts", "prefix", "origins", "any_input")
RULE_KEYS = ("id", "decision", "match", "scope", "priority", "message", "description", "source")


NO_ARGUMENT = freeze_object({"parameter": "", "value": None, "trusted": False, "sources": []})
"""The origin that is shown where a call has no argument to show."""


def read_only_commands() -> tuple[Rule, ...]:
    """
    Return allow rules for commands that only look, such as ``ls``, ``rg`` and ``git log``.

    Each lets a closed list of options through and, where it takes files, only paths below the working folder that name no
    secret file.
    """
    return tuple([Rule("allow", Command(form)) for form in READ_ONLY])


def injection_rules() -> tuple[Rule, ...]:
    """
    Return the rules against prompt injection: a person is asked where an effect would reach what the user has not named.

    That are destinations of tools (recipients, addresses to fetch, ids to delete); once something untrusted was received also commands
    that do more than look, files that instruct later runs, and calls of tools that do not say their destinations.
    """
    return (Rule.ask_untrusted("*", id="untrusted destinations"),)


@frozen
class PolicyDecision:
    """
    The decision of a policy about a call.

    Attributes:
        decision: ``"allow"``, ``"deny"`` or ``"ask"``.
        rule: The rule that decided; ``None`` when the mode did.
        why: One sentence for people.
        message: For a deny, what the model is told; for an ask, the question when the rule has one.
        origins: For a rule that follows data, where each argument comes from that it judges; see ``Question.provenance``.
        is_only_reason: Whether the call would be allowed without that rule.
    """

    decision: Effect
    rule: Rule | None
    why: str
    message: str = ""
    origins: tuple[JsonDict, ...] = attrs.field(default=(), kw_only=True)
    is_only_reason: bool = attrs.field(default=False, kw_only=True)


def _convert_rules(value: Iterable[Rule]) -> tuple[Rule, ...]:
    rules = tuple(value)
    for rule in rules:
        if not isinstance(rule, Rule):
            msg = f'a policy takes rules, such as Rule.allow_tool("read_files"), not {rule!r}'
            raise DefinitionError(msg)
    seen: set[str] = set()
    for rule in rules:
        if rule.id in seen:
            msg = f"two rules of one policy have the id {rule.id!r}; pass one of them another id="
            raise DefinitionError(msg)
        seen.add(rule.id)
    return rules


@frozen
class Policy:
    """
    Which tool calls may run, which need a person, and which never do. Frozen: adding a rule gives a new policy.

    Rules bind tool calls: one that denies a file does not keep an allowed program from reading it, and one that denies a
    program does not keep another from doing the same.

    Attributes:
        rules: In order of addition.
        mode: What holds where no rule matches. ``default`` asks. ``plan`` allows what changes nothing and denies the rest.
            ``accept_edits`` allows tools of the category ``write`` and asks for the rest, and for files that instruct later
            runs, such as ``AGENTS.md`` and ``.agents/``. ``dont_ask`` denies wherever it
            would have to be asked, ``bypass`` allows there. Denying and allowing rules hold in every mode.
        remembered: What people allowed for good. These decide nothing: they answer the questions that the policy asks, so
            that a run that waits is judged as it was when it began. See ``PolicyFile``.

    Raises:
        DefinitionError: for an unknown mode, and for two rules with one id.
    """

    rules: tuple[Rule, ...] = attrs.field(default=(), converter=_convert_rules)
    mode: Mode = "default"
    remembered: tuple[Rule, ...] = attrs.field(default=(), converter=_convert_rules, kw_only=True)
    _ordered: tuple[Rule, ...] = attrs.field(init=False, eq=False, repr=False)
    _following: tuple[Rule, ...] = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if self.mode not in MODES:
            msg = f"{self.mode!r} is not a mode of a policy{_format_suggestion(str(self.mode), MODES)}; {', '.join(MODES)} are"
            raise DefinitionError(msg)
        # Sorted once, since every call of every run goes through all of them. `sorted` is stable: rules of one scope
        # and priority keep the order in which they were added.
        ordered = sorted(self.rules, key=lambda rule: (ORDER[rule.scope.kind], -rule.priority))
        # Apart from the others: they are asked last and win (provenance:PV7).
        following = [rule for rule in ordered if isinstance(rule.matcher, FOLLOWING)]
        object.__setattr__(self, "_ordered", tuple([rule for rule in ordered if rule not in following]))
        object.__setattr__(self, "_following", tuple(sorted(following, key=lambda rule: rule.decision != "deny")))

    @classmethod
    def against_injection(cls, *rules: Rule) -> Policy:
        """
        Return a policy that asks only where an effect would reach what the user has not named; see ``injection_rules``.

        Everything else is allowed, but for what *rules* say. Add the same rules to a policy of your own with
        ``policy.with_rules(*injection_rules())``.
        """
        return cls((*rules, *injection_rules()), "bypass")

    # --- deciding -----------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> PolicyDecision:
        """Return what the policy says about a call. Deny is absolute; a predicate that fails denies."""
        verdict = self._check_call(request)
        if verdict.decision == "deny" or not self._following or self._allows_values(request):
            return verdict
        for rule in self._following:
            if rule.holds(request) and rule.matcher.matches(request, rule.decision):
                return self._decide_by_origin(rule, request, is_only_reason=verdict.decision == "allow")
        return verdict

    def _allows_values(self, request: Request) -> bool:
        """Return whether a person allowed exactly these arguments for good."""
        rules = [rule for rule in self.rules if isinstance(rule.matcher, Values) and rule.decision == "allow"]
        return any(rule.holds(request) and rule.matcher.matches(request, "allow") for rule in rules)

    def _decide_by_origin(self, rule: Rule, request: Request, *, is_only_reason: bool) -> PolicyDecision:
        """Return the verdict of a rule that follows data, which holds in every mode."""
        assert isinstance(rule.matcher, FOLLOWING)  # noqa: S101
        known = request.provenance
        values = rule.matcher.judged_values(request)
        is_id = isinstance(rule.matcher, Untrusted) and rule.matcher.judges_ids(request)
        origins = (() if known is None else find_origins(known, values, is_id=is_id)) or (NO_ARGUMENT,)
        why = f"the rule {rule.id!r} {'denies it' if rule.decision == 'deny' else 'asks'}"
        if rule.decision == "ask" and self.mode != "dont_ask":
            return PolicyDecision("ask", rule, why, rule.message, origins=origins, is_only_reason=is_only_reason)
        told = untrusted_reasons(origins)
        return PolicyDecision(
            "deny", rule, why, rule.message or f"{ASKED if rule.decision == 'ask' else UNTRUSTED} {told}".rstrip()
        )

    def _check_call(self, request: Request) -> PolicyDecision:
        """Return what the rules and the mode say about a call, wherever its arguments come from."""
        first: Rule | None = None
        possible: tuple[Rule, str] | None = None
        for rule in self._ordered:
            # As ``rule.holds``, without a call more for each rule of each call.
            if (
                rule.source is not None
                and request.source != rule.source
                and (request.source or rule.decision == "allow")
            ):
                continue
            # Once something has allowed or asked, only a deny can still change the verdict, and that from anywhere in
            # the list: a deny wins whatever its scope and priority (reliability:R7).
            if not rule.scope.holds(request) or (first is not None and rule.decision != "deny"):
                continue
            try:
                matches = rule.matcher.matches(request, rule.decision)
            # A predicate that cannot be asked might have denied. Whatever its rule would have decided, the call is
            # denied (reliability:PM33).
            except Exception as error:  # noqa: BLE001  (a predicate is the author's code, and this fails closed)
                why = f"the rule {rule.id!r} could not be asked: {type(error).__name__}: {error}"
                return PolicyDecision("deny", rule, why, f"Denied: {why}")
            if matches and rule.decision == "deny":
                message = rule.message or f"Denied by the rule {rule.id!r}."
                return PolicyDecision(
                    "deny", rule, f"the rule {rule.id!r} denies it, and a deny wins over everything", message
                )
            if matches:
                first = rule
            elif possible is None and rule.decision == "deny" and isinstance(rule.matcher, Path):
                path = rule.matcher.find_possible_path(request)
                possible = None if path is None else (rule, path)
        verdict = self._decide_by_mode(request) if first is None else self._decide_by_rule(first, request)
        return self._decide_doubt(request, first, possible, verdict)

    def _decide_doubt(
        self, request: Request, first: Rule | None, possible: tuple[Rule, str] | None, verdict: PolicyDecision
    ) -> PolicyDecision:
        """
        Return a question about an allowed call that may name a denied path or run a denied command, else *verdict*.

        Args:
            request: The call.
            first: The rule that decides; ``None`` if the mode does.
            possible: The rule that denies a path which the call may name, and that path.
            verdict: What the rules and the mode say about what the call names plainly.
        """
        if verdict.decision != "allow":
            return verdict
        if possible is not None:
            return _ask_about_path(*possible, self.mode)
        doubt = _find_doubt(self._ordered, request, first)
        if doubt is None:
            return verdict
        rule, reason = doubt
        return self._decide_question(
            request, rule, f"the rule {rule.id!r} may mean it: {reason}", DOUBT.format(rule.id, reason)
        )

    def _decide_by_rule(self, rule: Rule, request: Request) -> PolicyDecision:
        why = f"the rule {rule.id!r} {'allows it' if rule.decision == 'allow' else 'asks'}"
        if rule.decision == "allow":
            return PolicyDecision("allow", rule, why)
        return self._decide_question(request, rule, why, rule.message)

    def _decide_question(self, request: Request, rule: Rule | None, why: str, message: str = "") -> PolicyDecision:
        """Return the verdict where a person would be asked."""
        if not request.tool.requires_permission:
            return PolicyDecision("allow", rule, f"{why}, but {request.tool.name} needs no permission")
        if self.mode == "bypass":
            return PolicyDecision("allow", rule, f"{why}, and the mode 'bypass' allows where it would have to ask")
        if self.mode == "dont_ask":
            return PolicyDecision(
                "deny", rule, f"{why}, and the mode 'dont_ask' denies where it would have to ask", ASKED
            )
        return PolicyDecision("ask", rule, why, message)

    def _decide_by_mode(self, request: Request) -> PolicyDecision:
        tool = request.tool
        # A tool that says nothing about itself may change something: only what says that it changes nothing is let
        # through (reliability:PM35).
        if self.mode == "plan":
            if tool.annotations.read_only or not tool.requires_permission:
                return PolicyDecision(
                    "allow", None, f"no rule matches; the mode 'plan' allows {tool.name}, which changes nothing"
                )
            return PolicyDecision(
                "deny", None, f"no rule matches; the mode 'plan' denies {tool.name}, which may change something", PLAN
            )
        if self.mode == "accept_edits" and tool.category == "write" and not names_instruction_file(request):
            return PolicyDecision(
                "allow", None, "no rule matches; the mode 'accept_edits' allows tools of the category 'write'"
            )
        return self._decide_question(
            request, None, f"no rule matches, so the mode {self.mode!r} decides, which is to ask"
        )

    def explain(self, request: Request) -> str:
        """Return which rule decided about a call, why, and what every other rule that holds there said."""
        verdict = self.check(request)
        others = [
            rule for rule in (*self._ordered, *self._following) if rule is not verdict.rule and rule.holds(request)
        ]
        return "\n".join(
            [f"{verdict.decision}: {verdict.why}", *[f"  {r.id}: {_describe_match(r, request)}" for r in others]]
        )

    def hook(self, spec_of: Callable[[HookContext, str], ToolSpec | None] | None = None) -> Hook:
        """
        Return the ``pre_tool`` hook that applies the policy: ``Hooks(pre_tool=policy.hook())``.

        ``Engine(permissions=policy)`` installs it for all agents, behind every other hook, so that it judges the final input.

        Args:
            spec_of: Returns what is known of a tool, by the context of the hook and the tool's name; an unknown tool is asked about
                like one that does anything. By default that is what the agent's own ``Tool`` objects and the tool definitions of its
                state say.
        """
        said = lru_cache(KEPT_DECISIONS)(Decision)  # nearly every call of a run is told the same

        def permission(ctx: HookContext, call: ToolCallPart) -> Decision:
            spec = (spec_of or _find_own_spec)(ctx, call.tool_name)
            request = Request(
                tool=spec or ToolSpec(call.tool_name),
                input=call.input,
                agent_id=ctx.agent.id,
                session_id=ctx.session_id,
                user_id=ctx.user_id,
                context=ctx,
                source=ctx.source,
            )
            verdict = self.check(request)
            rule_id = verdict.rule.id if verdict.rule else None
            if verdict.decision != "ask":
                return said(verdict.decision, verdict.message, rule_id)
            if verdict.origins:
                if not verdict.is_only_reason:
                    return Decision("ask", verdict.message, rule_id, provenance=verdict.origins)
                text, kept = ASKED_ABOUT_DATA.format(call.tool_name), _make_values_rule(verdict, request)
                return Decision("ask", verdict.message or text, rule_id, remember=kept, provenance=verdict.origins)
            offered = self._rules_to_offer(request)
            remember = offered[0] if offered else None
            return Decision("ask", verdict.message, rule_id, remember=remember, wider=offered[1:])

        if self._following:
            permission.__qualname__ = permission.__name__ = ORIGIN_HOOK
            permission.keeps_provenance = True  # type: ignore[attr-defined]
        return permission

    def _rules_to_offer(self, request: Request) -> list[JsonDict]:
        """
        Return the rules that "always allow this" may add, as policy files have them, the narrowest first.

        One of them is for all edits, where the mode ``accept_edits`` would allow the call. It answers no question about any
        other call, since no other question offers it. None are offered when another rule would still ask.
        """
        scope = Scope("user", request.user_id)
        rules = [Rule("allow", call, scope=scope) for call in (Call.from_request(request), *Call.wider_than(request))]
        if _find_doubt(self._ordered, request, None) is not None:
            rules = rules[:1]  # what may be a denied command is allowed as it was seen
        # An "always" that does not help, because another rule asks all the same, would teach people that it means
        # nothing.
        is_enough = self.with_rules(rules[0]).check(request).decision == "allow"
        if attrs.evolve(self, mode="accept_edits").check(request).decision == "allow":
            rules.insert(-1, Rule("allow", Category("write"), scope=scope, id=f"allow all edits of files in {scope}"))
        return [freeze_object(_rule_to_json(rule)) for rule in rules] if is_enough else []

    # --- files --------------------------------------------------------------------------------------------------------

    @property
    def binds_files(self) -> bool:
        """Whether any call has a ``guard``."""
        return any(isinstance(rule.matcher, Path) or _is_read_only_rule(rule) for rule in self.rules)

    def guard(self, request: Request) -> CallGuard | None:
        """
        Return what the rules say about each file that an allowed call leads to; ``None`` where they say nothing.

        A file that a rule denies is withheld. So is one about which a person would have to be asked, had the call named it,
        where nobody was asked about the call. A command that a rule allows because it only looks is confined to what that
        rule means. ``When`` is not asked again: it may look at a context that is gone.
        """
        # Rules about files judge a call by the paths that it names; what it leads to (a link, a folder that is
        # searched) is known only when it is opened. So the same rules are asked there again, by this (reliability:FP4).
        rules = [rule for rule in self._ordered if rule.holds(request)]
        first = self._first_matching_rule(rules, request)
        looks = first is not None and _is_read_only_rule(first) and isinstance(first.matcher, Command)
        about_files = [rule.matcher for rule in rules if rule.decision == "deny" and isinstance(rule.matcher, Path)]
        denied = [glob for path in about_files for glob in path.denied]
        file = self._make_file_guard(rules, request)
        named = () if request.tool.confined else tuple(request.paths)
        if looks:
            return CommandGuard(file=file, named=named, confine=partial(confine_command, first.matcher.form, denied))  # type: ignore[union-attr]
        if file is None:
            return None
        was_asked = not _has_predicates(rules) and self._check_call(request).decision != "allow"
        return CallGuard(file=file, named=named, others=tuple(request.other_texts), was_asked=was_asked)

    def _first_matching_rule(self, rules: Iterable[Rule], request: Request) -> Rule | None:
        """Return the first rule that allows a call or asks about it, predicates aside."""
        found = (rule for rule in rules if rule.decision != "deny" and not isinstance(rule.matcher, When))
        return next((rule for rule in found if rule.matcher.matches(request, rule.decision)), None)

    def _make_file_guard(self, rules: list[Rule], request: Request) -> FileGuard | None:
        about_files = {rule.id: rule.matcher for rule in rules if isinstance(rule.matcher, Path)}
        if not any(path.covers_tool(request) for path in about_files.values()):
            return None
        others = [rule for rule in rules if rule.decision != "deny" and not isinstance(rule.matcher, Path | When)]
        holding = {rule.id for rule in others if rule.matcher.matches(request, rule.decision)}
        # A person who was asked about the call has seen what it names; a file that it merely leads to is then covered
        # by that yes.
        nobody_asked = not request.is_call or (
            not _has_predicates(rules) and self._check_call(request).decision == "allow"
        )
        # A search asks about every file that it meets: what is the same for all of them is found out before.
        fitting = [(rule, path) for rule in rules if (path := about_files.get(rule.id)) and path.covers_tool(request)]
        always = next((at for at, rule in enumerate(rules) if rule.id in holding), len(rules))
        order = {rule.id: at for at, rule in enumerate(rules)}

        @cache
        def explain_refusal(first: int) -> str:
            verdict = (
                self._decide_by_rule(rules[first], request) if first < len(rules) else self._decide_by_mode(request)
            )
            return "" if verdict.decision == "allow" or not nobody_asked else UNASKED

        def judge(_root: Sequence[str], parts: Sequence[str]) -> str:
            first, low = always, normalize_for_deny(parts)
            for rule, path in fitting:
                if not path.fits(parts, low, rule.decision):
                    continue
                if rule.decision == "deny":
                    return rule.message or f"is kept from tools by the rule {rule.id!r}"
                first = min(first, order[rule.id])
            # Other rules and the mode decide about calls. Whoever reads files for a prompt makes none.
            is_about_files = first < len(rules) and rules[first].id in about_files
            return explain_refusal(first) if request.is_call or is_about_files else ""

        return judge

    # --- other policies -----------------------------------------------------------------------------------------------

    def with_rules(self, *rules: Rule) -> Policy:
        """Return the policy with *rules* added; one of the same id is replaced in its place."""
        new = {rule.id: rule for rule in rules}
        kept = [new.pop(rule.id, rule) for rule in self.rules]
        return attrs.evolve(self, rules=(*kept, *new.values()))

    def without_rules(self, *ids: str) -> Policy:
        """
        Return the policy without the rules of these ids.

        Raises:
            DefinitionError: for an id that no rule has.
        """
        known = {rule.id for rule in self.rules}
        for identity in ids:
            if identity not in known:
                msg = f"the policy has no rule {identity!r}{_format_suggestion(identity, known)}; it has {list_names(sorted(known), identity)}"
                raise DefinitionError(msg)
        return attrs.evolve(self, rules=[rule for rule in self.rules if rule.id not in ids])

    def with_session_rule(self, session_id: str, rule: Rule) -> Policy:
        """Return the policy with a rule that holds in one conversation."""
        made = attrs.evolve(rule, scope=Scope("session", session_id), id=f"{rule.id} in session:{session_id}")
        return self.with_rules(made)

    def without_session_rules(self, session_id: str) -> Policy:
        """Return the policy without the rules of one conversation."""
        scope = Scope("session", session_id)
        return attrs.evolve(self, rules=[rule for rule in self.rules if rule.scope != scope])

    # --- as a file ----------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """
        Return the policy as JSON.

        Raises:
            DefinitionError: for a rule with a function.
        """
        stored = {"version": FORMAT_VERSION, "mode": self.mode, "rules": [_rule_to_json(rule) for rule in self.rules]}
        return stored | ({"remembered": [_rule_to_json(rule) for rule in self.remembered]} if self.remembered else {})

    @classmethod
    def from_json(cls, data: object, *, where: str = "the policy") -> Policy:
        """
        Return the policy that JSON describes.

        Raises:
            DefinitionError: naming *where*, the rule and the member that cannot be used; also for the mode ``bypass``, which
                only code may set.
        """
        found = _check_members(data, ("version", "mode", "rules", "remembered"), where)
        if found.get("version", FORMAT_VERSION) != FORMAT_VERSION:
            msg = f"{where} has the version {found['version']!r}; this stepengine reads version {FORMAT_VERSION}"
            raise DefinitionError(msg)
        # A file may come with a repository; it must not be able to switch questions off (reliability:PM27).
        if found.get("mode") == "bypass":
            msg = f"{where} asks for the mode 'bypass', which only code may set: Policy(rules, mode='bypass')"
            raise DefinitionError(msg)
        for name in ("rules", "remembered"):
            if not isinstance(found.get(name, []), list):
                msg = f"{where} has {name} that are no list"
                raise DefinitionError(msg)
        try:
            rules = [
                _rule_from_json(rule, f"rule {number}") for number, rule in enumerate(found.get("rules", []), start=1)
            ]
            kept = [
                _rule_from_json(rule, f"remembered {n}") for n, rule in enumerate(found.get("remembered", []), start=1)
            ]
            return cls(rules, found.get("mode", "default"), remembered=kept)
        except DefinitionError as error:
            msg = f"{where}: {error.message}"
            raise DefinitionError(msg) from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """
        Read a policy from a file that ``save`` wrote, or a person.

        Raises:
            DefinitionError: for a file that is missing, larger than 1 MiB, or no policy; see ``from_json``.
        """
        where = f"the policy file {os.fspath(path)!r}"
        try:
            text = read_regular_file(path, MAX_FILE_BYTES)
            if len(text) > MAX_FILE_BYTES:
                msg = f"{where} has more than {MAX_FILE_BYTES:,} bytes"
                raise DefinitionError(msg)
            data = json.loads(text)
        except OSError as error:
            msg = f"{where} cannot be read: {error.strerror}"
            raise DefinitionError(msg) from None
        except (ValueError, RecursionError) as error:
            msg = f"{where} is not JSON: {error}"
            raise DefinitionError(msg) from None
        return cls.from_json(data, where=where)

    def save(self, path: str | os.PathLike[str]) -> None:
        """
        Write the policy to a file, all of it or nothing, and durably.

        Raises:
            DefinitionError: for a rule with a function; for the mode ``bypass``, which no file may set; when the file exists
                and is not a policy, and is left unchanged.
            OSError: when the file cannot be written.
        """
        if self.mode == "bypass":
            msg = "a policy in the mode 'bypass' is not saved, because no file may set that mode; save one in another mode"
            raise DefinitionError(msg)
        text = json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n"
        if FilePath(path).exists() and FilePath(path).stat().st_size:
            _check_is_policy(path)
        with _lock_file(path):
            replace_path(FilePath(path), text.encode())


class PolicyFile:
    """
    A policy in a file, which also keeps what people allow for good: ``Engine(permissions=PolicyFile("policy.json"))``.

    ``Answer(remember="always")`` adds to it, and every process that uses the file knows it from its next question on. No
    answer is lost when several add at once, or when one is killed: the file is replaced as a whole, under the lock of
    ``policy.json.lock`` beside it. The policy itself is the one that the file held when this was made.

    An engine refuses tools that write or run programs in a folder that the file is in: a model could allow itself
    everything. With *below_root* it takes them. File tools are kept from the file and its lock all the same; a program that
    a model may run is not.

    Args:
        path: The file, which ``Policy.save`` wrote, or a person.
        below_root: Whether it may be in a folder that tools write to.

    Attributes:
        path: The file.
        policy: What it said when it was read.

    Raises:
        DefinitionError: as ``Policy.load``.
    """

    def __init__(self, path: str | os.PathLike[str], *, below_root: bool = False) -> None:
        self.path = FilePath(path)
        self.policy = Policy.load(path)
        self.below_root = below_root
        place = os.path.realpath(self.path).split("/")[1:]
        self._places = (tuple(place), (*place[:-1], f"{place[-1]}.lock"))
        self._known: tuple[Any, frozenset[str]] = (None, frozenset())

    def is_below(self, folder: Sequence[str]) -> bool:
        """Return whether the file is in a folder, or deeper; *folder* holds the components of its real path."""
        return self._places[0][: len(folder)] == tuple(folder)

    @property
    def binds_files(self) -> bool:
        """Whether any call has a ``guard``."""
        return self.below_root or self.policy.binds_files

    def guard(self, request: Request) -> CallGuard | None:
        """Return what binds a call: the rules, as ``Policy.guard``, and that no file tool touches this file."""
        ruled = self.policy.guard(request)
        if not self.below_root:
            return ruled
        judged = None if ruled is None else ruled.file

        def judge(root: Sequence[str], parts: Sequence[str]) -> str:
            if (*root, *parts) in self._places:
                return "holds what people have allowed, and is kept from tools"
            return "" if judged is None else judged(root, parts)

        named = () if request.tool.confined else tuple(request.paths)
        return attrs.evolve(ruled or CallGuard(), file=judge, named=named)

    @property
    def remembered(self) -> tuple[Rule, ...]:
        """What people allowed for good, in the order in which they did; read from the file."""
        return Policy.load(self.path).remembered

    def knows(self, rule: JsonDict) -> bool:
        """
        Return whether exactly this rule, in its stored form, is kept; the file is read when it has changed.

        Raises:
            DefinitionError: when the file is not a policy any more.
        """
        status = self.path.stat() if self.path.exists() else None
        # Read again only when the file has changed: every question of every run asks.
        state = status and (status.st_ino, status.st_size, status.st_mtime_ns)
        if state is None or state != self._known[0]:
            self._known = (state, frozenset([canonical(_rule_to_json(kept)) for kept in self.remembered]))
        return canonical(rule) in self._known[1]

    def remember(self, rule: JsonDict) -> None:
        """
        Keep a rule, in its stored form; it is durable when this returns.

        Raises:
            DefinitionError: when it is no rule, or the file is not a policy any more.
            OSError: when the file cannot be written.
        """
        made = _rule_from_json(thaw(rule), "the rule")
        self._update_remembered(lambda kept: {**kept, made.id: made})

    def forget(self, *ids: str) -> None:
        """
        Drop what people allowed for good: the rules of these ids, all without one.

        Raises:
            DefinitionError: when the file is not a policy any more.
            OSError: when the file cannot be written.
        """
        self._update_remembered(lambda kept: {i: rule for i, rule in kept.items() if ids and i not in ids})

    def _update_remembered(self, change: Callable[[dict[str, Rule]], dict[str, Rule]]) -> None:
        Policy.load(self.path)  # before the lock: a file that is no policy gets no file next to it
        with _lock_file(self.path):
            policy = Policy.load(self.path)
            kept = {rule.id: rule for rule in policy.remembered}
            changed = attrs.evolve(policy, remembered=change(kept).values())
            if changed != policy:
                replace_path(self.path, (json.dumps(changed.to_json(), indent=2, ensure_ascii=False) + "\n").encode())


def _make_values_rule(verdict: PolicyDecision, request: Request) -> JsonDict:
    """Return the rule that allows the judged arguments of a call, as policy files have it: the values, and never the tool."""
    matcher, tool = None if verdict.rule is None else verdict.rule.matcher, request.tool
    paths: Sequence[str] = ()
    # A file that instructs later runs is allowed with what is written into it.
    if isinstance(matcher, Untrusted):
        paths = matcher.parameters or (() if names_instruction_file(request) else tool.destinations or ())
    # The whole input where all of it is judged: a name of a member may itself have a dot.
    names = (*paths, *tool.texts) if paths else ("",)
    values = {path: [value for _, value in find_values(request.input, path)] for path in names}
    rule = Rule("allow", Values(tool.name, values), scope=Scope("user", request.user_id))
    return freeze_object(_rule_to_json(rule))


def _find_doubt(ordered: Sequence[Rule], request: Request, first: Rule | None) -> tuple[Rule, str] | None:
    """
    Return the rule against commands that a call may break although its words do not say so, and why; ``None`` without one.

    There is none where *first*, the rule that decides, allows commands of that program.
    """
    commands = request.commands
    if not commands or (first is not None and _allows_program(first)):
        return None
    # A question behind the rule that decides would not be asked; a deny holds wherever it is.
    end = len(ordered) if first is None else ordered.index(first)
    for at, rule in enumerate(ordered):
        counts = rule.decision == "deny" or (rule.decision == "ask" and at < end)
        if counts and isinstance(rule.matcher, Command) and rule.holds(request):
            reasons = [reason for one in commands if (reason := find_doubt(rule.matcher.form, one))]
            if reasons:
                return rule, reasons[0]
    return None


def _ask_about_path(rule: Rule, path: str, mode: str) -> PolicyDecision:
    """Return the verdict about a call that may name a path which *rule* denies: a question in every mode but ``dont_ask``."""
    why = POSSIBLE_PATH.format(path[:MAX_SHOWN_CHARS], rule.id)
    said = f"{why[0].upper()}{why[1:]}."
    if mode == "dont_ask":
        reason = f"{why}, and the mode 'dont_ask' denies where it would have to ask"
        return PolicyDecision("deny", rule, reason, f"{ASKED} {said}")
    return PolicyDecision("ask", rule, why, f"{said} Allow the call?")


def _allows_program(rule: Rule) -> bool:
    """Return whether a rule allows commands of one program, or one call."""
    matcher = rule.matcher
    is_call = isinstance(matcher, Call) and (matcher.input is not None or matcher.prefix is not None)
    return rule.decision == "allow" and (is_call or isinstance(matcher, Command))


def _has_predicates(rules: Iterable[Rule]) -> bool:
    return any(isinstance(rule.matcher, When) for rule in rules)


def _is_read_only_rule(rule: Rule) -> bool:
    """Return whether a rule allows read-only commands, judged by the files that their operands name."""
    return rule.decision == "allow" and isinstance(rule.matcher, Command) and rule.matcher.form.operands in CONFINED


def _check_is_policy(path: str | os.PathLike[str]) -> None:
    """Raise unless a policy can be read from an existing file: no other file is written over."""
    try:
        Policy.load(path)
    except DefinitionError as error:
        msg = f"{error.message}. It was left unchanged. Give another path"
        raise DefinitionError(msg) from None


@contextmanager
def _lock_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the lock of a policy file, ``policy.json.lock`` beside it, against other processes and threads."""
    import fcntl

    descriptor = os.open(f"{os.fspath(path)}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        # Said, and not left to closing: a process that was forked meanwhile has the open file, too.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _find_own_spec(ctx: HookContext, name: str) -> ToolSpec | None:
    """Return the spec of a tool by the run's agent, else by its state; ``None`` if neither has it."""
    own = [tool.spec for tool in ctx.agent.tools if isinstance(tool, ToolLike) and tool.spec.name == name]
    return own[0] if own else ctx.state.tool_definitions.get(name)


def _describe_match(rule: Rule, request: Request) -> str:
    try:
        if rule.matcher.matches(request, rule.decision):
            return f"matches, {rule.decision}"
        is_possible = rule.decision == "deny" and isinstance(rule.matcher, Path)
        path = rule.matcher.find_possible_path(request) if is_possible else None  # type: ignore[union-attr]
        return "does not match" if path is None else f"may match by {path[:MAX_SHOWN_CHARS]!r}, ask"
    except Exception as error:  # noqa: BLE001  (a predicate is the author's code)
        return f"failed with {type(error).__name__}: {error}"


def _format_suggestion(word: str, known: Iterable[str]) -> str:
    near = find_nearest(word, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _check_members(data: object, known: tuple[str, ...], where: str) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        msg = f"{where} is a {type(data).__name__}, not an object with {list_names(known)}"
        raise DefinitionError(msg)
    for name in data:
        if name not in known:
            msg = f"{where} has the unknown member {name!r}{_format_suggestion(str(name), known)}; known are {list_names(known, name)}"
            raise DefinitionError(msg)
    return data


def _rule_to_json(rule: Rule) -> dict[str, Any]:
    given = {
        "scope": str(rule.scope) if rule.scope.kind != "global" else None,
        "priority": rule.priority or None,
        "message": rule.message or None,
        "description": rule.description or None,
        "source": rule.source,
    }
    match = {rule.matcher.kind: _matcher_to_json(rule)}
    return {
        "id": rule.id,
        "decision": rule.decision,
        "match": match,
        **{k: v for k, v in given.items() if v is not None},
    }


def _matcher_to_json(rule: Rule) -> object:
    match rule.matcher:
        case Every():
            return True
        case Call():
            return _call_to_json(rule.matcher)
        case ToolNamed(name) | Category(name):
            return name
        case Command(form):
            given: dict[str, object] = {
                "exact": form.exact or None,
                "operands": form.operands if form.operands != "any" else None,
            }
            given["flags"] = None if form.flags is None else sorted(form.flags)
            return {"prefix": list(form.prefix), **{k: v for k, v in given.items() if v is not None}}
        case Path(text, tool) | Domain(text, tool) | Regex(text, tool):
            return text if tool is None else {"is": text, "tool": tool}
        case Untrusted() | AfterUntrusted() | Values():
            return _origin_matcher_to_json(rule.matcher)
        case When():
            msg = f"the rule {rule.id!r} cannot be stored: it holds a function; use a matcher that is data, or add it in code"
            raise DefinitionError(msg)


def _origin_matcher_to_json(matcher: Untrusted | AfterUntrusted | Values) -> object:
    match matcher:
        case Untrusted(tool, parameters) if parameters:
            return {"is": tool, "parameters": list(parameters)}
        case Values(tool, values):
            return {"is": tool, "values": thaw(values)}
        case _:
            return matcher.tool


def _call_to_json(call: Call) -> object:
    narrowed = {name: getattr(call, name) for name in CALL_KEYS[1:]}
    given = {
        name: list(v) if isinstance(v, tuple) else v for name, v in narrowed.items() if v is not None and v is not False
    }
    return {"is": call.tool, **given} if given else call.tool


def _rule_from_json(data: Any, where: str) -> Rule:
    found = _check_members(data, RULE_KEYS, where)
    where = f"rule {found['id']!r}" if isinstance(found.get("id"), str) else where
    options: dict[str, Any] = {}
    for name, kind in (
        ("id", str),
        ("scope", str),
        ("priority", int),
        ("message", str),
        ("description", str),
        ("source", str),
    ):
        if name in found:
            options[name] = _check_type(found[name], kind, f"{where}: {name}")
    if found.get("decision") not in get_args(Effect):
        msg = f"{where}: the decision is {found.get('decision')!r}; 'allow', 'deny' and 'ask' are fine"
        raise DefinitionError(msg)
    try:
        return Rule(found["decision"], _matcher_from_json(found.get("match"), where), **options)
    except DefinitionError as error:
        prefix = "" if error.message.startswith(where) else f"{where}: "
        msg = f"{prefix}{error.message}"
        raise DefinitionError(msg) from None


def _check_type(value: object, kind: type, where: str, what: str = "text") -> Any:
    if type(value) is not kind:
        msg = f"{where} is {value!r}, not {'a whole number' if kind is int else what}"
        raise DefinitionError(msg)
    return value


PLAIN: Mapping[str, Callable[[str], Matcher]] = {
    "tool": ToolNamed,
    "category": Category,
    "after_untrusted": AfterUntrusted,
}
NARROWED: Mapping[str, Callable[[str, str | None], Matcher]] = {"path": Path, "domain": Domain, "regex": Regex}
KINDS = ("all", *PLAIN, "call", "command", *NARROWED, "untrusted", "values")


def _matcher_from_json(data: object, where: str) -> Matcher:  # noqa: C901 - one line for each matcher
    found = _check_members(data, KINDS, f"{where}: match")
    if len(found) != 1:
        msg = f"{where}: match has {len(found)} members; exactly one of {list_names(KINDS)} is fine"
        raise DefinitionError(msg)
    ((kind, value),) = found.items()
    what = f"{where}: match.{kind}"
    if kind == "all":
        if value is not True:
            msg = f"{what} is {value!r}; true is fine"
            raise DefinitionError(msg)
        return Every()
    if kind in PLAIN:
        return PLAIN[kind](_check_type(value, str, what))
    if kind == "call":
        return _call_from_json(value, what)
    if kind == "command":
        return Command(_form_from_json(value, what))
    if kind in ("untrusted", "values"):
        return _origin_matcher_from_json(kind, value, what)
    if isinstance(value, str):
        return NARROWED[kind](value, None)
    narrow = _check_members(value, ("is", "tool"), what)
    tool = narrow.get("tool")
    return NARROWED[kind](
        _check_type(narrow.get("is"), str, f"{what}.is"),
        None if tool is None else _check_type(tool, str, f"{what}.tool"),
    )


def _origin_matcher_from_json(kind: str, value: object, where: str) -> Matcher:
    more = "parameters" if kind == "untrusted" else "values"
    found = _check_members({"is": value} if isinstance(value, str) else value, ("is", more), where)
    tool = _check_type(found.get("is"), str, f"{where}.is")
    if kind == "values":
        return Values(tool, _check_type(found.get("values"), dict, f"{where}.values", "an object"))
    return Untrusted(tool, _check_word_list(found.get("parameters", []), f"{where}.parameters", '["to"]'))


def _call_from_json(value: object, where: str) -> Call:
    if isinstance(value, str):
        return Call(value)
    found = _check_members(value, CALL_KEYS, where)
    given: dict[str, Any] = {
        name: _check_type(found[name], kind, f"{where}.{name}", what)
        for name, kind, what in (
            ("input", dict, "an object"),
            ("agent", str, "text"),
            ("any_input", bool, "true or false"),
        )
        if name in found
    }
    given |= {
        name: _check_word_list(found[name], f"{where}.{name}", '["src/app.py"]')
        for name in CALL_KEYS[3:-1]
        if name in found
    }
    return Call(_check_type(found.get("is"), str, f"{where}.is"), **given)


def _check_word_list(value: object, where: str, example: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        msg = f"{where} is {value!r}, not a list of words such as {example}"
        raise DefinitionError(msg)
    return value


def _form_from_json(value: object, where: str) -> CommandForm:
    data: JsonDict = freeze_object(value if isinstance(value, dict) else {"prefix": value})
    found = _check_members(data, ("prefix", "exact", "flags", "operands"), where)
    for name in ("prefix", "flags"):
        _check_word_list(found.get(name, []), f"{where}.{name}", '["git", "status"]')
    operands = found.get("operands", "any")
    if operands not in ("any", "none", "paths", "pattern"):
        msg = f"{where}.operands is {operands!r}; 'any', 'none', 'paths' and 'pattern' are fine"
        raise DefinitionError(msg)
    exact = _check_type(found.get("exact", False), bool, f"{where}.exact")
    return CommandForm(found.get("prefix", []), exact, found.get("flags"), operands)
