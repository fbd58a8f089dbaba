"""Functions on tensors, without knowledge of models or batches. They import nothing else of the engine.

Shape suffixes: T tokens, S slots of the KV pool, B sequences, L tokens of context, N query heads, K key/value heads,
G query heads per key/value head (N = G * K), H head size, D hidden size, V vocabulary, I inputs, O outputs; a digit is
a dimension of that size.
"""
