"""What the catalog says against what lies at the destinations."""
