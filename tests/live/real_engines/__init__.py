"""Real engines on a host without GPU: how to install them, the models they serve, and the runs that compare them."""
