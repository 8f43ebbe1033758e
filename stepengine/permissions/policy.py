"""
``Policy``: rules and a mode. It decides about a call, explains the decision, and can be stored in a file.

A matching deny wins, whatever its scope and priority. Otherwise scopes are checked in the order user, session, agent,
global. Within a scope, rules with higher priority are checked first, then in order of addition. The first rule that matches
decides. If no rule matches, the mode decides. Rules about data origins are checked last, and override allows and questions.
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
from stepengine.data.json import JsonDict, canonical, freeze_object, make_object_with_unique_keys, thaw
from stepengine.data.messages import ToolCallPart
from stepengine.data.origins import ASKED as ASKED_ABOUT_DATA
from stepengine.data.origins import ORIGIN_HOOK, describe_untrusted_origins, make_origins
from stepengine.data.questions import Decision
from stepengine.data.tools import ToolLike, ToolSpec, find_values_at_path
from stepengine.errors import DataError, DefinitionError
from stepengine.permissions.commands import CONFINED, READ_ONLY, CommandForm, confine_command, explain_possible_match
from stepengine.permissions.rules import (
    ORDER,
    ORIGIN_MATCHERS,
    AfterUntrusted,
    Call,
    CallsWhere,
    Category,
    Command,
    Domain,
    Effect,
    EveryCall,
    Matcher,
    Path,
    Regex,
    Request,
    Rule,
    Scope,
    ToolNamed,
    Untrusted,
    Values,
    names_instruction_file,
    normalize_path_for_deny,
)
from stepengine.workspace.atomic import replace_path
from stepengine.workspace.command_guard import CommandGuard
from stepengine.workspace.file_formats import read_regular_file
from stepengine.workspace.guard import CallGuard, FileGuard

Mode: TypeAlias = Literal["default", "plan", "accept_edits", "dont_ask", "bypass"]
"""The decision where no rule of a ``Policy`` matches; see ``Policy.mode``."""

Hook: TypeAlias = Callable[[HookContext, ToolCallPart], Decision]

MODES: tuple[Mode, ...] = get_args(Mode)
FORMAT_VERSION = 1
"""Files with another version are rejected, since their rules could be misread as permissions."""
CACHED_DECISIONS = 256
"""A run asks the same few questions repeatedly; the table takes a few kilobytes."""
MAX_FILE_BYTES = 1024 * 1024
"""Enough for ten thousand rules. The file is read at each start, and may belong to a project that is not trusted."""
PLAN = "Denied: in plan mode only tools that change nothing may be used; describe what you would do instead."
DOUBT = "May it run? The rule {!r} may mean it: {}."
ASKED = "Denied: this needs a person's approval, and the mode is not to ask."
UNTRUSTED = "Denied: an argument of this call is not from the user."
POSSIBLE_PATH = "a text of the call may name {!r}, which the rule {!r} denies"
MAX_SHOWN_CHARS = 200
"""The longest path in a question, in characters; a person reads no longer one."""
UNASKED = "needs the approval of a person first; name the file itself in the call"
CALL_KEYS = ("is", "input", "agent", "paths", "hosts", "prefix", "origins", "any_input")
RULE_KEYS = ("id", "decision", "match", "scope", "priority", "message", "description", "source")


NO_ARGUMENT = freeze_object({"parameter": "", "value": None, "trusted": False, "sources": []})
"""The origin to show for a call without arguments."""


def read_only_commands() -> tuple[Rule, ...]:
    """
    Return allow rules for read-only commands, such as ``ls``, ``rg`` and ``git log``.

    Each rule allows a closed list of options. Commands that take files may only name paths below the working folder, and no
    secret files.
    """
    return tuple([Rule("allow", Command(form)) for form in READ_ONLY])


def injection_rules() -> tuple[Rule, ...]:
    """
    Return the rules against prompt injection: they ask a person about destinations that the user has not named.

    Destinations are the recipients, addresses and ids in the arguments of tools. After the run has received untrusted
    data, the rules also ask about three kinds of calls: commands that are not read-only, writes to files that instruct
    later runs, and calls of tools without declared destinations.
    """
    return (Rule.ask_untrusted("*", id="untrusted destinations"),)


@frozen
class PolicyDecision:
    """
    The decision of a policy about a call.

    Attributes:
        decision: ``"allow"``, ``"deny"`` or ``"ask"``.
        rule: The rule that decided; ``None`` if the mode did.
        why: One sentence for people.
        message: For a deny, the text for the model; for an ask, the question if the rule has one.
        origins: For a rule about data origins, the origin of each argument that it checks; see ``Question.provenance``.
        is_only_reason: Whether the call would be allowed without that rule.
    """

    decision: Effect
    rule: Rule | None
    why: str
    message: str = ""
    origins: tuple[JsonDict, ...] = attrs.field(default=(), kw_only=True)
    is_only_reason: bool = attrs.field(default=False, kw_only=True)


def _validate_rules(value: Iterable[Rule]) -> tuple[Rule, ...]:
    """Return the rules as a tuple; raise ``DefinitionError`` for other objects and equal ids."""
    rules = tuple(value)
    for rule in rules:
        if not isinstance(rule, Rule):
            msg = f'a policy accepts only rules, such as Rule.allow_tool("read_files"), not {rule!r}'
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
    The rules that allow tool calls, deny them, or ask a person about them. Immutable: adding a rule returns a new policy.

    Rules bind tool calls only. A rule that denies a file does not prevent an allowed program from reading it. A rule that
    denies a program does not prevent another program from doing the same.

    Attributes:
        rules: In order of addition.
        mode: The decision where no rule matches. ``default`` asks. ``plan`` allows tools that change nothing and denies the
            rest. ``accept_edits`` allows tools of the category ``write``. It asks about all other calls, and about files that
            instruct later runs, such as ``AGENTS.md`` and ``.agents/``. ``dont_ask`` denies instead of asking, and ``bypass``
            allows instead of asking. Deny and allow rules hold in every mode. Even ``bypass`` asks about a text that may name a
            denied path, and where a rule about data origins asks.
        remembered: The rules that people allowed permanently. They answer the questions that the policy asks, and decide
            nothing themselves. So a suspended run gets the decisions of its start. See ``PolicyFile``.

    Raises:
        DefinitionError: for an unknown mode, and for two rules with the same id.
    """

    rules: tuple[Rule, ...] = attrs.field(default=(), converter=_validate_rules)
    mode: Mode = "default"
    remembered: tuple[Rule, ...] = attrs.field(default=(), converter=_validate_rules, kw_only=True)
    _ordered: tuple[Rule, ...] = attrs.field(init=False, eq=False, repr=False)
    _origin_rules: tuple[Rule, ...] = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if self.mode not in MODES:
            msg = f"unknown mode {self.mode!r} of a policy{_format_suggestion(str(self.mode), MODES)}; valid modes: {', '.join(MODES)}"
            raise DefinitionError(msg)
        # Sorted once, since every call of every run checks all of them. `sorted` is stable: rules of the same scope
        # and priority stay in the order of addition.
        ordered = sorted(self.rules, key=lambda rule: (ORDER[rule.scope.kind], -rule.priority))
        # Kept separate: they are checked last and win (provenance:PV7).
        origin_rules = [rule for rule in ordered if isinstance(rule.matcher, ORIGIN_MATCHERS)]
        object.__setattr__(self, "_ordered", tuple([rule for rule in ordered if rule not in origin_rules]))
        object.__setattr__(self, "_origin_rules", tuple(sorted(origin_rules, key=lambda rule: rule.decision != "deny")))

    @classmethod
    def guard_injection(cls, *rules: Rule) -> Policy:
        """
        Return a policy that asks only about destinations not named by the user; see ``injection_rules``.

        Everything else is allowed, except where *rules* decide otherwise. To add the same rules to your own policy, use
        ``policy.with_rules(*injection_rules())``.
        """
        return cls((*rules, *injection_rules()), "bypass")

    # --- deciding -----------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> PolicyDecision:
        """Return the decision about a call. A deny always wins, and a predicate that fails denies."""
        verdict = self._decide_without_origin_rules(request)
        if verdict.decision == "deny":
            return verdict
        for rule in self._find_matching_origin_rules(request):
            if rule.decision == "deny" or not _has_approved_values(self.rules, rule, request):
                return self._decide_by_data_origin(rule, request, is_only_reason=verdict.decision == "allow")
        return verdict

    def _find_matching_origin_rules(self, request: Request) -> Iterator[Rule]:
        """Yield the rules about data origins that match a call; those that deny come first."""
        for rule in self._origin_rules:
            if rule.covers_scope_and_source(request) and rule.matcher.matches(request, rule.decision):
                yield rule

    def _decide_by_data_origin(self, rule: Rule, request: Request, *, is_only_reason: bool) -> PolicyDecision:
        """Return the decision of a matching rule about data origins; the mode ``dont_ask`` turns an ask into a deny."""
        assert isinstance(rule.matcher, ORIGIN_MATCHERS)  # noqa: S101
        known = request.provenance
        values = rule.matcher.list_checked_arguments(request)
        is_id = isinstance(rule.matcher, Untrusted) and rule.matcher.treats_numbers_as_ids(request)
        origins = (() if known is None else make_origins(known, values, is_id=is_id)) or (NO_ARGUMENT,)
        why = f"the rule {rule.id!r} {'denies it' if rule.decision == 'deny' else 'asks'}"
        if rule.decision == "ask" and self.mode != "dont_ask":
            return PolicyDecision("ask", rule, why, rule.message, origins=origins, is_only_reason=is_only_reason)
        told = describe_untrusted_origins(origins)
        return PolicyDecision(
            "deny", rule, why, rule.message or f"{ASKED if rule.decision == 'ask' else UNTRUSTED} {told}".rstrip()
        )

    def _decide_without_origin_rules(self, request: Request) -> PolicyDecision:
        """Return the decision of the rules and the mode, without the rules about data origins."""
        first: Rule | None = None
        possible: tuple[Rule, str] | None = None
        for rule in self._ordered:
            # The same as ``rule.covers_scope_and_source``, inlined because every call checks every rule.
            if (
                rule.source is not None
                and request.source != rule.source
                and (request.source or rule.decision == "allow")
            ):
                continue
            # After a rule has allowed or asked, only a deny can change the verdict. It may be anywhere in the list: a deny
            # wins whatever its scope and priority (reliability:R7).
            if not rule.scope.applies_to(request) or (first is not None and rule.decision != "deny"):
                continue
            try:
                matches = rule.matcher.matches(request, rule.decision)
            # A predicate that fails might have denied. So the call is denied, whatever its rule would have decided
            # (reliability:PM30).
            except Exception as error:  # noqa: BLE001  (a predicate is the author's code; a failure denies)
                why = f"the rule {rule.id!r} failed: {type(error).__name__}: {error}"
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
        return self._decide_about_possible_denial(request, first, possible, verdict)

    def _decide_about_possible_denial(
        self, request: Request, first: Rule | None, possible: tuple[Rule, str] | None, verdict: PolicyDecision
    ) -> PolicyDecision:
        """
        Return an ask or deny if *verdict* allows a call that may name a denied path or run a denied command; else *verdict*.

        For a possible path, the decision is to ask in every mode except ``dont_ask``. For a command, ``bypass`` allows the call.

        Args:
            request: The call.
            first: The rule that decides; ``None`` if the mode does.
            possible: The rule that denies a path, with the path that the call may name; ``None`` if there is none.
            verdict: The decision of the rules and the mode.
        """
        if verdict.decision != "allow":
            return verdict
        if possible is not None:
            return _decide_about_possible_path(*possible, self.mode)
        doubt = _find_rule_about_unnamed_command(self._ordered, request, first)
        if doubt is None:
            return verdict
        rule, reason = doubt
        return self._decide_to_ask_unless_mode_differs(
            request, rule, f"the rule {rule.id!r} may mean it: {reason}", DOUBT.format(rule.id, reason)
        )

    def _decide_by_rule(self, rule: Rule, request: Request) -> PolicyDecision:
        """Return the decision of a matching rule that allows or asks; the mode may change an ask."""
        why = f"the rule {rule.id!r} {'allows it' if rule.decision == 'allow' else 'asks'}"
        if rule.decision == "allow":
            return PolicyDecision("allow", rule, why)
        return self._decide_to_ask_unless_mode_differs(request, rule, why, rule.message)

    def _decide_to_ask_unless_mode_differs(
        self, request: Request, rule: Rule | None, reason: str, message: str = ""
    ) -> PolicyDecision:
        """Return the decision to ask; an allow or deny if the mode or ``requires_permission=False`` prevents the question."""
        if not request.tool.requires_permission:
            return PolicyDecision("allow", rule, f"{reason}, but {request.tool.name} needs no permission")
        if self.mode == "bypass":
            return PolicyDecision("allow", rule, f"{reason}, and the mode 'bypass' allows where it would have to ask")
        if self.mode == "dont_ask":
            return PolicyDecision(
                "deny", rule, f"{reason}, and the mode 'dont_ask' denies where it would have to ask", ASKED
            )
        return PolicyDecision("ask", rule, reason, message)

    def _decide_by_mode(self, request: Request) -> PolicyDecision:
        """Return the decision of the mode for a call that no rule matches."""
        tool = request.tool
        # A tool without annotations may change something. Only tools that declare themselves read-only are allowed
        # (reliability:PM35).
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
        return self._decide_to_ask_unless_mode_differs(
            request, None, f"no rule matches, so the mode {self.mode!r} decides, which is to ask"
        )

    def explain(self, request: Request) -> str:
        """Return the decision, its reason, and the result of every other rule that applies to the call."""
        verdict = self.check(request)
        others = [
            rule
            for rule in (*self._ordered, *self._origin_rules)
            if rule is not verdict.rule and rule.covers_scope_and_source(request)
        ]
        return "\n".join(
            [f"{verdict.decision}: {verdict.why}", *[f"  {r.id}: {_describe_match(r, request)}" for r in others]]
        )

    def hook(self, find_spec: Callable[[HookContext, str], ToolSpec | None] | None = None) -> Hook:
        """
        Return the ``pre_tool`` hook that applies the policy: ``Hooks(pre_tool=policy.hook())``.

        ``Engine(permissions=policy)`` installs it for all agents, after all other hooks, so that it checks the final input.

        Args:
            find_spec: Returns the spec of a tool from the hook's context and the tool's name. A tool without a spec is treated as
                one that may do anything. By default the agent's ``Tool`` objects and the tool definitions of its state are
                searched.
        """
        said = lru_cache(CACHED_DECISIONS)(Decision)  # nearly all calls of a run get the same decision

        def permission(ctx: HookContext, call: ToolCallPart) -> Decision:
            spec = (find_spec or _find_tool_spec_of_agent)(ctx, call.tool_name)
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
                text, kept = (
                    ASKED_ABOUT_DATA.format(call.tool_name),
                    _make_values_rule(self._find_matching_origin_rules(request), request),
                )
                return Decision("ask", verdict.message or text, rule_id, remember=kept, provenance=verdict.origins)
            offered = self._make_always_allow_rules(request)
            remember = offered[0] if offered else None
            return Decision("ask", verdict.message, rule_id, remember=remember, wider=offered[1:])

        if self._origin_rules:
            permission.__qualname__ = permission.__name__ = ORIGIN_HOOK
            permission.keeps_provenance = True  # type: ignore[attr-defined]
        return permission

    def _make_always_allow_rules(self, request: Request) -> list[JsonDict]:
        """
        Return the stored rules that "always allow this" may add, the narrowest first; none if they would not prevent the question.

        In cases where the mode ``accept_edits`` would allow the call, one of them allows all edits. It answers no question
        about other calls, since no other question offers it. No rules are offered if another rule would still ask.
        """
        scope = Scope("user", request.user_id)
        rules = [
            Rule("allow", call, scope=scope)
            for call in (Call.from_request(request), *Call.list_broader_matchers(request))
        ]
        if _find_rule_about_unnamed_command(self._ordered, request, None) is not None:
            rules = rules[:1]  # a call that may run a denied command is allowed only exactly as it was shown
        # An "always" that changes nothing, because another rule still asks, would teach people to ignore it.
        is_enough = self.with_rules(rules[0]).check(request).decision == "allow"
        if attrs.evolve(self, mode="accept_edits").check(request).decision == "allow":
            rules.insert(-1, Rule("allow", Category("write"), scope=scope, id=f"allow all edits of files in {scope}"))
        return [freeze_object(_rule_to_json(rule)) for rule in rules] if is_enough else []

    # --- files --------------------------------------------------------------------------------------------------------

    @property
    def may_guard_calls(self) -> bool:
        """Whether ``make_guard`` may return a guard for some call."""
        return any(isinstance(rule.matcher, Path) or _allows_confined_commands(rule) for rule in self.rules)

    def make_guard(self, request: Request) -> CallGuard | None:
        """
        Return the guard that checks each file an allowed call opens; ``None`` if no rule restricts its files.

        The guard withholds files that a rule denies. It also withholds files about which a person would have to be asked,
        unless a person was asked about the call. A command that is allowed as read-only is confined to the files of its rule.
        ``CallsWhere`` predicates are not called again, because their context may no longer exist. If only a predicate can tell
        whether a person was asked, those files are withheld.
        """
        # Rules about files check the paths that a call names. Other files (behind a link, in a searched folder) are
        # known only when they are opened. So the guard applies the same rules then (reliability:FP4).
        rules = [rule for rule in self._ordered if rule.covers_scope_and_source(request)]
        first = _find_allow_or_ask_rule(rules, request)
        explain_refusal = self._make_refusal_explainer(rules, request)
        file = _make_file_guard(rules, request, explain_refusal)
        named = () if request.tool.confined else tuple(request.paths)
        if first is not None and _allows_confined_commands(first) and isinstance(first.matcher, Command):
            before = rules.index(first)
            withheld = [
                glob
                for at, rule in enumerate(rules)
                if isinstance(rule.matcher, Path) and rule.matcher.covers_tool(request)
                if rule.decision == "deny" or (rule.decision == "ask" and at < before and explain_refusal(at))
                for glob in rule.matcher.denied_globs
            ]
            return CommandGuard(file=file, named=named, confine=partial(confine_command, first.matcher.form, withheld))
        if file is None:
            return None
        was_asked = (
            _get_first_allowing_predicate_index(rules) == len(rules)
            and self._decide_without_predicates(request).decision != "allow"
        )
        return CallGuard(file=file, named=named, others=tuple(request.unmarked_texts), was_asked=was_asked)

    def _decide_without_predicates(self, request: Request) -> PolicyDecision:
        """Return the decision of the rules and the mode, ignoring predicates and rules about data origins."""
        rules = [rule for rule in self.rules if not isinstance(rule.matcher, CallsWhere)]
        policy = self if len(rules) == len(self.rules) else attrs.evolve(self, rules=rules)
        return policy._decide_without_origin_rules(request)  # noqa: SLF001 - a policy of the same rules

    def _make_refusal_explainer(self, rules: Sequence[Rule], request: Request) -> Callable[[int], str]:
        """
        Return the function that explains why a file is withheld, given the index of the first rule that allows it or asks.

        The index is the number of rules if no rule matches and the mode decides. The function returns ``""`` for a visible file.
        """
        predicate = _get_first_allowing_predicate_index(rules)

        @cache
        def explain_refusal(rule_index: int) -> str:
            """Return why a file is withheld if the rule at *rule_index* is the first that allows or asks; ``""`` if it may be opened."""
            verdict = (
                self._decide_by_rule(rules[rule_index], request)
                if rule_index < len(rules)
                else self._decide_by_mode(request)
            )
            if verdict.decision == "allow":
                return ""
            # A person who was asked about the call has approved what it names. That approval covers files that it leads to.
            nobody_asked = not request.is_call or self._decide_without_predicates(request).decision == "allow"
            # A predicate may have allowed the call, and then nobody was asked, unless a rule before it asks about the call.
            may_be_unasked = rule_index < predicate < len(rules) and not rules[rule_index].matcher.matches(
                request, "ask"
            )
            return UNASKED if nobody_asked or may_be_unasked else ""

        return explain_refusal

    # --- other policies -----------------------------------------------------------------------------------------------

    def with_rules(self, *rules: Rule) -> Policy:
        """Return the policy with *rules* added; a rule with an existing id replaces the old one in its position."""
        new = {rule.id: rule for rule in rules}
        kept = [new.pop(rule.id, rule) for rule in self.rules]
        return attrs.evolve(self, rules=(*kept, *new.values()))

    def without_rules(self, *ids: str) -> Policy:
        """
        Return the policy without the rules with these ids; raise ``DefinitionError`` for an unknown id.

        Raises:
            DefinitionError: for an id without a rule.
        """
        known = {rule.id for rule in self.rules}
        for identity in ids:
            if identity not in known:
                msg = f"the policy has no rule {identity!r}{_format_suggestion(identity, known)}; its rules: {list_names(sorted(known), identity)}"
                raise DefinitionError(msg)
        return attrs.evolve(self, rules=[rule for rule in self.rules if rule.id not in ids])

    def with_session_rule(self, session_id: str, rule: Rule) -> Policy:
        """Return the policy with a rule for one conversation."""
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
            DefinitionError: for a rule that holds a function.
        """
        stored = {"version": FORMAT_VERSION, "mode": self.mode, "rules": [_rule_to_json(rule) for rule in self.rules]}
        return stored | ({"remembered": [_rule_to_json(rule) for rule in self.remembered]} if self.remembered else {})

    @classmethod
    def from_json(cls, data: object, *, where: str = "the policy") -> Policy:
        """
        Return the policy that JSON describes.

        Raises:
            DefinitionError: for invalid JSON data, with *where*, the rule and the member. Also for the mode ``bypass``, which only
                code may set.
        """
        found = _require_object_with_members(data, ("version", "mode", "rules", "remembered"), where)
        if found.get("version", FORMAT_VERSION) != FORMAT_VERSION:
            msg = f"{where} has the version {found['version']!r}; this stepengine reads version {FORMAT_VERSION}"
            raise DefinitionError(msg)
        # A file may come with a repository; it must not be able to switch questions off (reliability:PM27).
        if found.get("mode") == "bypass":
            msg = f"{where} asks for the mode 'bypass', which only code may set: Policy(rules, mode='bypass')"
            raise DefinitionError(msg)
        for name in ("rules", "remembered"):
            if not isinstance(found.get(name, []), list):
                msg = f"{where}: {name} is not a list"
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
        Read a policy from a file, written by ``save`` or manually.

        Raises:
            DefinitionError: for a file that is missing, larger than 1 MiB, or not a policy; see ``from_json``.
        """
        where = f"the policy file {os.fspath(path)!r}"
        try:
            text = read_regular_file(path, MAX_FILE_BYTES)
            if len(text) > MAX_FILE_BYTES:
                msg = f"{where} has more than {MAX_FILE_BYTES:,} bytes"
                raise DefinitionError(msg)
            # The second of two equal members would silently replace rules that deny.
            data = json.loads(text, object_pairs_hook=make_object_with_unique_keys)
        except OSError as error:
            msg = f"{where} cannot be read: {error.strerror}"
            raise DefinitionError(msg) from None
        except (ValueError, RecursionError) as error:
            msg = f"{where} is not JSON: {error}"
            raise DefinitionError(msg) from None
        return cls.from_json(data, where=where)

    def save(self, path: str | os.PathLike[str]) -> None:
        """
        Write the policy to a file, atomically and durably.

        The whole file is replaced; for a link, its target. Rules that people allowed permanently since the policy was loaded are lost.

        Raises:
            DefinitionError: for a rule that holds a function, for the mode ``bypass``, and for an existing file that is not a
                policy. The file is left unchanged.
            OSError: if the file cannot be written.
        """
        if self.mode == "bypass":
            msg = "a policy in the mode 'bypass' cannot be saved, because no file may set that mode; save it in another mode"
            raise DefinitionError(msg)
        text = json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n"
        file = FilePath(os.path.realpath(path))
        if file.exists() and file.stat().st_size:
            _check_is_policy_file(path)
        with _lock_file(file):
            replace_path(file, text.encode())


