"""
Policies: which rule decides, what never happens whatever the rules, and their form as a file.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import posixpath
import shlex
import subprocess
import sys

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.data.json import freeze_object
from stepengine.data.tools import ToolAnnotations, ToolSpec
from stepengine.errors import DefinitionError
from stepengine.permissions import (
    Call,
    CallsWhere,
    Category,
    Policy,
    PolicyFile,
    Request,
    Rule,
    Scope,
    read_only_commands,
)
from stepengine.permissions.rules import Domain, Regex, ToolNamed

READS = ToolSpec("read_files", category="read", annotations=ToolAnnotations(read_only=True))
WRITES = ToolSpec("write_file", category="write")
RUNS = ToolSpec("run_terminal_command", category="execute")
FETCHES = ToolSpec("read_url", category="network")
CONTROL = ToolSpec("set_output", requires_permission=False)
TOOLS = (READS, WRITES, RUNS, FETCHES, CONTROL)
MODES = ("default", "plan", "accept_edits", "dont_ask", "bypass")


def request(tool=READS, *, agent_id="lead", session_id=None, user_id=None, **members):
    return Request(
        tool=tool, input=freeze_object(members), agent_id=agent_id, session_id=session_id, user_id=user_id
    )  # fmt: skip


def decided(policy, *args, **kwargs):
    return policy.check(request(*args, **kwargs)).decision


@pytest.mark.spec("requirements:M9", "reliability:HP6", "remote:WP6")
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("default", "ask ask ask ask allow"),
        ("plan", "allow deny deny deny allow"),
        ("accept_edits", "ask allow ask ask allow"),
        ("dont_ask", "deny deny deny deny allow"),
        ("bypass", "allow allow allow allow allow"),
    ],
)
def test_where_no_rule_matches_the_mode_decides(mode, expected):
    policy = Policy(mode=mode)

    assert expected.split() == [decided(policy, tool) for tool in TOOLS]


@pytest.mark.spec("requirements:M9", "requirements:X29")
@pytest.mark.parametrize("mode", MODES)
def test_allow_rules_hold_in_every_mode(mode):
    assert "allow" == decided(Policy([Rule.allow_tool("write_file")], mode), WRITES)


SCOPE_KINDS = ("global", "agent", "session", "user")
SCOPES = st.sampled_from([Scope("user"), Scope("session", "s"), Scope("agent", "lead"), Scope()])
ANY = st.builds(
    lambda decision, scope, priority, name: Rule(decision, ToolNamed(name), scope=scope, priority=priority, id=""),
    st.sampled_from(["allow", "deny", "ask"]), SCOPES, st.integers(-1000, 1000), st.sampled_from(["*", "write_*", "read_files"]),
)  # fmt: skip


@pytest.mark.spec("reliability:R7", "requirements:X29", "requirements:M9")
@given(st.lists(ANY, max_size=8), st.sampled_from(MODES), st.permutations(range(8)))
def test_deny_wins_else_the_first_rule_by_scope_and_priority(rules, mode, order):
    rules = [attrs.evolve(rule, id=f"r{n}") for n, rule in enumerate(rules)]
    verdict = Policy(rules, mode).check(request(WRITES, session_id="s"))
    matching = [rule for rule in rules if rule.matcher.name in ("*", "write_*")]

    if any(rule.decision == "deny" for rule in matching):
        assert "deny" == verdict.decision
        assert verdict.rule in matching
    elif matching:
        scopes = ["user", "session", "agent", "global"]
        first = min(matching, key=lambda r: (scopes.index(r.scope.kind), -r.priority, rules.index(r)))
        assert first == verdict.rule
    else:
        assert verdict.rule is None
    # Deny does not depend on where a rule stands.
    shuffled = [rules[i] for i in order if i < len(rules)]
    assert (verdict.decision == "deny") == (decided(Policy(shuffled, mode), WRITES, session_id="s") == "deny")


@pytest.mark.spec("requirements:M3", "reliability:PM39")
def test_rules_of_a_scope_hold_only_there():
    policy = Policy(
        [
            Rule.allow_tool("read_files", scope="agent:code-reviewer"),
            Rule.allow_tool("write_file", scope="session:one"),
            Rule.allow_tool("read_url", scope="user:ada"),
        ],
        "dont_ask",
    )

    assert ["allow", "deny"] == [decided(policy, READS, agent_id=a) for a in ("code_reviewer", "lead")]
    assert ["allow", "deny", "deny"] == [decided(policy, WRITES, session_id=s) for s in ("one", "two", None)]
    assert ["allow", "deny", "deny"] == [decided(policy, FETCHES, user_id=u) for u in ("ada", "bob", None)]


@pytest.mark.spec("requirements:M11")
def test_session_rules_are_added_and_cleared_per_session():
    rule = Rule.allow_tool("write_file")
    policy = Policy(mode="dont_ask").with_session_rule("one", rule).with_session_rule("two", rule)

    assert ["allow", "allow"] == [decided(policy, WRITES, session_id=s) for s in ("one", "two")]
    cleared = policy.without_session_rules("one")
    assert ["deny", "allow"] == [decided(cleared, WRITES, session_id=s) for s in ("one", "two")]


@pytest.mark.spec("reliability:PM30")
@pytest.mark.parametrize("answer", [ZeroDivisionError("no"), None, 1, "yes"])
@pytest.mark.parametrize("decision", ["allow", "ask", "deny"])
def test_a_failing_predicate_denies(answer, decision):
    def odd(_):
        if isinstance(answer, Exception):
            raise answer
        return answer

    verdict = Policy([Rule(decision, CallsWhere(odd), id="mine")], "bypass").check(request())

    assert "deny" == verdict.decision
    assert "mine" in verdict.message


@pytest.mark.spec("requirements:M3")
def test_a_predicate_decides_by_the_request():
    policy = Policy([Rule("allow", CallsWhere(lambda r: r.input.get("n", 0) < 3), id="small")], "dont_ask")

    assert ["allow", "deny"] == [decided(policy, n=n) for n in (1, 5)]


@pytest.mark.spec("requirements:M3", "reliability:PM45")
def test_tool_names_match_with_hyphens_and_wildcards():
    policy = Policy([Rule.deny_tool("mcp__git*__push*")], "bypass")

    for name, expected in {
        "mcp__github__push_files": "deny", "mcp--gitlab--push": "deny", "mcp__github__pull": "allow", "mcp__git": "allow",
    }.items():  # fmt: skip
        assert expected == decided(policy, ToolSpec(name)), name


@given(st.text("ab*", min_size=1, max_size=8), st.text("ab", min_size=1, max_size=10))
def test_stars_stand_for_anything(pattern, name):
    policy = Policy([Rule.deny_tool(pattern)], "bypass")

    assert ("deny" if fnmatch.fnmatchcase(name, pattern) else "allow") == decided(policy, ToolSpec(name))


# --- paths, domains, expressions ------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:M3")
def test_one_path_suffices_to_deny_and_allow_needs_all():
    policy = Policy([Rule.deny_path("**/.env"), Rule.allow_path("docs/**")], "dont_ask")

    for paths, expected in {
        ("docs/a.md",): "allow", ("docs/a.md", "./docs/b/c.md"): "allow", ("docs/a.md", "src/a.py"): "deny",
        ("docs/.env",): "deny", ("docs/.ENV",): "deny", (".env",): "deny", ("/somewhere/below/.env",): "deny",
        ("/docs/a.md",): "deny", (): "deny",
    }.items():  # fmt: skip
        assert expected == decided(policy, READS, paths=list(paths)), paths
    assert "deny" == decided(policy, READS, paths=[{"path": "docs/.env", "offset": 1}])
    assert "deny" == decided(policy, READS, note="docs/a.md")


@pytest.mark.spec("requirements:M3", "reliability:PM43")
def test_a_domain_rule_matches_only_its_host():
    policy = Policy([Rule.allow_domain("docs.example.org"), Rule.allow_domain("*.test.org")], "dont_ask")

    for url, expected in {
        "https://docs.example.org/a": "allow", "https://DOCS.example.org./": "allow", "https://x.test.org": "allow",
        "https://example.org": "deny", "https://docs.example.org.evil.com": "deny", "https://docs.example.org@evil.com/": "deny",
        "https://evil.com/docs.example.org": "deny", "https://test.org": "deny", "https://eviltest.org": "deny",
        "https://[": "deny", "": "deny",
    }.items():  # fmt: skip
        assert expected == decided(policy, FETCHES, url=url), url
    assert "deny" == decided(Policy([Rule.deny_domain("evil.com")], "bypass"), FETCHES, url="https://[")


@pytest.mark.spec("requirements:M14", "reliability:PM45")
def test_an_expression_searches_the_input_and_never_allows_a_command():
    asks = Policy([Rule("deny", Regex("rm +-rf"))], "bypass")
    allows = Policy([Rule("allow", Regex("^"))], "dont_ask")

    assert "deny" == decided(asks, RUNS, command="x" * 100_000 + "; rm  -rf /")
    assert "allow" == decided(asks, RUNS, command="rm x")
    assert ["allow", "deny"] == [decided(allows, tool, command="ls") for tool in (WRITES, RUNS)]


@pytest.mark.spec("requirements:M14")
@given(st.text(), st.sampled_from(MODES[:-1]))
def test_an_allowed_path_or_host_allows_no_command(command, mode):
    policy = Policy([Rule.allow_path("docs/**"), Rule.allow_domain("example.org")], mode)
    place = {"cwd": "docs", "path": "docs/a.md", "url": "https://example.org/"}

    assert "allow" != decided(policy, RUNS, command=command, **place)
    assert "allow" == decided(policy, WRITES, **place)


@pytest.mark.spec("reliability:PM45")
@pytest.mark.parametrize(
    "make",
    [
        lambda: Regex("("), lambda: Regex(""), lambda: Regex(r"(?=a)"), lambda: Rule.allow_tool(""), lambda: Rule.allow_command([]),
        lambda: Rule.allow_command("git status"), lambda: Domain("https://a.org"), lambda: Domain("a.*.org"),
        lambda: Policy(mode="yolo"), lambda: Policy(["allow all"]), lambda: Policy([Rule.allow_tool("a"), Rule.allow_tool("a")]),
    ],
    ids=map(str, itertools.count()),
)  # fmt: skip
def test_an_unusable_rule_is_refused_where_it_is_written(make):
    with pytest.raises(DefinitionError):
        make()


@pytest.mark.spec("reliability:PM45", "requirements:M14")
@given(
    kind=st.one_of(st.sampled_from(["global", "agent", "session", "user"]), st.text("abeglnoprsu ", max_size=8)),
    identity=st.none() | st.text("ab:", min_size=1, max_size=4),
)
def test_a_scope_has_a_known_kind_and_its_required_id(kind, identity):
    """
    A rule of a scope that nobody asks would be silently without force.
    """
    fine = {"global": identity is None, "user": True}.get(kind, kind in ("agent", "session") and identity is not None)
    written = kind if identity is None else f"{kind}:{identity}"
    stored = {"version": 1, "rules": [{"decision": "deny", "match": {"tool": "x"}, "scope": written}]}
    for make in (
        lambda: Scope(kind, identity),
        lambda: Rule.deny_tool("x", scope=written).scope,
        lambda: Policy.from_json(stored).rules[0].scope,
    ):
        if fine:
            assert (kind, identity) == (make().kind, make().id)
            assert str(make()) == written
        else:
            with pytest.raises(DefinitionError, match="unknown scope" if kind not in SCOPE_KINDS else "the scope"):
                make()


@pytest.mark.spec("reliability:PM45")
@pytest.mark.parametrize("name", ["", "  ", None, 3, ["read"]])
def test_a_category_that_is_no_word_is_refused(name):
    for make in (Category, Rule.allow_category, Rule.deny_category, Rule.ask_for_category):
        with pytest.raises(DefinitionError, match="a rule needs a category"):
            make(name)
    with pytest.raises(DefinitionError, match="category"):
        Policy.from_json({"version": 1, "rules": [{"decision": "deny", "match": {"category": name}}]})


def test_a_catastrophic_expression_is_searched_in_no_time():
    policy = Policy([Rule("deny", Regex("(a+)+$|(.*){40}b|(x|xx)*y"))], "bypass")

    assert "allow" == decided(policy, WRITES, content="a" * 200_000 + "!")


# --- explaining -----------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:M5")
def test_an_explanation_names_the_deciding_rule_and_the_others():
    policy = Policy([Rule.allow_category("write"), Rule.deny_tool("write_file", id="frozen"), Rule.allow_tool("glob")])
    text = policy.explain(request(WRITES))

    assert text.startswith("deny: the rule 'frozen' denies it")
    assert "allow category write: matches, allow" in text
    assert "allow tool glob: does not match" in text
    assert "the mode 'default'" in Policy().explain(request())


# --- as a file ------------------------------------------------------------------------------------------------------

STORED = [
    Rule.allow_tool("read_files", scope="agent:reviewer", priority=3),
    Rule.deny_category("network", "Work offline.", description="no web"),
    Rule.ask_for_command(["git", "push"], "Push?"),
    Rule.allow_path("docs/**", tool="write_file"),
    Rule.deny_domain("*.evil.com", scope="session:user:chat"),
    Rule("deny", Regex("secret", "write_file"), scope="user"),
    Rule("allow", Call("write_file"), scope="user"),
    Rule("allow", Call("sh", {"command": ["git", "status"], "cwd": None}), scope="user:ana"),
    *read_only_commands(),
]
PWD = Rule.allow_command("pwd", exact=True)
RULES = st.lists(st.sampled_from([*STORED, PWD]), unique_by=lambda rule: rule.id)


@pytest.mark.spec("requirements:M12")
@given(RULES, st.sampled_from([m for m in MODES if m != "bypass"]))
def test_a_policy_round_trips_through_json(rules, mode):
    policy = Policy(rules, mode)

    assert policy == Policy.from_json(json.loads(json.dumps(policy.to_json())))


@pytest.mark.spec("requirements:M12")
def test_a_policy_is_read_back_as_it_was_saved(tmp_path):
    policy = Policy(STORED, "plan")
    policy.save(tmp_path / "policy.json")

    assert policy == Policy.load(tmp_path / "policy.json")


@pytest.mark.spec("requirements:M12")
def test_a_rule_with_a_function_is_not_saved_and_named(tmp_path):
    with pytest.raises(DefinitionError, match="'mine'"):
        Policy([Rule("allow", CallsWhere(bool), id="mine")]).save(tmp_path / "p.json")
    assert not list(tmp_path.iterdir())


def test_no_file_sets_the_mode_that_allows_everything(tmp_path):
    (tmp_path / "p.json").write_text('{"mode": "bypass"}')

    with pytest.raises(DefinitionError, match="only code may set"):
        Policy.load(tmp_path / "p.json")
    with pytest.raises(DefinitionError, match="no file may set"):
        Policy(mode="bypass").save(tmp_path / "q.json")


GOOD = {"version": 1, "mode": "default", "rules": [{"decision": "deny", "match": {"tool": "x"}, "id": "one"}]}
WRONG = [
    None,
    3,
    "x",
    [],
    {},
    {"nope": 1},
    True,
    {"tool": 3},
    {"command": {"prefix": 3}},
    "bypass",
    -1,
    [[]],
    {"tool": "a", "category": "b"},
]


@pytest.mark.spec("reliability:PM45")
@given(st.sampled_from(["version", "mode", "rules", "rules/0", *[f"rules/0/{k}" for k in ("decision", "match", "scope", "priority", "id", "oops")]]), st.sampled_from(WRONG))  # fmt: skip
def test_a_broken_policy_file_is_refused_with_its_place(place, value):
    data = json.loads(json.dumps(GOOD))
    *outer, last = place.split("/")
    target = data
    for step in outer:
        target = target[int(step) if step.isdigit() else step]
    target[int(last) if last.isdigit() else last] = value
    refused, policy = "", None
    try:
        policy = Policy.from_json(data, where="the file")
    except DefinitionError as error:
        refused = error.message

    assert refused.startswith("the file") if policy is None else policy == Policy.from_json(policy.to_json())


@pytest.mark.spec("reliability:PM45")
def test_a_policy_with_a_repeated_member_is_refused(tmp_path):
    (tmp_path / "p.json").write_text('{"rules": [{"decision": "deny", "match": {"tool": "x"}}], "rules": []}')

    with pytest.raises(DefinitionError, match=r"p\.json.* twice"):
        Policy.load(tmp_path / "p.json")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"rules": NaN'])
def test_a_file_that_is_no_json_is_refused(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(DefinitionError, match=r"p\.json"):
        Policy.load(tmp_path / "p.json")
    with pytest.raises(DefinitionError, match="cannot be read"):
        Policy.load(tmp_path / "missing.json")


@pytest.mark.spec("reliability:PM45")
@pytest.mark.parametrize(
    "match", [r'{"command": ["git", "\ud800"]}', '{"call": {"is": "x", "input": {"a": NaN}}}', '{"values": {"is": "x", "values": {"a": [NaN]}}}']
)  # fmt: skip
def test_rule_with_a_value_outside_json_is_refused(tmp_path, match):
    (tmp_path / "p.json").write_text(f'{{"rules": [{{"decision": "deny", "match": {match}}}]}}')

    with pytest.raises(DefinitionError, match=r"the policy file '.*p\.json': rule 1: "):
        Policy.load(tmp_path / "p.json")


def test_rules_are_listed_replaced_and_removed_by_id():
    policy = Policy([Rule.allow_tool("a", id="one"), Rule.allow_tool("b", id="two")]).with_rules(
        Rule.deny_tool("a", id="one")
    )

    assert [("one", "deny"), ("two", "allow")] == [(r.id, r.decision) for r in policy.rules]
    assert ["two"] == [r.id for r in policy.without_rules("one").rules]
    with pytest.raises(DefinitionError, match="did you mean 'two'"):
        policy.without_rules("twoo")


# --- what is not what it seems --------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:PM43", "reliability:R7")
@pytest.mark.parametrize(
    "url",
    [
        "https://evil\u3002org/x", "https://\uff45vil.org", "https://evil.org./", "https:/evil.org", "https:evil.org", "evil.org/x",
        "https://ev%69l.org", "https://good.org@evil.org", "https://evil.org\\@good.org/", "HTTPS://EVIL.ORG", " https://evil.org",
        "ftp://evil.org/x", "https://evil.org:8443/x",
    ],
)  # fmt: skip
def test_a_denied_host_is_found_under_every_spelling(url):
    assert "deny" == decided(Policy([Rule.deny_domain("evil.org")], "bypass"), FETCHES, url=url)
    assert "deny" == decided(Policy([Rule.allow_domain("good.org")], "dont_ask"), FETCHES, url=url)


@given(st.lists(st.sampled_from(["..", ".", "", "a", "secrets", "SECRETS", "x"]), min_size=1, max_size=7))
def test_a_path_rule_judges_the_target_of_any_spelling(parts):
    path = "./" + "/".join(parts)
    led = posixpath.normpath(path).casefold()
    is_meant = led.startswith(("../", "secrets/")) or led in ("..", "secrets")

    asks = Policy([Rule.ask_for_path("secrets/**"), Rule.allow_tool("read_files")])
    denied = Policy([Rule.deny_path("secrets/**")], "bypass").check(request(READS, path=path))

    assert ("ask" if is_meant else "allow") == decided(asks, READS, path=path)
    assert is_meant == denied.why.endswith("a deny wins over everything")


@pytest.mark.spec("reliability:R7", "reliability:R8", "reliability:PM25")
def test_every_command_of_an_input_is_judged_even_unrunnable_ones():
    denied = Policy([Rule.deny_command("rm")], "bypass")
    allowed = Policy([Rule.allow_command("ls")], "dont_ask")

    for members in (
        {"argv": ["rm", "x"], "command": None}, {"argv": ["rm", "x"], "command": "ls"}, {"command": "rm x " + "y " * 1_500},
        {"command": "rm x\x00"}, {"command": ["rm", "\x00"]}, {"command": ["rm"] * 2_000},
    ):  # fmt: skip
        assert "deny" == decided(denied, RUNS, **members), members
        assert "deny" == decided(allowed, RUNS, **members), members
    assert "allow" == decided(allowed, RUNS, argv=["ls"], command=None)


# --- M1, M4: what a rule is made of, and its short builders ---------------------------------------------------------------


BUILDERS = {
    "tool": (("write_file",), WRITES, {}, READS, {}),
    "category": (("write",), WRITES, {}, READS, {}),
    "command": ((["git", "status"],), RUNS, {"command": "git status -s"}, RUNS, {"command": "git push"}),
    "path": (("docs/**",), WRITES, {"path": "docs/a"}, WRITES, {"path": "src/a"}),
    "domain": (("example.org",), FETCHES, {"url": "https://example.org/"}, FETCHES, {"url": "https://example.com/"}),
}


@pytest.mark.spec("requirements:M3")
@pytest.mark.parametrize("what", BUILDERS)
def test_rule_builders_decide_only_about_their_subject(what):
    arguments, tool, members, other, others = BUILDERS[what]
    made = [Rule.__dict__[f"allow_{what}"], Rule.__dict__[f"deny_{what}"], Rule.__dict__.get(f"ask_for_{what}")]
    rules = [make.__get__(None, Rule)(*arguments, id="mine", scope="user") for make in made if make is not None]

    for decision, rule in zip(("allow", "deny", "ask"), rules, strict=False):
        policy = Policy([rule], "dont_ask" if decision == "allow" else "bypass" if decision == "deny" else "default")
        assert (decision, "mine", "user") == (rule.decision, rule.id, str(rule.scope))
        assert decision == decided(policy, tool, **members)
        assert rule is not policy.check(request(other, **others)).rule
    if len(rules) > 1:
        told = made[1].__get__(None, Rule)(*arguments, "Not that.")
        assert "Not that." == Policy([told]).check(request(tool, **members)).message


@pytest.mark.spec("reliability:PM35")
def test_plan_mode_allows_only_tools_annotated_as_read_only():
    says, silent = ToolSpec("a", annotations=ToolAnnotations(read_only=True)), ToolSpec("b", category="read")

    assert ["allow", "deny"] == [decided(Policy(mode="plan"), tool) for tool in (says, silent)]


# --- what is kept for good, by several processes ------------------------------------------------------------------------


def keeper(path, worker, count):
    """
    Return the process that keeps rules one after the other, and says so after each.
    """
    script = (
        "import sys\n"
        "from stepengine.permissions import PolicyFile\n"
        "file = PolicyFile(sys.argv[1])\n"
        "for n in range(int(sys.argv[3])):\n"
        "    name = f'{sys.argv[2]}-{n}'\n"
        "    file.add_rule({'id': name, 'decision': 'allow', 'match': {'call': {'is': name, 'agent': 'a'}}})\n"
        "    print(name, flush=True)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", script, str(path), worker, str(count)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.deep
@pytest.mark.spec("requirements:M11", "requirements:M12")
def test_concurrent_processes_and_a_kill_lose_no_remembered_rule(tmp_path):
    path = tmp_path / "policy.json"
    Policy([Rule.allow_tool("get")]).save(path)
    workers = [keeper(path, name, 60) for name in ("a", "b")]
    said = set()
    killed = keeper(path, "k", 10_000)
    for _ in range(25):
        said.add(killed.stdout.readline().strip())
    killed.kill()
    said |= set(killed.communicate()[0].split())
    for worker in workers:
        said |= set(worker.communicate(timeout=60)[0].split())

    kept = {rule.id for rule in Policy.load(path).remembered}
    assert said <= kept
    assert len(kept - said) <= 1  # one may have been kept by a process that could not say so any more
    assert 120 == len({name for name in kept if name[0] in "ab"})
    assert (Rule.allow_tool("get"),) == Policy.load(path).rules
    assert oct(0o644 & ~0o022) == oct(path.stat().st_mode & 0o777)


def test_remembered_rules_of_a_policy_file_are_validated(tmp_path):
    path = tmp_path / "policy.json"
    for kept, said in (
        ({}, "remembered is not a list"),
        ([{"decision": "allow"}], "remembered 1: match"),
        ([{"id": "x", "decision": "allow", "match": {"call": {"is": "a", "path": "b"}}}], "did you mean 'paths'"),
        ([{"id": "x", "decision": "allow", "match": {"call": {"is": "a", "paths": "b"}}}], "not a list of words"),
        ([{"id": "x", "decision": "allow", "match": {"call": {"is": "a", "input": "b"}}}], "not an object"),
        ([{"id": "x", "decision": "allow", "match": {"all": True}}] * 2, "two rules of one policy have the id 'x'"),
    ):
        path.write_text(json.dumps({"remembered": kept}))
        with pytest.raises(DefinitionError, match=said):
            PolicyFile(path)


CALLS = st.builds(
    Call,
    st.sampled_from(["a", "b"]),
    st.none() | st.just({"x": 1}),
    agent=st.none() | st.sampled_from(["lead", "other"]),
    paths=st.none() | st.lists(st.sampled_from(["p", "/p", "p/q"]), min_size=1),
    hosts=st.none() | st.just(["example.org"]),
    prefix=st.none() | st.sampled_from([["ls"], ["git", "log"]]),
    origins=st.none() | st.just(["POST https://example.org:8443"]),
    any_input=st.booleans(),
)


@pytest.mark.spec("requirements:M12")
@given(st.lists(CALLS, max_size=4, unique_by=str))
def test_remembered_calls_round_trip_through_json(calls):
    policy = Policy(remembered=[Rule("allow", call) for call in calls])

    assert policy == Policy.from_json(json.loads(json.dumps(policy.to_json())))


SITE = {"url": "https://api.example.org/a", "method": "get"}
MOVED = {"path": "a/b", "destination": "c", "content": "x"}


@pytest.mark.spec("requirements:X71")
@pytest.mark.parametrize(
    ("category", "seen", "changed", "is_same"),
    [
        ("network", SITE, {"url": "https://API.example.org:443/b?c=d", "method": "GET"}, True),
        ("network", SITE, {"url": "https://api.example.org:8443/a"}, False),
        ("network", SITE, {"method": "DELETE"}, False),
        ("network", {"endpoint": "https://[2001:db8::1]/a"}, {"endpoint": "https://[2001:db8::1]:443/b"}, True),
        ("network", {"endpoint": "https://[2001:db8::1]/a"}, {"endpoint": "https://[2001:db8::1]:444/b"}, False),
        ("write", MOVED, {"content": "y", "path": "./a/b"}, True),
        ("write", MOVED, {"destination": "d"}, False),
        ("mcp", MOVED, {"content": "y"}, False),
        ("", SITE, {"url": "https://api.example.org/b"}, False),
    ],
)
def test_a_remembered_permission_covers_only_the_seen_target(category, seen, changed, is_same):
    spec = ToolSpec("some", category=category)
    call = Call.from_request(request(spec, **seen))

    assert call.matches(request(spec, **seen), "allow")
    assert is_same == call.matches(request(spec, **seen | changed), "allow")
    assert is_same == (call == Call.from_request(request(spec, **seen | changed)))


WORDS = st.lists(st.sampled_from(["--oneline", "-5", "src", "a b", "--output=x", "-p", "--", ";", "/x"]), max_size=5)


@pytest.mark.spec("requirements:X71")
@given(WORDS, WORDS)
def test_a_widened_command_covers_known_options_and_no_script(seen, other):
    sh = ToolSpec("sh", category="execute")
    *widened, last = Call.list_broader_matchers(request(sh, command=["git", "log", *seen]))

    def is_known(words):
        behind = words[words.index("--") + 1 :] if "--" in words else []
        return not {"--output=x", "/x"} & set(words) and not any(word.startswith("-") for word in behind)

    assert Call("sh", agent="lead", any_input=True) == last
    assert [("git", "log")] * is_known(seen) == [call.prefix for call in widened]
    for call in widened:
        assert is_known(other) == call.matches(request(sh, command=["git", "log", *other]), "allow")
        assert not call.matches(request(sh, command=f"git log {shlex.join(other)}; true"), "allow")
        assert not call.matches(request(sh, command=["git", "log"], cwd="elsewhere"), "allow")
