"""qat: quantization-aware training through folded BatchNorms."""
