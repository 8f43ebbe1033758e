"""``python -m stepengine`` is ``stepengine``, for environments whose scripts are not on the path."""

from __future__ import annotations

from stepengine.cli import main

if __name__ == "__main__":
    main()
