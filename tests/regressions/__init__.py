"""One sharply named test per trap of docs/exactness.md, per bug others shipped and per bug of the seed repositories.

The first line of every test says which: "trap 8", "T#48039" (T transformers, V vllm, S sglang, L llama.cpp, M mlx-lm,
R TensorRT-LLM, E EAGLE), "seed 2" (the second seed repository).
"""
