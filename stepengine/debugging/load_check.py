"""
A process that creates an application's engine from its current files, reports whether that worked, and ends.

Only ``stepengine.server`` starts ``python -m stepengine.debugging.load_check``.
"""

from __future__ import annotations

from stepengine.debugging.desk import EngineSpec, move_stdio_to_json_channel, wait_for_message
from stepengine.debugging.edits import disable_bytecode, find_error_location, format_error_without_advice


def main() -> None:
    """Load the engine that the first message describes, and send the result."""
    read_message, write_message = move_stdio_to_json_channel()
    first = wait_for_message(read_message)
    if first is None:
        return
    disable_bytecode()
    try:
        EngineSpec.from_json(first["maker"]).create_engine()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of the author's code is the result
        file, line = find_error_location(error)
        write_message({"problem": format_error_without_advice(error), "file": file, "line": line})
    else:
        write_message({"problem": "", "file": "", "line": 0})


if __name__ == "__main__":
    main()
