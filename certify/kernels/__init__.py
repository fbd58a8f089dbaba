"""What the part `kernels` tries and measures: random work for every Triton kernel, products, bits, times."""
