"""The check of names: which modules, functions and classes it reports."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts import load_script

SCRIPT = Path(__file__).resolve().parents[1] / ".ci" / "names.py"
NONE_LEFT = {"preposition": 0, "participle": 0, "class": 0}
PLANTED = {
    "a function called by a preposition": ("def below():\n    pass\n", "'below' is a preposition"),
    "a method called by a participle": ("class A:\n    def _told(self):\n        pass\n", "'_told' is a participle"),
    "an async function": ("async def until():\n    pass\n", "'until' is a preposition"),
    "two classes of one name": ("class Page:\n    pass\n", "2 classes are called 'Page'"),
}


@pytest.fixture
def names() -> ModuleType:
    return load_script(SCRIPT, "names_check")


def package(folder: Path, **modules: str) -> Path:
    place = folder / "somewhere"
    place.mkdir()
    for name, text in modules.items():
        (place / f"{name}.py").write_text(text, encoding="utf-8")
    return place


@pytest.mark.parametrize("case", PLANTED)
def test_a_new_name_against_the_rules_is_reported(names: ModuleType, tmp_path: Path, case: str) -> None:
    text, said = PLANTED[case]
    place = package(tmp_path, first=text, second="class Page:\n    pass\n")
    assert any(said in fault for fault in names.check(place, NONE_LEFT))


def test_properties_and_verbs_pass(names: ModuleType, tmp_path: Path) -> None:
    text = "class A:\n    @property\n    def shown(self):\n        pass\n\n    def for_thread(self):\n        pass\n"
    assert [] == names.check(package(tmp_path, first=text), NONE_LEFT)


def test_long_test_name_is_reported(names: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_a.py").write_text(
        "def test_a_b_c_d_e_f_g_h_i_j():\n    pass\n\n\ndef test_a_b_c_d_e_f_g_h_i_j_k():\n    pass\n"
    )
    (fault,) = names.find_long_test_names(folder)
    assert fault.startswith("tests/test_a.py:5: 'test_a_b_c_d_e_f_g_h_i_j_k' has 11 words")
