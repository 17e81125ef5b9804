"""Pure functions over what is recorded, shared by retention, restore and every interface."""