def _has_approved_values(rules: Iterable[Rule], asking_rule: Rule, request: Request) -> bool:
    """Return whether a person permanently allowed all argument values that *asking_rule*, about data origins, checks."""
    allowing = [rule for rule in rules if rule.decision == "allow" and rule.covers_scope_and_source(request)]
    matching = [
        rule.matcher for rule in allowing if isinstance(rule.matcher, Values) and rule.matcher.matches(request, "allow")
    ]
    checked = set(_list_approved_argument_paths([asking_rule], request))
    return any("" in matcher.values or checked <= set(matcher.values) for matcher in matching)


def _make_values_rule(asking_rules: Iterable[Rule], request: Request) -> JsonDict:
    """
    Return the rule, as stored in policy files, that allows this call's values of the arguments that *asking_rules* check.

    It never allows the whole tool.
    """
    names = _list_approved_argument_paths(asking_rules, request)
    values = {path: [value for _, value in find_values_at_path(request.input, path)] for path in names}
    rule = Rule("allow", Values(request.tool.name, values), scope=Scope("user", request.user_id))
    return freeze_object(_rule_to_json(rule))


def _find_allow_or_ask_rule(rules: Iterable[Rule], request: Request) -> Rule | None:
    """Return the first rule that allows a call or asks about it, ignoring predicates; ``None`` if there is none."""
    found = (rule for rule in rules if rule.decision != "deny" and not isinstance(rule.matcher, CallsWhere))
    return next((rule for rule in found if rule.matcher.matches(request, rule.decision)), None)


