"""Restores: the request and its rules, plan, execution, test restores, the catalog made anew, thaws."""
