"""What every destination can do, and how everything there is named."""
