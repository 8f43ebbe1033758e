"""
The page of the bundled tools is made of what the tools say, its block runs, and its names at codebuff are complete.
"""

from __future__ import annotations

import re
from typing import Any

from stepengine.tools.bundled import shapes
from stepengine.tools.bundled.reference import Form, document_tools, list_result_keys

from .pages import ROOT
from .test_site import script

PAGE = ROOT / "docs" / "reference" / "bundled-tools.md"


def shapes_in(form: Form) -> set[str]:
    inner = [key.form for key in form.keys if key.form is not None]
    return {form.shape, *[name for one in inner for name in shapes_in(one)]} - {""}


def test_the_page_matches_the_documentation_of_the_tools() -> None:
    assert script("make_bundled_tools").page() == PAGE.read_text(encoding="utf-8"), "python docs/make_bundled_tools.py"


def test_every_result_key_has_its_codebuff_name_or_none() -> None:
    known = script("make_bundled_tools").CODEBUFF
    given = {name for one in document_tools() for form in one.forms for name in shapes_in(form)}
    without = {name for name, keys in known.items() if not keys}
    expected = {
        name: {key.name for key in list_result_keys(getattr(shapes, name))}
        for name in given - without - {"Match", "WebHit"}
    }

    assert {"JobStatus"} == without
    assert expected == {name: set(keys) for name, keys in known.items() if keys}


def test_the_block_of_the_page_runs(monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)

    exec(compile(block, str(PAGE), "exec", dont_inherit=True), {"__name__": "page"})
