"""Benchmarks: our decoders and other libraries on the same prompts, in turns, and numbers from their runs."""
