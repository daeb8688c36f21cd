"""Everything kvbench saves: frozen result documents, one JSON codec, and the registry of their kinds."""
