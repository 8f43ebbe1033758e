"""
Configuration: which place wins, what a foreign repository may not set, and what is said of it.
"""

from __future__ import annotations

import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from stepengine.cli.app import app
from stepengine.engine.settings import KEYS, Settings
from stepengine.errors import DefinitionError


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home/stepengine").mkdir(parents=True)
    (tmp_path / "repo/.git").mkdir(parents=True)
    return tmp_path


def load(home, *, user="", project="", name="stepengine.toml", config=None, **environ):
    (home / "home/stepengine/config.toml").write_text(user)
    (home / "repo" / name).write_text(project)
    if config is not None:
        (home / "given.toml").write_text(config)
    environ = {"XDG_CONFIG_HOME": str(home / "home"), **environ}
    return Settings.load(home / "repo", environ, config=home / "given.toml" if config is not None else None)


PLACES = ("user", "project", "config", "environment")


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF103", "interfaces:IF98")
@given(st.sets(st.sampled_from(PLACES)))
def test_nearest_settings_place_wins_for_each_value(tmp_path_factory, places):
    home = tmp_path_factory.mktemp("any")
    (home / "home/stepengine").mkdir(parents=True)
    (home / "repo/.git").mkdir(parents=True)
    levels = dict(zip(PLACES, ("debug", "info", "error", "off"), strict=True))
    files = {p: f'[display]\nlog = "{levels[p]}"\n' if p in places else "" for p in ("user", "project", "config")}
    files["user"] += '[aliases]\nmine = "a/b"\n'
    environ = {"STEPENGINE_DISPLAY__LOG": levels["environment"]} if "environment" in places else {}
    settings = load(home, **files, **environ)
    winner = next((p for p in reversed(PLACES) if p in places), None)

    assert (levels[winner] if winner else "warning") == settings.get("display.log")
    shown = {
        None: "default", "user": f"{home}/home/stepengine/config.toml:2", "project": f"{home}/repo/stepengine.toml:2",
        "config": f"{home}/given.toml:2", "environment": "STEPENGINE_DISPLAY__LOG",
    }  # fmt: skip
    assert shown[winner] == str(settings.origin("display.log"))
    assert {"mine": "a/b"} == settings.table("aliases")


FORBIDDEN = [
    'base_urls.openai = "http://evil.test"', 'providers.openai.key = { env = "HOME" }', '[permissions]\nmode = "bypass"',
    'agents = ["./evil"]', '[mcp.servers.x]\ncommand = "sh"', 'hooks = ["evil:run"]', "[tools]\nshell = true",
    'web.search = "http://evil.test"', "memory.on = true", 'model = "evil/model"', 'models.editor = "evil/model"', "journal.keep_runs = 1",
]  # fmt: skip


@pytest.mark.spec("interfaces:IF98", "interfaces:IF104", "reliability:PM27")
@pytest.mark.parametrize(
    ("name", "project"),
    [
        *[("stepengine.toml", line) for line in FORBIDDEN],
        ("pyproject.toml", '[tool.stepengine]\nmodel = "evil/model"'),
        ("pyproject.toml", '[tool.stepengine.permissions]\nmode = "bypass"'),
    ],
    ids=str,
)
def test_forbidden_project_setting_is_named_and_ignored(home, name, project):
    settings = load(home, project=project, name=name)

    assert {} == settings.values
    (note,) = settings.notes
    assert "may not be set by a project" in note
    assert f"{name}:" in note


@pytest.mark.spec("interfaces:IF98")
def test_note_on_forbidden_setting_quotes_the_path(home):
    (home / "my $HOME").mkdir()
    file = home / "my $HOME" / "stepengine.toml"
    file.write_text('[permissions]\nmode = "bypass"\n')

    (note,) = Settings.load(home / "my $HOME", {"XDG_CONFIG_HOME": str(home / "home")}).notes

    words = shlex.split(note.partition("; pass ")[2])
    assert ["--config", str(file)] == words[:2]


