"""lpx: one YAML recipe turns a Hugging Face checkpoint into a proven, served model."""

__version__ = "0.1.0"
