"""The kernels of `engine.kernels` in Triton, for GPUs; under TRITON_INTERPRET=1 they run on a CPU, to be tested.

Triton: Tillet, Kung and Cox, "Triton: An Intermediate Language and Compiler for Tiled Neural Network Computations", 2019.
A public function takes tensors and returns the launch that fills the ones it was given for results. Tile sizes, warps and
stages are fixed next to each kernel. A launch depends on shapes and addresses alone; lengths, tables and slots are read from
device memory, so that a launch may be captured into a CUDA graph.

Shape suffixes beside those of `engine.kernels`:

    R   rows of single tokens     W   width of a block table          F   half a head, H/2
    P   tiles of prompts          A   width of a row of q, k and v    M   query rows of a tile
    Z   parts of a context

Integers on the device are int32, slots included, unless said otherwise.
"""
