"""From a target to a running server: plan, fetch, prepare, place, start, check; and the scratch copies of
test restores."""
