"""What is shown: overview, server, timeline, policies, destinations, metrics."""
