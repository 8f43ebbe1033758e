"""
``stepengine show --html``: a recorded run as one page that shows it whole, offline.

What lives here: the journal as the data of a page, the page, and what serves it while the run is under way. It changes nothing;
of the agent's code it runs what a replay runs, and only where it was given an agent.
"""
