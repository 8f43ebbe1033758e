"""
``stepengine show --html``: a recorded run as one page that works offline.

This package converts a journal to page data, renders the page, and serves it while the run is running. It changes nothing. With an
agent it replays the agent's code to show source lines and variables.
"""
