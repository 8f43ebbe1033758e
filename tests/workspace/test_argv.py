"""The strict splitter: what it takes for an argument list, every shell would split into the same words, and do no more."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stepengine.errors import ToolError
from stepengine.workspace.argv import Script, command_text, parse_command, split_argv

SHELLS = [shell for shell in ("dash", "bash", "sh") if shutil.which(shell)]
NASTY = "ab =:~#-/.,%^@+A0_'\"\\ \t\n;&|<>$`(){}*?[]!é\uff1b\u00a0\u200b"
nasty_text = st.text(st.sampled_from(NASTY), max_size=12)
quoted_text = st.lists(
    st.one_of(
        st.text(st.sampled_from("abA=:~#-/.,%^@+0_é\\'\" \t"), max_size=5),
        st.text(st.sampled_from('ab;&|$`*\n\t\\ "é'), max_size=4).map(lambda t: f"'{t}'"),
        st.text(st.sampled_from("ab;&|'*~#\n\t \\é"), max_size=4).map(lambda t: f'"{t}"'),
    ),
    max_size=5,
).map("".join)  # fmt: skip


# --- what is a script -----------------------------------------------------------------------------------------------

SCRIPTS = {
    "chains": ["ls; rm -rf x", "ls && rm x", "ls | sh", "ls&"],
    "lines": ["ls\nrm x", "ls\rrm x", "ls \\\nrm", 'ls "a\\\nb"'],
    "substitution": ["echo $(rm x)", 'echo "`rm x`"', "cat <(rm x)", 'echo "$HOME"', "echo $'a'", 'echo "!1"', "echo {a,b}", "ls *", "ls ?", "ls [a]"],
    "redirection": ["echo a >> .git/hooks/pre-commit", "cat < /etc/passwd", "ls>x"],
    "assignment": ["FOO=1 git status", "A+=1 ls", "A=", " \tA=1 ls"],
    "many": ["git status " + "&& true " * 51 + "&& curl evil"],
    "reliability:PM12": ["ls ~", "echo a=~", "echo a:~/x", "echo ''~"],
    "invisible": ["ls\u00a0-la", "ls\u200b", "ls \x1b[2K", "ls \U000e0041", "ls\u2028rm", "ls\x0brm"],
    "reliability:PM24": ["ls -la #" + " " * 3_000 + "; rm x", "ls ''#x"],
    "unfinished": ["ls '", 'ls "', "ls \\"],
}  # fmt: skip


@pytest.mark.spec("reliability:PM01", "reliability:PM24", "generator-contract:D36")
@pytest.mark.parametrize(
    "command", [pytest.param(c, id=f"{row} {c[:30]!a}") for row, cs in SCRIPTS.items() for c in cs]
)
def test_text_that_a_shell_would_act_on_is_a_script(command: str) -> None:
    read = parse_command(command)

    assert isinstance(read, Script)
    assert command == read.text
    assert read.reason
    with pytest.raises(ValueError, match=r".+"):
        split_argv(command)


# --- what is an argument list ---------------------------------------------------------------------------------------

ARGUMENTS: list[Any] = [
    ("ls", ["ls"]),
    ("  ls \t -la  ", ["ls", "-la"]),
    ("echo 'ls' 'a;b'", ["echo", "ls", "a;b"]),
    ('rg "a|b"', ["rg", "a|b"]),
    ('git log --format="%h;%s"', ["git", "log", "--format=%h;%s"]),
    ("git show HEAD~1 a#b a=b", ["git", "show", "HEAD~1", "a#b", "a=b"]),
    ("echo '' \"\" a''b", ["echo", "", "", "ab"]),
    (r"echo a\ b \; \$HOME \\ \' \" \~", ["echo", "a b", ";", "$HOME", "\\", "'", '"', "~"]),
    (r'echo "\$5 \`x\` \" \\ \n"', ["echo", '$5 `x` " \\ \\n']),
    ("echo 'a\nb' \"c\nd\"", ["echo", "a\nb", "c\nd"]),
    ("echo '$(rm x)' '`' '!' '*'", ["echo", "$(rm x)", "`", "!", "*"]),
    ("echo é \uff1b", ["echo", "é", "\uff1b"]),
    ("l\u0455", ["l\u0455"]),
    ("eval ls", ["eval", "ls"]),
    ("cd / ", ["cd", "/"]),
    (". x", [".", "x"]),
]


@pytest.mark.spec("reliability:PM01", "reliability:PM06")
@pytest.mark.parametrize(("command", "words"), ARGUMENTS, ids=lambda value: ascii(value)[:40])
def test_plain_text_is_split_into_an_argument_list(command: str, words: list[str]) -> None:
    assert tuple(words) == parse_command(command)


@pytest.mark.spec("reliability:PM01")
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12), max_size=6))
def test_a_quoted_argument_list_is_read_back(arguments: list[str]) -> None:
    argv = ["echo", *arguments]

    assert tuple(argv) == parse_command(shlex.join(argv))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.skipif(not SHELLS, reason="there is no shell")
@pytest.mark.spec("reliability:PM01")
@settings(max_examples=10)
@given(st.lists(st.one_of(nasty_text, quoted_text), min_size=30, max_size=60))
@example(
    ["a=~", "a\\=~", '"a="~', "a:~b", "''~", "\\~", "a~", "'~'", "#", "a#", "''#", "\\#", "%", "^", "-", "--", "é"]
)
def test_every_shell_splits_accepted_text_into_the_same_words(texts: list[str]) -> None:
    check_against_shells(texts)


def check_against_shells(texts: list[str]) -> None:
    """
    Have every shell split those of the texts that the splitter accepts; none may see other words.
    """
    accepted = []
    for text in texts:
        try:
            accepted.append((text, split_argv("printf " + text)[1:]))
        except ValueError:
            continue
    script = "\n".join([f"printf '%s\\0' begin {text}\nprintf 'end\\0'" for text, _ in accepted])
    for shell in SHELLS:
        done = subprocess.run(
            [shell, "-c", script], capture_output=True, check=False, timeout=20, env={"HOME": "/home/x"}
        )
        chunks = done.stdout.decode().split("end\0")[:-1]
        assert [words for _, words in accepted] == [tuple(chunk.split("\0")[1:-1]) for chunk in chunks], shell
        assert not done.stderr


# --- what is neither ------------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:PM25")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([], "names no program"),
        ([""], "names no program"),
        ("", "is empty"),
        (" \t ", "is empty"),
        ("''", "names no program"),
        (["a"] * 1_001, "1,001 elements"),
        (["a", "b" * 1024 * 1024], "bytes; at most 131,072"),
        (["a", *["é" * 1_000] * 66], "bytes; at most 131,072"),
        ("é;" * 50_000, "bytes; at most 131,072"),
        (["a", "b\0c"], "NUL"),
        ("a\0", "NUL"),
        (["a", "\ud800"], "surrogate"),
        ("a '\udc00'", "surrogate"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_an_unexecutable_command_is_refused(command: Any, said: str) -> None:
    with pytest.raises(ToolError, match=said):
        parse_command(command)


@pytest.mark.spec("reliability:PM25")
def test_the_largest_argument_list_and_empty_arguments_are_fine() -> None:
    assert len(parse_command(["a", *[""] * 999])) == 1_000  # type: ignore[arg-type]
    assert len(parse_command(["a", *["b" * 1_310] * 99])) == 100  # type: ignore[arg-type]


# --- how it is shown ------------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:PM24", "reliability:PM01")
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["git", "commit", "-m", "a b"], "git commit -m 'a b'"),
        ("git log -n 1", "git log -n 1"),
        (["ls", "a\nb"], "'ls'\n'a\\nb'\n(1 hidden characters, shown as escapes)"),
        (["l\u0455"], "'l\\u0455'"),
        (["a", "\u202eb\u200b"], "'a'\n'\\u202eb\\u200b'\n(2 hidden characters, shown as escapes)"),
        ("ls; rm x\nls", "ls; rm x\nls"),
        ("ls\r; rm x", "'ls\\r; rm x'\n(1 hidden characters, shown as escapes)"),
        ("ls -la #" + " " * 3_000 + "; rm x", "ls -la #" + " " * 3_000 + "; rm x"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_a_command_is_shown_whole_with_hidden_characters_escaped(command: Any, shown: str) -> None:
    assert shown == command_text(parse_command(command))
