"""
Agents of installed packages: how they are named, what is read before they are imported, and what is refused.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import AgentCall, AgentDefinition, Engine, Workspace, load_agent
from stepengine.engine import packages, trust
from stepengine.engine.packages import (
    FILE,
    FORMAT,
    find_published_agent,
    list_installed_agent_packages,
    make_declaration,
    read_declaration,
)
from stepengine.errors import DefinitionError
from stepengine.journal import MemoryJournal
from stepengine.testing import ScriptedModel, tool_call
from stepengine.tools.agent_tools import BUILT_IN
from stepengine.tools.makers import MAKERS, WORKSPACE_TOOLS

LEAD = """
from stepengine import AgentCall, AgentDefinition

def steps(ctx):
    child = yield from AgentCall({child!r}, prompt=ctx.prompt)
    return f"{name}({{child}})"

agent = AgentDefinition({name!r}, spawnable_agents=[{child!r}], handle_steps=steps)
"""
LEAF = """
from stepengine import AgentDefinition

def steps(ctx):
    return f"{who} {{ctx.prompt}}"
    yield

agent = AgentDefinition({name!r}, handle_steps=steps)
"""


def lead(name: str, child: str) -> str:
    return LEAD.format(name=name, child=child)


def leaf(name: str, who: str) -> str:
    return LEAF.format(name=name, who=who)


class Site:
    """
    A folder that Python looks through, with packages as pip leaves them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(
        self,
        name: str,
        modules: Mapping[str, str],
        agents: Mapping[str, Any] | None,
        *,
        publisher: str = "acme",
        version: str = "1.2.0",
        value: str = "",
        entries: str = "",
        declared: Mapping[str, Any] | None = None,
    ) -> Path:
        """
        Install a package; *agents* are declared, ``None`` writes no declaration.
        """
        module = name.replace("-", "_")
        code, info = self.folder / module, self.folder / f"{module}-{version}.dist-info"
        code.mkdir(exist_ok=True)
        info.mkdir()
        (code / "__init__.py").touch()
        for file, text in modules.items():
            (code / f"{file}.py").write_text(text)
        if agents is not None:
            (code / FILE).write_text(json.dumps({"format": FORMAT, "agents": agents, **(declared or {})}))
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = entries or f"{publisher} = {value or module}\n"
        (info / "entry_points.txt").write_text(f"[stepengine.agents]\n{lines}")
        importlib.invalidate_caches()
        return code


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = {*sys.modules}
    yield Site(folder)
    for name in {*sys.modules} - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


class Person:
    """
    Somebody at the command line, who agrees to what is named.
    """

    def __init__(self, *agreed: str) -> None:
        self.agreed, self.asked = agreed, list[trust.AccessRequest]()

    def allows(self, foreign: trust.UntrustedFolder) -> bool:
        return False

    def approves_access(self, request: trust.AccessRequest) -> bool:
        self.asked.append(request)
        return request.package in self.agreed

    def tell(self, message: str) -> None:
        pass


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("packages:PK1")
@pytest.mark.parametrize(
    ("modules", "value"),
    [
        ({"reviewer": leaf("reviewer", "r"), "helpers": "X = 1\n", "_notes": "raise OSError\n"}, "many"),
        ({"one": leaf("reviewer", "r")}, "many.one"),
        ({"one": leaf("reviewer", "r")}, "many.one:agent"),
        ({"one": leaf("reviewer", "r") + "\nagents = [agent]\ndel agent\n"}, "many.one:agents"),
    ],
)
def test_package_entry_names_a_folder_module_agent_or_list(site: Site, modules: dict[str, str], value: str) -> None:
    site.put("many", modules, {"reviewer": {}}, value=value)

    for wanted in ("acme/reviewer", "acme/reviewer@1.2"):
        assert "reviewer" == load_agent(wanted).id
    with Engine() as engine:
        assert "r Go" == engine.run_sync("acme/reviewer", "Go").unwrap()


