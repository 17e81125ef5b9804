"""How to restore by hand: templates of runbooks and the shell that goes with them."""
