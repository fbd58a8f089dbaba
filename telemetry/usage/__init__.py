"""The usage log: what each request has used, as lines of JSON, and what is made of them: sums, metrics, messages of Kafka."""
