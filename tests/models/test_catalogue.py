"""The catalogue: every entry follows the schema, and names find their models."""

import re
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from blockdraft.drafters import entries
from blockdraft.errors import UsageError
from blockdraft.models import Model, bundled_drafter, catalogue, find, known
from blockdraft.models.catalogue import BUNDLED, read_catalogue
from blockdraft.models.places import PAIRS
from blockdraft.targets import load_target

TABLE = "id,name,hub\na,Model A,o/a\nb,Model B,o/b\n"
UNGATED = {"falcon", "gpt_neox", "phi", "starcoder2"}  # families whose MLP has two matrices
EAGLE = {"hub": "o/d", "kind": "eagle3", "layout": "speculators", "source": "https://example.org"}


def spelled(value: Any) -> str:
    """A value in TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {spelled(entry)}" for key, entry in value.items()) + " }"
    return "[" + ", ".join(map(spelled, value)) + "]" if isinstance(value, list) else repr(value)


def toml(name: str = "a", **more: Any) -> str:
    """Return an entry of a model."""
    return f'[[models]]\nid = "{name}"\n' + "".join(f"{key} = {spelled(value)}\n" for key, value in more.items())


def test_most_used_models_have_dimensions_and_a_source() -> None:
    assert sum(bool(model.layers and model.parameters and model.source) for model in catalogue()) >= 200
    assert sum(len(model.drafters) for model in catalogue()) >= 60


@pytest.mark.parametrize("model", catalogue(), ids=lambda model: model.id)
def test_an_entry_holds_together(model: Model) -> None:
    assert all(find(name) == known(name) == model for name in model.names)
    assert known(model.hub) == known(model.name) == model
    alike = not (model.experts or model.recurrent_layers or model.global_kv_heads or model.active_parameters)
    if model.parameters and model.layers and model.intermediate_size and model.kv_heads and alike:
        assert model.hidden_size and model.vocabulary and model.heads and model.head_size
        attention = model.hidden_size * model.head_size * (2 * model.heads + 2 * model.kv_heads)
        matrices = 2 if model.family in UNGATED else 3
        layer = attention + matrices * model.hidden_size * model.intermediate_size
        ends = model.vocabulary * model.hidden_size * (1 if model.tied_head else 2)
        assert model.parameters == pytest.approx(model.layers * layer + ends, rel=0.01)  # norms and biases
    kinds = {*entries(), "dflash2", "mtp", "medusa"}
    for drafter in model.drafters:
        assert drafter.kind in kinds
        assert (drafter.layout == "in the target") == (drafter.hub == model.hub)
        assert (drafter.hub == BUNDLED) == (drafter.source == f"pair/{model.id}/drafter/README.md")
        assert drafter.hub != BUNDLED or (bundled_drafter(model) and (PAIRS.parent / drafter.source).is_file())
        for measured in drafter.measured:
            most = None if measured.block_size is None else measured.block_size + 1  # DSpark's anchor draft tokens too
            assert all(most is None or tau <= most for tau in measured.tau.values())
    if model.file:
        assert model.file.bytes > 0.9 * sum(wheel.bytes for wheel in model.file.wheels)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"hub": "a"}, "hub"),
        ({"aliases": ["A"]}, "aliases"),  # names are small letters
        ({"aliases": ["o/a"]}, "aliases"),  # or they would be hub names
        ({"wheight": 1}, "wheight"),
        ({"layers": "30", "source": "https://example.org"}, "layers"),
        ({"layers": 30}, "dimensions need a source"),
        ({"licence": "MIT"}, "a licence needs a source"),
        ({"heads": 9, "kv_heads": 2}, "9 heads cannot share 2"),
        ({"parameters": 5, "active_parameters": 6}, "more active parameters"),
        ({"layers": 4, "attention_layers": 3, "recurrent_layers": 2, "source": "https://example.org"}, "its 4 layers"),
        ({"drafters": [{**EAGLE, "source": "a friend"}]}, "source"),
        ({"drafters": [{**EAGLE, "measured": [{"tau": {"gsm8k": 4.0}}]}]}, "source"),
    ],
)
def test_what_does_not_follow_the_schema_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        read_catalogue(TABLE, toml(**more))


def test_a_line_of_the_table_follows_the_schema() -> None:
    [model, _] = read_catalogue(TABLE.replace("hub\n", "hub,heads,tied_head\n").replace("o/a", "o/a,8,true"), "")
    assert (model.heads, model.tied_head) == (8, True)
    for cell in ("30.5", "x"):
        with pytest.raises(ValueError):
            read_catalogue(TABLE.replace("hub\n", "hub,heads\n").replace("o/a", f"o/a,{cell}"), "")


def test_a_name_stands_for_one_model() -> None:
    assert [model.names for model in read_catalogue(TABLE, "")] == [("a", "model a"), ("b", "model b")]
    with pytest.raises(ValidationError, match="several models are named a"):
        read_catalogue(TABLE, toml("b", aliases=["a"]))
    with pytest.raises(ValueError, match="no model named c"):
        read_catalogue(TABLE, toml("c"))


def test_unknown_names_get_near_ones() -> None:
    assert find("SmolLM2") is not None and find("HuggingFaceTB/SmolLM2-135M-Instruct") is None
    with pytest.raises(UsageError, match=r"'smolm2' is not in the catalogue; did you mean smollm2"):
        known("smolm2")
    with pytest.raises(UsageError, match="`blockdraft models` lists all"):
        known("zzzzzz")


@pytest.mark.parametrize("name", ["qwen2.5-coder", "qwen2.5-coder-1.5"])
def test_names_of_models_with_a_drafter_are_suggested_first(name: str) -> None:
    with pytest.raises(UsageError, match=r"did you mean (qwen2\.5-coder-0\.5b or )?qwen2\.5-coder-1\.5b( or |\?)"):
        known(name)
    with pytest.raises(UsageError, match=r"did you mean (qwen2\.5-coder-0\.5b or )?qwen2\.5-coder-1\.5b( or |\?)"):
        load_target(name)


def test_the_list_needs_no_torch() -> None:
    code = (
        "import sys; from blockdraft.cli import app; app(['models'], standalone_mode=False); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False" and "smollm2" in done.stdout