def _make_file_guard(
    rules: Sequence[Rule], request: Request, explain_refusal: Callable[[int], str]
) -> FileGuard | None:
    """Return the function that explains why a file is withheld from the call; ``None`` if no rule is about its files."""
    about_files = {rule.id: rule.matcher for rule in rules if isinstance(rule.matcher, Path)}
    if not any(path.covers_tool(request) for path in about_files.values()):
        return None
    others = [rule for rule in rules if rule.decision != "deny" and not isinstance(rule.matcher, Path | CallsWhere)]
    holding = {rule.id for rule in others if rule.matcher.matches(request, rule.decision)}
    # A search calls the guard for every file, so everything that is the same for all files is computed before.
    fitting = [(rule, path) for rule in rules if (path := about_files.get(rule.id)) and path.covers_tool(request)]
    always = next((at for at, rule in enumerate(rules) if rule.id in holding), len(rules))
    order = {rule.id: at for at, rule in enumerate(rules)}

    def explain_refusal_of_file(_root: Sequence[str], parts: Sequence[str]) -> str:
        """Return why a file is withheld, by the first rules that match it; ``""`` if it may be opened."""
        first, low = always, normalize_path_for_deny(parts)
        for rule, path in fitting:
            if not path.matches_file(parts, low, rule.decision):
                continue
            if rule.decision == "deny":
                return rule.message or f"is withheld from tools by the rule {rule.id!r}"
            first = min(first, order[rule.id])
        # Other rules and the mode decide about calls. Reading files for a prompt is no call.
        is_about_files = first < len(rules) and rules[first].id in about_files
        return explain_refusal(first) if request.is_call or is_about_files else ""

    return explain_refusal_of_file


