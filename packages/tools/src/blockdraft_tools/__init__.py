"""Reports on checkpoints (`inspect`), quantized checkpoints (`quantize`) and drafters for other engines (`export`)."""
