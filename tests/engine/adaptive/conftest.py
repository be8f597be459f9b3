"""A machine on which only this process runs, as far as the policy can see."""

import pytest

from blockdraft.machine import OtherWork


@pytest.fixture(autouse=True)
def other_cores(monkeypatch: pytest.MonkeyPatch) -> dict[str, float | None]:
    """Return how many cores other programs seem to use: none, until the test says otherwise. Each step is checked."""
    load: dict[str, float | None] = {"cores": None}
    monkeypatch.setattr(OtherWork, "_seconds", staticmethod(lambda: 0.0))  # costs time, and each step would ask
    monkeypatch.setattr(OtherWork, "seconds", property(lambda self: 1.0))
    monkeypatch.setattr(OtherWork, "disturbing_cores", lambda self: load["cores"])
    return load
