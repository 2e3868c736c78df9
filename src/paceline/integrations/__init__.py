"""Connections to other libraries: transformers' custom_generate, Weights & Biases."""