@pytest.mark.spec("packages:PK3")
def test_package_version_is_compared_by_pep_440_and_mismatch_reported(site: Site) -> None:
    site.put("acme-agents", {"reviewer": leaf("reviewer", "r")}, {"reviewer": {}})

    assert load_agent("acme/reviewer@1.2") is load_agent("acme/reviewer@1.2.0") is load_agent("acme/reviewer")
    with pytest.raises(
        DefinitionError, match=r"is not installed, but acme-agents 1\.2\.0 is; install acme-agents==1\.3"
    ):
        load_agent("acme/reviewer@1.3")
    with pytest.raises(DefinitionError, match="'latest' in 'acme/reviewer@latest' is not a version"):
        load_agent("acme/reviewer@latest")
    with pytest.raises(DefinitionError, match=r"is not installed, but acme-agents 1\.2\.0 is; install acme-agents==2"):
        Engine([AgentDefinition("lead", spawnable_agents=["acme/reviewer@2"], tools=["spawn_agents"])])


@pytest.mark.spec("packages:PK4")
def test_two_packages_with_one_id_are_reported_and_neither_used(site: Site) -> None:
    site.put("acme-one", {"a": leaf("reviewer", "one")}, {"reviewer": {}})
    site.put(
        "acme-two",
        {"a": leaf("reviewer", "two"), "b": leaf("editor", "e")},
        {"reviewer": {}, "editor": {}},
        version="2.0",
    )

    with pytest.raises(
        DefinitionError, match=r"acme-one 1\.2\.0 and acme-two 2\.0, so it is ambiguous; uninstall one of them"
    ):
        load_agent("acme/reviewer")
    assert "editor" == load_agent("acme/editor").id


@pytest.mark.spec("programs:PG40")
@pytest.mark.parametrize("agent_id", ["acme/reviewer", "acme/reviewer@1.2.0"])
def test_sandboxed_load_never_imports_a_package(site: Site, agent_id: str) -> None:
    site.put("acme-agents", {"reviewer": leaf("reviewer", "r")}, {"reviewer": {}})

    with pytest.raises(
        DefinitionError, match=r"name an agent that runs in the sandbox by its file, such as './agents/reviewer.py'"
    ):
        load_agent(agent_id, sandboxed=True)

    assert "acme_agents" not in sys.modules


