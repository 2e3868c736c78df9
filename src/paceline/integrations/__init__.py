"""Other libraries: transformers' custom_generate, Weights & Biases."""
