"""Writers of GGUF files: any, and those of drafters, of targets and of their tokenizers."""

from typing import Literal, TypeAlias

# Type of the matrices in a file. The default is exact for a model in bfloat16.
MatrixType: TypeAlias = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
DEFAULT_MATRIX_TYPE: MatrixType = "bf16"
