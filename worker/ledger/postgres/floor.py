"""The floor: up to which number everything that was drawn from the server's sequence has been committed.

Numbers are drawn in order and committed in any order.  Whoever has seen everything up to the floor need not look
below it again.
"""

import collections


class Floor:
    """Rises as time passes; `value` is 0 before anything is known."""

    def __init__(self, settled: float) -> None:
        """`settled`: whoever has drawn a number has committed so many seconds later."""
        self.value = 0
        self._settled = settled
        self._marks: collections.deque[tuple[float, int]] = collections.deque()  # when which was the newest number

    def mark(self, now: float, newest: int) -> None:
        """Note the newest number, drawn by `now` (monotonic clock); raise the floor to what has settled by then."""
        self._marks.append((now, newest))
        while self._marks[0][0] <= now - self._settled:
            self.value = self._marks.popleft()[1]