@pytest.mark.spec("packages:PK4")
def test_package_agent_replaces_no_bundled_one_and_fills_missing_ids(site: Site) -> None:
    site.put("acme-agents", {"a": leaf("editor", "mine"), "b": leaf("unheard", "u")}, {"editor": {}, "unheard": {}})

    assert load_agent("editor") is not load_agent("acme/editor")
    with pytest.raises(DefinitionError, match="An installed package has acme/unheard: use that id"):
        load_agent("unheard")


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("packages:PK2", "packages:PK4")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"agents": None}, f"has no '{FILE}'; run `stepengine agents check --write`"),
        ({"version": "soon"}, "its version is 'soon', which is not a version"),
        ({"publisher": "stepengine"}, "the publisher 'stepengine' is reserved for bundled agents"),
        (
            {"publisher": "Acme Inc"},
            "its publisher must be lower-case letters, digits and single hyphens, not 'Acme Inc'",
        ),
        ({"publisher": "a" * 200}, "its publisher must be lower-case letters, digits and single hyphens, not 'aaa"),
        ({"value": "there is none!"}, "must be a module or 'module:attribute', not 'there is none!'"),
        ({"value": "nowhere_at_all"}, "there is no module 'nowhere_at_all'"),
        ({"value": "json"}, "the folder of 'json' has no 'stepengine-agents.json'"),
        ({"entries": "acme = odd\nother = odd\n"}, "it has several entries"),
        ({"agents": {}}, "agents must be an object with 1 to 200 members"),
        ({"agents": {f"a{n}": {} for n in range(201)}}, "agents must be an object with 1 to 200 members"),
        ({"agents": {"Reviewer": {}}}, "agents.Reviewer is not an id"),
        ({"agents": {"reviewer": []}}, "agents.reviewer must be an object, not []"),
        ({"agents": {"reviewer": {"grants": ["all"]}}}, "has ['grants'], which is unknown; valid members: "),
        ({"agents": {"reviewer": {"tools": {"x": 1}}}}, "should hold at most 500 printable texts"),
        ({"agents": {"reviewer": {"tools": {"\x1b[2J": "read"}}}}, "should hold at most 500 printable texts"),
        ({"agents": {"reviewer": {"spawns": ["x" * 301]}}}, "should hold at most 500 printable texts"),
        ({"agents": {"reviewer": {"description": "x" * 2_001}}}, "at most 2,000 characters"),
        ({"declared": {"hosts": "example.com"}}, "hosts should hold"),
        (
            {"declared": {"format": "stepengine.agents/2"}},
            "its format must be 'stepengine.agents/1', not 'stepengine.agents/2'",
        ),
        ({"declared": {"reads": ["x" * 300] * 900}}, "has more than 262,144 bytes"),
    ],
)
def test_unusable_package_is_reported_and_affects_no_other(site: Site, options: dict[str, Any], said: str) -> None:
    site.put("fine", {"a": leaf("reviewer", "r")}, {"reviewer": {}}, publisher="fine")
    site.put("odd", {"a": "raise SystemExit('imported')\n"}, **{"agents": {"reviewer": {}}, **options})

    found = list_installed_agent_packages()

    (problem,) = {*found.problems.values()}
    assert problem.startswith("the agents of 'odd' cannot be used: ")
    assert said in problem
    assert ["fine"] == [package.name for package in found.packages]
    assert "reviewer" == load_agent("fine/reviewer").id
    if options.get("publisher") is None:
        with pytest.raises(DefinitionError, match="the agents of 'odd' cannot be used"):
            load_agent("acme/reviewer")


@pytest.mark.spec("packages:PK2")
def test_declaration_outside_its_package_is_not_used(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.put("acme-agents", {"a": leaf("reviewer", "r")}, {"reviewer": {}})
    other = tmp_path / "cwd" / "acme_agents"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    (other / FILE).write_text(json.dumps({"format": FORMAT, "agents": {"reviewer": {}}}))
    monkeypatch.syspath_prepend(str(other.parent))

    assert not list_installed_agent_packages().packages
    assert "the folder of 'acme_agents' has no 'stepengine-agents.json'" in "".join(
        list_installed_agent_packages().problems.values()
    )


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["format", "agents", "reads", "tools", "a"]), inner, max_size=4)
        ),
    ).map(lambda value: json.dumps(value).encode())
)
@pytest.mark.spec("packages:PK2")
def test_any_package_declaration_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / FILE
    file.write_bytes(content)

    with contextlib.suppress(DefinitionError):
        assert {"agents", "reads", "writes", "hosts"} == read_declaration(file).keys()


# --- agreement --------------------------------------------------------------------------------------------------------


@pytest.mark.spec("packages:PK6")
def test_at_the_command_line_nothing_is_imported_before_somebody_agreed(site: Site) -> None:
    site.put(
        "acme-agents",
        {"a": leaf("reviewer", "r")},
        {"reviewer": {"spawns": ["other/x"]}},
        declared={"writes": ["."], "hosts": ["h.example"]},
    )
    person = Person()
    token = trust.GATE.set(person)
    try:
        with pytest.raises(DefinitionError, match="was not loaded: no one approved"):
            load_agent("acme/reviewer")
        assert not [name for name in sys.modules if name.startswith("acme_agents")]
        (request,) = person.asked
        assert ("agent other/x", "writes .", "host h.example") == request.asks
    finally:
        trust.GATE.reset(token)


