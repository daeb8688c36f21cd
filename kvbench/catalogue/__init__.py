"""Known models and GPUs as YAML, and the importer that turns any Hugging Face `config.json` into a `core` model."""