class PolicyFile:
    """
    A policy in a file that also stores permanent approvals: ``Engine(permissions=PolicyFile("policy.json"))``.

    ``Answer(remember="always")`` adds a rule. Every process that uses the file applies it from its next question on. No
    rule is lost if several processes add rules at once or one is killed. The file is replaced as a whole, under the
    lock ``policy.json.lock`` in the same folder. A link is resolved at construction and stays as it is. The attribute ``policy``
    does not change after construction.

    An engine raises an error for tools that write or run programs in a folder with the file, or with a link that leads to it,
    because a model could allow itself everything. With *below_root* it accepts them. File tools then cannot touch the file or its lock, but
    programs that a model runs can.

    Args:
        path: The file, written by ``Policy.save`` or manually.
        below_root: Whether it may be in a folder that tools write to.

    Attributes:
        path: The file.
        policy: The policy that was read at construction.

    Raises:
        DefinitionError: as ``Policy.load``.
    """

    def __init__(self, path: str | os.PathLike[str], *, below_root: bool = False) -> None:
        self.path = FilePath(path)
        self.policy = Policy.load(path)
        self.below_root = below_root
        self._file = FilePath(os.path.realpath(path))
        self._places = tuple(
            [
                tuple(place.split("/")[1:])
                for place in (str(self._file), f"{self._file}.lock", *_find_symlinks_on_path(path))
            ]
        )
        self._known: tuple[Any, frozenset[str]] = (None, frozenset())

    def is_below(self, folder: Sequence[str]) -> bool:
        """
        Return whether the file, or a link that leads to it, is in a folder or below it.

        Args:
            folder: The components of the folder's real path.
        """
        return any(place[: len(folder)] == tuple(folder) for place in self._places)

    @property
    def may_guard_calls(self) -> bool:
        """Whether ``make_guard`` may return a guard for some call."""
        return self.below_root or self.policy.may_guard_calls

    def make_guard(self, request: Request) -> CallGuard | None:
        """Return the guard of the policy for a call; with ``below_root`` it also withholds this file, its lock and the links to it."""
        ruled = self.policy.make_guard(request)
        if not self.below_root:
            return ruled
        explain_ruled = None if ruled is None else ruled.file

        def explain_refusal_of_file(root: Sequence[str], parts: Sequence[str]) -> str:
            """Return why a file is withheld: it stores the approvals, or a rule says so; ``""`` if it may be opened."""
            if (*root, *parts) in self._places:
                return "stores permanent approvals and is withheld from tools"
            return "" if explain_ruled is None else explain_ruled(root, parts)

        named = () if request.tool.confined else tuple(request.paths)
        return attrs.evolve(ruled or CallGuard(), file=explain_refusal_of_file, named=named)

    @property
    def remembered(self) -> tuple[Rule, ...]:
        """The permanently allowed rules, in order of addition, read from the file."""
        return Policy.load(self._file).remembered

    def has_rule(self, rule: JsonDict) -> bool:
        """
        Return whether exactly this rule, in its stored form, is one of the permanently allowed rules in the file.

        Raises:
            DefinitionError: if the file is no longer a policy.
        """
        status = self._file.stat() if self._file.exists() else None
        # Read again only when the file has changed: every question of every run calls this.
        state = status and (status.st_ino, status.st_size, status.st_mtime_ns)
        if state is None or state != self._known[0]:
            self._known = (state, frozenset([canonical(_rule_to_json(kept)) for kept in self.remembered]))
        return canonical(rule) in self._known[1]

    def add_rule(self, rule: JsonDict) -> None:
        """
        Add a permanently allowed rule, in its stored form, durably; it replaces one with the same id.

        Raises:
            DefinitionError: if it is not a rule, or the file is no longer a policy.
            OSError: if the file cannot be written.
        """
        made = _rule_from_json(thaw(rule), "the rule")
        self._rewrite_remembered_rules(lambda kept: {**kept, made.id: made})

    def remove_rules(self, *ids: str) -> None:
        """
        Remove permanently allowed rules: those with these ids, or all if no id is passed.

        Raises:
            DefinitionError: if the file is no longer a policy.
            OSError: if the file cannot be written.
        """
        self._rewrite_remembered_rules(lambda kept: {i: rule for i, rule in kept.items() if ids and i not in ids})

    def _rewrite_remembered_rules(self, change: Callable[[dict[str, Rule]], dict[str, Rule]]) -> None:
        """Apply *change* to the permanently allowed rules in the file, by id, under the file's lock."""
        Policy.load(self._file)  # before the lock, so that a file that is not a policy gets no lock file
        with _lock_file(self._file):
            policy = Policy.load(self._file)
            kept = {rule.id: rule for rule in policy.remembered}
            changed = attrs.evolve(policy, remembered=change(kept).values())
            if changed != policy:
                replace_path(self._file, (json.dumps(changed.to_json(), indent=2, ensure_ascii=False) + "\n").encode())


