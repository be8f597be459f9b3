"""Infills of clients that type: each drafts from the completion offered before, and replaces the one still running."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

from blockdraft.serving.request import Infill

MAX_CLIENTS, MAX_INFILLS = 64, 4  # clients, and latest infills of each, that are kept
MAX_TEXT = 65_536  # characters before and behind the cursor of an infill that is kept
MAX_TYPED = 128  # characters between an infill and the one that replaces it
ANCHOR = 32  # characters before a cursor that must agree if the text begins elsewhere


class TypedInfill:
    """An infill of a client.

    Args:
        draft: What its output is expected to be, from the completion offered before; "" if unknown.

    Attributes:
        output: Its output so far.
        replaced: Whether a newer infill has replaced it.
        cancel: Ends its request; None before it runs and after it has ended.
    """

    def __init__(self, infill: Infill, draft: str) -> None:
        self.before, self.after = infill.prefix + infill.begun, infill.suffix
        self.draft = draft
        self.output = ""
        self.replaced = False
        self.cancel: Callable[[], object] | None = None

    @property
    def offered(self) -> str:
        """The completion as far as it is known: its output, and what is left of a draft that agrees with it."""
        return self.draft if self.draft.startswith(self.output) else self.output

    def rest(self, before: str) -> str:
        """Return what follows a later text before the cursor in this text and its completion; "" if it has left them.

        It has left them, too, if more than `MAX_TYPED` characters were deleted.

        An editor sends a window of a file, which may begin elsewhere after a line end.
        """
        whole = self.before + self.offered
        if whole.startswith(before):
            return whole[len(before) :] if len(self.before) - len(before) <= MAX_TYPED else ""
        at = whole.rfind(before[-ANCHOR:], max(0, len(self.before) - ANCHOR - MAX_TYPED))
        return whole[at + ANCHOR :] if at >= 0 and len(before) >= ANCHOR else ""

    def is_replaced_by(self, before: str, after: str) -> bool:
        """Return whether an infill at this place is one for the same line, after characters were typed or deleted."""
        shorter, longer = sorted((self.before, before), key=len)
        typed = longer[len(shorter) :]
        same = after == self.after and longer.startswith(shorter)
        return same and 0 < len(typed) <= MAX_TYPED and "\n" not in typed and bool(shorter)

    def replace(self) -> None:
        self.replaced = True
        if self.cancel is not None:
            self.cancel()


class TypedInfills:
    """The latest infills of each client, which are known by their `SamplingParams.lookup_scope`.

    Infills of one client never affect those of another.
    """

    def __init__(self) -> None:
        self._clients: OrderedDict[str, deque[TypedInfill]] = OrderedDict()  # least recently used first

    def begin(self, client: str, infill: Infill) -> TypedInfill:
        """Return a client's new infill with its draft, and cancel those that it replaces."""
        before, after = infill.prefix + infill.begun, infill.suffix
        latest = self._clients.setdefault(client, deque(maxlen=MAX_INFILLS))
        self._clients.move_to_end(client)
        if len(self._clients) > MAX_CLIENTS:
            self._clients.popitem(last=False)
        for typed in latest:
            if typed.is_replaced_by(before, after):
                typed.replace()
        new = TypedInfill(infill, next(filter(None, (typed.rest(before) for typed in reversed(latest))), ""))
        if before and len(before) + len(after) <= MAX_TEXT:
            latest.append(new)
        return new
