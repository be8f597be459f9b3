import subprocess
import sys

import pytest


def output(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
def test_a_configuration_of_llama_imports_no_modelling_code() -> None:
    slow = {"torch._dynamo", "torch.distributed.tensor", "sympy", "transformers.activations"}
    code = "import sys, blockdraft.targets; from transformers import LlamaConfig; LlamaConfig()\n"
    assert output(code + f"print(sorted({slow} & set(sys.modules)))") == "[]"


@pytest.mark.slow
def test_names_of_activations_are_checked_by_the_real_table() -> None:
    code = "import blockdraft.targets; from transformers.utils import type_validators as checks\n"
    code += "from blockdraft.light_transformers import LazyActivations\n"
    code += "assert isinstance(checks.ACT2FN, LazyActivations)\n"
    code += "from transformers.activations import ACT2FN\n"
    assert output(code + "print(list(checks.ACT2FN) == list(ACT2FN), 'silu' in checks.ACT2FN)") == "True True"


@pytest.mark.slow
def test_whoever_imports_activations_meanwhile_gets_them() -> None:
    code = "import sys; from blockdraft import light_transformers as light\n"
    code += "sys.modules[light.ACTIVATIONS] = light._Activations(light.ACTIVATIONS)\n"
    code += "from transformers.activations import get_activation\n"
    assert output(code + "print(get_activation('silu'))") == "SiLUActivation()"


@pytest.mark.slow
def test_names_of_models_are_those_of_a_second_search() -> None:
    code = "import blockdraft.nn.rotary, transformers.models as models\n"
    code += "from transformers.utils import import_utils\n"
    code += "again = import_utils.define_import_structure(models.__file__)\n"
    code += "names = {name for held in again.values() for of in held.values() for name in of}\n"
    assert output(code + "print(len(names) > 1000, sorted(names - set(dir(models))))") == "True []"


@pytest.mark.slow
def test_files_of_models_are_searched_once() -> None:
    code = "import transformers\nfrom transformers.utils import import_utils\n"
    code += "of = import_utils.create_import_structure_from_path.cache_info\n"
    code += "before = of().misses\nimport blockdraft.nn.rotary\nfrom transformers import LlamaConfig\n"
    assert output(code + "print(before > 100, of().misses - before < 10)") == "True True"
