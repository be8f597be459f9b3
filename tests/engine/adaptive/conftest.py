"""A machine on which only this process runs, as far as the policy can see."""

import pytest

from blockdraft.machine import OtherWork


@pytest.fixture(autouse=True)
def _quiet_machine(other_work: dict[str, float | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OtherWork, "_seconds", staticmethod(lambda: 0.0))  # costs time, and each step would ask
