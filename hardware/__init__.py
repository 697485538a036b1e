"""The computer: processes and devices, their limits and peaks, fast kernels, terminal and disk."""
