"""Triton kernels of the gpt-oss forward pass, and the launchers that check and call them.

They are written for Hopper GPUs and can be tested without a GPU: if `TRITON_INTERPRET=1` is set
before this package is imported, every kernel runs on the CPU. Kernels use no atomics, and tile
shapes and split sizes do not depend on the batch, so every run gives the same bits. The package
only needs torch and triton.
"""