@pytest.mark.spec("packages:PK6")
def test_package_consent_holds_for_versions_that_want_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPENGINE_STATE_DIR", str(tmp_path / "state"))
    request = trust.AccessRequest("Acme_Agents", "1.0", "acme", ("tool a: read", "host b"))
    assert trust.find_unapproved_access(request) is None

    trust.approve_access(request)

    assert () == trust.find_unapproved_access(request)
    assert () == trust.find_unapproved_access(trust.AccessRequest("acme-agents", "2.0", "acme", ("host b",)))
    assert ("host c",) == trust.find_unapproved_access(
        trust.AccessRequest("acme-agents", "2.0", "acme", ("host c", "host b"))
    )
    assert trust.find_unapproved_access(trust.AccessRequest("acme-agents", "2.0", "other", ("host b",))) is None
    assert (True, False) == (trust.withdraw_approval("acme.agents"), trust.withdraw_approval("acme.agents"))
    assert trust.find_unapproved_access(request) is None


@pytest.mark.spec("packages:PK6")
def test_consent_file_writable_by_others_counts_as_no_consent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPENGINE_STATE_DIR", str(tmp_path / "state"))
    request = trust.AccessRequest("acme-agents", "1.0", "acme", ())
    trust.approve_access(request)
    (tmp_path / "state" / "agreed").chmod(0o777)

    assert trust.find_unapproved_access(request) is None
    with pytest.raises(DefinitionError, match="STEPENGINE_STATE_DIR"):
        trust.approve_access(request)


TOOLED = """
from stepengine import AgentDefinition, tool

@tool(category="network")
def fetch(url: str) -> str:
    '''Fetch a page.'''
    return url

def steps(ctx):
    yield from fetch(url="")

agent = AgentDefinition("reviewer", tools=[fetch], spawnable_agents=["other/x"], handle_steps=steps)
"""


@pytest.mark.spec("packages:PK7")
@pytest.mark.parametrize(
    ("modules", "agents", "said"),
    [
        (
            {"a": TOOLED},
            {"reviewer": {"spawns": ["other/x"]}},
            r"the tool 'fetch' \(network\) of its agent 'reviewer' is not declared",
        ),
        ({"a": TOOLED}, {"reviewer": {"tools": {"fetch": "read"}, "spawns": ["other/x"]}}, "is declared as 'read'"),
        ({"a": TOOLED}, {"reviewer": {"tools": {"fetch": "network"}}}, "may spawn 'other/x', which is not declared"),
        (
            {"a": leaf("reviewer", "r"), "b": leaf("second", "s")},
            {"reviewer": {}},
            "its agent 'second' is not declared",
        ),
        ({"a": leaf("other", "o")}, {"reviewer": {}}, "its code has no agent 'reviewer'"),
        (
            {"a": "import nothing_of_that_name\n"},
            {"reviewer": {}},
            r"importing 'odd.a' failed with ModuleNotFoundError.*\(.*a\.py:1\)",
        ),
        ({"a": "raise SystemExit(3)\n"}, {"reviewer": {}}, "importing 'odd.a' failed with SystemExit: 3"),
        ({"a": "raise ValueError('a' * 900)\n"}, {"reviewer": {}}, r"failed with ValueError: a{550,559}(?!a)"),
        (
            {"a": leaf("reviewer", "r"), "b": leaf("reviewer", "s")},
            {"reviewer": {}},
            "has two agents with the id 'reviewer'",
        ),
    ],
)
def test_package_code_that_differs_from_its_declaration_is_not_used(
    site: Site, modules: dict[str, str], agents: dict[str, Any], said: str
) -> None:
    site.put("odd", modules, agents)

    with pytest.raises(DefinitionError, match=said):
        load_agent("acme/reviewer")


def test_every_bundled_tool_is_declared_with_its_own_category(tmp_path: Path) -> None:
    from stepengine.tools.bundled import FileChangeHook, change_hook_tools, file_tools, memory_tools, skill_tools
    from stepengine.tools.bundled.bundled import rootless_tools, workspace_tools

    tools = [
        *workspace_tools(Workspace(tmp_path, write=True, shell=True)),
        *rootless_tools("http://localhost:8080"),
        *file_tools(tmp_path, write=True, delete=True),
        *change_hook_tools(tmp_path, [FileChangeHook("check", ["true"])]),
        *skill_tools(tmp_path),
        *memory_tools(),
    ]
    found = {one.spec.name: one.spec.category for one in tools}
    declared = make_declaration(AgentDefinition("one", tools=[*found])).tools

    assert found == declared
    assert {*MAKERS, *WORKSPACE_TOOLS} - {*BUILT_IN} == {*found}


