"""How many of what, as people read it."""


def of(number: float, one: str, more: str = "") -> str:
    """Return '1 step', '2 steps', '0.5 hours'; `more` is for other numbers than 1, by default `one` and an s."""
    shown = f"{number:g}" if isinstance(number, float) else str(number)
    return f"{shown} {one if number == 1 else more or f'{one}s'}"
