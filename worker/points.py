"""Named points at which the crash tests kill the process.

A point marks a place between two effects on the disk.  In production `at` does nothing at all;
a crash test replaces it in a child process and sends that child a real SIGKILL there.
"""


def at(point: str) -> None:
    """Do nothing.  The crash tests put a SIGKILL here; nothing else may."""