def _list_approved_argument_paths(rules: Iterable[Rule], request: Request) -> tuple[str, ...]:
    """Return the paths of the arguments that the rules about data origins check; ``("",)`` if they check the whole input."""
    found = dict[str, None]()
    for rule in rules:
        paths: Sequence[str] = ()
        # For a file that instructs later runs, its content is part of the approval.
        if isinstance(rule.matcher, Untrusted):
            paths = rule.matcher.parameters or (
                () if names_instruction_file(request) else request.tool.destinations or ()
            )
        # The whole input where all of it is checked: a name of a member may itself have a dot.
        if not paths:
            return ("",)
        found.update(dict.fromkeys([*paths, *request.tool.texts]))
    return tuple(found)


def _find_rule_about_unnamed_command(
    rules: Sequence[Rule], request: Request, first_match: Rule | None
) -> tuple[Rule, str] | None:
    """
    Return a deny or ask rule about a command that a call may run without naming it, with the reason; else ``None``.

    The result is ``None`` if *first_match*, the rule that decides, allows commands of one program, or only this call.
    """
    commands = request.commands
    if not commands or (first_match is not None and _allows_one_program_or_call(first_match)):
        return None
    # An ask rule after the rule that decides would not be reached; a deny holds wherever it is.
    end = len(rules) if first_match is None else rules.index(first_match)
    for at, rule in enumerate(rules):
        counts = rule.decision == "deny" or (rule.decision == "ask" and at < end)
        if counts and isinstance(rule.matcher, Command) and rule.covers_scope_and_source(request):
            reasons = [reason for one in commands if (reason := explain_possible_match(rule.matcher.form, one))]
            if reasons:
                return rule, reasons[0]
    return None


