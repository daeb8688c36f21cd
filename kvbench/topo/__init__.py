"""Reads a machine's links (live, from a captured /sys, or from what other tools printed) into one graph.

Every source becomes `Facts` (facts.py), `build.py` joins them on the PCI bus id, `core/` computes the rest.
"""
