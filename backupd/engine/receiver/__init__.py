"""Receiving a server's binary log by the replication protocol: the bytes of its files, as the server has them.

``connection`` begins a dump on a connection of its own, ``packets`` cuts what comes into messages, ``log_bytes`` tells
which of these are bytes of a file and checks them, ``receiver`` joins the three, ``endings`` says why a dump ended.
"""
