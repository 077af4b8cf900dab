# SPDX-License-Identifier: Apache-2.0
"""Which processes a command has started, and which of them are left."""

from pathlib import Path


def descendants(pid: int) -> set[int]:
    """Return the processes below ``pid`` that are no zombies."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue
        if entry.name.isdigit() and fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = set(), [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found.update(below)
        queue.extend(below)
    return found


def alive(pids: set[int]) -> set[int]:
    """Return those of ``pids`` that still run."""
    alive = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if state != "Z":
            alive.add(pid)
    return alive
