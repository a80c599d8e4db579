"""Triton kernels without a GPU: interpreted for their values, compiled for sm_90 for their machine code."""
