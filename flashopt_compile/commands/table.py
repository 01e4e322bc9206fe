"""The commands' output: tables on stdout, progress on stderr."""

import sys
from collections.abc import Iterator, Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows under a ruled heading. The first column is left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def size(count: float) -> str:
    """Format bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def phases(command: str, names: Sequence[str]) -> Iterator[str]:
    """Announce each phase as it begins: with a bar on a terminal if tqdm is installed, else with a line."""
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = None
    if tqdm is None or not sys.stderr.isatty():
        for name in names:
            print(f"flashopt {command}: {name}", file=sys.stderr)
            yield name
        return
    with tqdm(total=len(names), leave=False, bar_format="{desc} {bar} {n}/{total} {elapsed}") as bar:
        for name in names:
            bar.set_description_str(f"flashopt {command}: {name}")
            yield name
            bar.update()
