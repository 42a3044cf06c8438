"""PyTorch/XLA: runtime, ranks, mesh, kernels and optimizer rules."""
