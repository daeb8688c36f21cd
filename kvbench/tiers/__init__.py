"""Places where KV lies: one module per kind of tier behind one protocol, and the store that joins them."""
