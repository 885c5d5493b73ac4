"""A bar on a terminal, and nothing elsewhere. Knows nothing of what goes on."""

import contextlib
import sys
from collections.abc import Callable, Iterator

Advance = Callable[[str], None]
"""Called once per step, with a word on what is done."""


@contextlib.contextmanager
def bar(total: int) -> Iterator[Advance]:
    """A bar of `total` steps on stderr."""
    if not sys.stderr.isatty():
        yield lambda _text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=total)
        yield lambda text: shown.update(task, advance=1, description=text)
