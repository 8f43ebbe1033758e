"""
What is kept of an editor's sessions.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from stepengine.adapters.acp.kept import SessionStorage
from stepengine.errors import SessionError


@pytest.fixture
def kept(tmp_path: Path) -> SessionStorage:
    return SessionStorage(tmp_path / "editors")


@pytest.mark.spec("interfaces:IF50")
def test_session_is_reloaded_unchanged_and_a_copy_diverges(kept: SessionStorage, tmp_path: Path) -> None:
    session = kept.create_session(tmp_path)
    turn = session.add_turn("Fix\n\x1b[2J it")
    turn.journal.write_text("recorded")
    session.save_turn_end(turn, is_in_conversation=True)

    found = kept.load_session(session.id)
    assert (session.turns, session.cwd, session.updated) == (found.turns, found.cwd, found.updated)
    assert "Fix \\x1b[2J it" == found.title
    time.sleep(0.002)
    copy = kept.copy_session(found, tmp_path)
    copy.add_turn("Go on")
    assert ("recorded", 1, 2) == (
        copy.turns[0].journal.read_text(),
        len(kept.load_session(session.id).turns),
        len(kept.load_session(copy.id).turns),
    )
    assert [copy.id, session.id] == [each.id for each in kept.list_sessions(tmp_path)]
    assert [] == kept.list_sessions(tmp_path / "elsewhere")


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF50")
def test_session_with_very_long_prompts_is_loaded_again(kept: SessionStorage, tmp_path: Path) -> None:
    session = kept.create_session(tmp_path)
    session.add_turn("x" * 17 * 1_048_576)

    assert session.turns == kept.load_session(session.id).turns
    assert [session.id] == [each.id for each in kept.list_sessions(tmp_path)]


def test_failed_session_write_raises_and_adds_no_turn(kept: SessionStorage, tmp_path: Path) -> None:
    session = kept.create_session(tmp_path)
    (session.folder / "session.json").unlink()
    (session.folder / "session.json").mkdir()

    with pytest.raises(SessionError, match=r"the session cannot be stored in .*: Is a directory"):
        session.add_turn("Fix it", media="[]")
    assert ([], []) == (session.turns, list(session.folder.glob("*.media.json")))


@pytest.mark.parametrize(
    "about",
    [
        "",
        "[]",
        "{",
        '{"cwd": "/", "updated": ""}',
        "[" * 100_000,
        '{"cwd": "/", "updated": "", "turns": [{"prompt": "x"}]}',
        "\xff",
    ],
)
def test_unreadable_session_raises_and_is_not_listed(kept: SessionStorage, tmp_path: Path, about: str) -> None:
    session = kept.create_session(tmp_path)
    (session.folder / "session.json").write_text(about, encoding="latin-1")

    with pytest.raises(SessionError):
        kept.load_session(session.id)
    assert [] == kept.list_sessions(None)


def test_session_files_stay_inside_their_folder(kept: SessionStorage, tmp_path: Path) -> None:
    session = kept.create_session(tmp_path)
    for wrong in ("..", ".", "", "../editors", "A" * 16, "0" * 16, f"{session.id}/"):
        with pytest.raises(SessionError):
            kept.load_session(wrong)
    turns = [{"prompt": "x", "journal": "../../../etc/passwd", "kept": True}]
    (session.folder / "session.json").write_text(json.dumps({"cwd": "/", "updated": "", "turns": turns}))
    assert session.folder / "passwd" == kept.load_session(session.id).turns[0].journal


@pytest.mark.spec("interfaces:IF94")
def test_session_folder_writable_by_others_is_refused(kept: SessionStorage, tmp_path: Path) -> None:
    session = kept.create_session(tmp_path)
    assert 0o700 == session.folder.stat().st_mode & 0o777
    assert 0o600 == (session.folder / "session.json").stat().st_mode & 0o777
    (tmp_path / "editors").chmod(0o777)
    for call in (lambda: kept.create_session(tmp_path), lambda: kept.load_session(session.id)):
        with pytest.raises(SessionError, match="other users can write to the folder"):
            call()