@pytest.mark.spec("packages:PK7")
def test_declaration_lists_the_tools_of_spawnable_agents() -> None:
    leaf = AgentDefinition("leaf", tools=["web_search"])
    first = AgentDefinition("first", tools=["read_files", "spawn_agents"], spawnable_agents=[leaf])
    second = AgentDefinition("second", tools=["glob", "spawn_agents"], spawnable_agents=[leaf, "acme/other"])
    declared = make_declaration(AgentDefinition("root", tools=["spawn_agents"], spawnable_agents=[first, second]))

    assert {"web_search", "read_files", "glob"} <= {*declared.tools}
    assert ("acme/other",) == declared.spawns


# --- a space of its own -----------------------------------------------------------------------------------------------


@pytest.mark.spec("packages:PK5")
def test_agents_of_a_package_resolve_each_other_before_the_users(site: Site) -> None:
    site.put(
        "acme-agents",
        {"a": lead("lead", "helper"), "b": leaf("helper", "acme's")},
        {"lead": {"spawns": ["helper"]}, "helper": {}},
    )
    site.put(
        "other-agents",
        {"a": lead("lead", "helper"), "b": leaf("helper", "other's")},
        {"lead": {"spawns": ["helper"]}, "helper": {}},
        publisher="other",
    )

    def steps(ctx: Any) -> Any:
        found = []
        for wanted in ("acme/lead", "other/lead", "helper"):
            child = yield from AgentCall(wanted, prompt="Go")
            found.append(child)
        return found

    def mine(ctx: Any) -> Any:
        return "mine"
        yield

    helper = AgentDefinition("helper", handle_steps=mine)
    boss = AgentDefinition("boss", spawnable_agents=["acme/lead", "other/lead", helper], handle_steps=steps)
    with Engine([boss]) as engine:
        assert ["lead(acme's Go)", "lead(other's Go)", "mine"] == engine.run_sync("boss", "").unwrap()


@pytest.mark.spec("packages:PK5")
def test_foreign_agent_resolves_its_names_in_its_own_package(
    site: Site,
) -> None:
    acme = {"a": BOTH, "b": leaf("helper", "acme's")}
    site.put("acme-agents", acme, {"both": {"spawns": ["helper", "other/lead"]}, "helper": {}})
    theirs = {"a": lead("lead", "helper"), "b": leaf("helper", "other's")}
    site.put("other-agents", theirs, {"lead": {"spawns": ["helper"]}, "helper": {}}, publisher="other")
    site.put("third-agents", {"a": HELD}, {"lead": {}}, publisher="third")

    def mine(ctx: Any) -> Any:
        return "mine"
        yield

    helper = AgentDefinition("helper", handle_steps=mine)
    with Engine([helper, load_agent("acme/both"), load_agent("third/lead")]) as engine:
        assert "acme's Go, lead(other's Go)" == engine.run_sync("acme/both", "Go").unwrap()
        assert "held" == engine.run_sync("third/lead", "Go").unwrap()
        assert "mine" == engine.run_sync("helper", "Go").unwrap()


PLAIN = """
from stepengine import AgentDefinition

agent = AgentDefinition({name!r}, model="{model}/m", tools={tools!r}, spawnable_agents={spawns!r})
"""


def plain(name: str, model: str, tools: tuple[str, ...] = (), spawns: tuple[str, ...] = ()) -> str:
    return PLAIN.format(name=name, model=model, tools=[*tools], spawns=[*spawns])


