"""
A process that makes an application's engine of its files as they are now, says whether that went well, and ends.

``python -m stepengine.debugging.trying`` is started by ``stepengine.server``, and by nobody else.
"""

from __future__ import annotations

from stepengine.debugging.desk import Maker, talk
from stepengine.debugging.edits import error_text, places_of, see_sources_alone

__all__ = ()


def main() -> None:
    """Try what the first line says."""
    hear, say = talk()
    asked = hear(None)
    while asked is not None and not asked:
        asked = hear(None)
    if asked is None:
        return
    see_sources_alone()
    try:
        Maker.of_json(asked[0]["maker"]).engine()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the author's code raises is what is asked for
        file, line = next(iter(reversed(list(places_of(error)))), ("", 0))
        say({"problem": error_text(error), "file": file, "line": line})
    else:
        say({"problem": "", "file": "", "line": 0})


if __name__ == "__main__":
    main()
