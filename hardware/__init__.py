"""The computer: its processes and devices, the peaks of GPUs, fast kernels, and the disk."""