def _decide_about_possible_path(rule: Rule, path: str, mode: str) -> PolicyDecision:
    """Return the decision about a call that may name a path denied by *rule*: an ask, but a deny in the mode ``dont_ask``."""
    why = POSSIBLE_PATH.format(path[:MAX_SHOWN_CHARS], rule.id)
    said = f"{why[0].upper()}{why[1:]}."
    if mode == "dont_ask":
        reason = f"{why}, and the mode 'dont_ask' denies where it would have to ask"
        return PolicyDecision("deny", rule, reason, f"{ASKED} {said}")
    return PolicyDecision("ask", rule, why, f"{said} Allow the call?")


def _allows_one_program_or_call(rule: Rule) -> bool:
    """Return whether a rule allows commands of one program, or one specific input or command of a tool."""
    matcher = rule.matcher
    is_call = isinstance(matcher, Call) and (matcher.input is not None or matcher.prefix is not None)
    return rule.decision == "allow" and (is_call or isinstance(matcher, Command))


def _get_first_allowing_predicate_index(rules: Sequence[Rule]) -> int:
    """Return the index of the first rule that allows calls by a predicate; the number of rules if none does."""
    found = (at for at, rule in enumerate(rules) if rule.decision == "allow" and isinstance(rule.matcher, CallsWhere))
    return next(found, len(rules))


