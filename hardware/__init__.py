"""What this computer is and does: processes and devices, peaks of GPUs, kernels, and its disk."""
