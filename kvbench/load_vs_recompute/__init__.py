"""Is loading an evicted prefix from a lower tier faster than recomputing it, or should it be split?"""
