"""Version of the HTTP contract, which every answer of a coordinator names in a header."""

WIRE = 1
"""Increased with each change that the other side must know."""

WIRE_HEADER = "Sparrow-Wire"
