"""All knowledge of servers and their tools, by flavour and version; nothing above asks which flavour a server is."""
