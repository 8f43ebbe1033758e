# ruff: noqa: INP001
"""
Write the pictures of ``docs/studio.md`` and ``docs/prompt-injection.md``: ``python docs/make_studio_pictures.py``, with Chromium on PATH.

With a folder (``python docs/make_studio_pictures.py FOLDER``) every view goes there instead, light and dark, 400, 1280 and 2560
pixels wide, for somebody to look at. The server, the agents and the browser are those of ``tests/server/studio``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.debugging.browser import Browser, browser
from tests.server.studio.conftest import Page
from tests.server.studio.stage import Stage
from tests.server.studio.test_looks import prepared, views

TARGET = Path(__file__).with_name("pictures")
SHOWN = {"runs": "studio-runs", "run that asks": "studio-run", "approval": "studio-approval"}
WIDTHS = {400: 800, 1280: 800, 2560: 1440}
DRAWN = """
Promise.allSettled(
  document.getAnimations().filter(one => one.effect.getComputedTiming().endTime !== Infinity).map(one => one.finished)
).then(() => new Promise(go => requestAnimationFrame(() => requestAnimationFrame(go))))
"""
"""Ends when all movements have ended, but those that never do, and the page was drawn once more."""
MOST = 100_000
"""Bytes of a picture in the documentation."""
LEAST = 2_000
"""Bytes of a picture that shows something."""


def taken(page: Page, target: Path) -> None:
    """Take the picture of what the page shows, once it is drawn."""
    page.run(DRAWN)
    page.chromium.picture(target)


def every(page: Page, chromium: Browser, scene: dict[str, str], folder: Path) -> None:
    """Take a picture of every view in every width, light and dark."""
    folder.mkdir(parents=True, exist_ok=True)
    for scheme in ("light", "dark"):
        chromium.scheme(scheme)
        for width, height in WIDTHS.items():
            chromium.size(width, height)
            for name, (address, shows) in views(scene).items():
                page.go(address, shows)
                target = folder / f"{name.replace(' ', '-')}-{width}-{scheme}.png"
                taken(page, target)
                if not target.is_file() or target.stat().st_size < LEAST:
                    msg = f"{target.name} was not made"
                    raise SystemExit(msg)
    print(f"{len(list(folder.glob('*.png')))} pictures")  # noqa: T201 - a script


def main(*words: str) -> None:
    """Take the pictures."""
    with (
        tempfile.TemporaryDirectory() as place,
        tempfile.TemporaryDirectory() as profile,
        Stage(Path(place)).open() as stage,
        browser(Path(profile)) as chromium,
    ):
        scene = prepared(stage, prompt="Find a shelf for the attic") if not words else prepared(stage)
        chromium.size(1120, 600)
        chromium.open(stage.link())
        page = Page(chromium, stage)
        if words:
            every(page, chromium, scene, Path(words[0]))
            return
        TARGET.mkdir(exist_ok=True)
        for name, file in SHOWN.items():
            address, shows = views(scene)[name]
            page.go(address, shows)
            target = TARGET / f"{file}.png"
            taken(page, target)
            size = target.stat().st_size
            print(f"{target.name}: {size:,} bytes")  # noqa: T201 - a script
            if size > MOST:
                msg = f"{target.name} is larger than {MOST:,} bytes"
                raise SystemExit(msg)


if __name__ == "__main__":
    main(*sys.argv[1:])