def _allows_confined_commands(rule: Rule) -> bool:
    """Return whether a rule allows commands that must be confined to the files that the rule permits."""
    return rule.decision == "allow" and isinstance(rule.matcher, Command) and rule.matcher.form.operands in CONFINED


def _check_is_policy_file(path: str | os.PathLike[str]) -> None:
    """Raise ``DefinitionError`` if an existing file is not a policy, so that no other file is overwritten."""
    try:
        Policy.load(path)
    except DefinitionError as error:
        msg = f"{error.message}. The file was left unchanged. Pass another path"
        raise DefinitionError(msg) from None


def _find_symlinks_on_path(path: str | os.PathLike[str]) -> list[str]:
    """Return the absolute paths of the symbolic links on the way to a file, since a change of one of them replaces the file."""
    text = os.path.join(os.getcwd(), os.fspath(path))  # noqa: PTH109, PTH118 - resolving it would lose the links
    found, at, names = list[str](), FilePath("/"), text.split("/")
    while names:
        name = names.pop(0)
        step = at.parent if name == ".." else at / name
        if step.is_symlink():
            target = str(step.readlink())
            found.append(str(step))
            names = [*target.split("/"), *names]
            step = FilePath("/") if target.startswith("/") else at
        at = step
    return found


@contextmanager
def _lock_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the lock of a policy file, ``policy.json.lock``, against other processes and threads."""
    import fcntl

    descriptor = os.open(f"{os.fspath(path)}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        # Unlocked explicitly: a process that was forked meanwhile has the open file, too.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _find_tool_spec_of_agent(ctx: HookContext, name: str) -> ToolSpec | None:
    """Return the spec of a tool from the agent's definition, else from the run's state; ``None`` if neither has the tool."""
    own = [tool.spec for tool in ctx.agent.tools if isinstance(tool, ToolLike) and tool.spec.name == name]
    return own[0] if own else ctx.state.tool_definitions.get(name)


def _describe_match(rule: Rule, request: Request) -> str:
    """Return in words whether a rule matches a call, may match it, or fails."""
    try:
        if rule.matcher.matches(request, rule.decision):
            return f"matches, {rule.decision}"
        is_possible = rule.decision == "deny" and isinstance(rule.matcher, Path)
        path = rule.matcher.find_possible_path(request) if is_possible else None  # type: ignore[union-attr]
        return "does not match" if path is None else f"may match by {path[:MAX_SHOWN_CHARS]!r}, ask"
    except Exception as error:  # noqa: BLE001  (a predicate is the author's code)
        return f"failed with {type(error).__name__}: {error}"


def _format_suggestion(word: str, valid_words: Iterable[str]) -> str:
    """Return ``" (did you mean ...?)"`` with the valid word nearest to *word*; ``""`` if none is near."""
    near = find_nearest(word, valid_words, max_count=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _require_object_with_members(data: object, valid_members: tuple[str, ...], where: str) -> Mapping[str, Any]:
    """Return *data*; raise ``DefinitionError`` if it is no object or has other members than *valid_members*."""
    if not isinstance(data, dict):
        msg = f"{where} is a {type(data).__name__}, not an object with {list_names(valid_members)}"
        raise DefinitionError(msg)
    for name in data:
        if name not in valid_members:
            msg = (
                f"{where} has the unknown member {name!r}{_format_suggestion(str(name), valid_members)}; "
                f"valid members: {list_names(valid_members, name)}"
            )
            raise DefinitionError(msg)
    return data


def _rule_to_json(rule: Rule) -> dict[str, Any]:
    """Return a rule as in a policy file; raise ``DefinitionError`` for a function."""
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
    """Return the matcher of a rule as in a policy file; raise ``DefinitionError`` for a function."""
    match rule.matcher:
        case EveryCall():
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
        case CallsWhere():
            msg = f"the rule {rule.id!r} cannot be stored: it holds a function; use a matcher that is data, or add it in code"
            raise DefinitionError(msg)


def _origin_matcher_to_json(matcher: Untrusted | AfterUntrusted | Values) -> object:
    """Return a matcher of data origins as in a policy file."""
    match matcher:
        case Untrusted(tool, parameters) if parameters:
            return {"is": tool, "parameters": list(parameters)}
        case Values(tool, values):
            return {"is": tool, "values": thaw(values)}
        case _:
            return matcher.tool


def _call_to_json(call: Call) -> object:
    """Return a call matcher as in a policy file: the tool's name alone, or an object if it has more members."""
    narrowed = {name: getattr(call, name) for name in CALL_KEYS[1:]}
    given = {
        name: list(v) if isinstance(v, tuple) else v for name, v in narrowed.items() if v is not None and v is not False
    }
    return {"is": call.tool, **given} if given else call.tool


