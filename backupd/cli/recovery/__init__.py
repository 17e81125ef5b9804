"""The commands for an incident: plan, restore, tables, thaw, timeline."""