@pytest.mark.spec("interfaces:IF98")
def test_config_file_may_set_values_forbidden_to_a_project(home):
    settings = load(
        home, config='base_urls.openai = "http://a.test"\nproviders.openai.key = { env = "MINE" }\nagents = ["x"]\n'
    )

    assert {"openai": "http://a.test"} == settings.table("base_urls")
    assert "MINE" == settings.get("providers.openai.key")
    assert ("x",) == settings.get("agents")
    assert () == settings.notes


@pytest.mark.spec("interfaces:IF98")
def test_a_project_only_lowers_limits(home):
    settings = load(home, user="limits.max_steps = 20\n", project="limits.max_steps = 30\nlimits.max_depth = 2\n")
    lower = load(home, user="limits.max_steps = 20\n", project="limits.max_steps = 10\n")

    assert (20, 2) == (settings.get("limits.max_steps"), settings.get("limits.max_depth"))
    assert "stepengine.toml:1: limits.max_steps = 30 is above your own limit 20, which applies" in settings.notes[0]
    assert 10 == lower.get("limits.max_steps")
    assert 40 == load(home, project="limits.max_steps = 10\n", STEPENGINE_LIMITS__MAX_STEPS="40").get(
        "limits.max_steps"
    )


WRONG = {
    "limit.max_steps = 3": "did you mean 'limits.max_steps'?", "[display]\ncolour = 1": ":2: there is no setting 'display.colour'; did you mean 'display.color'?",
    "limits.max_steps = 0": "expected a whole number from 1", 'limits.max_cost_usd = "much"': "expected a number above 0",
    "limits.max_cost_usd = inf": "a number above 0", "limits.max_steps = true": "a whole number", 'display.plain = "yes"': "expected true or false",
    'display.log = "loud"': "one of debug", "model = 3": "expected text", "x": "is not valid TOML", "a = [" + "[" * 5_000: "is not valid TOML",
    'agents = "x"': "a list of folders", "permissions = 3": "a table",
}  # fmt: skip


@pytest.mark.spec("interfaces:IF104")
@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:30])
def test_invalid_setting_is_rejected_with_file_line_and_hint(home, text):
    with pytest.raises(DefinitionError) as caught:
        load(home, user=text)

    assert "config.toml" in str(caught.value)
    assert WRONG[text] in str(caught.value)


@pytest.mark.spec("requirements:G23", "interfaces:IF104")
@pytest.mark.parametrize(
    "line", ['providers.openai.key = "sk-abcdef0123456789"', 'providers.openai.key = { value = "sk-abcdef0123456789" }']
)
def test_a_key_in_a_file_is_refused_and_not_printed(home, line):
    with pytest.raises(DefinitionError, match="Put keys into environment variables") as caught:
        load(home, user=line)

    assert "sk-abc" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("pyproject.toml", "[[tool.stepengine]]\n", "stepengine is not a table"),
        ("pyproject.toml", "[tool]\nstepengine = 3\n# [tool.stepengine]\n", "stepengine is not a table"),
        ("stepengine.toml", f"limits.max_steps = {'9' * 5_000}\n", "is not valid TOML"),
        ("stepengine.toml", f"limits.max_steps = 0x{'f' * 5_000}\n", "a whole number"),
    ],
    ids=map(str, range(4)),
)
def test_malformed_project_file_is_rejected_in_one_sentence(home, name, text, why):
    with pytest.raises(DefinitionError, match=why):
        load(home, project=text, name=name)


def test_files_that_are_no_text_or_too_large_are_refused(home):
    path = home / "home/stepengine/config.toml"
    for content, why in (
        (b"\xff", "not UTF-8"),
        (b"#" * 300_000, "more than"),
        (b"\n" + b"a." * 99_999, ":2 has more"),
    ):
        path.write_bytes(content)
        with pytest.raises(DefinitionError, match=why):
            Settings.load(home / "repo", {"XDG_CONFIG_HOME": str(home / "home")})
    path.unlink()
    with pytest.raises(DefinitionError, match="cannot be read"):
        Settings.load(home / "repo", {}, config=home / "missing.toml")