@pytest.mark.spec("packages:PK5")
@pytest.mark.parametrize("wanted", ["editor", "acme/editor"])
@pytest.mark.parametrize("how", ["by id", "as an object", "by an agent of its user"])
def test_package_agents_named_like_bundled_ones_take_precedence(site: Site, wanted: str, how: str) -> None:
    """The engine has none of the tools that the bundled editor wants."""
    site.put(
        "acme-agents",
        {"a": lead("boss", wanted), "b": leaf("editor", "acme's")},
        {"boss": {"spawns": [wanted]}, "editor": {}},
    )
    boss = AgentDefinition("mine", spawnable_agents=["acme/editor", "acme/boss"], handle_steps=_calls_boss)
    agents = {"by id": [], "as an object": [load_agent("acme/boss")], "by an agent of its user": [boss]}[how]
    with Engine(agents) as engine:
        ran = engine.run_sync("mine" if how == "by an agent of its user" else "acme/boss", "Go").unwrap()

        assert "boss(acme's Go)" == ran
        assert "read_files" not in {name for agent in engine.agents for name in agent.tool_names}


def _calls_boss(ctx: Any) -> Any:
    return (yield from AgentCall("acme/boss", prompt=ctx.prompt))


@pytest.mark.spec("packages:PK5", "generator-contract:L41")
@pytest.mark.parametrize("wanted", ["clerk", "acme/clerk", "acme/billing"])
def test_next_message_reaches_the_agent_with_the_conversation(site: Site, wanted: str) -> None:
    """Billing hands on to the clerk of its package; it is not the clerk of the engine, though it is called so."""
    site.put(
        "acme-agents",
        {"a": plain("clerk", "acme"), "b": plain("billing", "billing", ("hand_off",), ("clerk",))},
        {"clerk": {}, "billing": {"tools": {"hand_off": "control"}, "spawns": ["clerk"]}},
    )
    own = AgentDefinition("clerk", model="own/m")
    spawns = [own, "acme/clerk" if wanted == "clerk" else wanted]
    desk = AgentDefinition("desk", model="desk/m", tools=["hand_off"], spawnable_agents=spawns)
    models = {
        "desk": ScriptedModel([tool_call("hand_off", {"agent": wanted})]),
        "billing": ScriptedModel([tool_call("hand_off", {"agent": "clerk"})]),
        "own": ScriptedModel(["own", "own again"]),
        "acme": ScriptedModel(["acme", "acme again"]),
    }
    with Engine([desk], models=models) as engine:
        first = engine.run_sync(desk, "One")
        second = engine.run_sync(desk, "Two", previous=first.state)

    assert ("own" if wanted == "clerk" else "acme") == first.unwrap()
    assert f"{first.output} again" == second.unwrap()


@pytest.mark.spec("packages:PK5", "generator-contract:L41")
def test_handed_over_package_agent_keeps_the_model_without_its_own(site: Site) -> None:
    clerk = PLAIN.replace('model="{model}/m", ', "").format(name="clerk", tools=[], spawns=[])
    site.put(
        "acme-agents",
        {"a": clerk, "b": plain("billing", "billing", ("hand_off",), ("clerk",))},
        {"clerk": {}, "billing": {"tools": {"hand_off": "control"}, "spawns": ["clerk"]}},
    )
    desk = AgentDefinition("desk", model="desk/m", tools=["hand_off"], spawnable_agents=["acme/billing"])
    models = {
        "desk": ScriptedModel([tool_call("hand_off", {"agent": "acme/billing"})]),
        "billing": ScriptedModel([tool_call("hand_off", {"agent": "clerk"}), "one", "two"]),
    }
    with Engine([desk], models=models) as engine:
        first = engine.run_sync(desk, "One")
        second = engine.run_sync(desk, "Two", previous=first.state)

    assert ["one", "two"] == [first.unwrap(), second.unwrap()]


