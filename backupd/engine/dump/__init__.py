"""Logical dumps: mydumper, the server's dump client, the exact reader, files of rows."""
