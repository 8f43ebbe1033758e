"""The commands: one module for each, or for a few that do one thing. What several share stands beside this folder."""