def _rule_from_json(data: Any, where: str) -> Rule:
    """Return the rule of a policy file; raise ``DefinitionError`` for invalid JSON data."""
    found = _require_object_with_members(data, RULE_KEYS, where)
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
            options[name] = _require_type(found[name], kind, f"{where}: {name}")
    if found.get("decision") not in get_args(Effect):
        msg = f"{where}: unknown decision {found.get('decision')!r}; valid decisions: 'allow', 'deny', 'ask'"
        raise DefinitionError(msg)
    try:
        return Rule(found["decision"], _matcher_from_json(found.get("match"), where), **options)
    except (DataError, DefinitionError) as error:
        prefix = "" if error.message.startswith(where) else f"{where}: "
        msg = f"{prefix}{error.message}"
        raise DefinitionError(msg) from None


def _require_type(value: object, kind: type, where: str, expected: str = "text") -> Any:
    """Return *value* if its type is exactly *kind*; else raise ``DefinitionError``."""
    if type(value) is not kind:
        msg = f"{where} is {value!r}, not {'a whole number' if kind is int else expected}"
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
    """Return the matcher of a policy file; raise ``DefinitionError`` for an unknown kind or an invalid value."""
    found = _require_object_with_members(data, KINDS, f"{where}: match")
    if len(found) != 1:
        msg = f"{where}: match has {len(found)} members; use exactly one of {list_names(KINDS)}"
        raise DefinitionError(msg)
    ((kind, value),) = found.items()
    what = f"{where}: match.{kind}"
    if kind == "all":
        if value is not True:
            msg = f"{what} is {value!r}; the only valid value is true"
            raise DefinitionError(msg)
        return EveryCall()
    if kind in PLAIN:
        return PLAIN[kind](_require_type(value, str, what))
    if kind == "call":
        return _call_from_json(value, what)
    if kind == "command":
        return Command(_command_form_from_json(value, what))
    if kind in ("untrusted", "values"):
        return _origin_matcher_from_json(kind, value, what)
    if isinstance(value, str):
        return NARROWED[kind](value, None)
    narrow = _require_object_with_members(value, ("is", "tool"), what)
    tool = narrow.get("tool")
    return NARROWED[kind](
        _require_type(narrow.get("is"), str, f"{what}.is"),
        None if tool is None else _require_type(tool, str, f"{what}.tool"),
    )


def _origin_matcher_from_json(kind: str, value: object, where: str) -> Matcher:
    """Return the matcher of data origins of a policy file; raise ``DefinitionError`` for an invalid value."""
    more = "parameters" if kind == "untrusted" else "values"
    found = _require_object_with_members({"is": value} if isinstance(value, str) else value, ("is", more), where)
    tool = _require_type(found.get("is"), str, f"{where}.is")
    if kind == "values":
        return Values(tool, _require_type(found.get("values"), dict, f"{where}.values", "an object"))
    return Untrusted(tool, _require_word_list(found.get("parameters", []), f"{where}.parameters", '["to"]'))


def _call_from_json(value: object, where: str) -> Call:
    """Return the call matcher of a policy file; raise ``DefinitionError`` for an invalid value."""
    if isinstance(value, str):
        return Call(value)
    found = _require_object_with_members(value, CALL_KEYS, where)
    given: dict[str, Any] = {
        name: _require_type(found[name], kind, f"{where}.{name}", what)
        for name, kind, what in (
            ("input", dict, "an object"),
            ("agent", str, "text"),
            ("any_input", bool, "true or false"),
        )
        if name in found
    }
    given |= {
        name: _require_word_list(found[name], f"{where}.{name}", '["src/app.py"]')
        for name in CALL_KEYS[3:-1]
        if name in found
    }
    return Call(_require_type(found.get("is"), str, f"{where}.is"), **given)


def _require_word_list(value: object, where: str, example: str) -> list[str]:
    """Return *value* if it is a list of texts; else raise ``DefinitionError`` with an *example*."""
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        msg = f"{where} is {value!r}, not a list of words such as {example}"
        raise DefinitionError(msg)
    return value


def _command_form_from_json(value: object, where: str) -> CommandForm:
    """Return the command form of a policy file; raise ``DefinitionError`` for an invalid value."""
    data: JsonDict = freeze_object(value if isinstance(value, dict) else {"prefix": value})
    found = _require_object_with_members(data, ("prefix", "exact", "flags", "operands"), where)
    for name in ("prefix", "flags"):
        _require_word_list(found.get(name, []), f"{where}.{name}", '["git", "status"]')
    operands = found.get("operands", "any")
    if operands not in ("any", "none", "paths", "pattern"):
        msg = f"{where}.operands is {operands!r}; valid values: 'any', 'none', 'paths', 'pattern'"
        raise DefinitionError(msg)
    exact = _require_type(found.get("exact", False), bool, f"{where}.exact")
    return CommandForm(found.get("prefix", []), exact, found.get("flags"), operands)
