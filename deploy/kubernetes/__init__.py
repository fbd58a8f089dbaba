"""A cluster on Kubernetes, with KubeRay: `raycluster/` or `rayservice/` on what is in `base/`, and `monitoring/` beside it."""
