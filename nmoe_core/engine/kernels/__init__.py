"""Triton kernels of the gpt-oss forward pass, and the launchers that check and call them.

Written for Hopper and provable without one: with `TRITON_INTERPRET=1` set before this package is
imported, every kernel runs on the CPU. Nothing here uses atomics, and tile shapes and split sizes
do not depend on the batch, so results are the same bits run after run. Needs torch and triton only.
"""
