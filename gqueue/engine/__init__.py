"""The broker itself: transitions on an index in memory. No socket, no disk, no sleep, no clock (design I6)."""
