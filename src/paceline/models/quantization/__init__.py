"""Linear layers in int8, int4 and bfloat16."""
