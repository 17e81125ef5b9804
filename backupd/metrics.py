"""What the service tells Prometheus: values in, the text of its exposition format out."""
