"""Bytes and frames: what travels between a client and the broker. No sockets here."""
