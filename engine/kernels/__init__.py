"""Functions on tensors, without knowledge of models or batches. They import nothing else of the engine.

Shape suffixes, of which a digit is a dimension of that size:

    T   tokens                  N   query heads                               D   hidden size
    S   slots of the KV pool    K   key/value heads                           V   vocabulary
    B   sequences               G   query heads per key/value head, N = G*K   I   inputs
    L   tokens of context       H   head size                                 O   outputs
"""
