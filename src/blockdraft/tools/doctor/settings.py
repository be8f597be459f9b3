"""Settings of `blockdraft doctor`."""

from __future__ import annotations

from blockdraft.settings import Count, settings


@settings
class DoctorSettings:
    """Settings of `blockdraft doctor`.

    Attributes:
        max_new_tokens: Maximum number of tokens per response.
        anchors: Maximum number of evenly spaced anchors per response at which each check drafts.
    """

    max_new_tokens: Count = 96
    anchors: Count = 48
