"""How a cluster is deployed (images, Kubernetes, systemd), and what others run beside it: rules for Prometheus, dashboards."""
