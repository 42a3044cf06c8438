"""Task and distillation losses: pure maths on tensors, one family a file."""
