"""What a cluster is configured with and what a model is: the frozen schema, its YAML files and the readers of model files.

Imports nothing of Tandem but the leaf `protocol.errors`, and no torch: the router reads a model's facts from here too.
"""