BOTH = """
from stepengine import AgentCall, AgentDefinition

def steps(ctx):
    mine = yield from AgentCall("helper", prompt=ctx.prompt)
    theirs = yield from AgentCall("other/lead", prompt=ctx.prompt)
    return f"{mine}, {theirs}"

agent = AgentDefinition("both", spawnable_agents=["helper", "other/lead"], handle_steps=steps)
"""
HELD = """
from stepengine import AgentCall, AgentDefinition

def inner(ctx):
    return "held"
    yield

def steps(ctx):
    return (yield from AgentCall("helper", prompt=ctx.prompt))

agent = AgentDefinition("lead", spawnable_agents=[AgentDefinition("helper", handle_steps=inner)], handle_steps=steps)
"""


@pytest.mark.spec("packages:PK5")
def test_circles_within_and_across_packages_are_fine(site: Site) -> None:
    site.put(
        "acme-agents",
        {"a": lead("one", "two"), "b": lead("two", "other/three")},
        {"one": {"spawns": ["two"]}, "two": {"spawns": ["other/three"]}},
    )
    back = (
        lead("three", "acme/one")
        .replace("child = yield from", "if len(ctx.prompt) > 2: return 'deep'\n    child = yield from")
        .replace("prompt=ctx.prompt", "prompt=ctx.prompt + '+'")
    )
    site.put("other-agents", {"a": back}, {"three": {"spawns": ["acme/one"]}}, publisher="other")

    with Engine([load_agent("acme/one")]) as engine:
        assert "one(two(three(one(two(deep)))))" == engine.run_sync("acme/one", "Go").unwrap()


@pytest.mark.spec("packages:PK5")
async def test_equal_ids_of_two_publishers_are_offered_under_full_names(site: Site) -> None:
    for publisher in ("acme", "other"):
        site.put(f"{publisher}-agents", {"a": leaf("helper", f"{publisher}'s")}, {"helper": {}}, publisher=publisher)
    from stepengine.testing import text, tool_call

    boss = AgentDefinition(
        "boss", model="test/any", tools=["spawn_agents"], spawnable_agents=["acme/helper", "other/helper"]
    )
    model = ScriptedModel([tool_call("other_helper", {"prompt": "Go"}), text("done")])
    async with Engine([boss], models=model) as engine:
        result = await engine.run("boss", "Start")

    first, second = model.calls
    assert {"acme_helper", "other_helper"} <= {one.name for one in first.tools}
    assert "- acme/helper" in first.messages[-1].text
    assert "other's Go" in second.messages[-1].text
    assert "done" == result.unwrap()


# --- journals ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("packages:PK9")
def test_journal_head_names_package_agents_and_replay_reports_other_versions(site: Site) -> None:
    code = site.put(
        "acme-agents",
        {"a": lead("lead", "helper"), "b": leaf("helper", "h"), "c": leaf("third", "t")},
        {"lead": {"spawns": ["helper"]}, "helper": {}, "third": {}},
    )
    journal = MemoryJournal()
    with Engine() as engine:
        assert "lead(h Go)" == engine.run_sync("acme/lead", "Go", journal=journal).unwrap()
    head = journal.history().head

    assert "acme/lead" == head.agent
    assert {"acme/helper": "acme-agents==1.2.0", "acme/lead": "acme-agents==1.2.0"} == head.packages

    # Later, in a process of its own, as it were: another version.
    (site.folder / "acme_agents-1.2.0.dist-info").rename(site.folder / "acme_agents-1.3.0.dist-info")
    info = site.folder / "acme_agents-1.3.0.dist-info" / "METADATA"
    info.write_text(info.read_text().replace("1.2.0", "1.3.0"))
    assert code.is_dir()
    with Engine() as engine:
        again = engine.replay_sync(journal)

    assert "lead(h Go)" == again.unwrap()
    said = [warning.partition(" was ")[2] for warning in again.warnings]
    assert [
        f"recorded with acme/{name} of acme-agents==1.2.0; acme-agents==1.3.0 is installed now"
        for name in ("helper", "lead")
    ] == said


def test_the_id_of_no_installed_package_is_none_of_ours() -> None:
    assert find_published_agent("nobody-at-all/reviewer@1.0") is None
    assert find_published_agent("reviewer") is None
    assert find_published_agent("a/b/c") is None
    assert packages.list_agent_package_versions() == {}
