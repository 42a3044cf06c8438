"""Weights and images that programs are given: their flags, and what stands behind them."""
