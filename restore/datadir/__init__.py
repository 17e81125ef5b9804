"""Where a restore may write, and putting a data directory into place: owner, room, state, start."""
