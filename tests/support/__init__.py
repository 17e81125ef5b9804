"""Real parts for tests, the demo and the benchmarks: private database servers, sample data, keys, load."""
