"""One test per trap of speculative decoding, and per bug that other projects had.

The first line of a test names the trap by its number in docs/traps.md, or the issue of the other project: T is
transformers, V vllm, S sglang, L llama.cpp, M mlx-lm, R TensorRT-LLM, E EAGLE. T#48039 is issue 48039 of transformers.
"""
