"""Where jobs are kept: one interface, one strategy for each kind of store. Imported as `gqueue.storage`."""
