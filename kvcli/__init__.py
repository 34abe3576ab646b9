"""Vision-language models over pictures, with only a part of the KV cache kept."""

__version__ = "0.1.0"
