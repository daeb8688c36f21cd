"""One builder per model family: it reads `config.json` fields and returns the layers."""
