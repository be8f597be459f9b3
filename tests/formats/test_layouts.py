"""Layouts, found by their files, and a folder's layout by its config.json."""

from pathlib import Path

import pytest

from blockdraft.formats import find_layout, layout_of, layouts, read_drafter


def test_layouts_go_by_their_file_names() -> None:
    speculators = ["eagle3_speculators", "mtp_speculators", "speculators"]
    assert sorted(layouts()) == sorted(["eagle3", "medusa", "mtp", "zlab", *speculators])
    assert find_layout("zlab") is layouts()["zlab"]
    with pytest.raises(
        ValueError, match="format must be one of zlab, speculators, mtp_speculators, mtp, medusa.*, got 'gguf'"
    ):
        find_layout("gguf")


def test_a_folder_is_read_in_its_own_layout(tiny_drafter_dir: Path, tiny_target_dir: Path) -> None:
    assert read_drafter(tiny_drafter_dir, None, 3).config.block_size == 8
    with pytest.raises(
        ValueError,
        match=r"config\.json does not describe a drafter; the known layouts are .*eagle3, .*, zlab",
    ):
        read_drafter(tiny_target_dir, None, 3)


def test_what_is_no_drafters() -> None:
    for raw in ([], "x", {}, {"architectures": "DFlashDraftModel"}, {"architectures": ["LlamaForCausalLM"]}):
        assert layout_of(raw) is None
    assert layout_of({"architectures": ["DFlashDraftModel"]}) is layouts()["zlab"]
    ours = {"architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash"}
    assert layout_of(ours) is layouts()["speculators"]
    assert layout_of({**ours, "speculators_model_type": "eagle3"}) is layouts()["eagle3_speculators"]
