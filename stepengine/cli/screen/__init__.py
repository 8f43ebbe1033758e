"""What stands on a terminal and how: values as text, progress, log lines, and the console that also asks."""
