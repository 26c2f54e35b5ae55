"""The program gqueue-server: sockets, connections, dispatch, and the store hosted beside the hub."""
