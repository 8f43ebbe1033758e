"""Output to a terminal: values as text, progress, log lines, and the console that also asks questions."""
