"""What benchmarks that take long have in common."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.process import PeerError
from blockdraft.errors import BlockdraftError


def settled(out: Path, measured: dict[str, Any]) -> None:
    """Keep what the figures of a folder have in common; raises ValueError where they were measured otherwise."""
    path = out / "settings.json"
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(measured, indent=2), encoding="utf-8")
    kept = json.loads(path.read_text(encoding="utf-8"))
    other = [name for name in measured if kept.get(name) != measured[name]]
    if other:
        raise ValueError(
            f"{out} holds figures with other {', '.join(other)}; choose another --out, or add --anew to forget them."
        )


@contextmanager
def in_words() -> Iterator[None]:
    """Around a command: what went wrong is told in a line, and so is an interruption, which loses nothing."""
    try:
        yield
    except (ValueError, PeerError, BlockdraftError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("\nInterrupted; the same command goes on from here.", file=sys.stderr)
        raise SystemExit(130) from None
