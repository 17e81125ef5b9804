"""The whole program through its command line, on real servers, tools and keys."""
