"""What others run beside a cluster: rules for Prometheus and dashboards for Grafana."""
