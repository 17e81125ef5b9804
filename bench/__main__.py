"""``python -m bench``: every measurement there is."""

from bench.physical import main

main()
