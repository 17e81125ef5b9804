"""Logical dumps: mydumper, our exact reader, files of rows."""
