"""Checks of links between nodes: exchanges before agents have workers, probes when nodes do not reach each other."""
