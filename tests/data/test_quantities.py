"""Ages and sizes as people type and read them."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from stepengine.cli.app import app
from stepengine.data.quantities import format_age, parse_age, parse_size


@pytest.mark.spec("durable:UC8", "studio:SV32")
def test_ages_and_sizes_are_a_number_and_a_unit() -> None:
    ages = [
        timedelta(),
        timedelta(seconds=45),
        timedelta(minutes=90),
        timedelta(hours=12),
        timedelta(30),
        timedelta(56),
    ]

    assert ages == [parse_age(text) for text in ("0s", "45s", "90m", "12h", "30d", "8w")]
    assert [0, 7, 2048, 3 << 20, 2 << 30] == [parse_size(text) for text in ("0", "7", "2KiB", "3 mib", "2GiB")]


@pytest.mark.parametrize("text", ["", "30", "-1d", "1.5h", "1h30m", "30d\n", "\u0661d", "9" * 5_000 + "d", "99999w"])
def test_another_text_is_no_age(text: str) -> None:
    with pytest.raises(ValueError, match=r"30d, 12h, 90m and 2w are valid"):
        parse_age(text)


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.5GiB", "2GB", "\u00b2", "1\n", "9" * 5_000])
def test_another_text_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"100, 64KiB, 8MiB and 2GiB are valid"):
        parse_size(text)


def test_an_age_is_shown_in_its_largest_unit() -> None:
    seconds = [-5, 0, 59.9, 60, 3_599, 3_600, 86_399, 86_400, 90 * 86_400]

    assert ["0s", "0s", "59s", "1m", "59m", "1h", "23h", "1d", "90d"] == [
        format_age(timedelta(seconds=s)) for s in seconds
    ]


@given(st.timedeltas(min_value=timedelta(), max_value=timedelta(36_500)))
def test_formatted_age_parses_and_never_exceeds_the_age(age: timedelta) -> None:
    shown = parse_age(format_age(age))

    assert shown <= age < 2 * shown + timedelta(seconds=1)


@pytest.mark.spec("durable:UC8")
@pytest.mark.parametrize(
    "command",
    [
        ["tokens", "add", "ci", "--file", "tokens.json", "--expires"],
        ["deploy", "gc", "--db", "postgresql://localhost:1/x", "--older-than"],
    ],
    ids=["tokens add", "deploy gc"],
)
def test_commands_reject_invalid_ages_with_the_same_examples(command: list[str]) -> None:
    refused = CliRunner().invoke(app, [*command, "1h30m"])

    assert 2 == refused.exit_code
    assert "30d, 12h, 90m and 2w are valid" in " ".join(refused.stderr.split())
