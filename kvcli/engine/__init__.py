"""Models and tensors: a compressible KV cache under stock `generate`. Knows nothing of the terminal."""
