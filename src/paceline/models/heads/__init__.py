"""The modules of trained heads: their layers, and output layers over a part of the vocabulary."""
