"""How a pass runs; `torch.cuda` and `torch.compile` are named nowhere else."""
