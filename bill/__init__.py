"""What the TPU compiler says of a step, on a machine without a TPU."""