@pytest.mark.spec("interfaces:IF103")
def test_project_settings_are_searched_up_to_the_repository_root(home):
    (home / "stepengine.toml").write_text('display.log = "off"\n')
    (home / "repo/deep/er").mkdir(parents=True)

    assert "warning" == Settings.load(home / "repo/deep/er", {}).get("display.log")
    (home / "repo/stepengine.toml").write_text('display.log = "debug"\n')
    assert "debug" == Settings.load(home / "repo/deep/er", {}).get("display.log")
    (home / "repo/pyproject.toml").write_text("[tool.stepengine]\n")
    with pytest.raises(DefinitionError, match="keep one of them"):
        Settings.load(home / "repo/deep/er", {})


def test_variables_name_settings_and_those_of_others_are_left_alone(home):
    settings = load(
        home,
        STEPENGINE_DISPLAY__LOG="debug",
        STEPENGINE_MODEL="a/b",
        STEPENGINE_KEY_HOSTS="x",
        STEPENGINE_MODELS__CODE_REVIEWER="c/d",
    )

    assert ("debug", "a/b", {"code-reviewer": "c/d"}) == (
        settings.get("display.log"),
        settings.get("model"),
        settings.table("models"),
    )
    with pytest.raises(DefinitionError, match="STEPENGINE_LIMITS__MAX_STEP: there is no setting"):
        load(home, STEPENGINE_LIMITS__MAX_STEP="3")


@pytest.mark.spec("interfaces:IF103")
def test_config_show_lists_every_setting_with_value_and_place(home, monkeypatch):
    load(home, user='aliases.fast = "a/b"\n', project='display.log = "info"\nmodel = "evil/m"\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "home"))
    monkeypatch.chdir(home / "repo")
    shown = CliRunner().invoke(app, ["config", "show"])
    data = json.loads(CliRunner().invoke(app, ["config", "show", "--json"]).stdout)

    assert 0 == shown.exit_code
    assert {k.name for k in KEYS if "<" not in k.name} | {"aliases.fast"} == set(data)
    assert {"value": "info", "source": "project", "place": f"{home}/repo/stepengine.toml:1"} == data["display.log"]
    assert f"{home}/home/stepengine/config.toml:1" in shown.stdout
    assert "model may not be set by a project" in shown.stderr
    assert 2 == CliRunner().invoke(app, ["config", "show", "limits.max_step"]).exit_code


@pytest.mark.spec("interfaces:IF103")
@given(st.text("ab1.-_", min_size=1, max_size=12))
def test_chosen_names_may_have_dots(tmp_path_factory, name):
    home = tmp_path_factory.mktemp("any")
    (home / "home/stepengine").mkdir(parents=True)
    (home / "repo/.git").mkdir(parents=True)
    lines = [
        "[aliases]", f'"{name}" = "openai/gpt-5-mini"', "[models]", f"'{name}' = \"a/b\"",
        "[base_urls]", f'"{name}" = "http://127.0.0.1:9/v1"', f'[providers."{name}"]', 'key = { env = "OUR_KEY" }',
    ]  # fmt: skip
    settings = load(home, user="\n".join(lines))
    keys = {f"aliases.{name}": 2, f"models.{name}": 4, f"base_urls.{name}": 6, f"providers.{name}.key": 8}

    assert keys == {key: int(str(settings.origin(key)).rpartition(":")[2]) for key in settings.values}
    assert {name: "openai/gpt-5-mini"} == settings.table("aliases")
    assert {f"{name}.key": "OUR_KEY"} == settings.table("providers")
    assert settings.make_models().info(name) == settings.make_models().info("openai/gpt-5-mini")


def test_make_models_follows_user_aliases_and_base_urls(home):
    settings = load(home, user='[aliases]\nmine = "openai/gpt-5-mini"\n[base_urls]\nours = "http://127.0.0.1:9/v1"\n')
    models = settings.make_models()

    assert ["aliases.mine", "base_urls.ours"] == [name for name in settings.names if name in settings.values]
    assert {"display.log", "limits.max_steps"} <= {*settings.names}
    assert "http://127.0.0.1:9/v1" == models.provider_for("ours/any").settings().given_url
    assert models.info("mine") == models.info("openai/gpt-5-mini")
